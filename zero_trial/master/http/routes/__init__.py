"""The routes room."""
