"""Mesh arithmetic: which rank has which coordinates on the axes, and which ranks form a group. Pure.

The axes, outermost first, are ``pipe``, ``replica``, ``shard``, ``model``: neighbouring ranks differ in the innermost axis, so that the axes with
the most traffic per step stay on one host.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from zero_trial.errors import ConfigError

AXES = ("pipe", "replica", "shard", "model")


@dataclass(frozen=True)
class MeshShape:
    """Sizes of the four axes; their product is the number of ranks."""

    pipe: int = 1
    replica: int = 1
    shard: int = 1
    model: int = 1

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        return (self.pipe, self.replica, self.shard, self.model)

    @property
    def world_size(self) -> int:
        return prod(self.sizes)

    @property
    def data_parallel_size(self) -> int:
        """Ranks that see different data: replica x shard."""
        return self.replica * self.shard

    def coordinates(self, rank: int) -> dict[str, int]:
        """``rank`` as one index per axis (mixed radix, ``model`` fastest)."""
        out: dict[str, int] = {}
        for name, size in zip(reversed(AXES), reversed(self.sizes), strict=True):
            rank, out[name] = divmod(rank, size)
        return {name: out[name] for name in AXES}

    def rank_at(self, **coordinates: int) -> int:
        """The inverse of :meth:`coordinates`."""
        rank = 0
        for name, size in zip(AXES, self.sizes, strict=True):
            rank = rank * size + coordinates[name]
        return rank

    def groups(self, *axes: str) -> list[tuple[int, ...]]:
        """All groups of ranks that differ only on ``axes``; every rank is in exactly one. Sorted, so that all ranks build them alike."""
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            at = self.coordinates(rank)
            found.setdefault(tuple(at[name] for name in AXES if name not in axes), []).append(rank)
        return sorted(tuple(ranks) for ranks in found.values())


def plan_shape(
    world_size: int,
    *,
    shard_optimizer: bool,
    shard: int | None = None,
    replica: int | None = None,
    pipe: int = 1,
    model: int = 1,
) -> MeshShape:
    """The mesh for ``world_size`` ranks.

    Without sharding (ZeRO stage 0) all data-parallel ranks are replicas; with it they all lie on ``shard`` unless ``shard`` or ``replica`` asks
    for hybrid sharding (shard x replica). Raises ConfigError naming the key when the product is not the world size.
    """
    if pipe < 1 or model < 1 or world_size % (pipe * model):
        raise ConfigError(
            "the ranks cannot be divided into pipelines",
            where="mesh",
            got=f"pipe {pipe} x model {model} on {world_size} ranks",
            expected="a product that divides the number of ranks",
        )
    data = world_size // (pipe * model)
    if not shard_optimizer:
        if shard not in (None, 1):
            raise ConfigError(
                "ZeRO stage 0 shards nothing",
                where="mesh.shard",
                got=shard,
                expected=1,
                fix="Set zero_optimization.stage to 1, 2 or 3.",
            )
        if replica not in (None, data):
            raise ConfigError(
                "at ZeRO stage 0 every data-parallel rank is a replica",
                where="mesh.replica",
                got=replica,
                expected=data,
            )
        return MeshShape(pipe, data, 1, model)
    if shard is None:
        shard = data // replica if replica else data
    replica = replica if replica is not None else (data // shard if shard else 0)
    if shard < 1 or replica < 1 or shard * replica != data:
        fits = ", ".join(f"{n} x {data // n}" for n in range(1, data + 1) if data % n == 0)
        raise ConfigError(
            "shard x replica is not the number of data-parallel ranks",
            where="mesh.shard",
            got=f"{shard} x {replica}",
            expected=f"a product of {data}",
            fix=f"Possible (shard x replica): {fits}.",
        )
    return MeshShape(pipe, replica, shard, model)
