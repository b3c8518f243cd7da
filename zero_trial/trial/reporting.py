"""What a run says while it trains: averages over replicas, live progress, and the news that a loss is not finite.

Ranks talk at exchanges: after the first step, then about once a second (rank 0 proposes the step, so that all agree),
and at every boundary. When they talk changes nothing in what is trained or reported.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from zero_trial.errors import Diverged
from zero_trial.trial.callbacks import TrialCallback
from zero_trial.trial.context import ZeroTrialContext
from zero_trial.trial.loop import Overflowed
from zero_trial.trial.metrics import Sums, add_sums, averages
from zero_trial.trial.stragglers import StragglerWatch

EXCHANGE_SECONDS = 1.0
FORGIVEN = 10  # losses in a row that may be not finite in steps that a loss scale skipped

Clock = Callable[[], float]


class StepTimer:
    """Seconds spent training, without validation and saving."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since: float | None = None
        self._spent = 0.0

    def start(self) -> None:
        self._since = self._clock()

    def stop(self) -> None:
        self._spent, self._since = self.seconds, None

    @property
    def seconds(self) -> float:
        return self._spent + (self._clock() - self._since if self._since is not None else 0.0)


class Reporter:
    """Collects this rank's training metrics step by step, exchanges them, and reports."""

    def __init__(
        self, context: ZeroTrialContext, callbacks: Sequence[TrialCallback], total: int, step: int, clock: Clock
    ) -> None:
        self.timer = StepTimer(clock)
        self.window: Sums = {}  # agreed sums since the last report; the same on every rank
        self.tokens_per_sample: int | None = None
        self.last_checkpoint: str | None = None
        self._overflows = 0  # steps in a row that were skipped with a loss that is not finite
        self._context = context
        self._callbacks = callbacks
        self._total = total
        self._first = step
        self._exchanged = step  # step of the last exchange
        self._exchanged_at = 0.0  # training seconds then
        self._next = step + 1
        self._waits = StepTimer(lambda: _seconds_waited(context) or 0.0)
        self._busy_at = 0.0  # busy seconds at the last exchange
        self._stragglers = StragglerWatch()
        self._steps: list[tuple[int, Overflowed, dict[str, torch.Tensor]]] = []  # since the last exchange
        self._batches: list[dict[str, float]] = []  # this rank's values since the last report

    def start(self) -> None:
        """Training begins, or goes on after validation and saving."""
        self.timer.start()
        self._waits.start()

    def stop(self) -> None:
        """Training pauses."""
        self.timer.stop()
        self._waits.stop()

    def add(self, step: int, metrics: dict[str, torch.Tensor], overflowed: Overflowed) -> None:
        """Step ``step`` (complete steps, from 1) gave ``metrics``; nothing is read from the device here.

        ``overflowed()`` is only asked about a loss that is not finite.
        """
        self._steps.append((step, overflowed, metrics))

    def wants_exchange(self, step: int) -> bool:
        return step >= self._next

    def exchange(self, step: int) -> bool:
        """Collective. Joins the ranks' metrics since the last exchange; whether some rank wants to stop.

        Raises Diverged on every rank if any rank's loss was not finite unless a loss scale explains it.
        """
        count = len(self._steps)
        sums, broken = self._read_steps()
        proposal = {
            "sums": sums,
            "broken": broken,
            "stop": self._context.get_stop_requested(),
            "next": self._propose(step),
            "busy": self._read_busy(),
        }
        ranks = self._context.distributed.allgather(proposal)
        self._raise_if_broken([rank["broken"] for rank in ranks])
        latest = add_sums(rank["sums"] for rank in ranks)
        self.window = add_sums([self.window, latest])
        self._say(step, averages(latest), self._batches[len(self._batches) - count :])
        self._name_straggler(step, [rank["busy"] for rank in ranks])
        self._exchanged, self._exchanged_at, self._next = step, self.timer.seconds, ranks[0]["next"]
        return any(rank["stop"] for rank in ranks)

    def _read_busy(self) -> float | None:
        """Seconds since the last exchange in which this rank did not wait for others; None where that cannot be known."""
        if _seconds_waited(self._context) is None:
            return None
        before, self._busy_at = self._busy_at, self.timer.seconds - self._waits.seconds
        return self._busy_at - before

    def _name_straggler(self, step: int, busy: Sequence[float | None]) -> None:
        """Stages of a pipeline do different work: there nobody is compared."""
        told = self._stragglers.see(step, busy) if self._context.mpu.data_parallel_world_size == len(busy) else None
        if told is not None:
            self._context.note(told)

    def _read_steps(self) -> tuple[Sums, list[Any] | None]:
        """This rank's sums, and [step, loss] of the first loss that is not finite. Waits for the device."""
        steps, self._steps = self._steps, []
        rows = [dict.fromkeys(metrics, 0.0) for _, _, metrics in steps]
        for name in dict.fromkeys(name for _, _, metrics in steps for name in metrics):
            having = [index for index, (_, _, metrics) in enumerate(steps) if name in metrics]
            values = torch.stack([_readable(steps[index][2][name]) for index in having])
            for index, value in zip(having, values.tolist(), strict=True):
                rows[index][name] = value
        self._batches += rows
        counted = []
        for (step, overflowed, _), row in zip(steps, rows, strict=True):
            finite = math.isfinite(row.get("loss", 0.0))
            self._overflows = 0 if finite else self._overflows + 1
            if not finite and (self._overflows > FORGIVEN or not overflowed()):
                return {}, [step, str(row["loss"])]
            if finite:
                counted.append(row)
        return add_sums({name: (value, 1) for name, value in row.items()} for row in counted), None

    def _raise_if_broken(self, broken: Sequence[Any]) -> None:
        found = [(step, rank, loss) for rank, entry in enumerate(broken) if entry is not None for step, loss in [entry]]
        if not found:
            return
        step, rank, loss = min(found)
        saved = (
            f" The last checkpoint is {self.last_checkpoint}." if self.last_checkpoint else " Nothing was saved yet."
        )
        raise Diverged(
            f"the loss became {loss}",
            where=f"rank {rank}, step {step}",
            expected="a finite loss",
            fix="Try half the learning rate, gradient_clipping: 1.0, or look at that step's batch." + saved,
        )

    def _propose(self, step: int) -> int:
        """The step of the next exchange, about EXCHANGE_SECONDS from now at the pace of the last steps.

        At most twice as many steps as the last time: a pace may change, and nobody shall wait long for news.
        """
        steps = max(step - self._exchanged, 1)
        seconds = (self.timer.seconds - self._exchanged_at) / steps
        fitting = int(EXCHANGE_SECONDS / seconds) if seconds > 0 else 2 * steps
        return step + max(1, min(fitting, 2 * steps))

    def _say(self, step: int, latest: Mapping[str, float], own: Sequence[Mapping[str, float]]) -> None:
        """One event: ``latest`` averages over ranks and over the steps since the last one, which is a matter of time; ``each`` does not
        depend on it: the values of rank 0 (``own``) at each of these steps, by which two runs are compared.
        """
        steps = step - self._exchanged
        if self._context.distributed.rank != 0 or steps <= 0:
            return
        seconds = self.timer.seconds - self._exchanged_at
        samples = self._context.get_global_batch_size()
        event: dict[str, Any] = {"kind": "train", "step": step, "total_steps": self._total, **latest}
        rates = self._context.engines[0].get_lr()
        if rates:
            event["lr"] = rates[0]
        norm = _gradient_norm(self._context.engines[0])
        if norm is not None:
            event["grad_norm"] = norm
        event["each"] = {
            name: [_as_json(row.get(name)) for row in own] for name in sorted({n for row in own for n in row})
        }
        if seconds > 0:
            event["samples_per_second"] = steps * samples / seconds
            if self.tokens_per_sample:
                event["tokens_per_second"] = event["samples_per_second"] * self.tokens_per_sample
            event["eta_seconds"] = (self._total - step) * self.timer.seconds / (step - self._first)
        self._context.platform.progress.emit(event)

    def report(self, step: int) -> None:
        """Collective, after an exchange.

        The training metrics since the last report, to the platform and the callbacks.
        """
        metrics: dict[str, Any] = averages(self.window) | self._context.reduce_metrics(for_training=True)
        self._context.reset_reducers(for_training=True)
        batches, self._batches, self.window = self._batches, [], {}
        if not metrics:
            return
        if self._context.distributed.rank == 0:
            platform = self._context.platform
            platform.metrics.report_training_metrics(step, metrics)
            platform.progress.report_progress(step / self._total)
            write_tensorboard(self._context, "training", step, metrics)
        for callback in self._callbacks:
            callback.on_training_workload_end(dict(metrics), [dict(batch) for batch in batches])


