"""``zero-trial run``: placeholder until the experiment reader lands."""

from __future__ import annotations

from typing import Any


def add_parser(subparsers: Any) -> None:
    """Add the verb."""
