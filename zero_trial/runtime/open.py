"""Opening a run on one rank, in a folder or as a task of a cluster, and ending the process so that its launcher understands it.

Every way to start a rank (``python -m zero_trial.run``, the harness, ``zero_trial.init()``) goes through the same two pairs:

    with rank_of_folder(state) as stop, open_folder(run, state, stop) as platform: ...
    with rank_of_task(state), open_task(state) as platform: ...

The outer one ends the process: an error of the block becomes an exit code and a message where the launcher looks for
them. The inner one joins the ranks and opens the platform.

A run in a folder ends with the error's exit code, 75 if it was asked to stop and has saved. A task of a cluster ends with 0 if
it was trained, or preempted and saved, or if its hyperparameters cannot be trained, which is reported to the master; any
other code is a crash, after which the master starts the trial again, up to max_restarts times.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch

from zero_trial.comm.env import launcher_error_file
from zero_trial.comm.rendezvous import destroy_distributed, init_distributed, open_exit_notice
from zero_trial.ds_config.report import entries_of, short_report
from zero_trial.errors import (
    ConfigError,
    InvalidHP,
    Preempted,
    StorageError,
    TrialError,
    ZeroTrialError,
)
from zero_trial.runs.events import append_line, write_json
from zero_trial.runs.layout import RunFolder, lock_run
from zero_trial.runs.provenance import add_start
from zero_trial.runs.records import error_record, write_error
from zero_trial.runtime.determined import DeterminedPlatform, invalid_hp_class, open_platform
from zero_trial.runtime.local import LocalPlatform, agree_on_start
from zero_trial.runtime.protocols import Distributed
from zero_trial.runtime.rank import (
    EventLog,
    RankState,
    Trained,
    TrialFactory,
    as_known_error,
    done_event,
    figures_of,
    own_device,
    rank_world,
    train,
)
from zero_trial.trial.context import EngineFactory
from zero_trial.trial.reporting import End, Outcome
from zero_trial.util.failures import with_user_line

EARLY_EXIT = "early exit"


# A run in a folder


@dataclass(frozen=True)
class LocalRun:
    """What a run in a folder is made from.

    Attributes:
        folder: absolute; a checkpoint in it is continued.
        model_dir: where the trial's code is, and where relative paths begin.
        resume: another run's folder, or a checkpoint, whose trial goes on here.
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
    """Whether a signal has asked this process to save and stop.

    A launcher sends the same signal to end the other ranks when one has failed. ``failed`` tells the two apart: if it
    is true, the signal ends the process as usual.
    """

    def __init__(self, failed: Callable[[], bool] = lambda: False) -> None:
        self._asked = threading.Event()
        self._failed = failed

    def __call__(self) -> bool:
        return self._asked.is_set()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """SIGTERM asks, however often it comes: a scheduler may send it to every process, and a launcher pass it on.

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
    """One rank of a run in a folder, from its first line to its last.

    SIGTERM asks it to save and stop. An error of the block is recorded in the folder, as soon as ``state`` knows it, and
    ends the process. ``script``: errors that are not this package's are raised as they are.
    """
    stop = StopRequest(lambda: state.folder is not None and RunFolder(state.folder).has_failed_ranks())
    try:
        with stop.listening():
            yield stop
    except (Exception, KeyboardInterrupt) as error:
        if isinstance(error, InvalidHP) and state.context is not None:
            with suppress(OSError, ZeroTrialError):  # the error itself is recorded whether this can be written or not
                state.context.platform.report_early_exit("INVALID_HP")
        _end(error, state, script=script)
    finally:
        destroy_distributed()


@contextmanager
def open_folder(
    run: LocalRun, state: RankState, stop: StopRequest, *, show: EventLog | None = None
) -> Iterator[LocalPlatform]:
    """Collective. The platform of a run in its folder, on ranks that have joined, at the checkpoint where the run starts.

    Raises CheckpointError on every rank where there are checkpoints and all of them are damaged.
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
        record_provenance(platform, own_device(state.env))
        _print_config_report(RunFolder(run.folder))
    for note in notes:
        platform.progress.emit({"kind": "note", "message": note})
    yield platform


