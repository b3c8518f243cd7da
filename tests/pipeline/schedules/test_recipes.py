"""Schedules by name, and what cannot be built."""

from __future__ import annotations

import pytest

from zero_trial.errors import ConfigError
from zero_trial.pipeline.generators import RECIPES, build


@pytest.mark.parametrize("name", RECIPES)
def test_each_can_be_built(name: str):
    schedule = build(name, 3, 6)
    assert (schedule.name, schedule.stages, len(schedule.rows)) == (name, 3, 3)
    assert schedule.placement.chunks == 3 * RECIPES[name].chunks
    assert schedule.training is (name != "inference")


def test_chunks_are_per_rank():
    assert build("interleaved", 2, 4, 5).placement.chunks == 10
    assert build("zb_v", 2, 4, 2).placement.ranks == (0, 1, 1, 0)


def test_an_unknown_name():
    with pytest.raises(ConfigError, match=r"got 'pipedream', expected one of gpipe, 1f1b"):
        build("pipedream", 2, 2)


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 2), ("zb_v", 1), ("gpipe", 3)])
def test_chunks_that_cannot_be_chosen(name: str, chunks: int):
    with pytest.raises(ConfigError, match=r"cannot be chosen.*It can for interleaved, looped_bfs, inference"):
        build(name, 2, 4, chunks)


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, 0, 1), (2, 2, 0), (-1, 1, None)])
def test_sizes_below_one(sizes: tuple[int, int, int | None]):
    with pytest.raises(ConfigError, match="1 or more"):
        build("interleaved", *sizes)
