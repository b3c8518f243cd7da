"""One rank of a trial: its communicator, device, context, training, figures and log."""

from __future__ import annotations

import atexit
import gc
import json
import resource
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

import torch

from zero_trial.comm.mesh import MeshShape, build_mesh
from zero_trial.comm.rendezvous import RankEnv, launcher_error_file
from zero_trial.device import is_accelerator, own_device, torch_module
from zero_trial.errors import DoesNotFit, Preempted, TrialError, ZeroTrialError
from zero_trial.experiment.entrypoint import Entrypoint, check_entrypoint
from zero_trial.launch.screen import Screen, done_line
from zero_trial.trial import Controller, ZeroTrial, ZeroTrialContext
from zero_trial.trial.context import EngineFactory
from zero_trial.trial.reporting import End, Outcome, build_summary
from zero_trial.trial.runs.run_layout import RunFolder
from zero_trial.trial.runtime.protocols import Distributed, Platform
from zero_trial.trial.settings import settings_from_experiment
from zero_trial.trial.trial import import_trial_class, seed_everything
from zero_trial.util.failures import error_in_worker, known_fault, user_line, with_user_line

if TYPE_CHECKING:
    from zero_trial.planning.memory_watch import MemoryWatch

TrialFactory = Callable[[ZeroTrialContext], ZeroTrial]
Context = TypeVar("Context", bound=ZeroTrialContext)


@dataclass
class RankState:
    """The state of a rank so far; errors are recorded with it.

    ``folder``: the run's; None on a cluster. ``watch``: rank 0's watch on its engine's memory.
    """

    env: RankEnv = RankEnv()  # noqa: RUF009 - frozen
    folder: Path | None = None
    context: ZeroTrialContext | None = None
    watch: MemoryWatch | None = None

    @property
    def step(self) -> int | None:
        position = self.context.position if self.context is not None else None
        return None if position is None else position.step


@dataclass(frozen=True)
class Trained:
    """A trial that has ended, and its memory measurements."""

    outcome: Outcome
    trial: ZeroTrial
    context: ZeroTrialContext
    watch: MemoryWatch | None = None


def rank_world(env: RankEnv) -> Distributed:
    """Return the trial's ranks, which communicate through the mesh.

    Its groups are those of the engines; its traffic is not included in theirs.
    """
    if env.world_size == 1:
        return Distributed()
    comm = build_mesh(MeshShape(replica=env.world_size)).world
    return Distributed(env.rank, env.world_size, env.local_rank, lambda value: comm.gather_json(value, "trial"))


def load_trial_class(name: Entrypoint, model_dir: Path) -> type[ZeroTrial]:
    """Import the user's class. Raises ConfigError that lists the available trials."""
    check_entrypoint(name, model_dir, where="entrypoint")
    with _refuse_sys_exit(
        f"the import of {name.module} ended the process",
        'Move code that parses arguments or exits under if __name__ == "__main__"; a trial reads context.get_hparams().',
    ):
        return import_trial_class(name.module, name.name, model_dir)


def open_context(
    platform: Platform,
    state: RankState,
    engine_factory: EngineFactory,
    make: Callable[[Platform, EngineFactory, torch.device], Context],
) -> Context:
    """Seed all generators, and create the context of the trial that is built next."""
    # Skip the garbage collection at exit, since the memory is freed anyway. It would scan 300 000
    # objects, which takes a second in every trial of a search: four fifths of the time between a
    # rank's last line and its exit.
    atexit.unregister(gc.freeze)
    atexit.register(gc.freeze)
    env = state.env
    watch: MemoryWatch | None = None
    if env.rank == 0:
        from zero_trial.planning import memory_watch  # also imports the planner

        watch = memory_watch.MemoryWatch(platform.emit, env.local_world_size)
        engine_factory = watch.around(engine_factory)
    seed_everything(platform.seed)
    context = make(platform, engine_factory, own_device(env.local_rank))
    state.context, state.watch = context, watch
    return context


def train(make: TrialFactory, platform: Platform, state: RankState, engine_factory: EngineFactory) -> Trained:
    """Collective. Build the context and the trial, and train as the experiment specifies."""
    context = open_context(platform, state, engine_factory, ZeroTrialContext)
    with _refuse_sys_exit(
        "the trial's code called exit()",
        "Raise an exception instead; to stop the run after a save, call context.set_stop_requested(True).",
    ):
        trial = make(context)
        settings = settings_from_experiment(platform.experiment, context.known_batch_size)
        return Trained(Controller(trial, context, settings).run(), trial, context, state.watch)


@contextmanager
def _refuse_sys_exit(what: str, fix: str) -> Iterator[None]:
    """Raise TrialError if the trial's code calls ``sys.exit``: otherwise its rank would record no
    error, and the other ranks would wait for it."""
    try:
        yield
    except SystemExit as ending:
        raise TrialError(what, where=user_line(ending), got=f"sys.exit({ending.code!r})", fix=fix) from ending


def explained(error: BaseException, state: RankState) -> BaseException:
    """Convert ``error`` to an error of this package, or return it unchanged. If memory ran out,
    write a table of what the engines hold, and torch's snapshot of an accelerator's memory, next to
    the rank's error, and name both files."""
    known = known_fault(error) or error
    context, cause = state.context, known.__cause__
    if not isinstance(known, DoesNotFit) or cause is None or state.folder is None or context is None:
        return known
    from zero_trial.engine.observe import memory_table

    place = RunFolder(state.folder).errors / f"rank-{state.env.rank}.memory"
    found = []
    with suppress(OSError, RuntimeError):
        place.parent.mkdir(parents=True, exist_ok=True)
        text = "\n\n".join(memory_table(engine) for engine in context.engines)
        place.with_suffix(".memory.txt").write_text(text + "\n", encoding="utf-8")
        found.append(f"what each group held: {place.with_suffix('.memory.txt')}")
        if is_accelerator(context.device):
            torch_module(context.device).memory._dump_snapshot(str(place.with_suffix(".memory.pickle")))
            found.append(f"torch's snapshot: {place.with_suffix('.memory.pickle')}")
    told = DoesNotFit(known.what, where=known.where, got="; ".join(found) or None, fix=known.fix)
    told.__cause__ = cause
    return told


