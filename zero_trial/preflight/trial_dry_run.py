"""Build the user's trial in this process, with the engine of a fake rank 0, train and evaluate one
batch with it, and report what fails."""

from __future__ import annotations

import contextlib
import math
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

import zero_trial
import zero_trial.engine
from zero_trial.errors import Diverged, InvalidHP, TrialError, ZeroTrialError
from zero_trial.experiment.entrypoint import Entrypoint
from zero_trial.experiment.experiment import ExperimentConfig
from zero_trial.preflight.dry_run import first_rows, rows_of
from zero_trial.preflight.fake_engine import MOST_VALUES, fake_initialize, whole_pipelines
from zero_trial.preflight.issues import Area, CheckIssue, Severity, issues_of, note
from zero_trial.runtime.in_memory import InMemoryPlatform
from zero_trial.runtime.protocols import JsonDistributed
from zero_trial.stand_in.deepspeed_table import install_deepspeed
from zero_trial.stand_in.determined_table import install_determined
from zero_trial.stand_in.finder import StandInModule
from zero_trial.trial.context import EngineFactory, ZeroTrialContext
from zero_trial.trial.controller import StepRunner
from zero_trial.trial.data import (
    TRAIN_LOADER,
    Resume,
    TrainFeed,
    accept_loader,
    compare_batch,
    epoch_steps,
    open_feed,
)
from zero_trial.trial.metrics import COUNTERS, without_counters
from zero_trial.trial.settings import settings_from_experiment
from zero_trial.trial.source import training_issues
from zero_trial.trial.trial import ZeroTrial, import_trial_class, seed_everything
from zero_trial.trial.validation import Validator


@dataclass(frozen=True)
class DryRunRequest:
    """What to run: one point of an experiment on ``slots`` ranks.

    ``dry_run``: train and evaluate also where that is much work.
    """

    experiment: ExperimentConfig
    entrypoint: Entrypoint
    hyperparameters: Mapping[str, Any]
    model_dir: Path
    slots: int
    seed: int = 0
    dry_run: bool = False


@dataclass
class DryRunResult:
    """What was found; None where the dry run did not get so far, or was not asked to."""

    issues: list[CheckIssue] = field(default_factory=list)
    parameters: int | None = None
    epoch_steps: int | None = None
    validation_batches: int | None = None
    metrics: tuple[str, ...] | None = None


# Trained parameters times elements of a step's batches: about 3 seconds on one core.
_MOST_WORK = 10_000_000_000


class _Ended(Exception):
    """The dry run cannot go on; the issues say why."""


class _TooMuchWork(Exception):
    """Two samples are already more than ``_MOST_WORK``, or the engine has no values."""


def dry_run_trial(request: DryRunRequest) -> DryRunResult:
    """Import and build the trial, check its loaders and the metrics that it reports, train one step
    and evaluate one batch.

    Without ``dry_run`` a batch that means more work than ``_MOST_WORK`` is cut to its first
    samples; what fails then is a warning.

    Whatever the trial raises becomes an issue.
    """
    found = DryRunResult()
    most = math.inf if request.dry_run else MOST_VALUES
    with fake_task(request, fake_initialize(request.slots, most), most) as task, contextlib.suppress(_Ended):
        _Stage(request, found, task).run()
    return found


class FakeTask:
    """What surrounds a trial that is built in this process: rank 0 of ranks that are not there.

    Attributes:
        ranks: what the ranks would tell each other; each says what rank 0 says.
    """

    def __init__(self, request: DryRunRequest, storage: Path) -> None:
        self._request = request
        self.ranks = JsonDistributed(0, request.slots, 0, lambda value: [value] * request.slots)
        self.platform = InMemoryPlatform(
            hparams=request.hyperparameters,
            experiment=request.experiment.plain(),
            model_dir=request.model_dir.resolve(),
            seed=request.seed,
            distributed=self.ranks,
            storage=storage,
        )

    def import_class(self) -> type[ZeroTrial]:
        """Import the trial's class, which runs the user's module."""
        name = self._request.entrypoint
        if name.as_determined:
            install_deepspeed().refuse_if_installed()
            install_determined()
        return import_trial_class(name.module, name.name, self._request.model_dir.resolve())

    def seeded_context(self) -> ZeroTrialContext:
        """Seed all random generators as a run does and return the context to build the trial
        with.
        """
        seed_everything(self._request.seed)
        return ZeroTrialContext(self.platform, zero_trial.initialize, torch.device("cpu"))


