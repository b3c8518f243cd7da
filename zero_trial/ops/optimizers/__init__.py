"""Optimizers over lists of flat pieces, and one step with a gradient multiplier for any."""
