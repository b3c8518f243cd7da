"""The layout of a run's folder: the names of its files, its status, the errors that its ranks
leave, the numbered folders ``runs/0001``, and the run lock."""

from __future__ import annotations

import fcntl
import json
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path

from zero_trial.errors import ConfigError, Preempted
from zero_trial.trial.runs.events import read_json, write_json

_NUMBER = re.compile(r"\d{4,}")


class RunStatus(Enum):
    """The state of a run, from the files in its folder."""

    NONE = "there is no run"
    UNFINISHED = "running, or killed"
    PREEMPTED = "preempted"  # it has saved and can be resumed
    FAILED = "failed"
    STOPPED = "stopped"  # the trial itself ended it early
    COMPLETED = "completed"


@dataclass(frozen=True)
class RunFolder:
    """A run's folder. This class is the only place that defines its file names."""

    path: Path

    @property
    def config_lock(self) -> Path:
        """Everything needed to repeat the run, written before its first rank starts."""
        return self.path / "config.lock.yaml"

    @property
    def resolved_config(self) -> Path:
        """The ds_config with every default, and where each value came from."""
        return self.path / "resolved_config.json"

    @property
    def provenance(self) -> Path:
        """Code, versions and machine of each start."""
        return self.path / "certificate.json"

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
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def summary(self) -> Path:
        """The figures of a run that completed."""
        return self.path / "summary.json"

    @property
    def preempt(self) -> Path:
        """Creating this file asks the run to save and stop."""
        return self.path / "preempt"

    @property
    def early_exit(self) -> Path:
        """Written once, by the first rank whose hyperparameters cannot be trained."""
        return self.path / "early_exit.json"

    @property
    def lock(self) -> Path:
        """The file of the run lock."""
        return self.path / "held"

    @property
    def errors(self) -> Path:
        return self.path / "errors"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def error(self, rank: int) -> Path:
        return self.errors / f"rank-{rank}.json"

    def log(self, rank: int) -> Path:
        return self.logs / f"rank-{rank}.log"

    def error_files(self) -> list[Path]:
        """List the errors that ranks have recorded, in rank order."""
        found = [path for path in self.errors.glob("rank-*.json") if path.stem.removeprefix("rank-").isdigit()]
        return sorted(found, key=lambda path: int(path.stem.removeprefix("rank-")))

    def has_run(self) -> bool:
        """Return whether a run has begun in this folder, however it ended."""
        return any(path.exists() for path in (self.config_lock, self.events, self.metrics, self.logs, self.errors))

    def has_failed_ranks(self) -> bool:
        """Return whether a rank has recorded an error other than a preemption."""
        return any(read_json(path).get("exit_code") != Preempted.exit_code for path in self.error_files())

    def status(self) -> RunStatus:
        """Return how the run in this folder ended, according to its readable files."""
        if self.error_files():
            return RunStatus.FAILED if self.has_failed_ranks() else RunStatus.PREEMPTED
        if self.summary.is_file():
            ended = {status.value: status for status in (RunStatus.STOPPED, RunStatus.PREEMPTED)}
            return ended.get(str(read_json(self.summary).get("end")), RunStatus.COMPLETED)
        return RunStatus.UNFINISHED if self.has_run() else RunStatus.NONE


@dataclass(frozen=True)
class ErrorRecord:
    """Why a rank ended, as ``errors/rank-<r>.json`` in the run's folder; a missing field has its
    default.

    Attributes:
        message: text for the user.
        expected: whether it is an error of this package, whose message contains a fix.
        time: seconds since the epoch; the earliest error is the cause of the others.
        step: completed optimizer steps, if the rank knew them.
    """

    rank: int = 0
    type: str = "Error"
    message: str = ""
    exit_code: int = 1
    time: float = 0.0
    step: int | None = None
    expected: bool = False


