"""The schema room."""
