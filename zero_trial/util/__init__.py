"""Small helpers that several rooms share: text, atomic files, failures on several ranks."""