@contextmanager
def lock_run_together(folder: Path, ranks: Distributed) -> Iterator[None]:
    """Collective at its beginning. Rank 0 takes the run lock; every rank raises ConfigError if another process has it."""
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
    """Each rank removes its own error of an earlier start in this folder, rank 0 those of ranks that do not exist now."""
    if state.folder is None:
        return
    env = state.env
    for path in RunFolder(state.folder).error_files():
        rank = int(path.stem.removeprefix("rank-"))
        if rank == env.rank or (env.rank == 0 and rank >= env.world_size):
            path.unlink(missing_ok=True)


def record_provenance(run: LocalPlatform, device: torch.device) -> None:
    """Note this start in the run's provenance: rank 0, before training."""
    facts = {
        "step": run.steps_completed,
        "seed": run.seed,
        "ranks": run.distributed.size,
        "hyperparameters": run.hparams,
    }
    machine = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }
    add_start(run.run_dir, facts, run.model_dir, str(torch.__version__), machine)


def _print_config_report(folder: RunFolder) -> None:
    """Print into this rank's log which ds_config values are defaults and which have no effect."""
    if folder.resolved_config.is_file():
        entries = entries_of(json.loads(folder.resolved_config.read_text(encoding="utf-8")))
        sys.stdout.write(short_report(entries) + "\n")


# A task of a Determined cluster


@contextmanager
def rank_of_task(state: RankState, *, script: bool = False) -> Iterator[None]:
    """One rank of a task of a cluster, from its first line to its last; an error of the block ends the process."""
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        _end(error, state, script=script)


@contextmanager
def open_task(state: RankState, core_context: Any = None) -> Iterator[DeterminedPlatform]:
    """Collective. Join the ranks and open the trial's platform, in a core.Context of its own or in the given one.

    Hyperparameters that cannot be trained are reported to the master, once, and end every rank with exit code 0.
    """
    state.env = init_distributed()
    log, notice = EventLog(), open_exit_notice()
    notice.watch(EARLY_EXIT)
    error: BaseException | None = None
    try:
        with open_platform(
            rank_world(state.env), notice.claim, log, launched=state.env.launched, core_context=core_context
        ) as platform:
            try:
                yield platform
            except (Exception, KeyboardInterrupt) as raised:
                error = raised  # until the platform is closed: it still has TensorBoard files to copy
                if is_invalid_hp(raised):
                    platform.report_early_exit("INVALID_HP")
                    sys.stderr.write(f"hyperparameters that cannot be trained: {raised}\n")
                    error = SystemExit(0)
                elif notice.claimed(EARLY_EXIT):  # an echo: another rank has left
                    error = SystemExit(0)
    except Exception:
        if error is None:  # else the first error is the cause
            raise
    finally:
        log.close()
        notice.close()
        destroy_distributed()
    if error is not None:
        raise error


def train_task(
    load: Callable[[DeterminedPlatform], TrialFactory],
    engine_factory: EngineFactory,
    core_context: Any = None,
) -> None:
    """Collective. Train the experiment's trial. ``load`` gives its class once the ranks have joined."""
    state = RankState()
    with rank_of_task(state), open_task(state, core_context) as platform:
        if (platform.experiment.get("profiling") or {}).get("enabled"):
            platform.profile_system()
        finish(train(load(platform), platform, state, engine_factory))


def is_invalid_hp(error: BaseException) -> bool:
    """Whether the error is this package's InvalidHP or Determined's own."""
    theirs = invalid_hp_class()
    return isinstance(error, InvalidHP) or (theirs is not None and isinstance(error, theirs))


# The end of a run


