"""Small helpers that several rooms share: text for terminals."""
