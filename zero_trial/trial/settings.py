"""When things happen, and how long a trial runs: periods, boundaries as a pure function of one step
counter, settings.

Steps are optimizer steps, counted from the start of the trial and never from the start of a process
or of an epoch; "after step s" means that s steps are complete. So a resumed run has exactly the
same boundaries as an uninterrupted run.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any

from zero_trial.errors import ConfigError
from zero_trial.trial.metrics import COUNTERS, SPEED_METRIC


@dataclass(frozen=True)
class Batch:
    """A period in optimizer steps, or a set of steps; 0: never."""

    value: int | Container[int]


@dataclass(frozen=True)
class Epoch:
    """A period in epochs, or a set of epochs (1 is the first); 0: never."""

    value: int | Container[int]


@dataclass(frozen=True)
class Record:
    """A period in records (samples), converted to max(value // global batch size, 1) steps."""

    value: int


TrainUnit = Batch | Epoch

UNENDING = 2**40  # steps; the length of an epoch whose loader does not know its own

NEVER = Batch(0)
EVERY_HUNDRED = Batch(100)


def is_boundary(step: int, unit: TrainUnit, epoch_length: int) -> bool:
    """Return whether ``unit`` is due after ``step`` complete steps. Step 0 is never a boundary."""
    count, rest = (step, 0) if isinstance(unit, Batch) else divmod(step, epoch_length)
    if step <= 0 or rest:
        return False
    if isinstance(unit.value, int):
        return unit.value > 0 and count % unit.value == 0
    return count in unit.value


def total_steps(max_length: TrainUnit, epoch_length: int) -> int:
    """Return the step counter's value at the end of the run, including steps before a resume."""
    if not isinstance(max_length.value, int) or max_length.value <= 0:
        raise ConfigError("the run's length must be a positive number", where="max_length", got=max_length)
    if isinstance(max_length, Batch):
        return max_length.value
    if epoch_length >= UNENDING:
        fix = "Give the length in batches, or return a loader with a length."
        raise ConfigError(
            "the training loader has no length, so there are no epochs", where="max_length", got=max_length, fix=fix
        )
    return max_length.value * epoch_length


def read_unit(value: Any, where: str, global_batch_size: int | None = None) -> TrainUnit:
    """Read ``{batches: n}``, ``{epochs: n}``, ``{records: n}``, a bare number of batches, or a
    Batch, Epoch or Record (ours or Determined's).

    Records need the global batch size: n records are max(n // global batch size, 1) steps.
    """
    kind = type(value).__name__
    if kind in ("Batch", "Epoch") and hasattr(value, "value"):
        return _checked(Batch(value.value) if kind == "Batch" else Epoch(value.value), where)
    if kind == "Record" and hasattr(value, "value"):
        value = {"records": value.value}
    name, number = next(iter(value.items())) if isinstance(value, Mapping) and len(value) == 1 else ("batches", value)
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        raise ConfigError(
            "not a training length",
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
                "records need a global batch size: an engine's, or hyperparameters.global_batch_size",
                where=where,
                got=value,
                fix="Write {batches: 100}.",
            )
        return Batch(max(number // global_batch_size, 1) if number else 0)
    if name != "batches":
        raise ConfigError("unknown unit", where=where, got=name, expected="batches, epochs or records")
    return Batch(number)


def _checked(unit: TrainUnit, where: str) -> TrainUnit:
    """Return ``unit`` if it is a valid count. Raises ConfigError otherwise."""
    value = unit.value
    good = (
        value >= 0 if isinstance(value, int) else isinstance(value, Container) and not isinstance(value, (str, bytes))
    )
    if isinstance(value, bool) or not good:
        name = type(unit).__name__
        raise ConfigError(
            "not a period",
            where=where,
            got=f"{name}({value!r})",
            expected=f"{name}(n) with a whole number, or with the set of steps or epochs at which it is due",
            fix=f"Write {name}(100).",
        )
    return unit


@dataclass(frozen=True)
class TrainPosition:
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


POLICIES = ("best", "all", "none")


@dataclass(frozen=True)
class Keep:
    """Which checkpoints of a trial are kept: the best few by the searcher's metric and the latest
    few. None keeps all. ``at_end``: how many of the latest are kept after the trial completes;
    None: no change."""

    best: int | None = None
    latest: int | None = None
    at_end: int | None = None


@dataclass(frozen=True)
class TrainSettings:
    """The arguments of ``fit``, under Determined's names.

    ``max_length`` counts the whole trial's steps, including those before a resume.
    ``checkpoint_policy``: after a validation, save if it is the ``best`` so far, always (``all``),
    or never (``none``).
    """

    max_length: TrainUnit
    validation_period: TrainUnit = NEVER
    checkpoint_period: TrainUnit = NEVER
    reporting_period: TrainUnit = EVERY_HUNDRED
    checkpoint_policy: str = "best"
    step_zero_validation: bool = False
    metric: str | None = None
    smaller_is_better: bool = True
    keep: Keep = Keep()
    validation_batches: int | None = None  # maximum per validation, for a test run

    @property
    def measures_speed(self) -> bool:
        """Return whether the run only measures its steps per second; such a run saves nothing."""
        return self.metric == SPEED_METRIC

    def __post_init__(self) -> None:
        if self.checkpoint_policy not in POLICIES:
            raise ConfigError(
                "unknown policy", where="checkpoint_policy", got=self.checkpoint_policy, expected=" or ".join(POLICIES)
            )


def run_length(experiment: Mapping[str, Any], global_batch_size: int | None) -> TrainUnit | None:
    """Return a trial's length from its experiment config: ``searcher.max_length``, or
    adaptive_asha's ``max_time`` if its ``time_metric`` counts steps or epochs; else None."""
    searcher = experiment.get("searcher") or {}
    if searcher.get("max_length") is not None:
        return read_unit(searcher["max_length"], "searcher.max_length", global_batch_size)
    time_metric = searcher.get("time_metric")
    if searcher.get("max_time") is None or time_metric not in COUNTERS:
        return None
    return read_unit({time_metric: searcher["max_time"]}, "searcher.max_time")


def settings_from_experiment(
    experiment: Mapping[str, Any], global_batch_size: int | None, max_length: TrainUnit | None = None
) -> TrainSettings:
    """Return the settings of an experiment config (plain data), with Determined's defaults.
    ``global_batch_size``: the engine's, for lengths in records.

    Raises ConfigError if neither the config nor ``max_length`` sets the length of the run.
    """
    searcher = experiment.get("searcher") or {}
    length = max_length if max_length is not None else run_length(experiment, global_batch_size)
    if length is None:
        raise ConfigError(
            "the run has no length", where="searcher.max_length", fix="Write searcher: {max_length: {batches: 200}}."
        )

    def period(name: str, default: int) -> TrainUnit:
        value = experiment.get(name)
        return read_unit(default if value is None else value, name, global_batch_size)

    return TrainSettings(
        max_length=length,
        validation_period=period("min_validation_period", 0),
        checkpoint_period=period("min_checkpoint_period", 0),
        reporting_period=period("scheduling_unit", 100),
        checkpoint_policy=str(experiment.get("checkpoint_policy") or "best"),
        step_zero_validation=bool(experiment.get("perform_initial_validation"))
        and searcher.get("metric") != SPEED_METRIC,
        metric=searcher.get("metric"),
        smaller_is_better=bool(searcher.get("smaller_is_better", True)),
        keep=_keep(experiment.get("checkpoint_storage") or {}),
    )


def _keep(storage: Mapping[str, Any]) -> Keep:
    """Return Determined's numbers, but keep at least the two latest until the trial is complete,
    because one may be damaged. A run's only trial keeps the experiment's best checkpoints."""
    best = max(int(storage.get("save_trial_best", 1)), int(storage.get("save_experiment_best", 0)))
    latest = int(storage.get("save_trial_latest", 1))
    return Keep(best=best, latest=max(latest, 2), at_end=latest)
