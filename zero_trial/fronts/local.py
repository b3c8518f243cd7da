"""A trial in a run's folder on this machine: where it starts, how it is asked to stop, and what it leaves behind."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from zero_trial.config.report import REPORT, entries_of, short_report
from zero_trial.errors import CheckpointError, ConfigError, Preempted, StorageError, TrialError, ZeroTrialError
from zero_trial.fronts.last_words import leave_last_words
from zero_trial.fronts.log import done_event
from zero_trial.fronts.rank import RankState, Trained, figures_of
from zero_trial.launch.own_line import with_own_line
from zero_trial.mesh.env import RankEnv
from zero_trial.platform.local import latest_checkpoint, named_step
from zero_trial.platform.run_folder import RunFolder, append_line, error_record, write_json
from zero_trial.platform.seal import METADATA
from zero_trial.trial.outcome import End, Outcome


class StopRequest:
    """Whether a signal has asked this process to save and stop.

    A launcher sends the same signal to end the ranks that are left when one has failed; ``failed`` tells the two apart, and then
    the signal ends the process as ever.
    """

    def __init__(self, failed: Callable[[], bool] = lambda: False) -> None:
        self._asked = threading.Event()
        self._failed = failed

    def __call__(self) -> bool:
        return self._asked.is_set()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """SIGTERM asks, however often it comes: a scheduler may send it to every process, and a launcher pass it on. Only
        the main thread can listen.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.getsignal(signal.SIGTERM)

        def note(number: int, frame: FrameType | None) -> None:
            if self._failed():
                signal.signal(number, before if before is not None else signal.SIG_DFL)
                os.kill(os.getpid(), number)
            self._asked.set()

        signal.signal(signal.SIGTERM, note)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before if before is not None else signal.SIG_DFL)


def has_failed_ranks(run_dir: Path) -> bool:
    """Whether a rank of the run has left an error; one that was asked to stop and has saved is none."""
    codes = [read_exit_code(path) for path in _error_files(run_dir)]
    return any(code != Preempted.exit_code for code in codes)


def read_exit_code(path: Path) -> int | None:
    """What an error's record says; None for one that cannot be read."""
    try:
        return int(json.loads(path.read_text())["exit_code"])
    except (OSError, ValueError, KeyError):
        return None


def forget_errors(run_dir: Path, env: RankEnv) -> None:
    """Each rank, when it begins: its own error of an earlier start in this folder; rank 0 those of ranks that are no more."""
    for path in _error_files(run_dir):
        rank = int(path.stem.removeprefix("rank-"))
        if rank == env.rank or (env.rank == 0 and rank >= env.world_size):
            path.unlink(missing_ok=True)


def _error_files(run_dir: Path) -> list[Path]:
    return [path for path in RunFolder(run_dir).error(0).parent.glob("rank-*.json") if path.stem[5:].isdigit()]


def starting_point(
    run_dir: Path, resume: Path | None = None, warm_start: Path | None = None, apart_from: Collection[str] = ()
) -> dict[str, Any]:
    """The checkpoint to try first, its step, and the trial's id: the run's own latest one, or what ``resume`` (the trial
    goes on) or ``warm_start`` (a new trial from its weights) names. Those of ``apart_from`` (absolute paths) are passed over.

    Raises CheckpointError for one that says nothing about itself.
    """
    own = latest_checkpoint(RunFolder(run_dir).checkpoints, apart_from)
    named = resume or warm_start
    path = own if own is not None or named is None else named_checkpoint(named, apart_from)
    fresh = {"checkpoint": None, "step": 0, "trial_id": uuid.uuid4().hex}
    if path is None:
        return fresh
    weights_only = own is None and resume is None
    return {**resumed_from(path), "trial_id": fresh["trial_id"]} if weights_only else resumed_from(path)


