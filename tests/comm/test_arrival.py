"""Ranks that wait in vain say for whom, in time."""

from __future__ import annotations

import datetime
import threading
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.pool import free_port
from zero_trial.comm import RankEnv
from zero_trial.comm.rendezvous import arrive, missing_ranks, open_store, rendezvous_error
from zero_trial.errors import MeshError

SOON = datetime.timedelta(seconds=0.6)
LATER = datetime.timedelta(seconds=4)  # by then even a busy machine has started the ranks that do come


def come(ranks: tuple[int, ...], size: int, limit: datetime.timedelta = SOON) -> dict[int, Any]:
    """These ranks of ``size`` arrive, as threads; what each got."""
    place, found = f"tcp://127.0.0.1:{free_port()}", {}

    def work(rank: int) -> None:
        try:
            found[rank] = arrive(place, RankEnv(rank, size, rank, size, True), limit)
        except MeshError as error:
            found[rank] = str(error)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    return found


def test_all_arrive_at_one_store() -> None:
    found = come((0, 1, 2), 3, datetime.timedelta(seconds=60))
    found[1].set("word", "of rank 1")
    assert found[2].get("word") == b"of rank 1"
    assert missing_ranks(found[0], 5) == [3, 4]


def test_those_who_do_not_come_are_named_by_all() -> None:
    found = come((0, 2), 4, LATER)
    for rank in (0, 2):
        assert found[rank].startswith(f"rank {rank} of 4, init_distributed: the ranks did not find each other: ")
        assert "rank 1, rank 3 never came" in found[rank]


def test_rank_0_which_keeps_the_store_is_named_by_the_others() -> None:
    assert "rank 0 never came" in come((1,), 2)[1]


def test_a_store_that_is_gone_says_nothing_of_anybody() -> None:
    class Gone:
        def check(self, keys: list[str]) -> bool:
            raise RuntimeError("Broken pipe")

    assert missing_ranks(Gone(), 2) == []
    text = str(rendezvous_error(RankEnv(1, 2), RuntimeError("Broken pipe\nmore"), []))
    assert "did not find each other: Broken pipe." in text and "every rank was started" in text


def test_other_meeting_places_are_torchs_own(tmp_path: Any) -> None:
    assert isinstance(open_store(f"file://{tmp_path}/meet", RankEnv(0, 1), SOON), dist.FileStore)
    with pytest.raises(MeshError, match="did not find each other"):
        arrive("nowhere://x", RankEnv(0, 2), SOON)
