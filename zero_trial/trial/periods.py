"""When things happen: every boundary of a run as a pure function of the one global step counter.

Steps are optimizer steps, counted from the start of the trial and never from the start of a process or of an epoch;
"after step s" means that s steps are complete. So a resumed run meets exactly the boundaries that an unbroken one
meets.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any

from zero_trial.errors import ConfigError


@dataclass(frozen=True)
class Batch:
    """A period of so many optimizer steps, or the very steps after which something happens. 0 means never."""

    value: int | Container[int]


@dataclass(frozen=True)
class Epoch:
    """A period of so many epochs, or the very epochs (1 is the first) after which something happens. 0 means never."""

    value: int | Container[int]


TrainUnit = Batch | Epoch
NEVER = Batch(0)
UNENDING = 2**40  # steps; an epoch as long as this is one whose loader does not know its length
EVERY_HUNDRED = Batch(100)


def is_boundary(step: int, unit: TrainUnit, epoch_length: int) -> bool:
    """Whether ``unit`` is due after ``step`` complete steps. Step 0 is never a boundary."""
    count, rest = (step, 0) if isinstance(unit, Batch) else divmod(step, epoch_length)
    if step <= 0 or rest:
        return False
    if isinstance(unit.value, int):
        return unit.value > 0 and count % unit.value == 0
    return count in unit.value


def next_boundary(step: int, unit: TrainUnit, epoch_length: int, total: int) -> int | None:
    """The first boundary of ``unit`` that lies ahead of ``step`` and not beyond ``total``."""
    if isinstance(unit.value, int):
        if unit.value <= 0:
            return None
        every = unit.value * (1 if isinstance(unit, Batch) else epoch_length)
        ahead = (step // every + 1) * every
        return ahead if ahead <= total else None
    return next((ahead for ahead in range(step + 1, total + 1) if is_boundary(ahead, unit, epoch_length)), None)


def total_steps(max_length: TrainUnit, epoch_length: int) -> int:
    """The step counter's value at the end of the run: all steps of the trial, not those still to do."""
    if not isinstance(max_length.value, int) or max_length.value <= 0:
        raise ConfigError("the run's length must be a positive number", where="max_length", got=max_length)
    if isinstance(max_length, Batch):
        return max_length.value
    if epoch_length >= UNENDING:
        fix = "Give the length in batches, or return a loader that has a length."
        raise ConfigError(
            "the training loader has no length, so there are no epochs", where="max_length", got=max_length, fix=fix
        )
    return max_length.value * epoch_length


def read_unit(value: Any, where: str, global_batch_size: int | None = None) -> TrainUnit:
    """``{batches: n}``, ``{epochs: n}``, ``{records: n}`` or a bare number of batches, as a unit. So is a Batch or an
    Epoch of Determined's.

    Records need the global batch size: n records are max(n // global batch size, 1) steps.
    """
    if type(value).__name__ in ("Batch", "Epoch") and hasattr(value, "value"):
        return _checked(Batch(value.value) if type(value).__name__ == "Batch" else Epoch(value.value), where)
    name, number = next(iter(value.items())) if isinstance(value, Mapping) and len(value) == 1 else ("batches", value)
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        raise ConfigError(
            "this is no length of training",
            where=where,
            got=value,
            expected="a whole number of steps",
            fix="Write {batches: 100}.",
        )
    if name == "epochs":
        return Epoch(number)
    if name == "records":
        if not global_batch_size:
            raise ConfigError(
                "records need hyperparameters.global_batch_size", where=where, got=value, fix="Write {batches: 100}."
            )
        return Batch(max(number // global_batch_size, 1) if number else 0)
    if name != "batches":
        raise ConfigError("unknown unit", where=where, got=name, expected="batches, epochs or records")
    return Batch(number)


def _checked(unit: TrainUnit, where: str) -> TrainUnit:
    """``unit``, if it counts something. Raises ConfigError otherwise."""
    value = unit.value
    good = (
        value >= 0 if isinstance(value, int) else isinstance(value, Container) and not isinstance(value, (str, bytes))
    )
    if isinstance(value, bool) or not good:
        name = type(unit).__name__
        raise ConfigError(
            "this is no period",
            where=where,
            got=f"{name}({value!r})",
            expected=f"{name} of a whole number, or of the set of those after which it is due",
            fix=f"Write {name}(100).",
        )
    return unit


@dataclass(frozen=True)
class Position:
    """Where a run is: ``step`` complete optimizer steps, in epochs of ``epoch_length`` steps."""

    step: int
    epoch_length: int

    @property
    def epoch(self) -> int:
        """Index of the epoch that the next step belongs to."""
        return self.step // self.epoch_length

    @property
    def is_epoch_start(self) -> bool:
        """Whether the next step is the first of its epoch."""
        return self.step % self.epoch_length == 0

    @property
    def is_epoch_end(self) -> bool:
        """Whether the next step is the last of its epoch."""
        return (self.step + 1) % self.epoch_length == 0
