"""Pages of runs and searches: read from a run's folder or a master's store, written as a single
HTML file each, or served as the live board."""

from __future__ import annotations

BOARD = "/board"
"""The path of the live page."""


def board_address(url: str, token: str) -> str:
    """Return a URL that logs in automatically. Browsers do not send the part after the #."""
    return f"{url}{BOARD}#token={token}"
