"""How often or how long, in the words of an experiment's YAML: so many batches, epochs or records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zero_trial.config.canonical import shown
from zero_trial.config.kinds import Int
from zero_trial.config.numerals import Mismatch

UNITS = ("batches", "epochs", "records")


@dataclass(frozen=True)
class Period:
    """``count`` of ``unit``; batches are optimizer steps. A count of 0 means never."""

    unit: str
    count: int

    def __str__(self) -> str:
        return f"{self.count} {self.unit}"

    def batches(self, *, epoch_batches: int | None = None, global_batch_size: int | None = None) -> int | None:
        """The period in batches, or None where what it would take is not known. Records are rounded up to whole batches."""
        if self.unit == "batches":
            return self.count
        if self.unit == "epochs":
            return None if epoch_batches is None else self.count * epoch_batches
        return None if global_batch_size is None else -(-self.count // global_batch_size)


NEVER = Period("batches", 0)


def read_period(value: Any, low: int = 0) -> Period:
    """A Period from ``{batches: 100}`` or a bare number of batches; raises Mismatch."""
    expected = "{batches: n}, {epochs: n}, {records: n} or a number of batches"
    if isinstance(value, Mapping):
        if len(value) != 1 or next(iter(value)) not in UNITS:
            raise Mismatch(expected)
        unit, count = next(iter(value.items()))
    else:
        unit, count = "batches", value
    try:
        return Period(unit, Int(low).read(count).value)
    except Mismatch:
        what = "a positive" if low else "a non-negative"
        raise Mismatch(expected, f"{shown(count)} is not {what} integer.") from None
