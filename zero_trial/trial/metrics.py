"""Metrics of a trial, averaged over steps, batches and ranks; the user's own reducers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise
from statistics import median
from typing import Any

import torch

from zero_trial.errors import TrialError
from zero_trial.trial.runtime.protocols import Distributed


class Reducer(Enum):
    """How a validation metric is reduced over batches and ranks. AVG weights ranks by batches."""

    AVG = "avg"
    SUM = "sum"
    MAX = "max"
    MIN = "min"


SPEED_METRIC = "zero_trial_steps_per_second"
"""As ``searcher.metric``: the trial reports its speed, without validating or saving."""

WARM_UP = 2  # steps excluded from the speed

COUNTERS = ("batches", "epochs")  # added to the validation metrics, for the searcher's time metric

Sums = dict[str, tuple[float, int]]  # name -> (sum over steps and ranks, number of values)


def training_metrics(returned: Any, where: str) -> dict[str, torch.Tensor]:
    """Return the metrics of ``train_batch`` as detached scalars by name; a bare tensor is the loss.

    Reads no value, so it does not wait for a GPU. Raises TrialError for anything but named scalars.
    """
    if isinstance(returned, (torch.Tensor, float)):
        returned = {"loss": returned}
    if not isinstance(returned, Mapping) or not all(isinstance(name, str) for name in returned):
        raise TrialError(
            "train_batch must return a dictionary mapping string names to Tensor metrics",
            where=where,
            got=type(returned).__name__,
            expected="a loss tensor, or {'loss': loss, ...}",
        )
    return {name: _scalar(name, value, where) for name, value in returned.items()}


def _scalar(name: str, value: Any, where: str) -> torch.Tensor:
    if isinstance(value, (int, float)):
        return torch.tensor(float(value), dtype=torch.float64)
    tensor = _as_tensor(name, value, where)
    if tensor.numel() != 1:
        raise TrialError(
            f"train_batch returned a {name} that is not a scalar",
            where=where,
            got=f"a tensor of shape {tuple(tensor.shape)}",
            expected="one number",
            fix=f"Return {name}.mean().",
        )
    return tensor.detach().reshape(())


def _as_tensor(name: str, value: Any, where: str) -> torch.Tensor:
    try:
        tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        tensor = None
    if tensor is None or tensor.is_complex():
        got = type(value).__name__ if tensor is None else "a complex tensor"
        raise TrialError(
            f"the metric {name} is not a number", where=where, got=got, expected="a number or a tensor"
        ) from None
    return tensor


def mean_over_calls(calls: Sequence[dict[str, torch.Tensor]], where: str) -> dict[str, torch.Tensor]:
    """Return the mean of each metric over a step's micro-batches; their names must agree."""
    names = set(calls[0])
    if any(set(call) != names for call in calls):
        raise TrialError("train_batch must return the same metrics for every micro-batch", where=where)
    if len(calls) == 1:
        return dict(calls[0])
    return {name: torch.stack([call[name].float() for call in calls]).mean() for name in calls[0]}


def add_sums(many: Iterable[Mapping[str, Sequence[float]]]) -> Sums:
    """Add up sums and counts by name, in the given order."""
    total: Sums = {}
    for sums in many:
        for name, (value, number) in sums.items():
            before, count = total.get(name, (0.0, 0))
            total[name] = (before + value, count + int(number))
    return total


