"""A run's folder: the names of its files, how they are written, and what can be read from them.
Imports no torch."""
