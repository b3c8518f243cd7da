"""A byte-level language model, as files to copy."""
