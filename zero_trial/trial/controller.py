"""The loop around a trial, driven by one step counter: train, report, validate, save, stop."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from zero_trial.errors import ConfigError, InvalidHP, TrialError
from zero_trial.trial.checkpointing import Checkpointer, TrialSnapshot
from zero_trial.trial.context import ZeroTrialContext
from zero_trial.trial.data import TrainData, TrainFeed, data_position, open_train_data
from zero_trial.trial.metrics import COUNTERS, mean_over_calls, shape_of, training_metrics, without_counters
from zero_trial.trial.reporting import Clock, End, MetricReporter, Outcome, Overflowed
from zero_trial.trial.settings import UNENDING, TrainPosition, TrainSettings, is_boundary, total_steps
from zero_trial.trial.trial import TrialCallback, ZeroTrial, fitted
from zero_trial.trial.validation import SpeedMeter, Validator


def not_a_scalar(metric: str, value: Any, where: str = "searcher.metric") -> ConfigError:
    """Return the error for a searcher's metric whose value cannot be ordered."""
    return ConfigError(
        f"the searcher's metric {metric!r} is not a scalar",
        where=where,
        got=f"values of shape {shape_of(value)}" if isinstance(value, list) else type(value).__name__,
        expected="one number",
        fix=f"Return {metric}.mean() from evaluate_batch.",
    )


@dataclass(frozen=True)
class Score:
    """The searcher's metric, which ranks checkpoints; None: they are not ranked."""

    metric: str | None
    smaller_is_better: bool = True

    def of(self, metrics: Mapping[str, Any]) -> float | None:
        """Return the metric's value. Raises ConfigError if it is missing or not a scalar."""
        if self.metric is None:
            return None
        value = metrics.get(self.metric)
        if value is not None and not isinstance(value, (int, float)):
            raise not_a_scalar(self.metric, value)
        if value is None:
            raise ConfigError(
                f"searcher.metric {self.metric!r} was never reported",
                where="searcher.metric",
                got=f"the trial reports {sorted(without_counters(metrics))}",
                fix="Name one of these.",
            )
        return float(value)

    def is_better(self, value: float, best: float | None) -> bool:
        """Return whether ``value`` beats ``best``. Anything beats None; nan beats nothing."""
        if math.isnan(value):
            return False
        if best is None or math.isnan(best):
            return True
        return value < best if self.smaller_is_better else value > best


class StepRunner:
    """One optimizer step of a trial: calls ``train_batch`` and checks that it trained. Puts the
    engines in training mode first, which a model from ``from_pretrained`` is not in."""

    def __init__(self, trial: ZeroTrial, context: ZeroTrialContext, feed: TrainFeed | None) -> None:
        for engine in context.engines:
            engine.train()
        self._call = fitted(trial.train_batch)
        self._context = context
        self._feed = feed
        self._calls = calls_per_step(context)

    def run(self, step: int, epoch: int) -> tuple[dict[str, torch.Tensor], Overflowed]:
        """Run step number ``step`` (from 0).

        Returns its metrics, averaged over micro-batches (empty on ranks that do not report), and a
        function that returns whether a loss scale skipped the step. The function may wait for the
        device, so call it only if needed.
        """
        engines = self._context.engines
        where = f"rank {self._context.distributed.rank}, step {step + 1}"
        before, taken = [engine.micro_steps for engine in engines], self._feed.taken if self._feed is not None else 0
        steps = [engine.global_steps for engine in engines]
        outputs = [self._call(self._feed, epoch, step) for _ in range(self._calls)]
        self._check_accumulation(before, taken, where)
        spans = [(engine, first, engine.global_steps) for engine, first in zip(engines, steps, strict=True)]

        def overflowed() -> bool:
            return any(engine.fp16_enabled() and engine.skipped_between(first, end) for engine, first, end in spans)

        if not self._context.mpu.should_report_metrics:
            return {}, overflowed
        return mean_over_calls([training_metrics(output, where) for output in outputs], where), overflowed

    def _check_accumulation(self, before: list[int], taken: int, where: str) -> None:
        engines = self._context.engines
        moved = [engine.micro_steps - old for engine, old in zip(engines, before, strict=True)]
        if not any(moved):
            raise TrialError(
                "train_batch did not train: no engine took a step",
                where=where,
                fix="Call engine.backward(loss) and engine.step() for every micro-batch.",
            )
        if self._feed is not None and not any(before):  # after the first step
            self._note_reads(max(moved), self._feed.taken - taken, where)
        for index, engine in enumerate(engines):
            accumulation = engine.gradient_accumulation_steps()
            if engine.micro_steps % accumulation:
                raise TrialError(
                    "train_batch did not train for gradient accumulation steps",
                    where=f"{where}, model{index}",
                    got=f"{moved[index]} micro-batches",
                    expected=f"a multiple of {accumulation}",
                    fix="Call engine.step() once per call of train_batch; after disable_auto_grad_accumulation(), once per micro-batch.",
                )

    def _note_reads(self, trained: int, taken: int, where: str) -> None:
        """Log a note if epochs, records and progress do not count the data that the first step
        read. A trial may have data of its own, or read ahead."""
        counted, found = self._context.get_num_micro_batches_per_slot(), ""
        if not taken:
            found = "took no batch from its iterator: read each with next(dataloader_iter)"
        elif trained > counted < taken:
            found = f"trained {trained} of them: train one per call, or call disable_auto_grad_accumulation()"
        if found:
            counts = f"epochs, records and progress count {counted} micro-batches per step"
            self._context.note(f"{where}: {counts}, and train_batch {found}")


