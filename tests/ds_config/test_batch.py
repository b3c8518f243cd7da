"""The batch triangle against brute force, its messages, and the ways out that it offers."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from zero_trial.ds_config.batch import derive_triple, solve_axes, solve_batch
from zero_trial.ds_config.keys_zero import MeshSection, ZeroSection
from zero_trial.ds_config.table import DsConfig
from zero_trial.errors import ConfigError
from zero_trial.schema.document import ValueSource

LIMIT, RANKS = 64, 16


def every_mesh(ranks: int) -> list[tuple[int, int, int, int]]:
    """All (pipe, model, shard, replica) of ``ranks`` ranks."""
    sizes = range(1, ranks + 1)
    return [mesh for mesh in itertools.product(sizes, repeat=4) if math.prod(mesh) == ranks]


def test_every_mesh_up_to_16_ranks_gives_its_data_parallel_size():
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
            with pytest.raises(ConfigError, match="cannot be divided"):
                solve_axes(DsConfig(mesh=MeshSection(pipe=pipe, model=model)), ranks)


def by_brute_force(ranks: int) -> np.ndarray:
    """legal[b, m, s], for all triples up to 64: whether b = m x s x ranks. Index 0 is not used."""
    sizes = np.arange(LIMIT + 1)
    legal: np.ndarray = sizes[:, None, None] == sizes[None, :, None] * sizes[None, None, :] * ranks
    legal[0] = legal[:, 0] = legal[:, :, 0] = False
    return legal


@pytest.mark.parametrize("ranks", range(1, RANKS + 1))
def test_all_triples_up_to_64_against_brute_force(ranks: int):
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


def test_message_of_wrong_arithmetic():
    with pytest.raises(ConfigError) as error:
        solve_batch(6, 4, 1, 2, given_by={"train_batch_size": ValueSource("ds_config.json:2")})
    assert str(error.value) == (
        "train_batch_size 6 ≠ micro 4 × accumulation 1 × ranks 2 = 8. "
        "Set train_batch_size: 8, or remove it and it is derived. "
        "Values: train_batch_size 6 (ds_config.json:2), train_micro_batch_size_per_gpu 4 (given), "
        "gradient_accumulation_steps 1 (given). "
        "Nearest that fit (batch = micro x accumulation x ranks): 6 = 3 x 1 x 2; 8 = 4 x 1 x 2."
    )


def test_message_names_the_ranks_that_fit():
    with pytest.raises(ConfigError, match="or remove it and it is derived, or start 8 data-parallel ranks"):
        solve_batch(32, 4, 1, 1)


def test_a_batch_size_is_needed():
    with pytest.raises(ConfigError, match=r"no batch size is given.*global_batch_size"):
        solve_batch(None, None, 4, 2)


@pytest.mark.parametrize("given", [(0, 1, 1, 2), (4, -1, None, 2), (None, 2, 0, 2), (4, 4, 1, 0)])
def test_sizes_are_positive(given: tuple[int | None, ...]):
    with pytest.raises(ConfigError, match="a positive integer"):
        solve_batch(*given)
