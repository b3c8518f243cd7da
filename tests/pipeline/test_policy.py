"""Which sharding actions a ZeRO stage puts into a schedule, and what they move."""

from __future__ import annotations

import pytest

from tests.pipeline.lowered import report
from zero_trial.errors import ConfigError
from zero_trial.pipeline.policy import Policy, choose
from zero_trial.pipeline.schedule import Parameters, Reduction


def volumes(policy: Policy, name: str = "1f1b", micro_batches: int = 8) -> list[float]:
    got = report(name, 4, micro_batches, parameters=policy.parameters, reduction=policy.reduction)
    chunks = 2 if name in ("looped_bfs", "zb_v") else 1
    return [policy.volume(rank, chunks) for rank in got.ranks]


def test_what_moves_least_is_the_default():
    assert choose(0) == Policy(0, None, Reduction.BOUNDARY)
    assert choose(1) == Policy(1, None, Reduction.BOUNDARY)
    assert choose(2) == Policy(2, None, Reduction.BOUNDARY)
    assert choose(3) == Policy(3, Parameters.HOLD, Reduction.BOUNDARY)
    assert choose(3, Parameters.FREE) == Policy(3, Parameters.FREE, Reduction.MICRO)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb_h1", "zb_v", "looped_bfs"])
def test_at_the_boundary_every_stage_moves_two(stage: int, name: str):
    assert volumes(choose(stage), name) == [2.0] * 4


def test_per_micro_batch():
    assert volumes(choose(2, reduction=Reduction.MICRO)) == [8 + 1] * 4
    assert volumes(choose(3, Parameters.FREE)) == [3 * 8] * 4
    assert volumes(choose(3, Parameters.FREE), "zb_h1") == [4 * 8] * 4
    assert volumes(choose(3, Parameters.FREE, Reduction.BOUNDARY)) == [2 * 8 + 1] * 4


def test_per_chunk():
    """Breadth first, two chunks: three gathers for two chunks, and one reduction of each."""
    assert volumes(choose(3, Parameters.CHUNK), "looped_bfs") == [(3 + 2) / 2] * 4


def test_inference_moves_its_gathers():
    got = report("inference", 2, 4, parameters=Parameters.HOLD)
    assert choose(3).volume(got.ranks[0], 1) == 1
    assert choose(2).volume(report("inference", 2, 4).ranks[0], 1) == 0


@pytest.mark.parametrize(
    ("stage", "parameters", "reduction", "message"),
    [
        (2, Parameters.HOLD, None, r"freed at ZeRO stage 3 only: got hold at ZeRO stage 2"),
        (1, None, Reduction.MICRO, r"saves nothing: got micro at ZeRO stage 1, expected boundary"),
        (4, None, None, r"no such ZeRO stage: got 4"),
    ],
)
def test_what_a_stage_cannot_do(stage: int, parameters: Parameters | None, reduction: Reduction | None, message: str):
    with pytest.raises(ConfigError, match=message):
        choose(stage, parameters, reduction)