def calls_per_step(context: ZeroTrialContext) -> int:
    """Return how many calls of ``train_batch`` make one optimizer step."""
    if context.use_pipeline_parallel or not context.auto_accumulation:
        return 1
    return context.get_num_micro_batches_per_slot()


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

    def run(self) -> Outcome:
        """Collective. Train to the end, or until the platform or the trial asks to stop; save in
        either case.

        Raises InvalidHP (reported to the platform first), Diverged, and any error of user code.
        Nothing is saved after an error, because the other ranks may be in the middle of a step.
        """
        failing = True
        try:
            loop = self._open_loop()
            with self._context.profile or nullcontext():
                outcome = loop.run()
            failing = False
            return outcome
        except InvalidHP:
            self._context.platform.report_early_exit("INVALID_HP")
            raise
        finally:
            self._shut_down(failing)

    def _open_loop(self) -> TrainLoop:
        """Collective. Build the loaders first: loading the engines restores the random state."""
        context = self._context
        context.get_train_micro_batch_size_per_gpu()  # raises if there is no engine
        storage_id = context.platform.latest_checkpoint
        state = TrialSnapshot(trial_id=context.platform.trial_id)
        checkpointer = Checkpointer(self._trial, context, self._callbacks)
        with checkpointer.open(storage_id) as opened:
            if opened is not None and opened[1].trial_id == state.trial_id:
                state = opened[1]
            elif opened is not None:
                context.weights_only = True
                context.note(f"the checkpoint is of another trial ({opened[1].trial_id}): only its weights are loaded")
            data = open_train_data(self._trial, context, state.resume(context.distributed.rank))
            loop = TrainLoop(
                self._trial,
                context,
                self._settings,
                self._callbacks,
                checkpointer,
                state,
                data,
                storage_id,
                self._clock,
            )
            loop.announce()
            for callback in self._callbacks.values():
                callback.on_trial_startup(state.step, storage_id)
            if opened is not None:
                checkpointer.load(*opened)
        return loop

    def _shut_down(self, failing: bool) -> None:
        """Call every ``on_trial_shutdown``; raise the first error unless the run is failing."""
        raised: list[Exception] = []
        for name, callback in self._callbacks.items():
            try:
                callback.on_trial_shutdown()
            except Exception as error:
                # user code; the other callbacks are still called
                raised.append(error)
                self._context.note(f"on_trial_shutdown of the callback {name} failed: {type(error).__name__}: {error}")
        if raised and not failing:
            raise raised[0]


