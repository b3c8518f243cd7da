"""Pages of runs and of searches: read from a run's folder or a master's store, written as one HTML
file each, or served as the live board."""

from __future__ import annotations

BOARD = "/board"
"""The path of the live page."""


def board_address(url: str, token: str) -> str:
    """Return the address that logs in by itself: browsers do not send what follows the #."""
    return f"{url}{BOARD}#token={token}"
