"""Which sharding actions a ZeRO stage puts into a schedule, and what they move."""

from __future__ import annotations

import pytest

from tests.pipeline.lowered import report
from zero_trial.errors import ConfigError
from zero_trial.pipeline.lowering import (
    ModelBytes,
    PricedPolicy,
    Sharding,
    ZeroPolicy,
    candidates,
    choose,
    choose_fitting,
    needed,
)
from zero_trial.pipeline.schedule import ParameterLifetime, ReductionTiming
from zero_trial.sharding.plan import plan_for_stage

ZERO = [Sharding(*plan_for_stage(stage).cuts) for stage in range(4)]


def volumes(policy: ZeroPolicy, name: str = "1f1b", micro_batches: int = 8) -> list[float]:
    got = report(name, 4, micro_batches, parameters=policy.parameters, reduction=policy.reduction)
    chunks = 2 if name in ("looped_bfs", "zb_v") else 1
    return [policy.volume(rank, chunks) for rank in got.ranks]


def test_what_moves_least_is_the_default():
    assert choose(ZERO[0]) == ZeroPolicy(ZERO[0], None, ReductionTiming.BOUNDARY)
    assert choose(ZERO[1]) == ZeroPolicy(ZERO[1], None, ReductionTiming.BOUNDARY)
    assert choose(ZERO[2]) == ZeroPolicy(ZERO[2], None, ReductionTiming.BOUNDARY)
    assert choose(ZERO[3]) == ZeroPolicy(ZERO[3], ParameterLifetime.HOLD, ReductionTiming.BOUNDARY)
    assert choose(ZERO[3], ParameterLifetime.FREE) == ZeroPolicy(ZERO[3], ParameterLifetime.FREE, ReductionTiming.MICRO)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb_h1", "zb_v", "looped_bfs"])
def test_at_the_boundary_every_stage_moves_two(stage: int, name: str):
    assert volumes(choose(ZERO[stage]), name) == [2.0] * 4


def test_per_micro_batch():
    assert volumes(choose(ZERO[2], reduction=ReductionTiming.MICRO)) == [8 + 1] * 4
    assert volumes(choose(ZERO[3], ParameterLifetime.FREE)) == [3 * 8] * 4
    assert volumes(choose(ZERO[3], ParameterLifetime.FREE), "zb_h1") == [4 * 8] * 4
    assert volumes(choose(ZERO[3], ParameterLifetime.FREE, ReductionTiming.BOUNDARY)) == [2 * 8 + 1] * 4


def test_per_chunk():
    """Breadth first, two chunks: three gathers for two chunks, and one reduction of each."""
    assert volumes(choose(ZERO[3], ParameterLifetime.CHUNK), "looped_bfs") == [(3 + 2) / 2] * 4


def test_inference_moves_its_gathers():
    got = report("inference", 2, 4, parameters=ParameterLifetime.HOLD)
    assert choose(ZERO[3]).volume(got.ranks[0], 1) == 1
    assert choose(ZERO[2]).volume(report("inference", 2, 4).ranks[0], 1) == 0


def test_held_and_reduced_per_micro_batch():
    assert volumes(choose(ZERO[3], ParameterLifetime.HOLD, ReductionTiming.MICRO)) == [1 + 8] * 4


@pytest.mark.parametrize(
    ("stage", "parameters", "reduction", "message"),
    [
        (2, ParameterLifetime.HOLD, None, r"freed at ZeRO stage 3 only: got hold"),
        (1, None, ReductionTiming.MICRO, r"saves nothing: got micro, expected boundary"),
    ],
)
def test_what_a_stage_cannot_do(
    stage: int, parameters: ParameterLifetime | None, reduction: ReductionTiming | None, message: str
):
    with pytest.raises(ConfigError, match=message):
        choose(ZERO[stage], parameters, reduction)


def test_each_stage_cuts_one_thing_more():
    assert [sum(plan_for_stage(stage).cuts) for stage in range(4)] == [0, 1, 2, 3]
    assert ZERO[1] == Sharding(optimizer=True) and ZERO[2] == Sharding(optimizer=True, gradients=True)
    with pytest.raises(ConfigError, match="no such ZeRO stage: got 4"):
        plan_for_stage(4)


