"""Build the user's trial in this process with the engine of a fake rank 0, train and evaluate one
batch, and report what fails."""

from __future__ import annotations

import contextlib
import inspect
import math
import re
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from zero_trial.errors import Diverged, InvalidHP, ZeroTrialError
from zero_trial.planning.issues import Area, CheckIssue, Severity, issues_of, note
from zero_trial.planning.lone_task import (
    MOST_VALUES,
    DryRunRequest,
    LoneTask,
    check_initialize,
    lone_task,
    trial_code_error,
)
from zero_trial.trial.context import ZeroTrialContext
from zero_trial.trial.controller import StepRunner, not_a_scalar
from zero_trial.trial.data import (
    TRAIN_LOADER,
    DataPosition,
    TrainFeed,
    accept_loader,
    compare_batch,
    epoch_steps,
    open_feed,
)
from zero_trial.trial.metrics import COUNTERS, SPEED_METRIC, without_counters
from zero_trial.trial.settings import UNENDING, TrainPosition
from zero_trial.trial.trial import ZeroTrial, overrides
from zero_trial.trial.validation import Validator
from zero_trial.util.memory import available_memory, machine_memory


@dataclass
class DryRunResult:
    """The findings; None for parts that the dry run did not reach or was not asked to run."""

    issues: list[CheckIssue] = field(default_factory=list)
    parameters: int | None = None
    epoch_steps: int | None = None
    validation_batches: int | None = None
    metrics: tuple[str, ...] | None = None


_MOST_SECONDS = 10  # limit for the step, and for the evaluation
_LEAST_MEMORY = 0.1  # fraction of the machine's memory that must remain available
_LOOK_SECONDS = 0.05
# Text in errors of code that needs a device other than the CPU, on which check trains.
_OF_A_DEVICE = re.compile(
    r"cuda|nvidia|triton|active drivers|dummy base class|same device|not implemented for '(Half|BFloat16)'",
    re.IGNORECASE,
)


class _Ended(Exception):
    """The dry run cannot continue, for the reason in the issues."""


class _TooMuch(BaseException):
    """The work exceeds its limit of time or memory. The trial's code should not catch it."""


def dry_run_trial(request: DryRunRequest) -> DryRunResult:
    """Import and build the trial, check its loaders and the metrics that it reports, train one step
    and evaluate one batch.

    Without ``dry_run``, a model that does not fit into this machine's memory is not trained or
    evaluated, and work ends after ``_MOST_SECONDS``, or if little memory is left.

    Exceptions of the trial become issues: a fault if a rank would also raise it, a warning if
    values or hook calls differ from a rank's, and a note if the code needs another device or other
    ranks.
    """
    found = DryRunResult()
    most = math.inf if request.dry_run else MOST_VALUES
    with lone_task(request, check_initialize(request.slots, most), most) as task, contextlib.suppress(_Ended):
        _Stage(request, found, task).run()
    return found


