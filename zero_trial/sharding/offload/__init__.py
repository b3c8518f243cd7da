"""The offload room."""
