"""Configuration text with the location of every key, and types that check values.

Does not import torch.
"""
