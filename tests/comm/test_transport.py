"""Tests for zero_trial/comm/backends.py."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tests.support.pool import Pools
from zero_trial.comm.backends import DirectTransport, NativeTransport, peers_from, sum_in_order


def test_every_rank_starts_with_its_right_hand_neighbour() -> None:
    assert [peers_from(index, 4) for index in range(4)] == [
        [1, 2, 3],
        [2, 3, 0],
        [3, 0, 1],
        [0, 1, 2],
    ]


def both_ways() -> None:
    """The native collectives of gloo and direct exchange give the same numbers (integers: any order of summation is exact)."""
    rank, size = dist.get_rank(), dist.get_world_size()
    native = NativeTransport(dist.group.WORLD)
    direct = DirectTransport(dist.group.WORLD, tuple(range(size)), rank, sum_in_order)
    full = torch.arange(4.0 * size) + 100 * rank
    expected = (size * torch.arange(4.0 * size) + 100 * sum(range(size))).view(size, 4)[rank]
    for transport in (native, direct):
        out = torch.empty(4)
        works, finish = transport.reduce_scatter(full.clone(), out, 7)
        for work in works:
            work.wait()
        finish()
        assert torch.equal(out, expected), transport
        whole = torch.empty(4 * size)
        works, finish = transport.all_gather(whole, torch.full((4,), float(rank)), 8)
        for work in works:
            work.wait()
        finish()
        assert torch.equal(whole, torch.arange(float(size)).repeat_interleave(4)), transport


def received_parts() -> None:
    """A direct reduce-scatter hands over what each peer contributed, so that a bad value can be traced to its rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    direct = DirectTransport(dist.group.WORLD, tuple(range(size)), rank, sum_in_order)
    full = torch.full((2 * size,), float(rank))
    works, finish = direct.reduce_scatter(full, full[2 * rank : 2 * rank + 2], 9)
    for work in works:
        work.wait()
    received = finish()
    assert {index: part.tolist() for index, part in received.items()} == {p: [p, p] for p in range(size) if p != rank}


def test_native_and_direct_exchange_agree(ranks: Pools) -> None:
    ranks(3).run(both_ways)


def test_contributions_can_be_told_apart(ranks: Pools) -> None:
    ranks(3).run(received_parts)
