"""Configuration text with the place of every key, and the types that values are checked against.

Imports no torch.
"""
