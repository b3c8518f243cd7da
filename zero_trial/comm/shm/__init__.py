"""The shm room."""
