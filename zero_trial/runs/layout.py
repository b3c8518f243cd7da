"""The numbered folders ``runs/0001``, ``runs/0002`` … in which runs keep all that they write."""

from __future__ import annotations

import re
from pathlib import Path
from zero_trial.errors import ConfigError
from contextlib import contextmanager
from collections.abc import Iterator
import os
import fcntl
from dataclasses import dataclass

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


# A run's folder, held by one process at a time: two that train in it would destroy each other's checkpoints.


LOCK_FILE = "held"


@contextmanager
def lock_run(folder: Path) -> Iterator[None]:
    """Holds ``folder`` until the block ends or this process does, however it does. Raises ConfigError if another one holds it.

    The lock is the operating system's (flock); on file systems without any, nothing is held.
    """
    if not folder.is_dir():
        yield
        return
    descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 100).decode(errors="replace").strip()
            raise ConfigError(
                "another process is running in this folder",
                where="--run-dir",
                got=str(folder),
                fix=f"Wait for process {holder or 'that holds it'}, or give another folder.",
            ) from None
        except OSError:
            pass  # a file system without locks
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class RunFolder:
    """Names of the files in a run's folder, and the two ways to write them."""

    path: Path

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def preempt(self) -> Path:
        """Whoever wants the run to save and stop creates this file."""
        return self.path / "preempt"

    def error(self, rank: int) -> Path:
        return self.path / "errors" / f"rank-{rank}.json"
