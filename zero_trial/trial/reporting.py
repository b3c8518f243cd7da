"""What a run reports: outcome, summary, stragglers, metrics, progress, diverged losses."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from statistics import median
from typing import Any

import torch

from zero_trial.errors import Diverged
from zero_trial.trial.context import ZeroTrialContext
from zero_trial.trial.metrics import Sums, add_sums, averages, without_counters
from zero_trial.trial.trial import TrialCallback, ZeroTrial

Clock = Callable[[], float]
Overflowed = Callable[[], bool]  # whether a loss scale skipped the step


class End(Enum):
    """Why the loop ended."""

    COMPLETED = "completed"
    STOPPED = "stopped"  # requested by the trial
    PREEMPTED = "preempted"  # requested by the platform; the run can be resumed


@dataclass(frozen=True)
class Outcome:
    """The figures of a run that completed.

    Training seconds and samples cover the whole trial, without start-up, validation, saving and the
    steps that a resume repeats.
    """

    end: End
    step: int
    total_steps: int
    train_seconds: float
    samples: int
    checkpoint: str | None
    initial_metrics: dict[str, Any] = field(default_factory=dict)
    final_metrics: dict[str, Any] = field(default_factory=dict)

    @property
    def samples_per_second(self) -> float:
        return self.samples / self.train_seconds if self.train_seconds > 0 else 0.0


def build_summary(
    outcome: Outcome, trial: ZeroTrial, context: ZeroTrialContext, more: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the figures for summary.json, on rank 0: the run's, the validation metrics,
    ``ZeroTrial.summary()``, then ``more``.

    Seconds and throughput cover only training, in this start and in earlier starts, without
    start-up, validation and saving.
    """
    summary: dict[str, Any] = {
        "end": outcome.end.value,
        "step": outcome.step,
        "total_steps": outcome.total_steps,
        "train_seconds": outcome.train_seconds,
        "samples": outcome.samples,
        "samples_per_second": outcome.samples_per_second,
        "ranks": context.distributed.size,
        "zero_stage": zero_stage(context),
        **({"pipeline_stages": pipeline_stages(context)} if context.use_pipeline_parallel else {}),
        "seed": context.get_trial_seed(),
        "parameters": context.parameters,
        "global_batch_size": context.get_global_batch_size(),
        "micro_batch_size": context.get_train_micro_batch_size_per_gpu(),
        "gradient_accumulation_steps": context.get_num_micro_batches_per_slot(),
        "checkpoint": outcome.checkpoint,
        "initial_validation": without_counters(outcome.initial_metrics),
        "final_validation": without_counters(outcome.final_metrics),
    }
    if trial.tokens_per_sample:
        summary["tokens_per_second"] = outcome.samples_per_second * trial.tokens_per_sample
    return {**summary, **without_counters(outcome.final_metrics), **trial.summary(), **more}


def pipeline_stages(context: ZeroTrialContext) -> int:
    """Return the first engine's number of pipeline stages."""
    return int(context.engines[0].mpu.get_pipe_parallel_world_size())


def zero_stage(context: ZeroTrialContext) -> int:
    """Return the first engine's ZeRO stage."""
    return int(context.engines[0].zero_optimization_stage())


STRAGGLER_STEPS = 4  # minimum length of a stretch
STRAGGLER_FACTOR = 2.0  # times the others' busy time
# per step: on a loaded machine, ranks differ by half of this by chance
STRAGGLER_SECONDS = 0.02
STRAGGLER_STRETCHES = 2


