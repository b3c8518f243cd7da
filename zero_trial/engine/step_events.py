"""The events of training that rank 0 writes to the monitors after every optimizer step."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from zero_trial.engine.monitor import Monitor
from zero_trial.engine.reporter import Reporter

if TYPE_CHECKING:
    from zero_trial.engine.engine import Engine


class StepEvents(Reporter):
    """``Train/Samples/{train_loss, lr, loss_scale, eval_loss}`` against global samples.

    ``train_loss`` is this rank's loss averaged over the micro-batches of the step, as in DeepSpeed; ``loss_scale`` is written where
    there is one. ``eval_loss`` is the mean of what ``engine(...)`` returned in eval mode while that was a scalar; it is written when
    training goes on, and at the end. On CUDA the loss is read, and so the device waited for, once per step.
    """

    def __init__(self, engine: Engine, monitor: Monitor, *, scaled: bool) -> None:
        self._engine = weakref.proxy(engine)
        self._monitor = monitor
        self._scaled = scaled
        self._sum: torch.Tensor | None = None
        self._count = 0
        self._evaluation = _Evaluation(monitor)
        engine.register_forward_hook(self._saw_output)
        weakref.finalize(engine, self._evaluation.write)  # also when the interpreter ends

    def saw_evaluation(self, loss: torch.Tensor) -> None:
        self._evaluation.add(loss.detach().float().reshape(()), self._engine.global_samples)

    def saw_loss(self, loss: torch.Tensor) -> None:
        self._evaluation.write()  # training goes on
        value = loss.detach().float().reshape(())
        self._sum = value.clone() if self._sum is None else self._sum + value
        self._count += 1

    def after_step(self) -> None:
        engine = self._engine
        events = []
        if self._sum is not None:
            events.append(("Train/Samples/train_loss", self._sum.item() / self._count, engine.global_samples))
        if engine.get_lr():
            events.append(("Train/Samples/lr", engine.get_lr()[0], engine.global_samples))
        if self._scaled:
            events.append(("Train/Samples/loss_scale", engine.loss_scale, engine.global_samples))
        self._sum, self._count = None, 0
        self._monitor.write_events(events)

    def close(self) -> None:
        self._evaluation.write()

    def _saw_output(self, engine: Any, _inputs: Any, output: Any) -> None:
        if engine.training:
            self._evaluation.write()
        elif isinstance(output, torch.Tensor) and output.numel() == 1 and output.is_floating_point():
            self._evaluation.add(output.detach().float().reshape(()), engine.global_samples)


class _Evaluation:
    """The losses of an evaluation under way."""

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor
        self._values: list[torch.Tensor] = []
        self._samples = 0

    def add(self, value: torch.Tensor, samples: int) -> None:
        self._values.append(value)
        self._samples = samples

    def write(self) -> None:
        if self._values:
            mean = torch.stack(self._values).mean().item()
            self._values.clear()
            self._monitor.write_events([("Train/Samples/eval_loss", mean, self._samples)])