def finish(trained: Trained, repeat: str = "") -> None:
    """Collective. The figures of a run that has ended well: into its folder, or to the master.

    ``repeat``: the command that summary.json names as the one to repeat a run in a folder.
    """
    context, platform = trained.context, trained.context.platform
    first = context.distributed.rank == 0
    if isinstance(platform, LocalPlatform):
        figures = figures_of(trained)
        if first:
            write_json(RunFolder(platform.run_dir).summary, {**figures, "repeat": repeat})
            platform.progress.emit(done_event(trained.outcome))
        context.distributed.barrier()  # the summary is written before any rank ends
        return
    if isinstance(platform, DeterminedPlatform) and trained.watch is not None and (kept := trained.watch.summary()):
        platform.keep(kept)
    # A preempted trial goes on later: its figures are those of a part.
    figures = figures_of(trained) if trained.outcome.end is not End.PREEMPTED else {}
    if first:
        platform.progress.emit(done_event(trained.outcome, figures))


def raise_if_preempted(outcome: Outcome) -> None:
    """Raise Preempted for a run that was asked to stop, so that it is known as resumable."""
    if outcome.end is End.PREEMPTED:
        raise Preempted(
            f"stopped at step {outcome.step} of {outcome.total_steps} and saved {outcome.checkpoint}",
            fix="The same command with this run folder goes on from there.",
        )


def _end(error: BaseException, state: RankState, *, script: bool) -> NoReturn:
    """End this process after ``error``: record it, print it, exit with its code."""
    known = as_known_error(error)
    if state.folder is not None:
        record_error(known, state.folder, state)
    if script and not isinstance(known, ZeroTrialError):
        write_error_file(error_text(known), printed=False)
        raise error
    print_error(known)
    raise SystemExit(known.exit_code if isinstance(known, ZeroTrialError) else 1) from None


def record_error(error: BaseException, run_dir: Path, state: RankState) -> None:
    """Leave the error in the run's folder for the supervisor. A disk that is full does not change how the rank ends."""
    record = error_record(error, state.env.rank, error_text(error), state.step)
    with suppress(StorageError):
        write_error(run_dir, record)
    if state.env.rank == 0:
        with suppress(StorageError):
            event = {"kind": "error", "time": record.time, "step": record.step, "message": record.message}
            append_line(RunFolder(run_dir).events, event)


def print_error(error: BaseException) -> None:
    """Print an error into the log: its message, and the traceback of one that is not this package's.

    The message begins with ``error   ``, so that it can be found among what launchers print after it. A run that was
    asked to stop, and has saved, is not an error.
    """
    text = error_text(error)
    write_error_file(text, printed=True)  # first: what is printed is then surely in the file
    first, *rest = text.splitlines()
    label = "stopped" if isinstance(error, Preempted) else "error  "
    lines = [f"{label} {first.removeprefix('stopped ')}", *(f"        {line}" for line in rest)]
    with suppress(OSError):  # a log on a full disk
        if not isinstance(error, ZeroTrialError):
            traceback.print_exception(error, file=sys.stderr)
        sys.stderr.write("\n".join(lines) + "\n")
        sys.stderr.flush()


def error_text(error: BaseException) -> str:
    """The message of an error of this package, of any other the last line of its traceback.

    Errors that arose in the trial's code name the line of that code.
    """
    if isinstance(error, ZeroTrialError):
        text = str(error) or type(error).__name__
        return with_user_line(text, error) if isinstance(error, TrialError) else text
    return with_user_line("".join(traceback.format_exception_only(error)).strip(), error)


def write_error_file(text: str, *, printed: bool, path: str | None = None, now: float | None = None) -> None:
    """Write the error into the file in which torch.distributed.run looks for it, once per rank: the first one is the cause.

    The form is that of torch's ``@record`` (torch.distributed.elastic.multiprocessing.errors). Without it the launcher
    reports that there is no traceback, whatever the rank has printed. Does nothing without a launcher, or where the file
    cannot be written: the log has the error. ``printed``: whether the log has it too.
    """
    place = launcher_error_file() if path is None else path
    if not place:
        return
    # torch reads the time as an integer and shows what is under "py_callstack".
    extra = {"py_callstack": text, "timestamp": str(int(time.time() if now is None else now))}
    content = {"message": {"message": text, "extraInfo": extra, "printed": printed}}
    with suppress(OSError), Path(place).open("x", encoding="utf-8") as file:
        json.dump(content, file)
