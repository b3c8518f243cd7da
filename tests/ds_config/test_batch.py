"""The batch triangle against brute force; and ds_config, hyperparameters, slots and mesh of a run
in agreement, or refused with the ways out."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from zero_trial.ds_config.batch import (
    AxisSizes,
    derive_triple,
    ranks_of,
    reconcile,
    solve_axes,
    solve_batch,
)
from zero_trial.ds_config.keys_zero import MeshSection, ZeroSection
from zero_trial.ds_config.reader import read_ds_config
from zero_trial.ds_config.table import DsConfig
from zero_trial.engine.resolved_config import mesh_shape
from zero_trial.errors import ConfigError, InvalidHP

LIMIT, RANKS = 32, 8


def every_mesh(ranks: int) -> list[tuple[int, int, int, int]]:
    """All (pipe, model, shard, replica) of ``ranks`` ranks."""
    sizes = range(1, ranks + 1)
    return [mesh for mesh in itertools.product(sizes, repeat=4) if math.prod(mesh) == ranks]


def test_every_mesh_of_few_ranks_gives_its_data_parallel_size():
    """By the factors themselves; what is left open is derived, and what does not multiply to the
    ranks is refused."""
    known = {}
    for ranks in range(1, RANKS + 1):
        for pipe, model, shard, replica in every_mesh(ranks):
            known[ranks, pipe, model] = ranks // (pipe * model)
            section = {"pipe": pipe, "model": model, "shard": shard, "replica": replica}
            for left_out in ("", "shard", "replica"):
                mesh = MeshSection(**{name: size for name, size in section.items() if name != left_out})
                axes = solve_axes(DsConfig(mesh=mesh, zero_optimization=ZeroSection(stage=1)), ranks)
                assert (axes.pipe, axes.model, axes.shard, axes.replica) == (pipe, model, shard, replica)
                assert axes.data_parallel == known[ranks, pipe, model]
    for ranks, pipe, model in itertools.product(range(1, RANKS + 1), repeat=3):
        if (ranks, pipe, model) not in known:
            with pytest.raises(ConfigError, match="are not divisible"):
                solve_axes(DsConfig(mesh=MeshSection(pipe=pipe, model=model)), ranks)


def by_brute_force(ranks: int) -> np.ndarray:
    """legal[b, m, s] up to LIMIT: whether b = m x s x ranks. Index 0 is not used."""
    sizes = np.arange(LIMIT + 1)
    legal: np.ndarray = sizes[:, None, None] == sizes[None, :, None] * sizes[None, None, :] * ranks
    legal[0] = legal[:, 0] = legal[:, :, 0] = False
    return legal


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8, 16])
def test_all_small_triples_against_brute_force(ranks: int):
    """Every legal triple is accepted from any two of its numbers, and the search and the solver
    find the same ones."""
    legal = by_brute_force(ranks)
    for b, m, s in np.argwhere(legal).tolist():
        for given in ((b, m, s), (b, m, None), (b, None, s), (None, m, s)):
            solved = solve_batch(*given, ranks)
            assert (solved.train_batch_size, solved.micro_batch_size, solved.accumulation) == (b, m, s)
    any_steps, any_micro = legal.any(axis=2), legal.any(axis=1)
    for first, second in itertools.product(range(1, LIMIT + 1), repeat=2):
        b, m, s = derive_triple(first, second, None, ranks)
        assert (b == m * s * ranks) == any_steps[first, second]
        b, m, s = derive_triple(first, None, second, ranks)
        assert (b == m * s * ranks) == any_micro[first, second]
        assert derive_triple(None, first, second, ranks) == (first * second * ranks, first, second)
    for only in range(1, LIMIT + 1):
        b, m, s = derive_triple(only, None, None, ranks)
        assert (b == m * s * ranks) == any_micro[only, 1] and s == 1
        assert derive_triple(None, only, None, ranks) == (only * ranks, only, 1)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((32, 4, 1, 1), "or remove it so that it is derived, or start 8 data-parallel ranks"),
        ((None, None, 4, 2), r"no batch size is given.*global_batch_size"),
        *((sizes, "a positive integer") for sizes in ((0, 1, 1, 2), (4, -1, None, 2), (None, 2, 0, 2), (4, 4, 1, 0))),
    ],
)
def test_sizes_that_do_not_fit(given: tuple[int | None, ...], message: str):
    with pytest.raises(ConfigError, match=message):
        solve_batch(*given)


# --- a whole run ---


def config(stage: int = 2, mesh: MeshSection | None = None, **keys: Any) -> DsConfig:
    """A DsConfig with a mesh of any shape, pipelines included."""
    read = read_ds_config({"zero_optimization": {"stage": stage}, **keys})
    return replace(read, mesh=mesh) if mesh else read


def test_a_run_in_one_table():
    given = read_ds_config(
        '{"train_micro_batch_size_per_gpu": 4,\n"zero_optimization": {"stage": 2, "mics_shard_size": 2}}',
        hyperparameters={"global_batch_size": 64},
    )
    found = reconcile(given, 8, {"data_parallel_world_size": 8})
    assert str(found) == (
        "ranks                           8   launcher\n"
        "mesh.pipe                       1   default\n"
        "mesh.model                      1   default\n"
        "data-parallel ranks             8   derived: 8 ranks / (pipe 1 × model 1)\n"
        "mesh.shard                      2   config:2 (mics_shard_size)\n"
        "mesh.replica                    4   derived for ZeRO stage 2\n"
        "train_batch_size                64  hyperparameter global_batch_size\n"
        "train_micro_batch_size_per_gpu  4   config:1\n"
        "gradient_accumulation_steps     2   derived: 64 // 4 // 8 ranks"
    )


@pytest.mark.parametrize(
    ("mesh", "world", "message"),
    [
        (MeshSection(pipe=2), 3, "mesh: 3 ranks are not divisible by pipe 2 × model 1 = 2. Start 2 or 4 ranks"),
        (MeshSection(pipe=4), 3, "Start 4 ranks"),
        (
            MeshSection(shard=3),
            4,
            "mesh: shard 3 does not divide the 4 data-parallel ranks. shard × replica can be 1 × 4, 2 × 2, 4 × 1.",
        ),
        (MeshSection(replica=8), 4, "mesh: replica 8 does not divide the 4"),
        (MeshSection(shard=2, replica=1), 4, "mesh: shard 2 × replica 1 is not the 4"),
    ],
)
def test_axes_that_do_not_fit(mesh: MeshSection, world: int, message: str):
    with pytest.raises(ConfigError) as error:
        solve_axes(config(2, mesh), world)
    assert message in str(error.value)


@pytest.mark.parametrize("given", [MeshSection(shard=4), MeshSection(replica=1), MeshSection(shard=2, replica=2)])
def test_stage_0_shards_nothing_as_its_engine_says(given: MeshSection):
    """So a search passes over the point, and no run starts with it."""
    with pytest.raises(ConfigError, match="stage 0"):
        mesh_shape(config(0, given), 4)
    with pytest.raises(InvalidHP, match="stage 0"):
        reconcile(config(0, given, train_batch_size=4), 4, search=True)


def test_the_mesh_divides_the_ranks_before_the_batch():
    assert solve_axes(config(0), 4) == AxisSizes(1, 4, 1, 1) and solve_axes(config(1), 4) == AxisSizes(4, 1, 1, 1)
    found = reconcile(config(2, MeshSection(pipe=2, model=2), train_batch_size=32, train_micro_batch_size_per_gpu=4), 8)
    assert (found.batch.accumulation, found.axes.data_parallel) == (4, 2)


def test_all_contradictions_come_together():
    given = config(train_batch_size=64, train_micro_batch_size_per_gpu=4)
    with pytest.raises(ConfigError) as error:
        reconcile(given, 6, {"data_parallel_world_size": 2})
    lines = str(error.value).splitlines()
    assert [line.split(":")[0].strip() for line in lines] == [
        "2 faults", "hyperparameters.data_parallel_world_size", "train_batch_size 64 ≠ micro 4 × accumulation 2 × ranks 6 = 48. Values",
    ]  # fmt: skip
    assert not isinstance(error.value, InvalidHP)
    for faulty in (given, config(2, MeshSection(shard=3), train_batch_size=4)):
        with pytest.raises(InvalidHP):  # in a search it is an invalid point
            reconcile(faulty, 6, search=True)
    assert "Nearest that fit (batch = micro x accumulation x ranks): 60 = 5 x 2 x 6; 72 = 4 x 3 x 6; 48" in lines[2]


@pytest.mark.parametrize(
    ("ranks", "given"),
    [
        (1, {}),
        (1, {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2}),  # the accumulation is derived
        (2, {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}),
        (1, {"train_batch_size": 9, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}),
        (12, {"mesh": MeshSection(shard=3, replica=2, pipe=2)}),
    ],
)
def test_the_ranks_that_a_file_was_written_for(ranks: int, given: dict[str, Any]):
    assert ranks_of(config(**given)) == ranks