class _Stage:
    """The steps of one dry run, each of which may end it.

    ``_doubt``: why a failure from now on may not occur on a rank; empty if nothing differs.
    """

    def __init__(self, request: DryRunRequest, found: DryRunResult, task: LoneTask) -> None:
        self._request = request
        self._found = found
        self._task = task
        self._doubt = ""

    def run(self) -> None:
        request = self._request
        kind = self._try(Area.ENTRYPOINT, self._task.import_class, "import")
        context = self._task.seeded_context()
        trial = self._try(Area.TRIAL, lambda: kind(context), f"{request.entrypoint.name}.__init__")
        self._try(Area.TRIAL, context.get_train_micro_batch_size_per_gpu)
        self._found.parameters = (
            context.parameters or sum(param.numel() for param in _parameters(context) if param.requires_grad) or None
        )
        self._doubt = "without the trial's callbacks" if overrides(trial, "build_callbacks") else ""
        loader, validator, room = None, None, not any(param.is_meta for param in _parameters(context))
        with contextlib.suppress(_Ended):
            loader = self._try(Area.LOADERS, lambda: self._train_loader(trial, context), TRAIN_LOADER)
        with contextlib.suppress(_Ended):
            build = lambda: Validator(trial, context, [], 1)  # noqa: E731
            validator = self._try(Area.LOADERS, build, "build_validation_data_loader")
        context.position = TrainPosition(0, self._found.epoch_steps or UNENDING)
        ready = self._train(trial, context, loader, room=room)
        if validator is not None:
            self._metric(validator, trial, ready=ready, room=room)

    def _train(self, trial: ZeroTrial, context: ZeroTrialContext, loader: Any, *, room: bool) -> bool:
        """Run one step of ``train_batch``, with the same samples in all micro-batches. Return
        whether the engines can evaluate now: the step completed, or did not start."""
        mpu, seed = context.mpu, self._request.seed
        with contextlib.suppress(_Ended):
            if loader is None:
                raise _Ended
            batch = self._try(
                Area.LOADERS,
                lambda: next(open_feed(loader, TRAIN_LOADER, mpu, seed, DataPosition())),
                f"reading a batch of {TRAIN_LOADER}",
            )
            if not room:
                self._left_out("train_batch")
                raise _Ended
            feed = TrainFeed([batch], TRAIN_LOADER, repeat=True)
            with contextlib.suppress(_Ended):
                before = len(self._task.events)
                try:
                    step = lambda: self._timed(StepRunner(trial, context, feed).run, 0, 0)  # noqa: E731
                    self._try(Area.TRIAL, step, "train_batch", differs=True)
                    self._warn_of_notes(Area.TRIAL, before)
                    context.position = TrainPosition(1, self._found.epoch_steps or UNENDING)
                    return True
                except _TooMuch as why:
                    self._left_out("train_batch", why)
            return False
        self._doubt = self._doubt or "without a step before it"
        return True

    def _timed(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """Return the result of ``work``. Raises _TooMuch, unless the user asked for the dry run."""
        with contextlib.nullcontext() if self._request.dry_run else _limited(_MOST_SECONDS):
            return work(*arguments)

    def _left_out(self, what: str, why: _TooMuch | None = None) -> None:
        """Add a note that ``what`` did not run; ``why``: the limit that ended it."""
        ended = f" to its end: it takes {why}" if why is not None else ": this model takes much memory"
        self._note(Area.TRIAL, Severity.NOTE, f"{what} was not run{ended}; --dry-run runs it")

    def _note(self, area: Area, severity: Severity, what: str, **parts: Any) -> None:
        self._found.issues.append(note(area, severity, what, **parts))

    def _train_loader(self, trial: ZeroTrial, context: ZeroTrialContext) -> Any:
        """Check the loader as the controller does and return it."""
        loader, before = trial.build_training_data_loader(), len(self._task.events)
        loader = accept_loader(loader, TRAIN_LOADER, context.check_reproducibility)
        compare_batch(loader, context)
        accumulation = context.get_num_micro_batches_per_slot()
        self._found.epoch_steps = epoch_steps(self._task.ranks, loader, context.mpu, accumulation, context.note)
        self._warn_of_notes(Area.LOADERS, before)
        return loader

    def _warn_of_notes(self, area: Area, before: int) -> None:
        """Add a warning for each note among the trial's events from number ``before`` on."""
        for event in self._task.events[before:]:
            if event["kind"] == "note":
                self._note(area, Severity.WARNING, event["message"])

    def _metric(self, validator: Validator, trial: ZeroTrial, *, ready: bool, room: bool) -> None:
        """Evaluate one batch if the engines are ``ready``, and check for the searcher's metric."""
        searcher = self._request.experiment.searcher
        if searcher.metric == SPEED_METRIC:
            return
        where = self._request.experiment.document.where("searcher.metric")
        if not validator.enabled:
            severity = Severity.FAULT if searcher.searches else Severity.WARNING
            what = f'"{searcher.metric}" never reported; the trial has no evaluate_batch'
            self._note(Area.METRIC, severity, what, where=where)
            return
        self._found.validation_batches = validator.batches
        metrics: Mapping[str, Any] | None = None
        stated = validator.stated_metrics()
        method = trial.evaluate_full_dataset if validator.evaluates_whole else trial.evaluate_batch
        if not ready:
            text = f"{method.__name__} was not run, because the step before it did not finish"
            self._note(Area.METRIC, Severity.NOTE, text)
        elif not room:
            self._left_out(method.__name__)
        elif self._request.dry_run or not validator.evaluates_whole:
            try:
                run = lambda: self._timed(validator.run)  # noqa: E731
                metrics = self._try(Area.METRIC, run, "evaluation", method, differs=True)
            except _TooMuch as why:
                self._left_out(method.__name__, why)
        if metrics is not None:
            self._found.metrics = tuple(sorted(without_counters(metrics)))
        elif stated is not None:
            metrics = dict.fromkeys(stated, 0.0)  # their values are not known
        else:
            without = " without --dry-run" if ready else ""
            what = f'whether "{searcher.metric}" is reported is unknown{without}: the source does not name every metric'
            self._note(Area.METRIC, Severity.NOTE, what, where=where)
            return
        if searcher.metric in COUNTERS:
            return
        if searcher.metric not in metrics and searcher.metric in (stated or ()):
            return  # according to the source, another batch may report it
        value, reported = metrics.get(searcher.metric), sorted(without_counters(metrics))
        if isinstance(value, (int, float)):
            return
        if value is not None:
            self._found.issues += issues_of(Area.METRIC, not_a_scalar(searcher.metric, value, where))
            return
        listed = ", ".join(f'"{name}"' for name in reported)
        what = f'"{searcher.metric}" never reported; the trial reports [{listed}]'
        fix = f"Write metric: {reported[0]}." if len(reported) == 1 else "Name one of these."
        self._note(Area.METRIC, Severity.FAULT, what, where=where, fix=fix)

    def _try(
        self,
        area: Area,
        work: Callable[[], Any],
        doing: str = "",
        method: Callable[..., Any] | None = None,
        *,
        differs: bool = False,
    ) -> Any:
        """Return the result of ``work``; an exception becomes an issue and ends the dry run.

        Args:
            doing: the name of ``work`` in messages.
            method: the trial's method; an error raised elsewhere may not occur after all batches.
            differs: whether the differences from a rank (``_doubt``) may cause the failure.
        """
        doubt = self._doubt if differs else ""
        try:
            return work()
        except InvalidHP as error:
            search = self._request.experiment.searcher.searches
            self._found.issues += issues_of(area, error, Severity.WARNING if search or doubt else Severity.FAULT)
        except ZeroTrialError as error:
            right = doubt or isinstance(error, Diverged)  # on a rank this depends on the other ranks
            self._found.issues += issues_of(area, error, Severity.WARNING if right else Severity.FAULT)
        except (Exception, SystemExit) as error:
            if method is not None and not _raised_inside(error, method):
                doubt = doubt or "after one batch"
            severity = Severity.WARNING if doubt else Severity.FAULT
            self._report(area, error, f"{doing} {doubt}".rstrip(), severity)
        raise _Ended

    def _report(self, area: Area, error: BaseException, doing: str, severity: Severity) -> None:
        """Add an exception of the trial's code; as a note if the code can only run on ranks."""
        if "process group has not been initialized" in str(error):
            severity, doing = Severity.NOTE, f"{doing}, which calls torch.distributed, could not be run here: it"
        elif _OF_A_DEVICE.search(str(error)):
            severity, doing = Severity.NOTE, f"{doing}, which needs another device, could not be run on the CPU: it"
        fault = trial_code_error(error, self._request.model_dir, doing)
        self._found.issues.append(CheckIssue(area, severity, fault))


@contextlib.contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Raise _TooMuch in the block after ``seconds``, or when less than ``_LEAST_MEMORY`` is left.

    No limit outside the main thread, which alone receives signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    inside, started, least = True, time.monotonic(), _LEAST_MEMORY * (machine_memory() or 0)

    def look(number: int, frame: Any) -> None:
        if inside and time.monotonic() - started >= seconds:
            raise _TooMuch(f"more than {seconds} s")
        if inside and (available_memory() or math.inf) < least:
            raise _TooMuch(f"the last {_LEAST_MEMORY:.0%} of the memory")

    before = signal.signal(signal.SIGALRM, look)
    every = min(seconds, _LOOK_SECONDS)
    left, interval = signal.setitimer(signal.ITIMER_REAL, every, every)
    try:
        try:
            yield
        finally:
            inside = False
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before if before is not None else signal.SIG_DFL)
        if left:  # restart the caller's timer
            signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - started), 0.001), interval)


def _raised_inside(error: BaseException, method: Callable[..., Any]) -> bool:
    """Return whether ``method`` is in the error's traceback."""
    code = getattr(inspect.unwrap(method), "__code__", None)
    return code is None or any(frame.f_code is code for frame, _ in traceback.walk_tb(error.__traceback__))


def _parameters(context: ZeroTrialContext) -> Iterator[torch.nn.Parameter]:
    """Yield the parameters of all engines."""
    for engine in context.engines:
        module = getattr(engine, "module", None)
        if isinstance(module, torch.nn.Module):
            yield from module.parameters()
