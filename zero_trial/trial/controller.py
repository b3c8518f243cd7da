"""The loop around a trial: a step, what is due after it, and the end, all at boundaries of one global step counter."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from zero_trial.errors import ConfigError, InvalidHP, TrialError
from zero_trial.trial.callbacks import TrialCallback
from zero_trial.trial.checkpointing import Checkpointer, TrialSnapshot
from zero_trial.trial.context import ZeroTrialContext
from zero_trial.trial.data import TrainFeed, data_position, open_train_data
from zero_trial.trial.metrics import COUNTERS, mean_over_calls, training_metrics, without_counters
from zero_trial.trial.reporting import Clock, End, MetricReporter, Outcome, Overflowed, write_tensorboard
from zero_trial.trial.settings import UNENDING, TrainPosition, TrainSettings, is_boundary, total_steps
from zero_trial.trial.trial import ZeroTrial, fitted
from zero_trial.trial.validation import Validator


@dataclass(frozen=True)
class Score:
    """``metric`` None: nothing is scored."""

    metric: str | None
    smaller_is_better: bool = True

    def of(self, metrics: Mapping[str, Any]) -> float | None:
        """The metric's value. Raises ConfigError, naming what there is, if it is missing or no scalar."""
        if self.metric is None:
            return None
        value = metrics.get(self.metric)
        if value is not None and not isinstance(value, (int, float)):
            raise ConfigError(
                f"searcher.metric {self.metric!r} is no scalar",
                where="searcher.metric",
                got=f"a list of {len(value)}" if isinstance(value, list) else type(value).__name__,
                expected="one number",
                fix="Return its .mean() from evaluate_batch.",
            )
        if value is None:
            raise ConfigError(
                f"searcher.metric {self.metric!r} was never reported",
                where="searcher.metric",
                got=f"the trial reports {sorted(without_counters(metrics))}",
                fix="Name one of these.",
            )
        return float(value)

    def is_better(self, value: float, best: float | None) -> bool:
        """Whether ``value`` beats ``best``; anything beats nothing, and nan beats nothing at all."""
        if math.isnan(value):
            return False
        if best is None or math.isnan(best):
            return True
        return value < best if self.smaller_is_better else value > best


# One optimizer step of a trial: call ``train_batch`` as often as the accumulation says, and check that it did its
# work.


Metrics = dict[str, torch.Tensor]


class StepRunner:
    """Runs steps; holds nothing but what it calls."""

    def __init__(self, trial: ZeroTrial, context: ZeroTrialContext, feed: TrainFeed | None) -> None:
        self._call = fitted(trial.train_batch)
        self._context = context
        self._feed = feed
        self._calls = context.calls_per_step

    def run(self, step: int, epoch: int) -> tuple[Metrics, Overflowed]:
        """Step number ``step`` (from 0): its metrics, averaged over micro-batches, and what tells whether a loss scale
        was too high.

        The metrics are empty on ranks that do not report. To be told may wait for the device: ask when it matters.
        """
        engines = self._context.engines
        where = f"rank {self._context.distributed.rank}, step {step + 1}"
        before = [engine.micro_steps for engine in engines]
        skips = [skips_from_here(engine) for engine in engines if scales_its_loss(engine)]
        outputs = [self._call(self._feed, epoch, step) for _ in range(self._calls)]
        self._check_accumulation(before, where)
        asked = [after() for after in skips]

        def overflowed() -> bool:
            return any(ask() for ask in asked)

        if not self._context.mpu.should_report_metrics:
            return {}, overflowed
        return mean_over_calls([training_metrics(output, where) for output in outputs], where), overflowed

    def _check_accumulation(self, before: list[int], where: str) -> None:
        engines = self._context.engines
        moved = [engine.micro_steps - old for engine, old in zip(engines, before, strict=True)]
        if not any(moved):
            raise TrialError(
                "train_batch did not train: no engine has made a step",
                where=where,
                fix="Call engine.backward(loss) and engine.step() for every micro-batch.",
            )
        for index, engine in enumerate(engines):
            accumulation = engine.gradient_accumulation_steps()
            if engine.micro_steps % accumulation:
                raise TrialError(
                    "train_batch did not train for gradient accumulation steps",
                    where=f"{where}, model{index}",
                    got=f"{moved[index]} micro-batches",
                    expected=f"a multiple of {accumulation}",
                    fix="Call engine.step() once per call of train_batch; after disable_auto_grad_accumulation() for all micro-batches.",
                )


