"""The cause of a failed run among all that is left behind."""

from __future__ import annotations

import pytest

from zero_trial.launch.supervisor import Cause, first_cause, how_it_ended, is_secondary
from zero_trial.trial.runs.rank_records import ErrorRecord, RankExit, RankRecord

RANKS = [RankRecord(0, 0, 100), RankRecord(1, 1, 101), RankRecord(2, 2, 102)]
ECHO = "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:41122"


def error(
    rank: int, time: float, message: str = "loss is not a scalar", type_: str = "TrialError", code: int = 2
) -> ErrorRecord:
    return ErrorRecord(rank, type_, message, code, time)


def test_the_first_error_is_the_cause_not_its_echo():
    # rank 0 wrote first, but only heard of it
    errors = [error(0, 1.0, ECHO, "RuntimeError", 1), error(1, 2.0)]
    assert first_cause(errors, RANKS, [RankExit(0, 100, 1)], []) == Cause(1, "loss is not a scalar", 2)


def test_the_earliest_of_several():
    assert first_cause([error(0, 5.0), error(2, 4.0, "no data")], RANKS, [], []) == Cause(2, "no data", 2)


def test_a_killed_rank_left_no_words():
    cause = first_cause([error(0, 1.0, ECHO, "RuntimeError", 1)], RANKS, [RankExit(1, 101, -9)], [])
    assert cause is not None
    assert (cause.rank, cause.exit_code) == (1, 5)
    assert cause.message.startswith("killed by SIGKILL (signal 9)")


def test_a_mesh_error_is_an_echo_where_a_process_died():
    lost = error(0, 1.0, "rank 1 never came to all_gather", "MeshError", 5)
    killed = first_cause([lost], RANKS, [RankExit(1, 101, -11)], [])
    assert killed is not None and killed.rank == 1
    assert first_cause([lost], RANKS, [], []) == Cause(0, "rank 1 never came to all_gather", 5, echo=True)


def test_the_agent_s_own_sigterm_is_no_cause():
    """Rank 2 was killed; the agent saw rank 0's echo first and ended rank 1."""
    deaths = [RankExit(0, 100, 1), RankExit(1, 101, -15), RankExit(2, 102, -9)]
    cause = first_cause([error(0, 1.0, ECHO, "RuntimeError", 1)], RANKS, deaths, [])
    assert cause is not None and cause.rank == 2
    # no one else: someone outside has sent it
    left = first_cause([], RANKS, [RankExit(1, 101, -15)], [])
    assert left is not None and left.message.startswith("killed by SIGTERM")


def test_a_rank_that_the_agent_ended_after_another_s_error_is_no_cause():
    lost = error(0, 1.0, "rank 0, step 5: a collective failed", "MeshError", 5)
    failed, by_agent, outside = RankExit(0, 100, 5), RankExit(1, 101, -15, by_agent=True), RankExit(1, 101, -15)
    for exits in ([failed, by_agent], [by_agent, failed]):  # torch orders them by whole seconds
        for vanished in ([], [RANKS[1]]):
            assert first_cause([lost], RANKS, exits, vanished) == Cause(0, lost.message, 5, echo=True)
    for exits in ([failed, outside], [outside, failed]):
        assert first_cause([lost], RANKS, exits, []) == Cause(1, how_it_ended(-15), 5)


def test_the_pid_names_the_rank_also_on_a_second_host():
    ranks = [RankRecord(8, 0, 100), RankRecord(9, 1, 101)]
    cause = first_cause([], ranks, [RankExit(1, 101, -9)], [])
    assert cause is not None and cause.rank == 9


def test_a_rank_that_only_vanished():
    cause = first_cause([error(0, 1.0, ECHO)], RANKS, [], [RANKS[1]])
    assert cause is not None and (cause.rank, cause.exit_code) == (1, 5)


def test_a_rank_gone_before_the_stop_comes_before_those_that_were_stopped():
    """The agent's word about the first to die may be missing; rank 0 died of the agent's
    SIGTERM."""
    ended = RankExit(0, 100, -15, by_agent=True)
    gone = Cause(1, "the process exited without an error report (killed?)", 5, killed=True)
    assert first_cause([], RANKS, [ended], [RANKS[1]]) == gone
    both = [ended, RankExit(1, 101, -15)]  # someone sent SIGTERM to rank 1
    assert first_cause([], RANKS, both, [RANKS[1]]) == Cause(1, how_it_ended(-15), 5)
    assert first_cause([], RANKS, both, []) == Cause(1, how_it_ended(-15), 5)
    # nothing else is known
    assert first_cause([], RANKS, [ended], []) == Cause(0, how_it_ended(-15), 5)


def test_an_exit_code_without_words():
    assert first_cause([], RANKS, [RankExit(2, 102, 3)], []) == Cause(
        2, "the process ended with exit code 3 and left no error", 3
    )


def test_nothing_is_known():
    assert first_cause([], RANKS, [], []) is None


@pytest.mark.parametrize(
    ("message", "secondary"),
    [
        (ECHO, True),
        ("Connection reset by peer", True),
        ("[Rank 1] NCCL communicator was aborted", True),
        ("recvValue failed on SocketImpl", True),
        ("loss is not a scalar", False),
        ("the loader yields nothing", False),
    ],
)
def test_echoes(message: str, secondary: bool):
    assert is_secondary(error(0, 1.0, message, "RuntimeError")) is secondary


def test_signals_in_words():
    assert "OOM" in how_it_ended(-9)
    assert how_it_ended(-200).startswith("killed by signal 200")


def test_an_exit_code_that_cannot_be_passed_on_is_one():
    assert first_cause([error(0, 1.0, code=-3)], RANKS, [], []) == Cause(0, "loss is not a scalar", 1)
