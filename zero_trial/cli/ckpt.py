"""``zero-trial ckpt ls|verify|show|export``: checkpoints as a person handles them. Each action is a module ``ckpt_<action>`` beside this one."""

from __future__ import annotations

import importlib
from typing import Any

ACTIONS = ("ls", "verify", "show", "export", "import")
"""Each is a module ``ckpt_<action>`` of this folder with ``add_parser(subparsers)``."""


def add_parser(subparsers: Any) -> None:
    """Add the verb and its actions."""
    parser = subparsers.add_parser(
        "ckpt",
        help="list, verify, look into and export checkpoints",
        description="What can be done with checkpoints that are there. Nothing of it needs the model's code, the number of ranks that wrote a "
        "checkpoint, or a GPU.",
        allow_abbrev=False,
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for action in ACTIONS:
        importlib.import_module(f"zero_trial.cli.ckpt_{action}").add_parser(actions)
