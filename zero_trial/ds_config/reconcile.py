"""Solve batch sizes and mesh axes from ds_config, hyperparameters and slots, or list the
contradictions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zero_trial.ds_config.batch import BatchTriple, solve_batch
from zero_trial.ds_config.report import Row, render_rows
from zero_trial.ds_config.table import DsConfig
from zero_trial.errors import ConfigError, InvalidHP
from zero_trial.schema.document import GIVEN, Provenance, ValueSource
from zero_trial.sharding.plan import plan_for_stage


@dataclass(frozen=True)
class AxisSizes:
    """How the ranks lie on the mesh: world = pipe x model x replica x shard."""

    shard: int
    replica: int
    pipe: int
    model: int

    @property
    def data_parallel(self) -> int:
        return self.shard * self.replica


@dataclass(frozen=True)
class Reconciliation:
    """The solved batch and mesh, and one row per value: what it is, and what was given or how it
    was derived.
    """

    batch: BatchTriple
    axes: AxisSizes
    rows: tuple[Row, ...]

    def __str__(self) -> str:
        return render_rows(self.rows)


def solve_axes(config: DsConfig, world_size: int) -> AxisSizes:
    """Return the axis sizes for ``world_size`` ranks.

    Pure; raises ConfigError where they do not multiply to it.

    ZeRO stage 0 shards nothing, so its shard axis is 1 unless the mesh says otherwise; at stages 1
    to 3 all data-parallel ranks share one copy unless mesh.shard, mesh.replica or mics_shard_size
    says otherwise.
    """
    mesh, zero = config.mesh, config.zero_optimization
    around = mesh.pipe * mesh.model
    if world_size < 1 or world_size % around:
        raise ConfigError(
            f"{world_size} ranks cannot be divided by pipe {mesh.pipe} × model {mesh.model} = {around}",
            where="mesh",
            fix=f"Start {_near_multiples(world_size, around)} ranks, or change mesh.pipe or mesh.model.",
        )
    data = world_size // around
    shard = mesh.shard if mesh.shard is not None else zero.mics_shard_size
    replica = mesh.replica
    if shard is None and replica is None:
        shard = data if plan_for_stage(zero.stage).shard_optimizer else 1
    if shard is None and replica is not None:
        shard = data // replica
    if replica is None and shard is not None:
        replica = data // shard
    if shard is None or replica is None or shard * replica != data:
        legal = ", ".join(f"{size} × {data // size}" for size in range(1, data + 1) if data % size == 0)
        raise ConfigError(
            f"shard {shard} × replica {replica} is not the {data} data-parallel ranks",
            where="mesh",
            fix=f"shard × replica can be {legal}.",
        )
    return AxisSizes(shard, replica, mesh.pipe, mesh.model)


def ranks_of(config: DsConfig) -> int:
    """Return the ranks that a ds_config was written for, as far as its mesh and its batch sizes
    say: 1 where they say nothing."""
    mesh, batch = config.mesh, config.train_batch_size
    data = (mesh.shard or config.zero_optimization.mics_shard_size or 1) * (mesh.replica or 1)
    each = (config.train_micro_batch_size_per_gpu or 0) * (config.gradient_accumulation_steps or 0)
    if batch is not None and each and batch % each == 0:
        data = batch // each
    return data * mesh.pipe * mesh.model


def reconcile(
    config: DsConfig,
    world_size: int,
    hyperparameters: Mapping[str, Any] | None = None,
    *,
    slots: int | None = None,
    search: bool = False,
) -> Reconciliation:
    """Bring batch, mesh and hyperparameters of a run of ``world_size`` ranks into agreement.

    Hyperparameters ``global_batch_size`` and ``data_parallel_world_size`` count where ds_config
    says nothing, and must agree where it does. Pure. Raises ConfigError, or InvalidHP in a
    ``search``, with all contradictions and the nearest legal triples.
    """
    hints = hyperparameters or {}
    kind = InvalidHP if search else ConfigError
    faults: list[ConfigError] = []
    try:
        axes = solve_axes(config, world_size)
    except ConfigError as fault:
        raise (kind(fault.what, where=fault.where, fix=fault.fix) if search else fault) from None
    data = axes.data_parallel
    if slots is not None and slots != world_size:
        faults.append(
            _differs("resources.slots_per_trial", slots, f"{world_size} ranks", "Start as many ranks as slots.")
        )
    wanted = hints.get("data_parallel_world_size")
    if wanted is not None and wanted != data:
        how = f"{world_size} ranks / (pipe {axes.pipe} × model {axes.model}) = {data}"
        faults.append(
            _differs("hyperparameters.data_parallel_world_size", wanted, how, f"Set it to {data}, or remove it.")
        )
    places = {name: config.sources.get(name, GIVEN) for name in _GIVEN}
    batch = config.train_batch_size
    hinted = hints.get("global_batch_size")
    if batch is None and isinstance(hinted, int):
        batch, places["train_batch_size"] = (
            hinted,
            ValueSource("hyperparameter global_batch_size", Provenance.HYPERPARAMETER),
        )
    elif hinted is not None and hinted != batch:
        fix = 'Set one of them, or write "auto" in ds_config.'
        faults.append(_differs("hyperparameters.global_batch_size", hinted, f"train_batch_size {batch}", fix))
    solved: BatchTriple | None = None
    try:
        solved = solve_batch(
            batch, config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps, data, given_by=places
        )
    except ConfigError as fault:
        faults.append(fault)
    if faults or solved is None:
        raise kind.many([kind(f.what, where=f.where, got=f.got, expected=f.expected, fix=f.fix) for f in faults])
    return Reconciliation(solved, axes, _rows(config, solved, axes, world_size, slots))


_GIVEN = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def _rows(config: DsConfig, batch: BatchTriple, axes: AxisSizes, world_size: int, slots: int | None) -> tuple[Row, ...]:
    data = f"derived: {world_size} ranks / (pipe {axes.pipe} × model {axes.model})"
    sources = config.sources
    mics = "zero_optimization.mics_shard_size"

    def axis(name: str, given: int | None) -> str:
        if given is not None:
            return sources.get(f"mesh.{name}", "given")
        if name == "shard" and config.zero_optimization.mics_shard_size is not None:
            return f"{sources.get(mics, 'given')} (mics_shard_size)"
        return f"derived for ZeRO stage {config.zero_optimization.stage}"

    values = (batch.train_batch_size, batch.micro_batch_size, batch.accumulation)
    return (
        Row("ranks", world_size, "resources.slots_per_trial" if slots is not None else "launcher"),
        Row("mesh.pipe", axes.pipe, sources.get("mesh.pipe", "default")),
        Row("mesh.model", axes.model, sources.get("mesh.model", "default")),
        Row("data-parallel ranks", axes.data_parallel, data),
        Row("mesh.shard", axes.shard, axis("shard", config.mesh.shard)),
        Row("mesh.replica", axes.replica, axis("replica", config.mesh.replica)),
        *(Row(name, value, batch.how[name]) for name, value in zip(_GIVEN, values, strict=True)),
    )


def _differs(where: str, got: Any, expected: str, fix: str) -> ConfigError:
    return ConfigError("does not agree", where=where, got=got, expected=expected, fix=fix)


def _near_multiples(number: int, of: int) -> str:
    below = number // of * of
    return f"{below} or {below + of}" if below else str(of)
