"""Convert checkpoints and weights of other programs without running their code."""
