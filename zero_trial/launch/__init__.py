"""Start ranks on one or several hosts, and end all of them together. Does not import torch."""
