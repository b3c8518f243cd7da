"""Optimizer arithmetic: the pure-torch reference, and optimizers that work on flat pieces of parameters."""
