"""One rank of a run in a folder on this machine: where it starts, how it is asked to stop, and
which records it leaves.

    with rank_of_folder(state) as stop, open_folder(run, state, stop) as platform: ...

The outer block ends the process: an error becomes an exit code, a message where the launcher looks
for it, and a record in the folder. A run that was asked to stop and has saved exits with 75. The
inner block joins the ranks and opens the platform.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from zero_trial.comm.rendezvous import destroy_distributed
from zero_trial.device import is_accelerator, own_device, torch_module
from zero_trial.ds_config.config_report import entries_of, short_report
from zero_trial.errors import (
    ConfigError,
    InvalidHP,
    Preempted,
    StorageError,
    ZeroTrialError,
)
from zero_trial.trial.reporting import End, Outcome
from zero_trial.trial.runs.events import append_line, join_memory, read_lines, write_json
from zero_trial.trial.runs.provenance import add_start
from zero_trial.trial.runs.run_layout import ErrorRecord, RunFolder, lock_run, write_error
from zero_trial.trial.runtime.local import LocalPlatform, agree_on_start
from zero_trial.trial.runtime.protocols import Distributed
from zero_trial.trial.runtime.rank import (
    EventLog,
    RankState,
    Trained,
    done_event,
    error_text,
    explained,
    figures_of,
    rank_world,
    report_error,
)


@dataclass(frozen=True)
class LocalRun:
    """Describes a run in a folder.

    Attributes:
        folder: absolute; the run continues from a checkpoint in it.
        model_dir: where the trial's code is, and the base of relative paths.
        resume: another run's folder, or a checkpoint, whose trial continues here.
        warm_start: the same, for a new trial that takes only the weights.
    """

    folder: Path
    experiment: Mapping[str, Any]
    hparams: Mapping[str, Any]
    model_dir: Path
    seed: int
    experiment_id: str
    resume: Path | None = None
    warm_start: Path | None = None


class StopRequest:
    """Records whether a signal has asked this process to save and stop.

    A launcher sends the same signal to end the other ranks when one has failed. ``failed`` tells
    the two apart: if it is true, the signal ends the process as usual.
    """

    def __init__(self, failed: Callable[[], bool] = lambda: False) -> None:
        self._asked = threading.Event()
        self._failed = failed

    def __call__(self) -> bool:
        return self._asked.is_set()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Treat every SIGTERM as one request to stop: a scheduler may send it to every process, and
        a launcher may forward it.

        Only the main thread can listen.
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


@contextmanager
def rank_of_folder(state: RankState, *, script: bool = False) -> Iterator[StopRequest]:
    """Run one rank of a run in a folder, from its first line to its last.

    SIGTERM asks the rank to save and stop. An error in the block is recorded in the folder, once
    ``state`` knows it, and ends the process. ``script``: errors that do not belong to this package
    are raised unchanged.
    """
    stop = StopRequest(lambda: state.folder is not None and RunFolder(state.folder).has_failed_ranks())
    try:
        with stop.listening():
            yield stop
    except (Exception, KeyboardInterrupt) as error:
        if isinstance(error, InvalidHP) and state.context is not None:
            # the error itself is recorded whether this can be written or not
            with suppress(OSError, ZeroTrialError):
                state.context.platform.report_early_exit("INVALID_HP")
        known = explained(error, state)
        if state.folder is not None:
            record_error(known, state.folder, state)
        ending = report_error(known, script=script)
        if ending is error:
            raise
        raise ending from None
    finally:
        destroy_distributed()


@contextmanager
def open_folder(
    run: LocalRun, state: RankState, stop: StopRequest, *, show: EventLog | None = None
) -> Iterator[LocalPlatform]:
    """Collective. Open the platform of a run in its folder, at the checkpoint where the run starts.
    The ranks must have joined.

    Raises CheckpointError on every rank if there are checkpoints but all of them are damaged.
    """
    state.folder = run.folder
    forget_errors(state)
    ranks = rank_world(state.env)
    notes: list[str] = []
    start = agree_on_start(ranks, run.folder, run.resume, run.warm_start, note=notes.append)
    platform = LocalPlatform(
        run_dir=run.folder,
        experiment=run.experiment,
        hparams=run.hparams,
        model_dir=run.model_dir,
        seed=run.seed,
        trial_id=start["trial_id"],
        experiment_id=run.experiment_id,
        latest_checkpoint=start["checkpoint"],
        steps_completed=start["step"],
        distributed=ranks,
        asked=stop,
        show=show,
    )
    if ranks.rank == 0:
        platform.tidy()
        record_provenance(platform, own_device(state.env.local_rank))
        _print_config_report(RunFolder(run.folder))
    for note in notes:
        platform.emit({"kind": "note", "message": note})
    yield platform


@contextmanager
def lock_run_together(folder: Path, ranks: Distributed) -> Iterator[None]:
    """Acquire the run lock on rank 0, or raise ConfigError on all ranks. Collective at entry."""
    with ExitStack() as stack:
        fault: str | None = None
        if ranks.rank == 0:
            try:
                stack.enter_context(lock_run(folder))
            except ConfigError as error:
                fault = str(error)
        fault = ranks.broadcast(fault)
        if fault is not None:
            raise ConfigError(fault)
        yield


def forget_errors(state: RankState) -> None:
    """Remove this rank's earlier error, and on rank 0 those of ranks that no longer exist."""
    if state.folder is None:
        return
    env = state.env
    for path in RunFolder(state.folder).error_files():
        rank = int(path.stem.removeprefix("rank-"))
        if rank == env.rank or (env.rank == 0 and rank >= env.world_size):
            path.unlink(missing_ok=True)


