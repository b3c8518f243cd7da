"""Tests for zero_trial/sharding/init.py."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.sharding.parts import mesh_for, parameters
from tests.support.pool import Pools
from zero_trial.sharding import full_params
from zero_trial.sharding.init import PreSharded, presharded, read_first_values


def cut_and_gathered(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[int, bool]:
    """(elements that this rank keeps, all is as it should be). Ranks start with different values; rank 0's count."""
    mesh = mesh_for(3)
    (param,) = parameters([shape], dtype, seed=mesh.rank)
    first = parameters([shape], dtype, seed=0)[0].detach()
    holder = PreSharded(param, mesh.shard)
    good = (
        tuple(param.shape) == shape and bool(param.isnan().all()) and param.untyped_storage().nbytes() == dtype.itemsize
    )
    good &= torch.equal(holder.gather(), first) and not holder.live
    holder.lift()
    good &= torch.equal(param, first) and holder.live
    with torch.no_grad():
        param.add_(mesh.rank)
    holder.cut()
    good &= bool(param.isnan().all()) and torch.equal(holder.gather(), first)
    return holder._shard.numel(), good


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(100, 7), (5,), ()])
def test_a_parameter_is_cut_and_comes_back(ranks: Pools, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    for kept, good in ranks(2).run(cut_and_gathered, shape, dtype):
        assert good
        assert kept == {(100, 7): 352, (5,): 32, (): 32}[shape]  # half, padded to 32


def edits() -> list[float]:
    mesh = mesh_for(3)
    param = nn.Parameter(torch.zeros(40))
    holder = PreSharded(param, mesh.shard)
    seen = []

    def value() -> float:
        whole = holder.gather()
        assert whole.eq(whole[0]).all()
        return whole[0].item()

    def write(number: float) -> None:
        with torch.no_grad():
            param.fill_(number)

    holder.open([param])
    write(1.0 + mesh.rank)
    holder.close([param], 1)
    seen.append(value())  # rank 1's
    holder.open([param])
    write(7.0)
    holder.close([param], None)
    seen.append(value())  # dropped
    holder.lift()
    write(5.0)  # an edit in a lifted parameter is kept when somebody then only looks
    holder.open([param])
    seen.append(param[0].item())
    holder.close([param], None)
    seen.append(value())
    holder.cut()  # again: nothing there, nothing happens
    seen.append(value())
    return seen


def test_edits(ranks: Pools) -> None:
    assert ranks(2).run(edits) == [[2.0, 2.0, 5.0, 5.0, 5.0]] * 2


def transposed() -> bool:
    mesh = mesh_for(3)
    param = nn.Parameter(torch.arange(12.0).view(3, 4).t())
    holder = PreSharded(param, mesh.shard)
    return torch.equal(holder.gather(), torch.arange(12.0).view(3, 4).t())


def test_strides_do_not_matter(ranks: Pools) -> None:
    assert ranks(2).run(transposed) == [True, True]


def first_values() -> list[bool]:
    mesh = mesh_for(3)
    ordinary, cut = parameters([(50,), (50,)])
    before = cut.detach().clone()
    holder = PreSharded(cut, mesh.shard)
    full_params.own_params([cut], holder)
    out = [
        torch.equal(read_first_values(ordinary), ordinary),
        torch.equal(read_first_values(cut), before),
        presharded([ordinary, cut]) == [holder],
    ]
    holder.lift()
    out.append(torch.equal(read_first_values(cut), before))
    return out


def test_reading_first_values(ranks: Pools) -> None:
    assert ranks(2).run(first_values) == [[True] * 4] * 2