def _seconds_waited(context: ZeroTrialContext) -> float | None:
    """Of this process, whichever of its engines has waited; None where the engine does not say."""
    ask = getattr(context.engines[0], "seconds_waited", None) if context.engines else None
    return ask() if callable(ask) else None


def _gradient_norm(engine: Any) -> float | None:
    """Of the last step, before clipping; None where the engine does not say, or it is not finite (a step that a loss scale skipped)."""
    ask = getattr(engine, "get_global_grad_norm", None)
    norm = ask() if callable(ask) else None
    return float(norm) if norm is not None and math.isfinite(norm) else None


def _as_json(value: float | None) -> float | str | None:
    """A value that is not finite as a text: JSON has no word for it."""
    return value if value is None or math.isfinite(value) else str(value)


def write_tensorboard(context: ZeroTrialContext, group: str, step: int, metrics: Mapping[str, Any]) -> None:
    """The scalars among ``metrics``, if the trial has made a writer."""
    writer = context.tensorboard_writer
    if writer is None:
        return
    for name, value in metrics.items():
        if isinstance(value, (int, float)):
            writer.add_scalar(f"{group}/{name}", value, step)
    writer.flush()


def _readable(value: torch.Tensor) -> torch.Tensor:
    """16-bit values as fp32: what is stacked must be of one dtype from step to step."""
    return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value
