"""Transports give the same numbers, and sums have one order."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
import torch.distributed as dist

from tests.support.pool import Pools
from zero_trial.comm import backends, sum_in_order
from zero_trial.comm.backends import DirectTransport, NativeTransport, Steps


def perform(steps: Steps) -> None:
    for works in steps:
        for work in works:
            work.wait()


def both_ways() -> None:
    """The native collectives of gloo and direct exchange give the same numbers (integers: any order
    of summation is exact)."""
    rank, size = dist.get_rank(), dist.get_world_size()
    native = NativeTransport(dist.group.WORLD)
    direct = DirectTransport(dist.group.WORLD, tuple(range(size)), rank, sum_in_order)
    full = torch.arange(4.0 * size) + 100 * rank
    expected = (size * torch.arange(4.0 * size) + 100 * sum(range(size))).view(size, 4)[rank]
    for transport in (native, direct):
        out = torch.empty(4)
        perform(transport.reduce_scatter(full.clone(), out, 7))
        assert torch.equal(out, expected), transport
        whole = torch.empty(4 * size)
        perform(transport.all_gather(whole, torch.full((4,), float(rank)), 8))
        assert torch.equal(whole, torch.arange(float(size)).repeat_interleave(4)), transport
        counts = [[(i + 2 * j) % 3 if i != j else 0 for j in range(size)] for i in range(size)]
        column = [row[rank] for row in counts]
        received = torch.empty(sum(column))
        perform(transport.all_to_all(torch.full((sum(counts[rank]),), float(rank)), received, counts, 9))
        assert torch.equal(received, torch.arange(float(size)).repeat_interleave(torch.tensor(column))), transport


def received_parts() -> None:
    """A direct reduce-scatter hands over what each peer contributed, so that a bad value can be
    traced to its rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    direct = DirectTransport(dist.group.WORLD, tuple(range(size)), rank, sum_in_order)
    full = torch.full((2 * size,), float(rank))
    received: dict[int, list[float]] = {}

    def look(total: torch.Tensor, contributions: Mapping[int, torch.Tensor]) -> None:
        received.update({index: part.tolist() for index, part in contributions.items()})

    perform(direct.reduce_scatter(full, full[2 * rank : 2 * rank + 2], 9, look))
    assert received == {peer: [peer, peer] for peer in range(size) if peer != rank}


def test_native_and_direct_exchange_agree(ranks: Pools) -> None:
    ranks(3).run(both_ways)


def test_contributions_differ(ranks: Pools) -> None:
    ranks(3).run(received_parts)


SIXTEEN = [torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", SIXTEEN)
def test_sixteen_bit_parts_are_rounded_once(dtype: torch.dtype) -> None:
    """Each small part alone is lost against the large one; all of them together are not."""
    large, small = torch.ones(3, dtype=dtype), torch.full((3,), torch.finfo(dtype).eps / 2, dtype=dtype)
    out = torch.empty(3, dtype=dtype)
    sum_in_order([large, small, small, small], out)
    assert out.tolist() == (large.float() + 3 * small.float()).to(dtype).tolist() and out[0] > 1
    assert (large + small)[0] == 1


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("dtype", [torch.float32, *SIXTEEN])
def test_the_result_may_be_written_over_any_part(count: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(count)
    parts = [torch.randn(37, generator=generator).to(dtype) for _ in range(count)]
    expected = torch.empty(37, dtype=dtype)
    sum_in_order(parts, expected)
    for target in range(count):
        copies = [part.clone() for part in parts]
        sum_in_order(copies, copies[target])
        assert torch.equal(copies[target], expected)
        assert all(torch.equal(copies[i], parts[i]) for i in range(count) if i != target)


@pytest.mark.parametrize("dtype", [torch.float32, *SIXTEEN, torch.int64])
def test_chunks_do_not_show(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(1)
    parts = [(1000 * torch.randn(257, generator=generator)).to(dtype) for _ in range(4)]
    whole, cut = torch.empty(257, dtype=dtype), parts[2].clone()
    sum_in_order(parts, whole)
    monkeypatch.setattr(backends, "CHUNK", 16)
    sum_in_order([*parts[:2], cut, parts[3]], cut)
    assert torch.equal(cut, whole) and whole.isfinite().all() and whole.count_nonzero() > 200
