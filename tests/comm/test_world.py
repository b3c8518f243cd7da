"""Tests for zero_trial/comm/rendezvous.py."""

from __future__ import annotations

import threading

import pytest
import torch.distributed as dist

from tests.support.pool import Pools, free_port
from zero_trial.comm import RankEnv, destroy_distributed, init_distributed, is_distributed, world_size
from zero_trial.comm.rendezvous import world_heartbeat
from zero_trial.errors import MeshError


def test_without_a_launcher_a_process_is_a_world_of_one() -> None:
    assert not is_distributed()
    assert world_size() == 1
    try:
        assert init_distributed() == RankEnv()
        assert is_distributed()
        assert world_size() == 1
    finally:
        destroy_distributed()
    assert not is_distributed()
    destroy_distributed()


def test_a_board_of_one_needs_no_world() -> None:
    assert world_heartbeat().world_size == 1


def twice() -> tuple[RankEnv, bool, int]:
    return init_distributed(), world_heartbeat() is world_heartbeat(), world_size()


def test_joining_again_only_says_where_this_rank_stands(ranks: Pools) -> None:
    assert ranks(2).run(twice) == [(RankEnv(0, 2, 0, 2, True), True, 2), (RankEnv(1, 2, 1, 2, True), True, 2)]


def test_leaving_stops_the_boards_thread() -> None:
    init_distributed(rank=0, world_size=1, init_method=f"tcp://127.0.0.1:{free_port()}", timeout=20)
    try:
        assert world_heartbeat() is world_heartbeat()
        assert world_heartbeat().rank == 0
    finally:
        destroy_distributed()
    assert not [thread for thread in threading.enumerate() if thread.name == "zero_trial-heartbeat"]


def test_ranks_that_do_not_find_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MeshError, match=r"rank 1 of 2, init_distributed: the ranks did not find each other"):
        init_distributed(rank=1, world_size=2, init_method=f"tcp://127.0.0.1:{free_port()}", timeout=1)
    assert not dist.is_initialized()


def test_a_world_that_must_run_already(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MeshError, match="dist_init_required=False"):
        init_distributed(dist_init_required=False)
