"""A failing rank's last words, in the file in which torch.distributed.run looks for them: what it reports of the rank ends with them.

The form is that of torch's own ``@record`` (torch.distributed.elastic.multiprocessing.errors); without it the report says that there is
no traceback, whatever the rank has printed.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import zero_trial
from zero_trial.checkpoint import CheckpointReader
from zero_trial.comm.env import RankEnv, launcher_error_file
from zero_trial.comm.rendezvous import ExitNotice, destroy_distributed, init_distributed, open_exit_notice
from zero_trial.ds_config.report import REPORT, entries_of, short_report
from zero_trial.errors import (
    CheckpointError,
    ConfigError,
    InvalidHP,
    Preempted,
    StorageError,
    TrialError,
    ZeroTrialError,
)
from zero_trial.runs.checkpoints import find_fault, manifests, starting_point
from zero_trial.runs.events import append_line, write_json
from zero_trial.runs.layout import RunFolder, lock_run
from zero_trial.runs.provenance import PROVENANCE, _earlier, code_of
from zero_trial.runs.records import _error_files, error_record, with_user_line
from zero_trial.runtime.determined import DeterminedPlatform, invalid_hp_class, open_platform
from zero_trial.runtime.local import LocalPlatform
from zero_trial.runtime.protocols import Distributed
from zero_trial.runtime.rank import (
    EventLog,
    RankState,
    Trained,
    TrialFactory,
    as_known_error,
    done_event,
    figures_of,
    rank_world,
    train,
)
from zero_trial.trial.context import EngineFactory
from zero_trial.trial.reporting import End, Outcome


def write_error_file(text: str, *, printed: bool, path: str | None = None, now: float | None = None) -> None:
    """Once per rank: the first words are the cause. Nothing where no launcher asks for them.

    ``printed``: whether the log has them too. A file that cannot be written is nobody's concern: the log has the error.
    """
    place = launcher_error_file() if path is None else path
    if not place:
        return
    # torch reads the time as an integer and shows what is under "py_callstack".
    extra = {"py_callstack": text, "timestamp": str(int(time.time() if now is None else now))}
    content = {"message": {"message": text, "extraInfo": extra, "printed": printed}}
    with contextlib.suppress(OSError), Path(place).open("x", encoding="utf-8") as file:
        json.dump(content, file)


# A trial in a run's folder on this machine: where it starts, how it is asked to stop, and what it leaves behind.


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


def forget_errors(run_dir: Path, env: RankEnv) -> None:
    """Each rank, when it begins: its own error of an earlier start in this folder; rank 0 those of ranks that are no more."""
    for path in _error_files(run_dir):
        rank = int(path.stem.removeprefix("rank-"))
        if rank == env.rank or (env.rank == 0 and rank >= env.world_size):
            path.unlink(missing_ok=True)


def print_config_report(run_dir: Path) -> None:
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


def record_error(error: BaseException, run_dir: Path, state: RankState) -> int:
    """Leaves the error in the run's folder for the supervisor; the exit code. A disk that takes no more words changes nothing about it."""
    now = time.time()
    folder, rank = RunFolder(run_dir), state.env.rank
    record = {**error_record(error, rank, state.step, now), "message": error_text(error)}
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
    text = error_text(error)
    write_error_file(text, printed=True)  # before they are printed: who has printed something has left it too
    first, *rest = text.splitlines()
    label = "stopped" if isinstance(error, Preempted) else "error  "
    words = [f"{label} {first.removeprefix('stopped ')}", *(f"        {line}" for line in rest)]
    with suppress(OSError):  # a log on a full disk
        if not isinstance(error, ZeroTrialError):
            traceback.print_exception(error, file=sys.stderr)
        sys.stderr.write("\n".join(words) + "\n")
        sys.stderr.flush()


