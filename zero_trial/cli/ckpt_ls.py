"""``zero-trial ckpt ls FOLDER``: which checkpoints there are, which of them is the latest, and which are broken."""

from __future__ import annotations

import argparse
import json
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero_trial.cli.output import shown, table
from zero_trial.util.text import format_bytes

if TYPE_CHECKING:
    from zero_trial.checkpoint.folder import CheckpointFolder, SavedCheckpoint


def add_parser(subparsers: Any) -> None:
    """Add the action."""
    parser = subparsers.add_parser(
        "ls",
        help="which checkpoints there are",
        description="List the checkpoints in a folder, lowest step first: when, how big, written by how many ranks at which ZeRO stage, and "
        "whether manifests and file sizes are right. Reads no tensor: `zero-trial ckpt verify` does.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "folder", type=Path, metavar="FOLDER", help="a run's folder, a folder of checkpoints, or a checkpoint"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(handler=handle)


def handle(options: argparse.Namespace) -> int:
    """Run the action."""
    from zero_trial.checkpoint.folder import inspect_folder

    shelf = inspect_folder(options.folder)
    if options.json:
        print(json.dumps({"folder": str(shelf.folder), "checkpoints": [_as_dict(one, shelf) for one in shelf.saved]}))
        return 0
    print(shown(shelf.folder))
    head = ("step", "saved (UTC)", "size", "files", "ranks", "stage", "name", *_trial("trial", shelf), "")
    print(table([head, *(_row(one, shelf) for one in shelf.saved)], right=(0, 2, 3, 4, 5)))
    sys.stdout.flush()
    for one in shelf.saved:
        if one.fault is not None and not one.leftover:
            sys.stderr.write(f"broken  {one.fault}\n")
    return 0


def state_of(saved: SavedCheckpoint, shelf: CheckpointFolder) -> str:
    """``whole``, ``latest``, ``broken`` or ``left over``."""
    if saved.leftover:
        return "left over"
    return "broken" if saved.fault is not None else "latest" if shelf.is_latest(saved) else "whole"


def _row(saved: SavedCheckpoint, shelf: CheckpointFolder) -> tuple[str, ...]:
    return (
        "-" if saved.step is None else str(saved.step),
        datetime.fromtimestamp(saved.saved, timezone.utc).strftime("%Y-%m-%d %H:%M:%S"),
        format_bytes(saved.bytes),
        str(saved.files),
        _words(saved.facts("ranks")),
        _words(saved.facts("zero_stage")),
        saved.folder.name,
        *_trial(saved.trial or "", shelf),
        state_of(saved, shelf),
    )


def _trial(word: str, shelf: CheckpointFolder) -> tuple[str, ...]:
    """A column only where checkpoints of several trials lie together."""
    return (word,) if len(shelf.trials) > 1 else ()


def _words(values: tuple[Any, ...]) -> str:
    """Several where a trial's engines differ."""
    return ",".join(map(str, values)) or "-"


def _one(values: tuple[Any, ...]) -> Any:
    return list(values) if len(values) > 1 else next(iter(values), None)


def _as_dict(saved: SavedCheckpoint, shelf: CheckpointFolder) -> dict[str, Any]:
    return {
        "folder": str(saved.folder),
        "step": saved.step,
        "saved": saved.saved,
        "bytes": saved.bytes,
        "files": saved.files,
        "ranks": _one(saved.facts("ranks")),
        "zero_stage": _one(saved.facts("zero_stage")),
        "mesh": _one(saved.facts("mesh")),
        "engines": [engine.folder.name for engine in saved.engines] if saved.trial is not None else [],
        "state": "whole" if saved.whole else state_of(saved, shelf),
        "latest": shelf.is_latest(saved),
        "trial": saved.trial,
        "fault": saved.fault,
    }