class TrainLoop:
    """Trains one trial on one rank, starting at ``state``: train, report, validate, save, stop.

    Collective: the constructor builds the validation loader. ``storage_id`` is the checkpoint that
    the run starts from.
    """

    def __init__(
        self,
        trial: ZeroTrial,
        context: ZeroTrialContext,
        settings: TrainSettings,
        callbacks: Mapping[str, TrialCallback],
        checkpointer: Checkpointer,
        state: TrialSnapshot,
        data: TrainData,
        storage_id: str | None,
        clock: Clock,
    ) -> None:
        self._trial = trial
        self._context = context
        self._settings = settings
        self._callbacks = list(callbacks.values())
        self._checkpointer = checkpointer
        self._data = data
        self._state = replace(state, epoch_length=data.epoch_length, ranks=[])
        self._score = Score(settings.metric, settings.smaller_is_better)
        self._meter = SpeedMeter(context, clock) if settings.measures_speed else None
        self._validator = self._meter or Validator(trial, context, self._callbacks, settings.validation_batches)
        if settings.metric is not None and not self._validator.enabled:
            context.note(f"searcher.metric {settings.metric!r} is never reported: the trial has no evaluate_batch")
        elif settings.metric is not None and (stated := self._validator.stated_metrics()) is not None:
            self._score.of(dict.fromkeys({*stated, *COUNTERS}, 0.0))  # a wrong name is an error before the first step
        self._total = total_steps(settings.max_length, data.epoch_length)
        context.position = TrainPosition(state.step, data.epoch_length)
        self._reporter = MetricReporter(
            context,
            self._callbacks,
            self._total,
            state.step,
            clock,
            window=state.window,
            tokens_per_sample=trial.tokens_per_sample,
        )
        self._before = state.train_seconds, state.train_samples
        self._first = state.step
        self._last_checkpoint = storage_id
        self._saved_step = state.step if storage_id is not None and not context.weights_only else None

    def announce(self) -> None:
        """Emit the ``start`` event."""
        state, context = self._state, self._context
        if state.step >= self._total:
            context.note(
                f"nothing is trained: the checkpoint is at step {state.step}, and max_length is {self._total} steps"
            )
        if context.distributed.rank == 0:
            context.platform.emit(
                {
                    "kind": "start",
                    "step": state.step,
                    "total_steps": self._total,
                    "epoch_steps": state.epoch_length if state.epoch_length < UNENDING else None,
                    "global_batch_size": context.get_global_batch_size(),
                    "parameters": context.parameters,
                    "resumed_from": self._last_checkpoint,
                    "resumed_from_step": state.step,
                }
            )

    def run(self) -> Outcome:
        """Collective. Train to the end, or to a boundary at which the run is asked to stop."""
        try:
            return self._run()
        except BaseException:
            self._checkpointer.abandon()
            raise

    def _run(self) -> Outcome:
        settings, state = self._settings, self._state
        fresh = state.step == 0 and state.last_validation is None
        if settings.step_zero_validation and fresh and self._validator.enabled:
            self._validate()
        for callback in self._callbacks:
            callback.on_training_start()
        end = End.COMPLETED
        runner = StepRunner(self._trial, self._context, self._data.feed)
        self._reporter.start()
        while state.step < self._total and end is End.COMPLETED:
            self._step(runner)
            self._note_checkpoint(self._checkpointer.poll())
            # whether to report, validate and save
            units = settings.reporting_period, settings.validation_period, settings.checkpoint_period
            report, validate, save = (is_boundary(state.step, unit, state.epoch_length) for unit in units)
            last = state.step == self._total
            due = report or last, validate or last, save
            if any(due) or self._meter is not None or state.step >= self._reporter.next:
                end = self._boundary(due)
        self._reporter.stop()
        self._finish(end)
        return Outcome(
            end,
            state.step,
            self._total,
            *self._trained(),
            self._last_checkpoint,
            state.initial_metrics,
            state.latest_metrics,
        )

    def _trained(self) -> tuple[float, int]:
        """Return the trial's training seconds and samples, including those before a resume."""
        samples = (self._state.step - self._first) * self._context.get_global_batch_size()
        return self._before[0] + self._reporter.timer.seconds, self._before[1] + samples

    def _step(self, runner: StepRunner) -> None:
        position = TrainPosition(self._state.step, self._state.epoch_length)
        if position.is_epoch_start:
            for callback in self._callbacks:
                callback.on_training_epoch_start(position.epoch)
        metrics, overflowed = runner.run(position.step, position.epoch)
        self._state.step += 1
        self._context.position = TrainPosition(self._state.step, self._state.epoch_length)
        self._reporter.add(self._state.step, metrics, overflowed)
        if self._context.profile is not None:
            self._context.profile.step()
        if position.is_epoch_end:
            for callback in self._callbacks:
                callback.on_training_epoch_end(position.epoch)

    def _boundary(self, due: tuple[bool, bool, bool]) -> End:
        """Collective. After a complete step, report, validate and save what is due."""
        report, validate, save = due
        stop = self._reporter.exchange(self._state.step, self._last_checkpoint)
        self._reporter.stop()
        if self._meter is not None:
            self._meter.step_done()
        if report:
            self._reporter.report(self._state.step)
        wanted = validate and self._validator.enabled and self._validate()
        if wanted or save:
            self._save()
        if any(due):
            self._context.platform.sync_tensorboard()
        # Not at the end: after an acknowledged preemption, the platform would restart a complete
        # trial.
        preempt = self._state.step < self._total and self._context.platform.should_preempt()
        self._reporter.start()
        if self._state.step < self._total and (preempt or stop):
            return End.PREEMPTED if preempt else End.STOPPED
        return End.COMPLETED

    def _finish(self, end: End) -> None:
        """Validate a run that is complete at its last step; save in either case."""
        if end is End.COMPLETED and self._validator.enabled and self._state.last_validation != self._state.step:
            self._validate()
        self._save()
        self._note_checkpoint(self._checkpointer.wait())
        if end is End.COMPLETED and not self._settings.measures_speed:
            self._checkpointer.keep_at_end(self._state, self._settings.keep, self._settings.smaller_is_better)
        if self._context.distributed.rank == 0:
            self._context.platform.report_progress(self._state.step / self._total)

    def _validate(self) -> bool:
        """Collective. Validate and report; return whether to save a checkpoint at this step."""
        context, state = self._context, self._state
        metrics = self._validator.run()
        # The searcher's time metric is looked up among the validation metrics.
        metrics |= dict(zip(COUNTERS, (state.step, state.step // state.epoch_length), strict=True))
        value = self._score.of(metrics)
        first = context.distributed.rank == 0
        best = context.platform.best_validation() if first else None  # before this one is reported
        state.last_validation, state.latest_metrics = state.step, metrics
        state.initial_metrics = state.initial_metrics or metrics
        if first:
            context.platform.report_validation_metrics(state.step, metrics)
            shown = {"step": state.step, "total_steps": self._total, "metrics": without_counters(metrics)}
            context.platform.emit({"kind": "validation", **shown})
            context.tensorboard.add("validation", state.step, metrics)
        for callback in self._callbacks:
            callback.on_validation_end(dict(metrics))
        if self._settings.checkpoint_policy != "best" or value is None:
            return self._settings.checkpoint_policy == "all"
        return bool(context.distributed.broadcast(self._score.is_better(value, best)))

    def _save(self) -> None:
        """Collective. Save a checkpoint of the current step unless it exists, or begin to save one
        (see :class:`Checkpointer`). A run that only measures its speed saves nothing."""
        state, settings = self._state, self._settings
        if self._saved_step == state.step or settings.measures_speed:
            return
        self._note_checkpoint(self._checkpointer.wait())
        position = data_position(self._data.feed, self._context)
        state.samples, state.micro_batches = position.samples, position.micro_batches
        state.window = {name: list(entry) for name, entry in self._reporter.window.items()}
        state.train_seconds, state.train_samples = self._trained()
        value = self._score.of(state.latest_metrics) if state.last_validation == state.step else None
        value = None if value is None or math.isnan(value) else value
        self._checkpointer.save(state, position.loader, value, settings.keep, settings.smaller_is_better)
        self._saved_step = state.step
        self._note_checkpoint(self._checkpointer.poll())

    def _note_checkpoint(self, storage_id: str | None) -> None:
        """Remember a checkpoint that has become complete."""
        self._last_checkpoint = storage_id or self._last_checkpoint


def _checked(callbacks: object) -> Mapping[str, TrialCallback]:
    """Return the callbacks. Raises TrialError unless they are callbacks by name."""
    if isinstance(callbacks, Mapping) and all(hasattr(value, "on_trial_shutdown") for value in callbacks.values()):
        return callbacks
    values = callbacks.values() if isinstance(callbacks, Mapping) else [callbacks]
    raise TrialError(
        "build_callbacks must return callbacks by name",
        where="build_callbacks",
        got=", ".join(sorted({type(value).__name__ for value in values})),
        expected='{"name": callback}, each derived from zero_trial.trial.TrialCallback',
    )
