"""The board: a live, read-only page of experiments, trials and runs, over HTTP."""

from __future__ import annotations

PATH = "/board"


def board_address(url: str, token: str) -> str:
    """Return the address that logs in by itself: browsers do not send what follows the #."""
    return f"{url}{PATH}#token={token}"