@contextlib.contextmanager
def fake_task(request: DryRunRequest, initialize: EngineFactory, most_values: float = 0.0) -> Iterator[FakeTask]:
    """Yield what a trial is built with; inside, its engines come from ``initialize``, and pipelines
    of at most ``most_values`` parameters have values.

    What the trial prints goes to stderr. Afterwards its modules are forgotten and its files are
    gone.
    """
    with (
        tempfile.TemporaryDirectory(prefix="zero-trial-dry-run-") as folder,
        contextlib.redirect_stdout(sys.stderr),
        _model_folder(request.model_dir),
        _replaced_initialize(initialize),
        whole_pipelines(most_values),
    ):
        yield FakeTask(request, Path(folder))


class _Stage:
    """The steps of one dry run, each of which may end it."""

    def __init__(self, request: DryRunRequest, found: DryRunResult, task: FakeTask) -> None:
        self._request = request
        self._found = found
        self._task = task

    def run(self) -> None:
        request = self._request
        if request.experiment.searcher.max_length is not None:
            settings = lambda: settings_from_experiment(self._task.platform.experiment, request.hyperparameters)  # noqa: E731
            with contextlib.suppress(_Ended):
                self._try(Area.EXPERIMENT, settings)
        kind = self._try(Area.ENTRYPOINT, self._task.import_class, "import")
        context = self._task.seeded_context()
        trial = self._try(Area.TRIAL, lambda: kind(context), f"{request.entrypoint.name}.__init__")
        self._try(Area.TRIAL, context.get_train_micro_batch_size_per_gpu)
        self._found.parameters = context.parameters or sum(param.numel() for param in _trained(context)) or None
        self._found.issues += _training_issues(trial)
        with contextlib.suppress(_Ended):
            loader = self._try(Area.LOADERS, lambda: self._train_loader(trial, context), TRAIN_LOADER)
            self._train(trial, context, loader)
        cut = _Cut(context, everything=request.dry_run)
        validator = self._try(
            Area.LOADERS, lambda: Validator(trial, context, [], 1, cut), "build_validation_data_loader"
        )
        self._metric(validator, cut)

    def _train(self, trial: ZeroTrial, context: ZeroTrialContext, loader: Any) -> None:
        """Run one step of ``train_batch``, all of its micro-batches with the same samples."""
        mpu, seed, cut = context.mpu, self._request.seed, _Cut(context, everything=self._request.dry_run)
        batch = self._try(
            Area.LOADERS,
            lambda: next(open_feed(loader, TRAIN_LOADER, mpu, seed, Resume())),
            f"reading a batch of {TRAIN_LOADER}",
        )
        try:
            batch = cut(batch)
        except _TooMuchWork:
            self._not_run("train_batch")
            return
        feed = TrainFeed([batch], TRAIN_LOADER, repeat=True)
        self._try(Area.TRIAL, lambda: StepRunner(trial, context, feed).run(0, 0), "train_batch", cut)

    def _not_run(self, what: str) -> None:
        text = f"{what} was not run: with this model it is much work; --dry-run runs it"
        self._found.issues.append(note(Area.TRIAL, Severity.NOTE, text))

    def _train_loader(self, trial: ZeroTrial, context: ZeroTrialContext) -> Any:
        """Check the loader as the controller does and return it."""
        loader, before = trial.build_training_data_loader(), len(self._task.platform.record.events)
        loader = accept_loader(loader, TRAIN_LOADER, context.check_reproducibility)
        compare_batch(loader, context)
        accumulation = context.get_num_micro_batches_per_slot()
        self._found.epoch_steps = epoch_steps(self._task.ranks, loader, context.mpu, accumulation, context.note)
        for event in self._task.platform.record.events[before:]:
            self._found.issues.append(note(Area.LOADERS, Severity.WARNING, event["message"]))
        return loader

    def _metric(self, validator: Validator, cut: _Cut) -> None:
        searcher = self._request.experiment.searcher
        where = self._request.experiment.document.at(("searcher", "metric")).where("searcher.metric")
        if not validator.enabled:
            severity = Severity.FAULT if searcher.searches else Severity.WARNING
            what = f'"{searcher.metric}" never reported; the trial has no evaluate_batch'
            self._found.issues.append(note(Area.METRIC, severity, what, where=where))
            return
        self._found.validation_batches = validator.batches
        metrics: Mapping[str, Any] | None = None
        stated = validator.stated_metrics()
        if self._request.dry_run or not validator.evaluates_whole:
            try:
                metrics = self._try(Area.METRIC, validator.run, "evaluation", cut)
            except _TooMuchWork:
                self._not_run("evaluate_batch")
        if metrics is not None:
            self._found.metrics = tuple(sorted(without_counters(metrics)))
        elif stated is not None:
            metrics = dict.fromkeys(stated, 0.0)  # their values are not known
        else:
            what = f'whether "{searcher.metric}" is reported is not known without --dry-run: the source does not name every metric'
            self._found.issues.append(note(Area.METRIC, Severity.NOTE, what, where=where))
            return
        if searcher.metric in COUNTERS:
            return
        if searcher.metric not in metrics and searcher.metric in (stated or ()):
            return  # by its source another batch may report it
        value, reported = metrics.get(searcher.metric), sorted(without_counters(metrics))
        listed = ", ".join(f'"{name}"' for name in reported)
        if value is None:
            what = f'"{searcher.metric}" never reported; the trial reports [{listed}]'
        elif not isinstance(value, (int, float)):
            what = f'"{searcher.metric}" is not a number; the trial reports [{listed}]'
        else:
            return
        fix = f"Write metric: {reported[0]}." if len(reported) == 1 else "Name one of these."
        self._found.issues.append(note(Area.METRIC, Severity.FAULT, what, where=where, fix=fix))

    def _try(self, area: Area, work: Callable[[], Any], doing: str = "", cut: _Cut | None = None) -> Any:
        """Return what ``work`` returns; what it raises becomes an issue and ends the dry run.

        ``doing`` names it in messages. A fault of work on a batch that was ``cut`` is a warning.
        """
        try:
            return work()
        except _TooMuchWork:
            raise
        except Diverged:
            pass  # the weights of other ranks are zeros here
        except InvalidHP as error:
            search = self._request.experiment.searcher.searches
            self._found.issues += issues_of(area, error, Severity.WARNING if search else Severity.FAULT)
        except ZeroTrialError as error:
            self._found.issues += issues_of(area, error)
        except (Exception, SystemExit) as error:
            severity = Severity.FAULT
            if cut is not None and "process group has not been initialized" in str(error):
                severity, doing = Severity.NOTE, f"{doing}, which calls torch.distributed, could not be run here: it"
            elif cut is not None and cut.samples:
                severity, doing = Severity.WARNING, f"{doing} with {cut.samples[0]} of {cut.samples[1]} samples"
            self._found.issues.append(
                CheckIssue(area, severity, trial_code_error(error, self._request.model_dir, doing))
            )
        raise _Ended