def error_text(error: BaseException) -> str:
    """The message of an error of this package; any other as the last line of its traceback has it. What the trial's code did, or did wrong,
    has the line of that code beside it."""
    if isinstance(error, ZeroTrialError):
        words = str(error) or type(error).__name__
        return with_user_line(words, error) if isinstance(error, TrialError) else words
    return with_user_line("".join(traceback.format_exception_only(error)).strip(), error)


# A run's folder that all ranks of a script hold together: rank 0 holds it, and a second run of the script ends on every rank.


@contextmanager
def lock_run_together(folder: Path, ranks: Distributed) -> Iterator[None]:
    """Collective at its beginning. Raises ConfigError on every rank if another process holds ``folder`` (see :func:`held`)."""
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


# Where a run starts: the newest checkpoint that is whole, which all ranks agree on before the trial is built.
#
# A checkpoint may have been damaged since it was made: a bit flipped, a file cut short or gone. Then the one before it is taken, and that is
# said. All of it is read for that, each file by one rank; the engine's load checks once more what it takes.


Note = Callable[[str], None]


def agree_on_start(
    ranks: Distributed, run_dir: Path, resume: Path | None = None, warm_start: Path | None = None, *, note: Note
) -> dict[str, Any]:
    """Collective. See :func:`starting_point`; ``note`` hears on rank 0 of each checkpoint that is passed over.

    Raises CheckpointError on every rank where there are checkpoints and none is whole: a run that starts afresh then was not meant to.
    """
    damaged: dict[str, str] = {}
    while True:
        start = ranks.broadcast(_propose(damaged, run_dir, resume, warm_start) if ranks.rank == 0 else None)
        if "fault" in start:
            raise CheckpointError(
                "no checkpoint is whole",
                where=str(run_dir),
                got=start["fault"],
                fix="Start in another folder, or move the damaged checkpoints away to start afresh.",
            )
        if start["checkpoint"] is None:
            return dict(start)
        found = ranks.allgather(verify_checkpoint(Path(start["checkpoint"]), ranks.rank, ranks.size))
        faults = [fault for fault in found if fault is not None]
        if not faults:
            return dict(start)
        damaged[start["checkpoint"]] = faults[0]
        if ranks.rank == 0:
            note(f"a damaged checkpoint is passed over: {faults[0]}")


def verify_checkpoint(folder: Path, index: int, count: int) -> str | None:
    """What is wrong with a finished checkpoint; None if nothing. Of ``count`` ranks each reads its share of the files of tensors."""
    if index == 0 and (fault := find_fault(folder)) is not None:
        return fault
    try:
        for manifest in manifests(folder):
            CheckpointReader(manifest.parent).verify(index, count)
    except CheckpointError as error:
        return str(error)
    except OSError as error:  # on this rank alone, perhaps: the others wait for its answer
        return f"rank {index} cannot read {folder} ({error.strerror or error})"
    return None


def _propose(damaged: Mapping[str, str], run_dir: Path, resume: Path | None, warm_start: Path | None) -> dict[str, Any]:
    """Rank 0: the next candidate, or a fault where all have been damaged."""
    try:
        start = starting_point(run_dir, resume, warm_start, apart_from=damaged)
    except CheckpointError:
        start = {"checkpoint": None}
    return {"fault": next(iter(damaged.values()))} if damaged and start["checkpoint"] is None else start


# A trial as a task of a Determined master: joins the ranks, opens the platform, and ends as the master understands it.
#
# exit code 0   trained; or preempted, acknowledged and saved; or hyperparameters that cannot be trained, told once
# any other     a crash: the master starts the trial again from its last checkpoint, up to max_restarts times


EARLY_EXIT = "early exit"


@contextmanager
def open_on_cluster(state: RankState, core_context: Any = None) -> Iterator[tuple[DeterminedPlatform, ExitNotice]]:
    """Collective. This rank among the others, with the cluster's platform; both are left at the end."""
    state.env = init_distributed()
    log, farewell = EventLog(), open_exit_notice()
    farewell.watch(EARLY_EXIT)
    try:
        with open_platform(
            rank_world(state.env), farewell.claim, log, launched=state.env.launched, core_context=core_context
        ) as platform:
            yield platform, farewell
    finally:
        log.close()
        farewell.close()
        destroy_distributed()