def write_error(run_dir: Path, record: ErrorRecord) -> None:
    """Write a rank's error unless it has one: the first is the cause. Raises StorageError."""
    path = RunFolder(run_dir).error(record.rank)
    if not path.exists():
        write_json(path, asdict(record))


def read_errors(run_dir: Path) -> list[ErrorRecord]:
    """Read the errors recorded so far, in rank order."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in RunFolder(run_dir).error_files()]
    return [ErrorRecord(**{name: data[name] for name in asdict(ErrorRecord()) if name in data}) for data in found]


def new_run_folder(root: Path) -> Path:
    """Create the next folder after the highest number in ``root``.

    Two concurrent commands get different folders: the second one tries the next number.
    """
    advice = "Start in a writable folder, or pass --run-dir DIR."
    make_folder(root, "run", advice)
    number = 1 + max((int(path.name) for path in root.iterdir() if _NUMBER.fullmatch(path.name)), default=0)
    while True:
        folder = root / f"{number:04d}"
        try:
            folder.mkdir()
        except FileExistsError:
            number += 1
        except OSError as error:
            raise _refused(error, folder, "run", advice) from None
        else:
            return folder


def given_run_folder(folder: Path) -> Path:
    """Create ``folder``, or use it if no run has begun in it. Raises ConfigError otherwise."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError("this is a file", where="--run-dir", got=str(folder), expected="a folder")
    if RunFolder(folder).has_run():
        raise ConfigError(
            "this folder already contains a run",
            where="--run-dir",
            got=str(folder),
            fix=f"Use another folder, or continue that run with --resume {folder}.",
        )
    make_folder(folder, "--run-dir", "Use another folder.")
    return folder


def resumed_run_folder(path: Path) -> Path:
    """Prepare a run's folder to continue: remove the records of its end, and keep its checkpoints,
    metrics and logs.

    The summary is removed, too: a completed run that continues and is killed must not look
    completed. A run that ended before its first checkpoint starts again at its first step.
    """
    folder = RunFolder(path)
    if not folder.has_run() and not folder.checkpoints.is_dir():
        raise ConfigError("there is nothing to resume", where="--resume", got=str(path), expected="a run's folder")
    ends = (folder.summary, folder.preempt, folder.early_exit)
    for record in (*folder.errors.glob("*.json"), *ends):
        record.unlink(missing_ok=True)
    return path


def make_folder(folder: Path, where: str, fix: str) -> None:
    """Create a run's folder unless it exists. Raises ConfigError for ``where``."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _refused(error, folder, where, fix) from None


def _refused(error: OSError, folder: Path, where: str, fix: str) -> ConfigError:
    reason = error.strerror
    there = next(
        (path for path in (*reversed(folder.parents), folder) if os.path.lexists(path) and not path.is_dir()), None
    )
    if isinstance(error, FileExistsError | NotADirectoryError) and there is not None:
        # not a permission problem
        reason, fix = f"{there} is not a folder", f"Rename or remove {there}."
    return ConfigError(f"the run's folder cannot be created ({reason})", where=where, got=str(folder), fix=fix)


@contextmanager
def lock_run(path: Path) -> Iterator[None]:
    """Lock every other process out of a run's folder until the block or this process ends.

    Two runs in one folder would destroy each other's checkpoints. The lock is the operating
    system's (flock), so a killed process holds nothing. On NFS it works between machines; the lock
    of a lost machine is free once the server releases it. On a file system without locks, or if the
    folder does not exist, nothing is locked. Raises ConfigError if another process has the lock,
    and names its machine.
    """
    if not path.is_dir():
        yield
        return
    descriptor = os.open(RunFolder(path).lock, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 200).decode(errors="replace").strip()
            raise ConfigError(
                "another process is running in this folder",
                where="--run-dir",
                got=str(path),
                fix=f"Wait for process {holder or 'that has locked it'}, or use another folder.",
            ) from None
        except OSError:
            pass  # a file system without locks
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)