class _Cut:
    """Cuts a batch to as many samples as are little work; ``samples`` are those left and those that
    there were, where it has cut.

    ``everything``: never cut.
    """

    def __init__(self, context: ZeroTrialContext, *, everything: bool) -> None:
        self._context = context
        self._everything = everything
        self.samples: tuple[int, int] | None = None

    def __call__(self, batch: Any) -> Any:
        """Return the batch or its first samples, at least two of them. Raises _TooMuchWork."""
        context, rows = self._context, rows_of(batch) or 1
        trained = list(_trained(context))
        if any(param.is_meta for param in trained):
            raise _TooMuchWork
        elements = sum(leaf.numel() for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor))
        work = sum(param.numel() for param in trained) * elements * context.get_num_micro_batches_per_slot()
        if self._everything or work <= _MOST_WORK:
            return batch
        wanted = int(rows * _MOST_WORK / work)
        if wanted < 2:
            raise _TooMuchWork
        self.samples = (wanted, rows)
        return first_rows(batch, rows, wanted)


def _trained(context: ZeroTrialContext) -> Iterator[torch.nn.Parameter]:
    """Yield the trained parameters of all engines."""
    for engine in context.engines:
        module = getattr(engine, "module", None)
        if isinstance(module, torch.nn.Module):
            yield from (param for param in module.parameters() if param.requires_grad)


