"""Solve batch sizes (train_batch_size = micro batch size x accumulation steps x data-parallel
ranks) and mesh axes from ds_config and hyperparameters, or list the contradictions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from zero_trial.ds_config.config_report import Row, render_rows
from zero_trial.ds_config.reader import refusal
from zero_trial.ds_config.table import DsConfig
from zero_trial.errors import ConfigError
from zero_trial.schema.document import GIVEN, Provenance, ValueSource
from zero_trial.sharding.plan import plan_for_stage
from zero_trial.util.text import did_you_mean

_NAMES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


@dataclass(frozen=True)
class BatchTriple:
    """The solved batch sizes; ``how`` maps each ds_config key to the source of its value."""

    train_batch_size: int
    micro_batch_size: int
    accumulation: int
    how: Mapping[str, ValueSource]

    def filled(self, config: DsConfig) -> DsConfig:
        """Return ``config`` with these batch sizes."""
        return replace(
            config,
            train_batch_size=self.train_batch_size,
            train_micro_batch_size_per_gpu=self.micro_batch_size,
            gradient_accumulation_steps=self.accumulation,
        )


def solve_batch(
    train_batch_size: int | None,
    micro_batch_size: int | None,
    accumulation: int | None,
    dp_world: int,
    *,
    given_by: Mapping[str, ValueSource] | None = None,
) -> BatchTriple:
    """Return the triple that matches the given values, for ``dp_world`` data-parallel ranks (world
    size divided by the pipeline and model axes).

    ``given_by`` maps ds_config keys to the source of their values ("ds_config.json:3"). Pure.
    Raises ConfigError if the given values contradict each other, do not divide, or do not determine
    a batch size; the message lists the nearest legal triples.
    """
    given = (train_batch_size, micro_batch_size, accumulation)
    places = given_by or {}
    for name, value in zip((*_NAMES, "data-parallel ranks"), (*given, dp_world), strict=True):
        if value is not None and value < 1:
            where = f"{places.get(name, '')} {name}".strip()
            raise ConfigError("not a batch size", where=where, got=value, expected="a positive integer")
    if train_batch_size is None and micro_batch_size is None:
        raise ConfigError(
            "no batch size is given",
            where="train_batch_size",
            expected="train_batch_size or train_micro_batch_size_per_gpu",
            fix="Set train_micro_batch_size_per_gpu: 1, or train_batch_size (global_batch_size in a trial).",
        )
    batch, micro, steps = derive_triple(*given, dp_world)
    derived = (
        f"derived: {micro} x {steps} x {dp_world} ranks",
        f"derived: {batch} // {dp_world} ranks // {steps}",
        f"derived: {batch} // {micro} // {dp_world} ranks"
        if None not in given[:2]
        else "derived: 1, because only one batch size is set",
    )
    how = {
        name: ValueSource(derived[number], Provenance.DERIVED) if given[number] is None else places.get(name, GIVEN)
        for number, name in enumerate(_NAMES)
    }
    if batch != micro * steps * dp_world:
        raise _contradiction(batch, micro, steps, dp_world, how)
    return BatchTriple(batch, micro, steps, how)


def derive_triple(batch: int | None, micro: int | None, steps: int | None, dp_world: int) -> tuple[int, int, int]:
    """Derive the missing numbers as DeepSpeed does, by integer division and at least 1 each; the
    caller checks that the product agrees. Pure."""
    if steps is None:
        steps = max(batch // (micro * dp_world), 1) if batch is not None and micro is not None else 1
    if micro is None:
        micro = max((batch or 1) // (dp_world * steps), 1)
    return micro * steps * dp_world if batch is None else batch, micro, steps


def _contradiction(batch: int, micro: int, steps: int, dp_world: int, how: Mapping[str, ValueSource]) -> ConfigError:
    """Return the error ``train_batch_size 6 != micro 4 x accumulation 1 x ranks 2 = 8``, with the
    source of each value and possible fixes."""
    product, first = micro * steps * dp_world, ""
    if not any(how[name].provenance is Provenance.DERIVED for name in _NAMES[1:]):
        whole, left = divmod(batch, micro * steps)
        ranks = f", or start {whole} data-parallel ranks" if not left else ""
        first = f"Set train_batch_size: {product}, or remove it so that it is derived{ranks}. "
    near = nearest_triples(batch, micro, steps, dp_world)
    listed = "; ".join(f"{b} = {m} x {s} x {dp_world}" for b, m, s in near)
    values = zip(_NAMES, (batch, micro, steps), strict=True)
    origins = ", ".join(f"{name} {value} ({how[name]})" for name, value in values)
    return ConfigError(
        f"train_batch_size {batch} ≠ micro {micro} × accumulation {steps} × ranks {dp_world} = {product}",
        fix=f"{first}Values: {origins}. Nearest that fit (batch = micro x accumulation x ranks): {listed}.",
    )


def nearest_triples(batch: int, micro: int, steps: int, dp_world: int) -> list[tuple[int, int, int]]:
    """Return legal (batch, micro, accumulation) triples with one number changed, closest first."""

    def nearest(samples: int) -> int:
        return max((batch + samples // 2) // samples, 1)

    found = {(micro, steps), (micro, nearest(micro * dp_world)), (nearest(steps * dp_world), steps)}
    return sorted(((m * s * dp_world, m, s) for m, s in found), key=lambda each: (abs(each[0] - batch), each))


# --- a whole run: mesh axes, batch sizes, and hyperparameters that set them -----------------------


@dataclass(frozen=True)
class AxisSizes:
    """The sizes of the mesh axes: world = pipe x model x replica x shard."""

    shard: int
    replica: int
    pipe: int
    model: int

    @property
    def data_parallel(self) -> int:
        return self.shard * self.replica


@dataclass(frozen=True)
class Reconciliation:
    """The solved batch and mesh, and one row per value with its source."""

    batch: BatchTriple
    axes: AxisSizes
    rows: tuple[Row, ...]

    def __str__(self) -> str:
        return render_rows(self.rows)


def solve_axes(config: DsConfig, world_size: int) -> AxisSizes:
    """Return the axis sizes for ``world_size`` ranks. Pure.

    Raises ConfigError if the product of the sizes is not ``world_size``.

    At ZeRO stage 0 nothing is sharded, so the shard axis is 1. At stages 1 to 3 all data-parallel
    ranks share one copy unless mesh.shard, mesh.replica or mics_shard_size is set.
    """
    mesh, zero = config.mesh, config.zero_optimization
    around = mesh.pipe * mesh.model
    if world_size < 1 or world_size % around:
        below = world_size // around * around
        near = f"{below} or {below + around}" if below else str(around)
        raise ConfigError(
            f"{world_size} ranks are not divisible by pipe {mesh.pipe} × model {mesh.model} = {around}",
            where="mesh",
            fix=f"Start {near} ranks, or change mesh.pipe or mesh.model.",
        )
    data = world_size // around
    given = shard = mesh.shard if mesh.shard is not None else zero.mics_shard_size
    replica = mesh.replica
    if not plan_for_stage(zero.stage).shard_optimizer and (shard not in (None, 1) or replica not in (None, data)):
        raise ConfigError(
            "ZeRO stage 0 shards nothing: every data-parallel rank is a replica",
            where="mesh",
            got=f"shard {shard}, replica {replica}",
            expected=f"1 × {data}",
            fix="Set zero_optimization.stage to 1, 2 or 3, or remove mesh.shard, mesh.replica and mics_shard_size.",
        )
    if shard is None and replica is None:
        shard = data if plan_for_stage(zero.stage).shard_optimizer else 1
    shard = data // (replica or 1) if shard is None else shard
    replica = data // shard if replica is None and shard else replica
    if shard * (replica or 0) != data:
        legal = ", ".join(f"{size} × {data // size}" for size in range(1, data + 1) if data % size == 0)
        alone = f"replica {mesh.replica}" if given is None else f"shard {given}" if mesh.replica is None else None
        raise ConfigError(
            f"{alone} does not divide the {data} data-parallel ranks"
            if alone
            else f"shard {shard} × replica {replica} is not the {data} data-parallel ranks",
            where="mesh",
            fix=f"shard × replica can be {legal}.",
        )
    return AxisSizes(shard, replica or 0, mesh.pipe, mesh.model)


def ranks_of(config: DsConfig) -> int:
    """Return the number of ranks that a ds_config was written for; 1 if unknown."""
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
    search: bool = False,
) -> Reconciliation:
    """Solve the batch sizes and the mesh of a run of ``world_size`` ranks.

    The hyperparameter ``data_parallel_world_size`` must match the result; ``read_ds_config`` checks
    all other hyperparameters. Pure. Raises ConfigError (InvalidHP in a ``search``) with all
    contradictions and the nearest legal triples.
    """
    faults: list[ConfigError] = []
    try:
        axes = solve_axes(config, world_size)
    except ConfigError as fault:
        raise refusal([fault], search) from None
    data, wanted = axes.data_parallel, (hyperparameters or {}).get("data_parallel_world_size")
    if wanted is not None and wanted != data:
        where = "hyperparameters.data_parallel_world_size"
        how = f"{world_size} ranks / (pipe {axes.pipe} × model {axes.model}) = {data}"
        fix = f"Set it to {data}, or remove it."
        faults.append(ConfigError("contradicts the mesh", where=where, got=wanted, expected=how, fix=fix))
    if config.train_batch_size is None and config.train_micro_batch_size_per_gpu is None:
        for name in hyperparameters or ():
            if (meant := did_you_mean(name, ("global_batch_size",))) is not None:
                faults.append(ConfigError("not a batch size", where=f"hyperparameters.{name}", fix=meant))
    try:
        solved = solve_batch(
            config.train_batch_size,
            config.train_micro_batch_size_per_gpu,
            config.gradient_accumulation_steps,
            data,
            given_by={name: config.sources.get(name, GIVEN) for name in _NAMES},
        )
    except ConfigError as fault:
        raise refusal([*faults, fault], search) from None
    if faults:
        raise refusal(faults, search)
    return Reconciliation(solved, axes, _rows(config, solved, axes, world_size))


def _rows(config: DsConfig, batch: BatchTriple, axes: AxisSizes, world_size: int) -> tuple[Row, ...]:
    sources, zero, mesh = config.sources, config.zero_optimization, config.mesh
    shard = replica = f"derived for ZeRO stage {zero.stage}"
    if zero.mics_shard_size is not None:
        shard = f"{sources.get('zero_optimization.mics_shard_size', 'given')} (mics_shard_size)"
    if mesh.shard is not None:
        shard = sources.get("mesh.shard", "given")
    if mesh.replica is not None:
        replica = sources.get("mesh.replica", "given")
    values = (batch.train_batch_size, batch.micro_batch_size, batch.accumulation)
    ranks = f"derived: {world_size} ranks / (pipe {axes.pipe} × model {axes.model})"
    return (
        Row("ranks", world_size, "launcher"),
        Row("mesh.pipe", axes.pipe, sources.get("mesh.pipe", "default")),
        Row("mesh.model", axes.model, sources.get("mesh.model", "default")),
        Row("data-parallel ranks", axes.data_parallel, ranks),
        Row("mesh.shard", axes.shard, shard),
        Row("mesh.replica", axes.replica, replica),
        *(Row(name, value, batch.how[name]) for name, value in zip(_NAMES, values, strict=True)),
    )
