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
    training goes on, and at the end. Where the device decides about a step (CUDA), its events are written with the next backward pass,
    when they are known, or at the end: nobody waits for them.
    """

    def __init__(self, engine: Engine, monitor: Monitor, *, scaled: bool) -> None:
        self._engine = weakref.proxy(engine)
        self._monitor = monitor
        self._scaled = scaled
        self._sum: torch.Tensor | None = None
        self._count = 0
        self._due: tuple[torch.Tensor | None, int, int] | None = (
            None  # sum and number of losses, and samples, of a step not yet written
        )
        self._evaluation = _Evaluation(monitor)
        engine.register_forward_hook(self._saw_output)
        weakref.finalize(engine, self._last_words)  # also when the interpreter ends

    def saw_evaluation(self, loss: torch.Tensor) -> None:
        self._write_step()
        self._evaluation.add(loss.detach().float().reshape(()), self._engine.global_samples)

    def saw_loss(self, loss: torch.Tensor) -> None:
        self._write_step()
        self._evaluation.write()  # training goes on
        value = loss.detach().float().reshape(())
        self._sum = value.clone() if self._sum is None else self._sum + value
        self._count += 1

    def after_step(self) -> None:
        self._due = (self._sum, self._count, self._engine.global_samples)
        self._sum, self._count = None, 0
        if not self._engine.verdict.open:
            self._write_step()

    def close(self) -> None:
        self._write_step()
        self._evaluation.write()

    def _write_step(self) -> None:
        """The events of the step that is due. Waits for it."""
        if self._due is None:
            return
        engine, samples, events = self._engine, self._due[2], self._losses()
        if engine.get_lr():
            events.append(("Train/Samples/lr", engine.get_lr()[0], samples))
        if self._scaled:
            events.append(("Train/Samples/loss_scale", engine.loss_scale, samples))
        self._due = None
        self._monitor.write_events(events)

    def _losses(self) -> list[tuple[str, float, int]]:
        total, count, samples = self._due or (None, 0, 0)
        return [("Train/Samples/train_loss", total.item() / count, samples)] if total is not None else []

    def _last_words(self) -> None:
        try:
            self._write_step()
        except ReferenceError:  # an engine that nobody destroyed is gone, and its rates with it
            self._monitor.write_events(self._losses())
        self._evaluation.write()

    def _saw_output(self, engine: Any, _inputs: Any, output: Any) -> None:
        if engine.training:
            self._evaluation.write()
            return
        self._write_step()
        if isinstance(output, torch.Tensor) and output.numel() == 1 and output.is_floating_point():
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
