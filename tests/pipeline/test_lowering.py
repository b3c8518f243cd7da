"""Lowering: what it adds to a schedule and what sharding costs; and which sharding actions a ZeRO
stage puts in."""

from __future__ import annotations

from typing import Any

import pytest

from tests.pipeline.lowered import drawn, lowered, parse_row, report
from zero_trial.errors import ConfigError
from zero_trial.pipeline.lowering import Sharding, ZeroPolicy, choose, lower
from zero_trial.pipeline.schedule import (
    COMPUTE,
    RECIPES,
    ChunkPlacement,
    ParameterLifetime,
    ReductionTiming,
    Schedule,
    build,
    tie_holders,
)
from zero_trial.pipeline.simulator import rows_as_text
from zero_trial.sharding.plan import plan_for_stage


def lowered_rows(*texts: str, place: ChunkPlacement | None = None, **lowering: Any) -> list[str]:
    """Return the text of lowered rows; micro-batches are those of the first row's chunk."""
    rows = tuple(map(parse_row, texts))
    schedule = Schedule("mine", place or ChunkPlacement.loop(len(rows)), 2, rows)
    return [" ".join(map(str, row)) for row in lower(schedule, **lowering).rows]


def test_all_of_it():
    schedule = lowered("1f1b", 2, 2, parameters=ParameterLifetime.HOLD, ties=[(0, 1)])
    assert rows_as_text(schedule) == (
        "rank 0  0UNSHARD 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0RESHARD 0REDUCE 0TIED_REDUCE0 STEP\n"
        "rank 1  1UNSHARD 1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1RESHARD 1REDUCE 1TIED_REDUCE0 STEP"
    )


def test_messages_of_a_v():
    """No message at the turn; the input gradient is sent before the weight gradient is computed.
    Both ends of a V are on rank 0: embedding and head need no message either."""
    assert rows_as_text(lowered("zb_v", 2, 1, ties=[(0, 3)])) == drawn("""
        rank 0  0F0 0SEND_F0 3RECV_F0 3F0 3I0 3SEND_B0 3W0 3REDUCE 0RECV_B0 0I0 0W0 0REDUCE STEP
        rank 1  1RECV_F0 1F0 2F0 2SEND_F0 2RECV_B0 2I0 2W0 2REDUCE 1I0 1SEND_B0 1W0 1REDUCE STEP
    """)


def test_receives_keep_the_order_of_the_sends():
    """Rank 1 wants micro-batch 1 first, but rank 0 has sent 0 before it: both are received, and 0
    is kept."""
    assert lowered_rows("0F0 0F1", "1F1 1F0")[1] == "1RECV_F0 1RECV_F1 1F1 1F0 STEP"


@pytest.mark.parametrize("name", RECIPES)
def test_computations_stay_where_they_are(name: str):
    before = build(name, 3, 4)
    after = lower(before, parameters=ParameterLifetime.FREE, reduction=ReductionTiming.MICRO)
    assert before.rows == tuple(tuple(action for action in row if action.kind in COMPUTE) for row in after.rows)


@pytest.mark.parametrize("name", RECIPES)
def test_what_holding_freeing_and_reducing_cost(name: str):
    """Gathers per chunk and step: 1, the runs of a chunk, or one for each computation. Reductions:
    1, or one for each micro-batch."""
    chunks, micro_batches = RECIPES[name].chunks, 8
    hold, chunk, free = (report(name, 4, micro_batches, parameters=how) for how in ParameterLifetime)
    micro = report(name, 4, micro_batches, reduction=ReductionTiming.MICRO)
    computations = 3 if name.startswith("zb") else 2
    for rank in range(4):
        assert hold.ranks[rank].gathers == hold.ranks[rank].reductions == chunks
        assert free.ranks[rank].gathers == computations * micro_batches * chunks
        assert hold.ranks[rank].gathers <= chunk.ranks[rank].gathers <= free.ranks[rank].gathers
        assert (hold.ranks[rank].peak_parameters, free.ranks[rank].peak_parameters) == (chunks, 1)
        assert (micro.ranks[rank].reductions, micro.ranks[rank].peak_gradients) == (chunks * micro_batches, 1)
        if chunks == 1:
            assert chunk.ranks[rank].gathers == 1


def test_where_reductions_stand():
    row = "0F0 0F1 0I0 0I1 0W0 0W1"
    assert lowered_rows(row) == [f"{row} 0REDUCE STEP"]
    assert lowered_rows(row, reduction=ReductionTiming.MICRO) == ["0F0 0F1 0I0 0I1 0W0 0REDUCE0 0W1 0REDUCE1 STEP"]


def test_ties_come_last_and_in_one_order():
    assert [row.split("REDUCE ", 1)[1] for row in lowered_rows("0B0", "1B0", "2B0", ties=[(2, 0), (0, 1, 2)])] == [
        "0TIED_REDUCE0 0TIED_REDUCE1 STEP",
        "1TIED_REDUCE1 STEP",
        "2TIED_REDUCE0 2TIED_REDUCE1 STEP",
    ]
    assert tie_holders((0, 1, 3), ChunkPlacement.v(2)) == {0: 0, 1: 1}


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


@pytest.mark.parametrize(
    ("policy", "name", "volume"),
    [
        (choose(ZERO[2], reduction=ReductionTiming.MICRO), "1f1b", 8 + 1),
        (choose(ZERO[3], ParameterLifetime.HOLD, ReductionTiming.MICRO), "1f1b", 1 + 8),
        (choose(ZERO[3], ParameterLifetime.FREE), "1f1b", 3 * 8),
        (choose(ZERO[3], ParameterLifetime.FREE), "zb_h1", 4 * 8),
        (choose(ZERO[3], ParameterLifetime.FREE, ReductionTiming.BOUNDARY), "1f1b", 2 * 8 + 1),
        # three gathers for two chunks, and one reduction of each
        (choose(ZERO[3], ParameterLifetime.CHUNK), "looped_bfs", (3 + 2) / 2),
    ],
)
def test_what_other_policies_move(policy: ZeroPolicy, name: str, volume: float):
    assert volumes(policy, name) == [volume] * 4


@pytest.mark.parametrize(
    ("stage", "parameters", "reduction", "message"),
    [
        (2, ParameterLifetime.HOLD, None, r"only freed at ZeRO stage 3: got hold"),
        (1, None, ReductionTiming.MICRO, r"saves nothing: got micro, expected boundary"),
    ],
)
def test_what_a_stage_cannot_do(
    stage: int, parameters: ParameterLifetime | None, reduction: ReductionTiming | None, message: str
):
    with pytest.raises(ConfigError, match=message):
        choose(ZERO[stage], parameters, reduction)
