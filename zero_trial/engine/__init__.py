"""One training step, wired from the parts: the only room that knows all of them."""