def run_on_cluster(load: Callable[[], TrialFactory], engine_factory: EngineFactory, core_context: Any = None) -> int:
    """Trains the experiment's trial; returns the exit code. Collective."""
    state = RankState()
    ending = ExitCode()
    with ending, open_on_cluster(state, core_context) as (platform, farewell), ending.of(platform, farewell):
        if (platform.experiment.get("profiling") or {}).get("enabled"):
            platform.profile_system()
        trained = train(load(), platform, state, engine_factory)
        keep_memory_figures(trained, platform)
        emit_done(trained)
    return ending.code


class ExitCode:
    """Turns whatever ends a rank into an exit code, in two layers: inside the platform, where an early end can be told
    to the master, and around it, for what fails while it opens and closes.
    """

    def __init__(self) -> None:
        self.code = 0

    def __enter__(self) -> ExitCode:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if error is None or not isinstance(error, (Exception, KeyboardInterrupt)):
            return False
        self._fail(error)
        return True

    @contextmanager
    def of(self, platform: DeterminedPlatform, farewell: ExitNotice) -> Iterator[None]:
        """What the block raises is told to the master if it is an early end, and printed otherwise."""
        try:
            yield
        except (Exception, KeyboardInterrupt) as error:
            if is_invalid_hp(error):
                platform.report_early_exit("INVALID_HP")
                sys.stderr.write(f"hyperparameters that cannot be trained: {error}\n")
            elif not farewell.claimed(EARLY_EXIT):  # else this is only the echo of another rank's leaving
                self._fail(error)

    def _fail(self, error: BaseException) -> None:
        error = as_known_error(error)
        print_error(error)
        self.code = self.code or (error.exit_code if isinstance(error, ZeroTrialError) else 1)


def is_invalid_hp(error: BaseException) -> bool:
    """Ours, or Determined's own."""
    theirs = invalid_hp_class()
    return isinstance(error, InvalidHP) or (theirs is not None and isinstance(error, theirs))


def keep_memory_figures(trained: Trained, platform: DeterminedPlatform) -> None:
    """Rank 0: what was planned and measured, for whoever compares trials."""
    figures = trained.watch.summary() if trained.watch is not None else {}
    if figures:
        platform.keep(figures)


def emit_done(trained: Trained) -> None:
    """Collective. The last event, on rank 0; that of a run that is not to go on has the run's figures."""
    figures = figures_of(trained) if trained.outcome.end is not End.PREEMPTED else {}
    if trained.context.distributed.rank == 0:
        trained.context.platform.progress.emit(done_event(trained.outcome, figures))


def record_provenance(run: LocalPlatform, device: torch.device) -> None:
    """Rank 0, before training: adds this start to the run's certificate. A run that goes on has one entry for each start."""
    path = run.run_dir / PROVENANCE
    starts = [*_earlier(path), _start(run, device)]
    write_json(path, {"starts": starts})


def _start(run: LocalPlatform, device: torch.device) -> dict[str, Any]:
    return {
        "time": time.time(),
        "step": run.steps_completed,
        "seed": run.seed,
        "ranks": run.distributed.size,
        "hyperparameters": json.loads(json.dumps(run.hparams, default=str)),
        "code": code_of(run.model_dir),
        "package": code_of(Path(zero_trial.__file__).parent)["sha256"][:16],
        "versions": {
            "zero_trial": zero_trial.__version__,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        },
        "machine": {
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "vectors": torch.backends.cpu.get_cpu_capability(),
            "threads": torch.get_num_threads(),
            "system": f"{sys.platform} {platform.machine()}",
        },
    }