def report_error(error: BaseException, *, script: bool) -> BaseException:
    """Print the error that ends this rank, write it where the launcher looks for it, and return the
    exception to raise.

    That is SystemExit with the error's exit code. In a ``script``, an error that does not belong to
    this package is neither printed nor changed: the script may catch it, and otherwise Python
    prints it.
    """
    known = known_fault(error) or error
    if script and not isinstance(known, ZeroTrialError):
        write_error_file(error_text(known), printed=False)
        return error
    print_error(known)
    return SystemExit(known.exit_code if isinstance(known, ZeroTrialError) else 1)


def print_error(error: BaseException) -> None:
    """Log an error: its message, and the traceback if the error does not belong to this package, or
    the traceback of the user's error behind a TrialError.

    The message starts with ``error   ``, so that it can be found in the output that launchers print
    after it. A run that was asked to stop, and has saved, is not an error.
    """
    text = error_text(error)
    write_error_file(text, printed=True)  # first: an error that was printed must be in the file
    first, *rest = text.splitlines()
    label = "stopped" if isinstance(error, Preempted) else "error  "
    lines = [f"{label} {first.removeprefix('stopped ')}", *(f"        {line}" for line in rest)]
    with suppress(OSError):  # a log on a full disk
        shown = error.__cause__ if isinstance(error, TrialError) else error
        if shown is not None and not isinstance(shown, ZeroTrialError):
            traceback.print_exception(shown, file=sys.stderr)
        sys.stderr.write("\n".join(lines) + "\n")
        sys.stderr.flush()


def error_text(error: BaseException) -> str:
    """Return the message of an error of this package, or any other error's last traceback line.

    For errors raised in the trial's code, add the line of that code.
    """
    if isinstance(error, ZeroTrialError):
        text = str(error) or type(error).__name__
        return with_user_line(text, error) if isinstance(error, TrialError) else text
    return error_in_worker(error) or with_user_line("".join(traceback.format_exception_only(error)).strip(), error)


def write_error_file(text: str, *, printed: bool, path: str | None = None, now: float | None = None) -> None:
    """Write the error into the file that torch.distributed.run reads, once per rank: the first
    error is the cause.

    The format is that of torch's ``@record`` (torch.distributed.elastic.multiprocessing.errors).
    Without this file, the launcher reports that there is no traceback, even if the rank printed
    one. Does nothing without a launcher, or if the file cannot be written: the log has the error.
    ``printed``: whether the log has it too.
    """
    place = launcher_error_file() if path is None else path
    if not place:
        return
    # torch reads the time as an integer and shows what is under "py_callstack".
    extra = {"py_callstack": text, "timestamp": str(int(time.time() if now is None else now))}
    content = {"message": {"message": text, "extraInfo": extra, "printed": printed}}
    with suppress(OSError), Path(place).open("x", encoding="utf-8") as file:
        json.dump(content, file)


def figures_of(trained: Trained) -> dict[str, Any]:
    """Collective. Return the run's figures on rank 0; empty on the others."""
    context = trained.context
    memory = context.distributed.gather(peak_memory(context.device))
    if context.distributed.rank != 0:
        return {}
    device = context.device.type
    kind = f"{device.upper()} memory allocated" if is_accelerator(context.device) else "resident set"
    more = {"peak_memory_bytes": memory, "peak_memory_kind": kind}
    more |= trained.watch.summary() if trained.watch is not None else {}
    return build_summary(trained.outcome, trained.trial, context, more)


def peak_memory(device: torch.device) -> int:
    """Return peak bytes of this process: device memory on an accelerator, resident set on CPU."""
    if is_accelerator(device):
        return int(torch_module(device).max_memory_allocated(device))
    status = Path("/proc/self/status")
    if status.is_file():  # ru_maxrss may include the parent's, from before exec
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class EventLog:
    """Prints a trial's events as lines if no launcher displays them.

    ``live``: update one line in place for the steps; None: only if ``stream`` is a terminal.
    """

    def __init__(self, stream: TextIO | None = None, live: bool | None = False) -> None:
        self._screen = Screen(stream if stream is not None else sys.stdout, live=live)

    def __call__(self, event: Mapping[str, Any]) -> None:
        if event.get("kind") == "done":
            self._screen.close()  # the last step before the last line
            word = {End.STOPPED.value: "stopped", End.PREEMPTED.value: "paused"}.get(event["end"], "done")
            where = f"step {event['step']}/{event['total_steps']}  checkpoint {event['checkpoint']}"
            if event.get("figures"):
                self._screen.say(done_line(event["figures"], word))
            self._screen.say(f"{'kept' if event.get('figures') else word:8}{where}")
        self._screen.show(event)
        self._screen.tick()

    def close(self) -> None:
        self._screen.close()


def done_event(outcome: Outcome, figures: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return a trial's last event, including its figures if they are in no file."""
    event = {"kind": "done", "step": outcome.step, "total_steps": outcome.total_steps, "end": outcome.end.value}
    return {**event, "checkpoint": outcome.checkpoint, **({"figures": dict(figures)} if figures else {})}