def record_provenance(run: LocalPlatform, device: torch.device) -> None:
    """Record this start in the run's provenance, on rank 0, before training."""
    facts = {
        "step": run.steps_completed,
        "seed": run.seed,
        "ranks": run.distributed.size,
        "hyperparameters": run.hparams,
    }
    machine = {
        "device": torch_module(device).get_device_name(device) if is_accelerator(device) else "cpu",
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }
    add_start(run.run_dir, facts, run.model_dir, str(torch.__version__), machine)


def _print_config_report(folder: RunFolder) -> None:
    """Log, on this rank, which ds_config values are defaults and which have no effect."""
    if folder.resolved_config.is_file():
        entries = entries_of(json.loads(folder.resolved_config.read_text(encoding="utf-8")))
        sys.stdout.write(short_report(entries) + "\n")


def finish_folder(trained: Trained, platform: LocalPlatform, repeat: str) -> None:
    """Collective. Write the figures of a run that completed into its folder.

    ``repeat``: the command in summary.json that repeats the run.
    """
    figures = figures_of(trained)
    if platform.distributed.rank == 0:
        earlier = [event for event in read_lines(RunFolder(platform.run_dir).events) if event.get("kind") == "memory"]
        platform.emit({"kind": "memory", "peak_memory_bytes": figures["peak_memory_bytes"]})
        figures = join_memory(figures, earlier)
        write_json(RunFolder(platform.run_dir).summary, {**figures, "repeat": repeat})
        platform.emit(done_event(trained.outcome))
    platform.distributed.barrier()  # the summary is written before any rank ends


def raise_if_preempted(outcome: Outcome, fix: str | None = None) -> None:
    """Raise Preempted for a run that was asked to stop, which marks it as resumable. ``fix`` says
    how to continue it if no launcher does."""
    if outcome.end is End.PREEMPTED:
        raise Preempted(
            f"stopped at step {outcome.step} of {outcome.total_steps} and saved {outcome.checkpoint}",
            fix=fix,
        )


def record_error(error: BaseException, run_dir: Path, state: RankState) -> None:
    """Leave the error in the run's folder for the supervisor, unless the disk is full."""
    known = isinstance(error, ZeroTrialError)
    code = error.exit_code if isinstance(error, ZeroTrialError) else 1
    name, text = type(error).__name__, error_text(error)
    record = ErrorRecord(state.env.rank, name, text, code, time.time(), state.step, expected=known)
    with suppress(StorageError):
        write_error(run_dir, record)
    if state.env.rank == 0:
        with suppress(StorageError):
            event = {"kind": "error", "time": record.time, "step": record.step, "message": record.message}
            append_line(RunFolder(run_dir).events, event)
