"""Small helpers that several rooms share: text for people, files that appear whole, failures on
several ranks."""
