"""A run's folder: its files' names, how they are written and read. Imports no torch."""
