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


class StepRunner:
    """Runs steps; holds nothing but what it calls."""

    def __init__(self, trial: ZeroTrial, context: ZeroTrialContext, feed: TrainFeed | None) -> None:
        self._call = fitted(trial.train_batch)
        self._context = context
        self._feed = feed
        self._calls = context.calls_per_step

    def run(self, step: int, epoch: int) -> tuple[Metrics, bool]:
        """Step number ``step`` (from 0): its metrics, averaged over micro-batches, and whether a loss scale was too
        high.

        The metrics are empty on ranks that do not report.
        """
        engines = self._context.engines
        where = f"rank {self._context.distributed.rank}, step {step + 1}"
        before = [(engine.micro_steps, engine.skipped_steps) for engine in engines]
        outputs = [self._call(self._feed, epoch, step) for _ in range(self._calls)]
        self._check_accumulation([micro for micro, _ in before], where)
        overflowed = any(
            engine.skipped_steps > old and scales_its_loss(engine)
            for engine, (_, old) in zip(engines, before, strict=True)
        )
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
