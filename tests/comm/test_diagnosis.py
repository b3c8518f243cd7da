"""The error for a slow or failed collective names the rank that is missing."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest

from zero_trial.comm.diagnosis import RankPosition, crossed, disagreement, way_out
from zero_trial.comm.shared_memory import CROSSED, ELSEWHERE, PeerProcesses
from zero_trial.comm.waits import FIRST_MESSAGE_TAG, KEPT_CALLS, CallOrder, Heartbeat, explain


class FakeHeartbeat(Heartbeat):
    """Rank 0 of three, and what the others are said to have published."""

    def __init__(self, others: dict[int, RankPosition | None]) -> None:
        super().__init__(None, 0, 1)
        self._others = others
        self.step = 17
        self.sequence = 8
        self.enter("all_gather(block.3) over shard")

    def positions(self, ranks: Iterable[int] | None = None) -> dict[int, RankPosition | None]:
        known = {0: self._now} | self._others
        return known if ranks is None else {rank: known[rank] for rank in ranks}


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zero_trial.comm.waits.time.sleep", lambda seconds: None)


HERE = RankPosition(17, 9, "all_gather(block.3) over shard", 0.0, True)
LATE = RankPosition(16, 4, "reduce_scatter(bucket0) over shard", 0.0, False)
TIMED_OUT = RuntimeError("Timed out waiting 1000ms for recv operation to complete")
NAME = "all_gather(block.3) over shard"


def test_the_rank_that_never_came_is_named_with_its_place() -> None:
    error = explain(FakeHeartbeat({1: LATE, 2: HERE}), (0, 1, 2), NAME, TIMED_OUT, 2.0)
    text = str(error)
    assert text.startswith(f"rank 0, step 17, {NAME}: waited 2 s for rank 1, which never reached this collective.")
    assert "rank 1 at step 16, after reduce_scatter(bucket0) over shard (collective 4" in text and "rank 2" not in text
    assert error.exit_code == 5


@pytest.mark.parametrize("text", ["Connection closed by peer [127.0.0.1]:1", "Connection reset by peer", "Broken pipe"])
def test_a_lost_connection_means_that_a_rank_ended(text: str) -> None:
    error = str(explain(FakeHeartbeat({1: LATE, 2: HERE}), (0, 1, 2), NAME, RuntimeError(text), 1.0))
    assert "another rank ended while this one waited for it" in error and "rank 1 at step 16" in error
    assert "rank 2 at step 17" in error and text in error


GAVE_UP = RankPosition(17, 9, "all_gather(block.3) over shard", 0.0, True, True)
EARLIER = RankPosition(16, 4, "reduce_scatter(bucket0) over shard", 0.0, True, True)
CLOSED = RuntimeError("Connection closed by peer")


def test_a_rank_that_comes_when_all_others_gave_up_was_late_itself() -> None:
    text = str(explain(FakeHeartbeat({1: GAVE_UP, 2: GAVE_UP}), (0, 1, 2), NAME, CLOSED, 1.0))
    assert f"rank 0, step 17, {NAME}: rank 1, rank 2 timed out before this rank arrived." in text
    assert "rank 2 at step 17, gave up in all_gather(block.3)" in text


def test_of_a_lost_connection_only_those_are_suspected_that_did_not_give_up() -> None:
    """Rank 2 died; rank 1 noticed and gave up as this rank does."""
    text = str(explain(FakeHeartbeat({1: GAVE_UP, 2: LATE}), (0, 1, 2), NAME, CLOSED, 1.0))
    assert "another rank ended" in text and "own error: rank 2 at" in text and "rank 1" not in text


def test_a_failure_that_was_caught_long_ago_excuses_no_rank() -> None:
    assert "another rank ended" in str(explain(FakeHeartbeat({1: EARLIER}), (0, 1), NAME, CLOSED, 1.0))
    assert "waited 1 s for rank 1" in str(explain(FakeHeartbeat({1: EARLIER}), (0, 1), NAME, TIMED_OUT, 1.0))


def test_when_all_are_there_they_disagree() -> None:
    other = RankPosition(17, 9, "reduce_scatter(block.3) over shard", 0.0, True)
    board = FakeHeartbeat({1: other})
    text = str(explain(board, (0, 1), NAME, TIMED_OUT, 1.0))
    assert board._now.gave_up  # the others learn that this rank no longer waits
    assert "waited 1 s although every rank has arrived here" in text
    assert "rank 1 at step 17, in reduce_scatter(block.3)" in text


@pytest.mark.parametrize("sequence", [9, 11])
def test_a_rank_that_is_here_by_now_or_further_on_was_late(sequence: int) -> None:
    """The peers' boards are read after the wait: a slow rank has come since. Only another name
    under the same number is a disagreement."""
    came = RankPosition(17, sequence, NAME if sequence == 9 else "all_reduce(reduction order) over shard", 0.0, True)
    text = str(explain(FakeHeartbeat({1: came}), (0, 1), NAME, TIMED_OUT, 1.0))
    assert "waited 1 s for a rank that arrived too late" in text
    assert f"rank 1 at step 17, in {came.operation} (collective {sequence}" in text
    assert "raise comm_timeout_seconds" in text and "disagree" not in text


def test_a_rank_that_came_with_another_call_is_named_at_once() -> None:
    """No one waited for the limit, and where the others' boards stand does not matter."""
    elsewhere = RuntimeError(f"another rank of this axis (index 1) {ELSEWHERE}")
    for position in (LATE, HERE, GAVE_UP):
        text = str(explain(FakeHeartbeat({1: position}), (0, 1), NAME, elsewhere, 300.0))
        assert (
            f"rank 0, step 17, {NAME}: collective mismatch: another rank calls a different collective at this point. The ranks disagree"
            in text
        )
        assert f"rank 1 at step {position.step}" in text and "300" not in text


