"""A small network that reads letters, as files to copy."""
