"""Other projects' names and files: what scripts import, and checkpoints that were written."""
