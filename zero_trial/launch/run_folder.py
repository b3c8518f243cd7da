"""The numbered folders ``runs/0001``, ``runs/0002`` … in which runs keep all that they write."""

from __future__ import annotations

import re
from pathlib import Path

from zero_trial.errors import ConfigError

RANKS = "ranks"
ERRORS = "errors"
LOGS = "logs"

_NUMBER = re.compile(r"\d{4,}")


def new_run_folder(root: Path) -> Path:
    """Make the folder after the highest number in ``root``. Two commands at once get two folders: the one that comes second tries the next number."""
    _make(root, "run", "Start it in a folder that can be written, or give --run-dir DIR.")
    number = 1 + max((int(path.name) for path in root.iterdir() if _NUMBER.fullmatch(path.name)), default=0)
    while True:
        folder = root / f"{number:04d}"
        try:
            folder.mkdir()
        except FileExistsError:
            number += 1
        except OSError as error:
            raise _refused(
                error, folder, "run", "Start it in a folder that can be written, or give --run-dir DIR."
            ) from None
        else:
            return folder


def given_run_folder(folder: Path) -> Path:
    """Make ``folder``, or take it when it is empty of runs. Raises ConfigError when a run has been there already."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError("this is a file", where="--run-dir", got=str(folder), expected="a folder")
    if has_run(folder):
        raise ConfigError(
            "there is a run in this folder already",
            where="--run-dir",
            got=str(folder),
            fix=f"Give another folder, or continue that run with --resume {folder}.",
        )
    _make(folder, "--run-dir", "Give another folder.")
    return folder


def has_run(folder: Path) -> bool:
    """Whether the ranks of a run have been started in this folder."""
    return any((folder / name).exists() for name in ("events.jsonl", RANKS, ERRORS))


def _make(folder: Path, where: str, fix: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _refused(error, folder, where, fix) from None


def _refused(error: OSError, folder: Path, where: str, fix: str) -> ConfigError:
    return ConfigError(f"the run's folder cannot be made ({error.strerror})", where=where, got=str(folder), fix=fix)


def resumed_run_folder(folder: Path) -> Path:
    """Make a run's folder ready to go on: the records of its end are removed, its checkpoints, metrics and logs stay.

    A run that ended before its first checkpoint starts again at its first step.
    """
    if not has_run(folder) and not (folder / "checkpoints").is_dir():
        raise ConfigError("there is nothing to resume", where="--resume", got=str(folder), expected="a run's folder")
    for name in (RANKS, ERRORS):
        for path in (folder / name).glob("*.json"):
            path.unlink()
    for name in ("preempt", "early_exit.json"):
        (folder / name).unlink(missing_ok=True)
    return folder