def pairs(policies: list[ZeroPolicy]) -> list[tuple[str | None, str]]:
    return [(policy.parameters and policy.parameters.value, policy.reduction.value) for policy in policies]


def test_what_is_open_has_candidates_and_each_moves_no_less_than_the_one_before():
    assert pairs(candidates(ZERO[0])) == pairs(candidates(ZERO[1])) == [(None, "boundary")]
    assert pairs(candidates(ZERO[2])) == [(None, "boundary"), (None, "micro")]
    free = [("hold", "boundary"), ("hold", "micro"), ("free", "micro")]
    assert pairs(candidates(ZERO[3])) == free
    assert pairs(candidates(ZERO[3], chunks=2)) == [free[0], ("chunk", "boundary"), *free[1:]]
    for policies, name in ((candidates(ZERO[2]), "1f1b"), (candidates(ZERO[3], chunks=2), "looped_bfs")):
        moved = [max(volumes(policy, name)) for policy in policies]
        assert moved == sorted(moved)


def test_what_is_asked_is_no_candidate_but_the_answer():
    assert pairs(candidates(ZERO[2], None, ReductionTiming.MICRO)) == [(None, "micro")]
    assert pairs(candidates(ZERO[3], ParameterLifetime.FREE)) == [("free", "micro")]
    assert pairs(candidates(ZERO[3], ParameterLifetime.HOLD)) == [("hold", "boundary"), ("hold", "micro")]
    assert pairs(candidates(ZERO[3], ParameterLifetime.FREE, ReductionTiming.BOUNDARY)) == [("free", "boundary")]


WEIGHTS = ModelBytes(parameters=400, gradients=400, optimizer=800, ranks=4)


@pytest.mark.parametrize(
    ("policy", "name", "expected"),
    [
        (choose(ZERO[0]), "1f1b", 400 + 400 + 800),
        (choose(ZERO[1]), "1f1b", 400 + 400 + 200),
        (choose(ZERO[2]), "1f1b", 400 + (100 + 400) + 200),
        (choose(ZERO[2], reduction=ReductionTiming.MICRO), "1f1b", 400 + (100 + 400) + 200),
        (choose(ZERO[3]), "1f1b", (100 + 400) + (100 + 400) + 200),
        (choose(ZERO[3], ParameterLifetime.CHUNK), "looped_bfs", (100 + 200) + (100 + 200) + 200),
        (choose(ZERO[3], ParameterLifetime.FREE), "looped_bfs", (100 + 200) + (100 + 200) + 200),
        (choose(ZERO[3], ParameterLifetime.HOLD, ReductionTiming.MICRO), "looped_bfs", (100 + 400) + (100 + 200) + 200),
    ],
)
def test_what_a_policy_needs(policy: ZeroPolicy, name: str, expected: int):
    """Shards, and what the schedule has whole at once: with one chunk per rank a rank's whole part, whatever the policy."""
    got = report(name, 2, 4, parameters=policy.parameters, reduction=policy.reduction)
    assert needed(policy, WEIGHTS, got.ranks[0], 2 if name == "looped_bfs" else 1) == expected


def test_the_first_that_fits_is_chosen_and_else_the_one_that_needs_least():
    policies = candidates(ZERO[3], chunks=2)
    prices = dict(zip(policies, [(100, 2.0), (80, 2.5), (70, 5.0), (60, 12.0)], strict=True))
    chosen = [choose_fitting(policies, prices.__getitem__, limit) for limit in (None, 100, 99, 75, 60)]
    assert [choice.policy for choice in chosen] == [policies[n] for n in (0, 0, 1, 2, 3)]
    assert choose_fitting(policies, prices.__getitem__, 59) == PricedPolicy(policies[3], 60, 12.0, fits=False)


def test_a_policy_in_words():
    assert choose(ZERO[3]).describe() == "parameters hold, gradients reduced at the boundary"
    assert (
        choose(ZERO[2], reduction=ReductionTiming.MICRO).describe()
        == "parameters stay, gradients reduced per micro-batch"
    )