class StragglerWatch:
    """Detects a straggler: a rank that all others wait for, by each rank's busy time.

    Ranks do the same work and synchronize in every step, so all take as long as the slowest, but
    the slowest does not wait. Busy time is training time without waiting. A rank that is busy twice
    as long as the others' median, in two consecutive stretches of steps, is reported once. Waiting
    can only be measured if ranks wait on the host: on CPU, not on CUDA.
    """

    def __init__(self) -> None:
        self._begin: int | None = None  # steps complete at the beginning of the stretch
        self._busy: list[float] = []  # seconds of each rank in the stretch so far
        self._suspect: tuple[int, int] = (-1, 0)  # rank, stretches in a row
        self._named: set[int] = set()

    def observe(self, step: int, busy: Sequence[float | None]) -> str | None:
        """Return a note about a straggler, if there is one.

        The first call only starts the count, because a first step is not typical.

        Args:
            step: steps that are complete now.
            busy: each rank's busy seconds since the last call. A single None stops the detection.
        """
        known = [seconds for seconds in busy if seconds is not None]
        if len(known) < 2 or len(known) < len(busy):
            return None
        if self._begin is None:
            self._begin, self._busy = step, [0.0] * len(known)
            return None
        self._busy = [sum(pair) for pair in zip(self._busy, known, strict=True)]
        steps = step - self._begin
        if steps < STRAGGLER_STEPS:
            return None
        begin, each = self._begin, [seconds / steps for seconds in self._busy]
        self._begin, self._busy = step, [0.0] * len(known)
        return self._judge(begin, step, each)

    def _judge(self, begin: int, step: int, each: list[float]) -> str | None:
        rank = max(range(len(each)), key=each.__getitem__)
        others = median(each[:rank] + each[rank + 1 :])
        slow = each[rank] >= STRAGGLER_FACTOR * others and each[rank] - others >= STRAGGLER_SECONDS
        self._suspect = (rank, self._suspect[1] + 1 if rank == self._suspect[0] else 1) if slow else (-1, 0)
        if self._suspect[1] < STRAGGLER_STRETCHES or rank in self._named:
            return None
        self._named.add(rank)
        return (
            f"rank {rank} delays the others: in steps {begin + 1} to {step} it was busy {_time(each[rank])} per step, others {_time(others)}. "
            "Check its data loading, and what else runs on its host"
        )


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{1000 * seconds:.1f} ms"


EXCHANGE_SECONDS = 1.0  # approximate time between two exchanges
FORGIVEN = 10  # non-finite losses in a row allowed in steps that a loss scale skipped


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


