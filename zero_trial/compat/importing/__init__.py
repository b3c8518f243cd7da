"""Checkpoints and weights of other programs, made into checkpoints of ours: nothing that such a
file says is run."""