def scales_its_loss(engine: Any) -> bool:
    """Whether a skipped step is the ordinary work of a loss scale (fp16), and no sign of trouble."""
    asked = getattr(engine, "fp16_enabled", None)
    return bool(asked()) if callable(asked) else False


def skips_from_here(engine: Any) -> Callable[[], Overflowed]:
    """To be called when some steps have been made: what tells, then or later, whether one of them was skipped.

    An engine that knows the numbers of its skipped steps (``skipped_between``) is asked only when somebody wants to
    know; another one's count is read at both ends.
    """
    between = getattr(engine, "skipped_between", None)
    if not callable(between):
        count = engine.skipped_steps

        def counted() -> Overflowed:
            more = engine.skipped_steps > count
            return lambda: more

        return counted
    first = engine.global_steps

    def numbered() -> Overflowed:
        end = engine.global_steps
        return lambda: bool(between(first, end))

    return numbered


# The loop around a trial: train, report, validate, save, stop, each at boundaries of the one global step counter.


class Due(Enum):
    """What a step can be the boundary of."""

    REPORT = "report"
    VALIDATE = "validate"
    CHECKPOINT = "checkpoint"


class Controller:
    """Runs one trial on one rank. Every rank runs one, with the same settings."""

    def __init__(
        self, trial: ZeroTrial, context: ZeroTrialContext, settings: TrainSettings, clock: Clock = time.perf_counter
    ) -> None:
        self._trial = trial
        self._context = context
        self._settings = settings
        self._clock = clock
        self._callbacks = _checked(trial.build_callbacks())
        self._checkpointer = Checkpointer(trial, context, self._callbacks)
        self._state = TrialSnapshot(trial_id=context.platform.trial_id)
        self._score = Score(settings.metric, settings.smaller_is_better)
        self._saved: tuple[int, str] | None = None  # step and storage id of the newest checkpoint

    def run(self) -> Outcome:
        """Collective. Trains to the end, or to where the platform or the trial wants to stop; saved in every case.

        Raises InvalidHP, Diverged and all that user code raises; an InvalidHP is posted to the platform first.
        Nothing is saved then: the other ranks may be in the middle of a step.
        """
        failing = True
        try:
            self._set_up()
            with self._context.profiling:
                outcome = self._train()
            failing = False
            return outcome
        except InvalidHP:
            self._context.platform.report_early_exit("INVALID_HP")
            raise
        finally:
            self._shut_down(failing)

    def _shut_down(self, failing: bool) -> None:
        """Every callback hears of the end. What one of them raises ends the run, but does not hide what has ended it already."""
        raised: list[Exception] = []
        for name, callback in self._callbacks.items():
            try:
                callback.on_trial_shutdown()
            except Exception as error:  # the user's code; the others are to be told all the same
                raised.append(error)
                self._context.note(f"on_trial_shutdown of the callback {name} failed: {type(error).__name__}: {error}")
        if raised and not failing:
            raise raised[0]

    # Setting up

    def _set_up(self) -> None:
        """Loaders and iterators are made first and the engines loaded last: loading restores the random state."""
        context = self._context
        context.get_train_micro_batch_size_per_gpu()  # there is an engine
        storage_id = context.platform.latest_checkpoint
        with self._checkpointer.open(storage_id) as opened:
            if opened is not None:
                self._take_state(opened[1])
            self._data = open_train_data(self._trial, context, self._state.resume(context.distributed.rank))
            self._state.epoch_length = self._data.epoch_length
            self._validator = Validator(
                self._trial, context, list(self._callbacks.values()), self._settings.validation_batches
            )
            if self._score.metric is not None and not self._validator.enabled:
                context.note(
                    f"searcher.metric {self._score.metric!r} is never reported: the trial has no evaluate_batch"
                )
            self._total = total_steps(self._settings.max_length, self._state.epoch_length)
            context.position = TrainPosition(self._state.step, self._state.epoch_length)
            self._reporter = MetricReporter(
                context, list(self._callbacks.values()), self._total, self._state.step, self._clock
            )
            self._reporter.tokens_per_sample = self._trial.tokens_per_sample
            self._reporter.window = {name: (value, count) for name, (value, count) in self._state.window.items()}
            self._reporter.last_checkpoint = storage_id
            self._announce(storage_id)
            for callback in self._callbacks.values():
                callback.on_trial_startup(self._state.step, storage_id)
            if opened is not None:
                self._load(opened[0], opened[1], storage_id)

    def _take_state(self, state: TrialSnapshot) -> None:
        if state.trial_id == self._context.platform.trial_id:
            self._state = state
        else:
            self._context.weights_only = True
            self._context.note(f"the checkpoint is of another trial ({state.trial_id}): only its weights are used")

    def _load(self, path: Path, state: TrialSnapshot, storage_id: str | None) -> None:
        self._checkpointer.load(path, state)
        if not self._context.weights_only and storage_id is not None:
            self._saved = (state.step, storage_id)
        state.ranks = []

    def _announce(self, storage_id: str | None) -> None:
        if self._context.distributed.rank == 0:
            self._context.platform.progress.emit(
                {
                    "kind": "start",
                    "step": self._state.step,
                    "total_steps": self._total,
                    "epoch_steps": self._state.epoch_length if self._state.epoch_length < UNENDING else None,
                    "global_batch_size": self._context.get_global_batch_size(),
                    "parameters": self._context.parameters,
                    "resumed_from": storage_id,
                    "resumed_from_step": self._state.step,
                }
            )

    # Training

    def _train(self) -> Outcome:
        settings, state = self._settings, self._state
        if (
            settings.step_zero_validation
            and state.step == 0
            and state.last_validation is None
            and self._validator.enabled
        ):
            self._validate()
        for callback in self._callbacks.values():
            callback.on_training_start()
        first, end = state.step, End.COMPLETED
        runner = StepRunner(self._trial, self._context, self._data.feed)
        self._reporter.start()
        while state.step < self._total and end is End.COMPLETED:
            self._step(runner)
            due = self._due()
            if due or self._reporter.wants_exchange(state.step):
                end = self._boundary(due)
        self._reporter.stop()
        self._finish(end)
        samples = (state.step - first) * self._context.get_global_batch_size()
        return Outcome(
            end,
            state.step,
            self._total,
            self._reporter.timer.seconds,
            samples,
            self._saved[1] if self._saved else None,
            state.initial_metrics,
            state.latest_metrics,
        )

    def _step(self, runner: StepRunner) -> None:
        position = TrainPosition(self._state.step, self._state.epoch_length)
        if position.is_epoch_start:
            for callback in self._callbacks.values():
                callback.on_training_epoch_start(position.epoch)
        metrics, overflowed = runner.run(position.step, position.epoch)
        self._state.step += 1
        self._context.position = TrainPosition(self._state.step, self._state.epoch_length)
        self._reporter.add(self._state.step, metrics, overflowed)
        self._context.profiling.step()
        if position.is_epoch_end:
            for callback in self._callbacks.values():
                callback.on_training_epoch_end(position.epoch)

    def _due(self) -> set[Due]:
        settings = self._settings
        units = {
            Due.REPORT: settings.reporting_period,
            Due.VALIDATE: settings.validation_period,
            Due.CHECKPOINT: settings.checkpoint_period,
        }
        step, epoch_length = self._state.step, self._state.epoch_length
        due = {what for what, unit in units.items() if is_boundary(step, unit, epoch_length)}
        return due | {Due.REPORT, Due.VALIDATE} if step == self._total else due

    def _boundary(self, due: set[Due]) -> End:
        """Collective.

        Everything that is due after the step that is complete now, in the order report, validate, save.
        """
        stop = self._reporter.exchange(self._state.step)
        self._reporter.stop()
        if Due.REPORT in due:
            self._reporter.report(self._state.step)
        wanted = Due.VALIDATE in due and self._validator.enabled and self._validate()
        if wanted or Due.CHECKPOINT in due:
            self._save()
        if due:
            self._context.platform.sync_tensorboard()
        # Not at the end: a platform that is told of stopping would start a trial again that is complete.
        preempt = self._state.step < self._total and self._context.platform.preemption.should_preempt()
        self._reporter.start()
        if self._state.step < self._total and (preempt or stop):
            return End.PREEMPTED if preempt else End.STOPPED
        return End.COMPLETED

    def _finish(self, end: End) -> None:
        """A run that completed is validated and saved at its last step; one that was stopped is saved."""
        if end is End.COMPLETED and self._validator.enabled and self._state.last_validation != self._state.step:
            self._validate()
        self._save()
        if self._context.distributed.rank == 0:
            self._context.platform.progress.report_progress(self._state.step / self._total)

    # Validating and saving

    def _validate(self) -> bool:
        """Collective. Validates and reports; whether the checkpoint policy wants a checkpoint of it."""
        context, state = self._context, self._state
        metrics = self._validator.run()
        taken = [name for name in COUNTERS if name in metrics]
        if taken and state.last_validation is None:
            context.note(f"the validation metrics {taken} of the trial are replaced by its counters of these names")
        # The searcher's time metric is looked up among the validation metrics.
        metrics |= dict(zip(COUNTERS, (state.step, state.step // state.epoch_length), strict=True))
        value = self._score.of(metrics)
        best = (
            context.platform.best_validation() if context.distributed.rank == 0 else None
        )  # before this one is reported
        state.last_validation, state.latest_metrics = state.step, metrics
        state.initial_metrics = state.initial_metrics or metrics
        if context.distributed.rank == 0:
            context.platform.metrics.report_validation_metrics(state.step, metrics)
            shown = {"step": state.step, "total_steps": self._total, "metrics": without_counters(metrics)}
            context.platform.progress.emit({"kind": "validation", **shown})
            write_tensorboard(context, "validation", state.step, metrics)
        self._validator.finish(dict(metrics))
        if self._settings.checkpoint_policy != "best" or value is None:
            return self._settings.checkpoint_policy == "all"
        return bool(context.distributed.broadcast(self._score.is_better(value, best)))

    def _save(self) -> None:
        """Collective. A checkpoint of the step that is complete now, unless there is one."""
        state, settings = self._state, self._settings
        if self._saved is not None and self._saved[0] == state.step:
            return
        position = data_position(self._data.feed, self._context)
        state.samples, state.micro_batches = position.samples, position.micro_batches
        state.window = {name: list(entry) for name, entry in self._reporter.window.items()}
        value = self._score.of(state.latest_metrics) if state.last_validation == state.step else None
        value = None if value is None or math.isnan(value) else value
        storage_id = self._checkpointer.save(state, position.loader, value, settings.keep, settings.smaller_is_better)
        self._saved = (state.step, storage_id)
        self._reporter.last_checkpoint = storage_id


def _checked(callbacks: object) -> Mapping[str, TrialCallback]:
    """What ``build_callbacks`` has returned. Raises TrialError for anything but callbacks by name."""
    if isinstance(callbacks, Mapping) and all(hasattr(value, "on_trial_shutdown") for value in callbacks.values()):
        return callbacks
    values = callbacks.values() if isinstance(callbacks, Mapping) else [callbacks]
    raise TrialError(
        "build_callbacks must return callbacks by name",
        where="build_callbacks",
        got=", ".join(sorted({type(value).__name__ for value in values})),
        expected='{"name": callback}, each derived from zero_trial.trial.TrialCallback',
    )