def _training_issues(trial: ZeroTrial) -> list[CheckIssue]:
    """Return what the source of ``train_batch`` does without effect."""
    return [
        note(Area.TRIAL, Severity.WARNING, f"train_batch: {each.what}", where=each.where, fix=each.fix)
        for each in training_issues(trial.train_batch)
    ]


class TrialCodeError(TrialError):
    """The trial's own code raised an exception."""

    exit_code = 1


def trial_code_error(error: BaseException, model_dir: Path, doing: str) -> ZeroTrialError:
    """Return the error for what the user's code raised, with the last line of that code in the
    traceback.
    """
    root = model_dir.resolve()
    own = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename).resolve().is_relative_to(root)
    ]
    where = f"{Path(own[-1].filename).resolve().relative_to(root)}:{own[-1].lineno}" if own else None
    if not own and isinstance(error, RuntimeError):
        return TrialError(str(error))  # ours, about what the trial did: Determined raises the same
    line = f" in: {own[-1].line}" if own and own[-1].line else ""
    text = str(error).strip()
    return TrialCodeError(f"{doing} raised {type(error).__name__}{f': {text}' if text else ''}{line}", where=where)


@contextlib.contextmanager
def raised_by_trial(model_dir: Path, doing: str) -> Iterator[None]:
    """Raise what the trial's code raises in the block as the error of that code."""
    try:
        yield
    except ZeroTrialError:
        raise
    except (Exception, SystemExit) as error:
        raise trial_code_error(error, model_dir, doing) from error


@contextlib.contextmanager
def _model_folder(folder: Path) -> Iterator[None]:
    """Forget afterwards what was imported from the model's folder: the next one may have modules of
    the same names.
    """
    path, before, root = list(sys.path), set(sys.modules), folder.resolve()
    try:
        yield
    finally:
        sys.path[:] = path
        for name in set(sys.modules) - before:
            file = getattr(sys.modules[name], "__file__", None)
            if file and Path(file).resolve().is_relative_to(root):
                del sys.modules[name]


@contextlib.contextmanager
def _replaced_initialize(initialize: EngineFactory) -> Iterator[None]:
    """Replace ``zero_trial.initialize`` inside: a trial may call it itself and wrap the engine that
    it returns.
    """
    places = [vars(zero_trial), vars(zero_trial.engine)]
    before = [place.get("initialize") for place in places]
    for place in places:
        place["initialize"] = initialize
    _resolve_again()
    try:
        yield
    finally:
        for place, value in zip(places, before, strict=True):
            if value is None:
                del place["initialize"]
            else:
                place["initialize"] = value
        _resolve_again()


def _resolve_again() -> None:
    """Let the stand-in for DeepSpeed, if there is one, look up ``initialize`` at its next use."""
    if isinstance(module := sys.modules.get("deepspeed"), StandInModule):
        vars(module).pop("initialize", None)
