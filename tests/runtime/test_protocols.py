"""JSON-able values between ranks, over an injected exchange."""

from __future__ import annotations

from zero_trial.runtime.in_memory import run_ranks
from zero_trial.runtime.protocols import Distributed, JsonDistributed


def test_alone_every_collective_answers_at_once() -> None:
    ranks = JsonDistributed()
    assert ranks.allgather({"a": (1, 2)}) == [{"a": [1, 2]}]
    assert ranks.gather(3) == [3]
    assert ranks.broadcast("x") == "x"
    ranks.barrier()


def test_three_ranks_in_order() -> None:
    def work(ranks: Distributed) -> list[object]:
        return [ranks.allgather(ranks.rank), ranks.gather(ranks.rank * 10), ranks.broadcast(f"from {ranks.rank}")]

    assert run_ranks(3, work) == [
        [[0, 1, 2], [0, 10, 20], "from 0"],
        [[0, 1, 2], None, "from 0"],
        [[0, 1, 2], None, "from 0"],
    ]


def test_it_answers_in_determineds_words_too() -> None:
    ranks = JsonDistributed(3, 4, 1)
    assert (ranks.get_rank(), ranks.get_size(), ranks.get_local_rank()) == (3, 4, 1)
