"""Activations that are not kept between forward and backward: checkpointing, with its inputs cut over ranks or held on the host."""
