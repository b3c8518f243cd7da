"""Metrics that cannot be averaged: values collected on every rank and joined once, by the user's own rule."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from zero_trial.errors import TrialError
from zero_trial.platform.protocols import Distributed


class MetricReducer(ABC):
    """Collects on each rank between two reports. What crosses ranks must be JSON-able."""

    @abstractmethod
    def reset(self) -> None:
        """Forgets what was collected."""

    @abstractmethod
    def per_slot_reduce(self) -> Any:
        """What this rank has collected, JSON-able."""

    @abstractmethod
    def cross_slot_reduce(self, per_slot_metrics: list[Any]) -> Any:
        """The metric (with a name) or a dict of metrics (without one), from all ranks' ``per_slot_reduce`` in rank
        order.
        """

    def state_dict(self) -> Mapping[str, Any]:
        """What was collected and not reported yet, JSON-able, for a checkpoint."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes back what ``state_dict`` gave."""
        del state


class FunctionReducer(MetricReducer):
    """``update(value)`` collects; the function gets all ranks' values in one list."""

    def __init__(self, function: Callable[[list[Any]], Any]) -> None:
        self._function = function
        self._values: list[Any] = []

    def update(self, value: Any) -> None:
        """``value``: JSON-able, or a tensor (kept as nested lists)."""
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
    """A reducer with its name and when it is asked."""

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
        """Collective: one all-gather for all reducers. The same metrics on every rank."""
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
