"""Compatibility with other projects: modules that scripts import, and checkpoints."""
