"""One optimizer step of a trial: call ``train_batch`` as often as the accumulation says, and check that it did its
work.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from zero_trial.errors import TrialError
from zero_trial.trial.context import ZeroTrialContext
from zero_trial.trial.feed import TrainFeed
from zero_trial.trial.metrics import mean_over_calls, training_metrics
from zero_trial.trial.trial import ZeroTrial

Metrics = dict[str, torch.Tensor]
Overflowed = Callable[[], bool]


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


def fitted(method: Callable[..., Any]) -> Callable[..., Any]:
    """``method`` called with only as many of its positional arguments as it takes: ``evaluate_batch(iterator)`` is an
    older form.
    """
    parameters = inspect.signature(method).parameters.values()
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        return method
    taken = sum(
        parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD) for parameter in parameters
    )
    return lambda *arguments: method(*arguments[:taken])
