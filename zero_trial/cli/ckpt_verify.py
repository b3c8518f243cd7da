"""``zero-trial ckpt verify FOLDER``: is every byte of a checkpoint as it was written? If not, which file, and what was in it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero_trial.cli.output import bytes_bar, shown
from zero_trial.errors import CheckpointError, ConfigError
from zero_trial.util.text import format_bytes

if TYPE_CHECKING:
    from zero_trial.checkpoint.folder import CheckpointFolder, Damage, SavedCheckpoint

NAMED = 6  # tensors of a broken file that are named; --json names all


def add_parser(subparsers: Any) -> None:
    """Add the action."""
    parser = subparsers.add_parser(
        "verify",
        help="compare every file with its SHA-256",
        description="Read every byte of the newest checkpoint in a folder, or of all of them, and compare it with the sums in the manifest. "
        "Exit code 5 if something is broken: then it says which file, and which tensors lie in it.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "folder", type=Path, metavar="FOLDER", help="a run's folder, a folder of checkpoints, or a checkpoint"
    )
    parser.add_argument("--all", action="store_true", help="all checkpoints in the folder, not the newest alone")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(handler=handle)


def handle(options: argparse.Namespace) -> int:
    """Run the action."""
    from zero_trial.checkpoint.folder import bytes_to_read, inspect_folder

    chosen = _chosen(inspect_folder(options.folder), options.all)
    found: list[tuple[SavedCheckpoint, list[Damage]]] = []
    with closing(bytes_bar("verify", sum(map(bytes_to_read, chosen)), quiet=options.json)) as bar:
        for saved in chosen:
            found.append((saved, _damage(saved, bar.update)))
    if options.json:
        print(json.dumps({"checkpoints": [_as_dict(saved, damage) for saved, damage in found]}))
    else:
        for saved, damage in found:
            _say(saved, damage)
    return CheckpointError.exit_code if any(damage for _, damage in found) else 0


def _damage(saved: SavedCheckpoint, told: Any) -> list[Damage]:
    """What is wrong with the engines' files, and where nothing is, with what a trial has written beside them."""
    from zero_trial.checkpoint.folder import Damage, find_damage
    from zero_trial.runs.checkpoints import find_fault

    found = find_damage(saved, told)
    if not found and saved.trial is not None and (fault := find_fault(saved.folder)) is not None:
        file, _, what = fault.partition(": ")
        found.append(Damage(Path(file), what))
    return found


def _chosen(shelf: CheckpointFolder, everything: bool) -> Sequence[SavedCheckpoint]:
    """All, or the one with the highest step, also where it is seen to be broken: no word about it would be no answer."""
    counted = [saved for saved in shelf.saved if shelf.single or not saved.leftover]
    if not counted:
        raise ConfigError(
            "there is no finished checkpoint here",
            where=str(shelf.folder),
            got=f"{len(shelf.saved)} left over by saves that did not finish",
        )
    if not everything and len(shelf.trials) > 1:
        raise ConfigError(
            f"checkpoints of {len(shelf.trials)} trials lie here",
            where=str(shelf.folder),
            fix="Name one, or verify them with --all.",
        )
    return counted if everything else counted[-1:]


def _say(saved: SavedCheckpoint, damage: Sequence[Damage]) -> None:
    files = sum(len(engine.manifest.files) for engine in saved.engines if engine.manifest is not None)
    word = "broken" if damage else "whole"
    step = "" if saved.step is None else f"step {saved.step}  "
    print(f"{word:<8}{shown(saved.folder)}  {step}{files} files  {format_bytes(saved.bytes)}", flush=True)
    for one in damage:
        lines = [f"broken  {shown(one.file)}: {one.what.removeprefix(f'{one.file}: ')}"]
        if one.tensors:
            more = f" and {len(one.tensors) - NAMED} more" if len(one.tensors) > NAMED else ""
            lines.append(f"        {len(one.tensors)} tensors lie in it: {', '.join(one.tensors[:NAMED])}{more}")
        sys.stderr.write("\n".join(lines) + "\n")


def _as_dict(saved: SavedCheckpoint, damage: Sequence[Damage]) -> dict[str, Any]:
    return {
        "folder": str(saved.folder),
        "step": saved.step,
        "bytes": saved.bytes,
        "whole": not damage,
        "damage": [{"file": str(one.file), "what": one.what, "tensors": list(one.tensors)} for one in damage],
    }