def resumed_from(path: Path) -> dict[str, Any]:
    """A checkpoint, its step, and the trial that it is of; the step of its name where its description is damaged."""
    start = {"checkpoint": str(path.resolve())}
    try:
        metadata = json.loads((path / METADATA).read_text())
        return {**start, "step": int(metadata["steps_completed"]), "trial_id": str(metadata["trial_id"])}
    except (OSError, ValueError, KeyError, TypeError):  # damaged: whoever looks at the whole of it will say how
        return {**start, "step": named_step(path) or 0, "trial_id": ""}


def named_checkpoint(path: Path, apart_from: Collection[str] = ()) -> Path:
    """``path`` itself if it is a checkpoint, or the latest of a run's folder. Raises ConfigError if it is neither."""
    itself = named_step(path) is not None
    found = path if itself else latest_checkpoint(RunFolder(path).checkpoints, apart_from)
    if str(path.resolve()) in apart_from or (apart_from and found is None):
        raise CheckpointError("it is damaged", where=str(path), fix="Name another checkpoint.")
    if found is None:
        raise ConfigError(
            "there is no finished checkpoint", where=str(path), expected="a run's folder or a folder step-NNNNNN"
        )
    return found


def say_config(run_dir: Path) -> None:
    """What of the ds_config the user did not write, and what has no effect, into this rank's log."""
    path = run_dir / REPORT
    if path.is_file():
        sys.stdout.write(short_report(entries_of(json.loads(path.read_text(encoding="utf-8")))) + "\n")


def write_summary(trained: Trained, run_dir: Path, repeat: str) -> None:
    """Collective. summary.json and the last event."""
    context, figures = trained.context, figures_of(trained)
    if context.distributed.rank == 0:
        write_json(RunFolder(run_dir).summary, {**figures, "repeat": repeat})
        context.platform.progress.emit(done_event(trained.outcome))
    context.distributed.barrier()  # the summary is there before any rank is gone


def raise_if_preempted(outcome: Outcome) -> None:
    """A preempted run ends in Preempted, so that it is known as resumable."""
    if outcome.end is End.PREEMPTED:
        raise Preempted(
            f"stopped at step {outcome.step} of {outcome.total_steps} and saved {outcome.checkpoint}",
            fix="The same command with this run folder goes on from there.",
        )


def leave_error(error: BaseException, run_dir: Path, state: RankState) -> int:
    """Leaves the error in the run's folder for the supervisor; the exit code. A disk that takes no more words changes nothing about it."""
    now = time.time()
    folder, rank = RunFolder(run_dir), state.env.rank
    record = {**error_record(error, rank, state.step, now), "message": words_of(error)}
    with suppress(StorageError):
        if not folder.error(rank).exists():  # the first error is the cause
            write_json(folder.error(rank), record)
    if rank == 0:
        with suppress(StorageError):
            append_line(folder.events, {"kind": "error", **{key: record[key] for key in ("time", "step", "message")}})
    return int(record["exit_code"])


def print_error(error: BaseException) -> None:
    """Into the log: the message of an error that a user may meet; the traceback of any other. In both cases a line that begins with
    ``error   ``: launchers print much after it, and that is how it is found. A run that was asked to stop, and has saved, is no error.
    """
    text = words_of(error)
    leave_last_words(text, printed=True)  # before they are printed: who has printed something has left it too
    first, *rest = text.splitlines()
    label = "stopped" if isinstance(error, Preempted) else "error  "
    words = [f"{label} {first.removeprefix('stopped ')}", *(f"        {line}" for line in rest)]
    with suppress(OSError):  # a log on a full disk
        if not isinstance(error, ZeroTrialError):
            traceback.print_exception(error, file=sys.stderr)
        sys.stderr.write("\n".join(words) + "\n")
        sys.stderr.flush()


def words_of(error: BaseException) -> str:
    """The message of an error of this package; any other as the last line of its traceback has it. What the trial's code did, or did wrong,
    has the line of that code beside it."""
    if isinstance(error, ZeroTrialError):
        words = str(error) or type(error).__name__
        return with_own_line(words, error) if isinstance(error, TrialError) else words
    return with_own_line("".join(traceback.format_exception_only(error)).strip(), error)
