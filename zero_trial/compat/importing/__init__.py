"""Checkpoints and weights of other programs, made into ours without running their code."""
