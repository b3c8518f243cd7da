"""Pages of runs and searches: one HTML file each, or the live board."""

from __future__ import annotations

BOARD = "/board"
"""The path of the live page."""


def board_address(url: str, token: str) -> str:
    """Return the address that logs in by itself: browsers do not send what follows the #."""
    return f"{url}{BOARD}#token={token}"