def test_any_other_failure_is_passed_on_as_it_is() -> None:
    error = str(explain(FakeHeartbeat({1: HERE}), (0, 1), NAME, RuntimeError("Invalid scalar type\nbacktrace"), 1.0))
    assert "a collective failed: got Invalid scalar type." in error and "backtrace" not in error
    assert "RuntimeError" in str(explain(FakeHeartbeat({1: HERE}), (0, 1), NAME, RuntimeError(), 1.0))


def called(*names: str, number: int = 0) -> CallOrder:
    order = CallOrder(number)
    for name in names:
        order.note(name)
    return order


def test_the_tag_of_a_call_depends_on_all_calls_before_it() -> None:
    first, other, engine = CallOrder(), CallOrder(), CallOrder(1)
    assert first.note("a") == other.note("a") != engine.note("a") and first.note("b") != other.note("c")
    for name in ("d", "e", "f"):  # they agree again, and are not taken for one another
        assert first.note(name) != other.note(name)
    tags = {first.note("a") for _ in range(2000)}
    assert len(tags) == 2000 and all(0 <= tag < FIRST_MESSAGE_TAG for tag in tags)


GATHER = "all_gather(parameters of {}) over shard"


def test_the_first_calls_that_differ_are_named() -> None:
    orders = {0: called("x", GATHER.format("h.0"), "y"), 3: called("x", GATHER.format("h.1"), "y")}
    error = str(disagreement({rank: (o.count, o.recent()) for rank, o in orders.items()}, "here"))
    assert "at call 2: rank 0 all_gather(parameters of h.0) over shard, rank 3 all_gather(parameters of h.1)" in error
    assert "rank 0 gathers h.0, rank 3 gathers h.1" in error and "leaf_module" in error


def test_a_rank_that_has_called_less_and_one_that_has_forgotten() -> None:
    orders = {0: called("x"), 1: called("x", "y")}
    error = str(disagreement({rank: (o.count, o.recent()) for rank, o in orders.items()}, "here"))
    assert "at call 2: rank 0 nothing more, rank 1 y" in error
    long = {rank: called(*(["x"] * rank + ["y"] * (KEPT_CALLS + 5))) for rank in (0, 1)}
    assert long[1].count == KEPT_CALLS + 6 and len(long[1].recent()) == KEPT_CALLS
    assert "y" in str(disagreement({rank: (o.count, o.recent()) for rank, o in long.items()}, "here"))


@pytest.mark.parametrize(
    ("mine", "theirs", "found"),
    [
        ({}, {}, [1]),
        ({"inside": False}, {}, []),
        ({}, {"inside": False}, []),
        ({"call": None}, {}, []),
        ({}, {"call": None}, []),
        ({}, {"calls": None}, []),  # it does not wait long yet
        ({}, {"calls": {"world 1": 5, "shard 1": 8}}, []),  # it has called this, before what it waits for
        ({"calls": {"world 1": 5, "shard 1": 8}}, {}, []),  # and this rank that
        ({"calls": {"world 1": 5}}, {}, []),  # this rank is not on their axis
        ({"call": ("shard 1", 8, 1), "calls": {"world 1": 4, "shard 1": 8}}, {}, []),  # the same one
        ({}, {"gave_up": True}, [1]),
        ({"call": ("shard 1", 8, 1)}, {"operation": "the outcome of step 3"}, []),  # which waits for the same
        ({"call": ("shard 1", 8, 2)}, {}, [1]),  # another of the same number
    ],
)
def test_ranks_that_wait_for_each_other_are_told_from_slow_ones(mine: Any, theirs: Any, found: list[int]) -> None:
    own = {"call": ("world 1", 5, 1), "calls": {"world 1": 5, "shard 1": 7}, "inside": True}
    other = {"call": ("shard 1", 8, 1), "calls": {"world 1": 4, "shard 1": 8}, "inside": True}
    positions = {0: RankPosition(**(own | mine)), 1: RankPosition(**(other | theirs)), 2: None}
    assert crossed(positions, 0) == found


def test_a_wait_that_can_never_end_ends() -> None:
    numbers = memoryview(bytearray(8)).cast("q")
    with pytest.raises(RuntimeError, match=CROSSED):
        PeerProcesses({1: os.getpid()}, lambda: True).wait_for(1, numbers, 0, 1, 3600.0)


def test_the_way_out_depends_on_what_ranks_gather() -> None:
    assert way_out({0: "all_reduce(gradient norm) over shard", 1: "barrier(x) over data"}) == ""
    same = way_out({0: GATHER.format("h.0"), 1: GATHER.format("h.0")})
    assert "leaf_module" not in same
    alone = way_out({0: GATHER.format("h.0"), 1: "reduce_scatter(h.3) over shard"})
    assert alone.startswith("ZeRO stage 3: rank 0 gathers h.0. ")
    assert "get_state_dict" in alone and "get_state_dict" not in same
    for text in (alone, way_out({0: GATHER.format("h.0"), 1: GATHER.format("h.1")})):
        assert "a block that only some ranks run" in text and "leaf_module" in text
