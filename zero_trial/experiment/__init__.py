"""The experiment configuration as a Determined 0.38.1 master reads it."""