class MetricReporter:
    """Collects this rank's training metrics step by step, exchanges them, and reports.

    Ranks exchange after the first step, then about once a second (rank 0 proposes the step, so that
    all agree), and at every boundary. The time of an exchange affects neither training nor reports.
    """

    def __init__(
        self,
        context: ZeroTrialContext,
        callbacks: Sequence[TrialCallback],
        total: int,
        step: int,
        clock: Clock,
        *,
        window: Mapping[str, Sequence[float]],
        tokens_per_sample: int | None,
    ) -> None:
        self.timer = StepTimer(clock)
        self.window = add_sums([window])
        self._tokens_per_sample = tokens_per_sample
        self._overflows = 0  # steps in a row that were skipped with a non-finite loss
        self._context = context
        self._callbacks = callbacks
        self._total = total
        self._paced: tuple[int, float] | None = None  # steps and seconds after the first exchange
        self._exchanged = step  # step of the last exchange
        self._exchanged_at = 0.0  # training seconds at the last exchange
        self.next = step + 1  # step of the next exchange
        self._waits = StepTimer(lambda: context.engines[0].seconds_waited() or 0.0)
        self._busy_at = 0.0  # busy seconds at the last exchange
        self._stragglers = StragglerWatch()
        # since the last exchange
        self._steps: list[tuple[int, Overflowed, dict[str, torch.Tensor]]] = []
        self._batches: list[dict[str, float]] = []  # this rank's values since the last report

    def start(self) -> None:
        """Start counting: training begins, or continues after validation and saving."""
        self.timer.start()
        self._waits.start()

    def stop(self) -> None:
        """Stop counting: training pauses."""
        self.timer.stop()
        self._waits.stop()

    def add(self, step: int, metrics: dict[str, torch.Tensor], overflowed: Overflowed) -> None:
        """Record the ``metrics`` of step ``step`` (complete steps, from 1). Does not read from the
        device.

        ``overflowed()`` is only called for a non-finite loss.
        """
        self._steps.append((step, overflowed, metrics))

    def exchange(self, step: int, last_checkpoint: str | None) -> bool:
        """Collective. Combine the ranks' metrics since the last exchange; return whether any rank
        wants to stop.

        Raises Diverged, naming ``last_checkpoint``, on every rank if any rank's loss was not finite
        and no loss scale explains it.
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
        _raise_if_diverged([rank["broken"] for rank in ranks], last_checkpoint)
        latest = add_sums(rank["sums"] for rank in ranks)
        self.window = add_sums([self.window, latest])
        self._emit_event(step, averages(latest), self._batches[len(self._batches) - count :])
        # stages of a pipeline do different work and are not compared
        if self._context.mpu.data_parallel_world_size == len(ranks):
            message = self._stragglers.observe(step, [rank["busy"] for rank in ranks])
            if message is not None:
                self._context.note(message)
        self._exchanged, self._exchanged_at, self.next = step, self.timer.seconds, ranks[0]["next"]
        return any(rank["stop"] for rank in ranks)

    def _read_busy(self) -> float | None:
        """Return seconds since the last exchange, minus waits for other ranks; None if unknown."""
        if self._context.engines[0].seconds_waited() is None:
            return None
        before, self._busy_at = self._busy_at, self.timer.seconds - self._waits.seconds
        return self._busy_at - before

    def _read_steps(self) -> tuple[Sums, list[Any] | None]:
        """Return this rank's sums, and [step, loss] of its first bad loss. Waits for the device."""
        steps, self._steps = self._steps, []
        rows = [dict.fromkeys(metrics, 0.0) for _, _, metrics in steps]
        for name in dict.fromkeys(name for _, _, metrics in steps for name in metrics):
            having = [index for index, (_, _, metrics) in enumerate(steps) if name in metrics]
            # dtypes may differ between steps
            halves = (torch.float16, torch.bfloat16)
            found = [steps[index][2][name] for index in having]
            values = torch.stack([value.float() if value.dtype in halves else value for value in found])
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

    def _propose(self, step: int) -> int:
        """Return the step of the next exchange, about EXCHANGE_SECONDS from now at the pace of the
        last steps.

        At most twice as many steps as last time, because the pace may change.
        """
        steps = max(step - self._exchanged, 1)
        seconds = (self.timer.seconds - self._exchanged_at) / steps
        fitting = int(EXCHANGE_SECONDS / seconds) if seconds > 0 else 2 * steps
        return step + max(1, min(fitting, 2 * steps))

    def _emit_event(self, step: int, latest: Mapping[str, float], own: Sequence[Mapping[str, float]]) -> None:
        """Emit a ``train`` event, on rank 0.

        Args:
            latest: averages over ranks and over the steps since the last event; the number of steps
                depends on timing.
            own: rank 0's values at each of these steps, for comparisons of runs.
        """
        steps = step - self._exchanged
        if self._context.distributed.rank != 0 or steps <= 0:
            return
        seconds = self.timer.seconds - self._exchanged_at
        samples = self._context.get_global_batch_size()
        event: dict[str, Any] = {**latest, "kind": "train", "step": step, "total_steps": self._total}
        rates = self._context.engines[0].get_lr()
        if rates:
            event["lr"] = rates[0]
        norm = self._context.engines[0].get_global_grad_norm()
        if norm is not None and math.isfinite(norm):  # before clipping, of the last step that was not skipped
            event["grad_norm"] = float(norm)
        event["each"] = {
            name: [_as_json(row.get(name)) for row in own] for name in sorted({n for row in own for n in row})
        }
        if seconds > 0:
            event["samples_per_second"] = steps * samples / seconds
            if self._tokens_per_sample:
                event["tokens_per_second"] = event["samples_per_second"] * self._tokens_per_sample
            if (mfu := self._context.engines[0].get_mfu(event["samples_per_second"])) is not None:
                event["mfu"] = mfu
            # at the pace since the first exchange: earlier steps include device and loader startup
            before, since = self._paced = self._paced or (step, self.timer.seconds)
            if step > before:
                event["eta_seconds"] = (self._total - step) * (self.timer.seconds - since) / (step - before)
        self._context.platform.emit(event)

    def report(self, step: int) -> None:
        """Collective, after an exchange. Report the training metrics since the last report."""
        metrics: dict[str, Any] = averages(self.window) | self._context.reduce_metrics(for_training=True)
        self._context.reset_reducers(for_training=True)
        batches, self._batches, self.window = self._batches, [], {}
        if not metrics:
            return
        if self._context.distributed.rank == 0:
            platform = self._context.platform
            platform.report_training_metrics(step, metrics)
            platform.report_progress(step / self._total)
            self._context.tensorboard.add("training", step, metrics)
        for callback in self._callbacks:
            callback.on_training_workload_end(dict(metrics), [dict(batch) for batch in batches])


def _raise_if_diverged(ranks: Sequence[tuple[int, str] | None], last_checkpoint: str | None) -> None:
    """Raise Diverged for the earliest non-finite loss in ``ranks``, one (or None) per rank."""
    found = [(entry[0], rank, entry[1]) for rank, entry in enumerate(ranks) if entry is not None]
    if not found:
        return
    step, rank, loss = min(found)
    saved = f" The last checkpoint is {last_checkpoint}." if last_checkpoint else " Nothing was saved yet."
    raise Diverged(
        f"the loss became {loss}",
        where=f"rank {rank}, step {step}",
        expected="a finite loss",
        fix="Try half the learning rate, gradient_clipping: 1.0, or look at that step's batch." + saved,
    )


def _as_json(value: float | None) -> float | str | None:
    """Convert a non-finite value to text, since JSON cannot represent it."""
    return value if value is None or math.isfinite(value) else str(value)