def averages(sums: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the average of each (sum, count)."""
    return {name: value / number for name, (value, number) in sums.items() if number}


def validation_metrics(batches: Sequence[Any], reducers: Mapping[str, Reducer], where: str) -> dict[str, Any]:
    """Return one rank's value (a number or nested lists) of each metric, reduced over its batches
    of ``evaluate_batch``.

    Raises TrialError if a batch returns no dictionary, different names than the first, or None as a
    value. Bytes are dropped.
    """
    if not batches:
        return {}
    for batch in batches:
        if not isinstance(batch, Mapping):
            raise TrialError(
                "evaluate_batch must return a dictionary mapping string names to metrics",
                where=where,
                got=type(batch).__name__,
            )
        if set(batch) != set(batches[0]):
            raise TrialError(
                "Validation metric names must match across all batches of data",
                where=where,
                got=sorted(map(str, batch)),
                expected=sorted(map(str, batches[0])),
            )
    names = [name for name, value in batches[0].items() if not isinstance(value, bytes)]
    return {
        name: _over_batches(name, [batch[name] for batch in batches], reducers.get(name, Reducer.AVG), where)
        for name in names
    }


def _over_batches(name: str, values: list[Any], reducer: Reducer, where: str) -> Any:
    if any(value is None for value in values):
        raise TrialError(f"the validation metric {name} is None", where=where, fix="Return a number, or omit the name.")
    tensors = [_as_tensor(name, value, where).detach() for value in values]
    if any(tensor.shape != tensors[0].shape for tensor in tensors):
        raise TrialError(
            f"the validation metric {name} changes its shape between batches",
            where=where,
            got=", ".join(map(str, dict.fromkeys(tuple(tensor.shape) for tensor in tensors))),
            fix=f"Return {name}.mean().",
        )
    return _reduce(torch.stack(tensors).cpu().double(), reducer).tolist()


def _reduce(stacked: torch.Tensor, reducer: Reducer) -> torch.Tensor:
    if reducer is Reducer.AVG:
        return stacked.mean(0)
    if reducer is Reducer.SUM:
        return stacked.sum(0)
    return stacked.amax(0) if reducer is Reducer.MAX else stacked.amin(0)


def over_ranks(parts: Sequence[tuple[Mapping[str, Any], int]], reducers: Mapping[str, Reducer]) -> dict[str, Any]:
    """Return the final metrics from each rank's metrics and number of batches. Ranks without
    metrics do not count.

    Raises TrialError, on every rank, if ranks have metrics of different names or shapes.
    """
    numbered = [(rank, metrics) for rank, (metrics, _) in enumerate(parts) if metrics]
    for rank, metrics in numbered[1:]:
        first, shapes = (
            {name: shape_of(value) for name, value in found.items()} for found in (numbered[0][1], metrics)
        )
        if shapes != first:
            raise TrialError(
                "evaluate_batch returns different metrics than on other ranks",
                where=f"rank {rank}",
                got=", ".join(f"{name} {list(shape)}" if shape else name for name, shape in sorted(shapes.items())),
                expected=f"as on rank {numbered[0][0]}: "
                + ", ".join(f"{name} {list(shape)}" if shape else name for name, shape in sorted(first.items())),
            )
    parts = [(metrics, batches) for metrics, batches in parts if metrics]
    result: dict[str, Any] = {}
    for name in parts[0][0] if parts else ():
        reducer = reducers.get(name, Reducer.AVG)
        stacked = torch.stack([torch.tensor(metrics[name], dtype=torch.float64) for metrics, _ in parts])
        if reducer is Reducer.AVG:
            weights = torch.tensor([batches for _, batches in parts], dtype=torch.float64)
            joined = torch.tensordot(weights, stacked, dims=1) / weights.sum()
        else:
            joined = _reduce(stacked, reducer)
        result[name] = joined.tolist()
    return result


def shape_of(value: Any) -> tuple[int, ...]:
    """Return the shape of nested lists, as ``Tensor.tolist`` makes them."""
    return (len(value), *(shape_of(value[0]) if value else ())) if isinstance(value, list) else ()


def evaluation_reducers(answer: Reducer | Mapping[str, Reducer], names: Iterable[str]) -> dict[str, Reducer]:
    """Return the reducer of each metric name, from what ``evaluation_reducer()`` returned."""
    if isinstance(answer, Reducer):
        return dict.fromkeys(names, answer)
    return {name: answer.get(name, Reducer.AVG) for name in names}


def without_counters(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the validation metrics that the trial itself returned."""
    return {name: value for name, value in metrics.items() if name not in COUNTERS}


class MetricReducer(ABC):
    """Collects values on each rank between two reports. Values sent between ranks must be
    JSON-able."""

    @abstractmethod
    def reset(self) -> None:
        """Drop the collected values."""

    @abstractmethod
    def per_slot_reduce(self) -> Any:
        """Return the values collected on this rank, JSON-able."""

    @abstractmethod
    def cross_slot_reduce(self, per_slot_metrics: list[Any]) -> Any:
        """Return the metric from all ranks' ``per_slot_reduce``; without a name, return a dict."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return the values that are collected but not yet reported, as JSON-able values for a
        checkpoint."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what ``state_dict`` returned."""
        del state


class FunctionReducer(MetricReducer):
    """``update(value)`` collects; the function receives all ranks' values in one list."""

    def __init__(self, function: Callable[[list[Any]], Any]) -> None:
        self._function = function
        self._values: list[Any] = []

    def update(self, value: Any) -> None:
        """Collect ``value``: JSON-able, or a tensor (kept as nested lists)."""
        self._values.append(value.tolist() if hasattr(value, "tolist") else value)

    def reset(self) -> None:
        self._values = []

    def per_slot_reduce(self) -> list[Any]:
        return self._values

    def cross_slot_reduce(self, per_slot_metrics: list[Any]) -> Any:
        return self._function([value for rank in per_slot_metrics for value in rank])

    def state_dict(self) -> Mapping[str, Any]:
        return {"values": self._values}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._values = list(state["values"])


@dataclass(frozen=True)
class Wrapped:
    """A reducer with its name, and whether it reduces training or validation metrics."""

    reducer: MetricReducer
    name: str | None
    for_training: bool
    for_validation: bool


@dataclass
class ReducerTable:
    """All reducers of a trial, in the order in which they were wrapped (the same on every rank)."""

    distributed: Distributed
    wrapped: list[Wrapped] = field(default_factory=list)

    def add(self, reducer: MetricReducer, name: str | None, for_training: bool, for_validation: bool) -> None:
        self.wrapped.append(Wrapped(reducer, name, for_training, for_validation))

    def _active(self, for_training: bool) -> list[Wrapped]:
        return [item for item in self.wrapped if (item.for_training if for_training else item.for_validation)]

    def reset(self, for_training: bool) -> None:
        for item in self._active(for_training):
            item.reducer.reset()

    def reduce(self, for_training: bool) -> dict[str, Any]:
        """Collective. Return the same metrics on every rank, with one all-gather."""
        active = self._active(for_training)
        if not active:
            return {}
        ranks = self.distributed.allgather([item.reducer.per_slot_reduce() for item in active])
        metrics: dict[str, Any] = {}
        for index, item in enumerate(active):
            metrics.update(_named(item, item.reducer.cross_slot_reduce([rank[index] for rank in ranks])))
        return metrics

    def state(self) -> list[Mapping[str, Any]]:
        return [item.reducer.state_dict() for item in self.wrapped]

    def load_state(self, states: list[Mapping[str, Any]]) -> None:
        for item, state in zip(self.wrapped, states, strict=False):
            if state:
                item.reducer.load_state_dict(state)


def _named(item: Wrapped, value: Any) -> dict[str, Any]:
    if item.name is None and not isinstance(value, Mapping):
        raise TrialError(
            "a reducer without a name must return a dictionary of metrics",
            where=type(item.reducer).__name__,
            got=type(value).__name__,
            fix="Pass name=... to context.wrap_reducer.",
        )
    if item.name is not None and isinstance(value, Mapping):
        raise TrialError("a reducer with a name must return one metric, not a dictionary", where=item.name)
    return dict(value) if item.name is None else {item.name: value}


def speed_of(times: Sequence[float], warm_up: int) -> tuple[int, float]:
    """Return how many steps were measured, and their speed: one divided by the median of their
    seconds.

    times: when each step was complete; when the first step started is unknown.
        times: when each step was complete; the start of the first step is unknown.
        warm_up: number of steps to skip, at least one.
    """
    spans = [after - before for before, after in pairwise(times[max(warm_up, 1) - 1 :])]
    return len(spans), 1 / max(median(spans), 1e-9) if spans else 0.0
