"""Tests for zero_trial/sharding/offload/host_updates.py and copies.py."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.sharding.parts import freeing, make_grad_buffer, make_group, parameters, run_update
from tests.support.strict_copier import StrictCopier
from zero_trial.ops.optimizers import FusedAdam
from zero_trial.sharding.offload.copies import BlockingCopier, HostCopier, StreamCopier, copier_for
from zero_trial.sharding.offload.host_updates import StagedPiece, StagedStore, StagingBuffers, master_to_host
from zero_trial.sharding.offload.nvme_optimizer import MasterSwapper, SwappedStore, state_columns
from zero_trial.sharding.offload.nvme_params import RoundedBuffers
from zero_trial.sharding.offload.region_file import RegionFile
from zero_trial.sharding.offload.swap_space import CUT
from zero_trial.sharding.optimizer import ShardedOptimizer
from zero_trial.sharding.pieces import cut_pieces
from zero_trial.sharding.publication import ParamPublisher

BUILDS: dict[str, Any] = {"fused": FusedAdam, "torch": torch.optim.AdamW}


class Training:
    """Three steps on two groups; ``buffers``: of a staging between the groups and masters of their
    own; ``folder``: masters behind it in a file."""

    def __init__(self, build: Any, dtype: torch.dtype, *, buffers: int = 0, folder: Path | None = None) -> None:
        self.groups = [
            make_group(parameters([(2 * CUT + 77,), (50,)], seed=seed), stage=2, dtype=dtype) for seed in (1, 2)
        ]
        grad_buffers = [make_grad_buffer(group)[0] for group in self.groups]
        self.copier = StrictCopier()
        staging = StagingBuffers(self.copier)
        behind = None
        if buffers:
            for group in self.groups:
                master_to_host(group)
        if folder is not None:
            masters = MasterSwapper(RegionFile([folder], 1 << 16))
            for group in self.groups:
                masters.swap_out(group)
        make = functools.partial(StagedPiece, staging=staging, rounded_buffers=RoundedBuffers()) if buffers else None
        given = {"most": CUT, "make": make} if make else {}
        pieces = cut_pieces(grad_buffers, **given)
        base = build([piece.weight for piece in pieces], lr=0.01)
        if folder is not None:
            columns = {torch.float32: state_columns(base)}
            behind = SwappedStore(masters, pieces, base.state, columns, buffer_numel=CUT, buffer_count=2)
        store = StagedStore(pieces, staging, behind, buffers=buffers) if buffers else None  # type: ignore[arg-type]
        self.store = store
        self.optimizer = ShardedOptimizer(base, pieces, store=store)
        for number in range(3):
            for grad_buffer in grad_buffers:
                grad_buffer.reduced().copy_(
                    torch.randn(grad_buffer.shard.shape, generator=torch.Generator().manual_seed(number))
                )
            ParamPublisher(self.groups, freeing()).publish(pieces, self.optimizer.update(0.5))

    def values(self) -> list[torch.Tensor]:
        with self.optimizer.state_by_tensor.lent():
            states = [self.optimizer.state_by_tensor.state_shard(group, "exp_avg_sq") for group in self.groups]
            masters = [group.master.clone() for group in self.groups]
        return [group.shard for group in self.groups] + masters + [state for state in states if state is not None]


@pytest.mark.parametrize("away", [False, True], ids=["host", "file"])
@pytest.mark.parametrize("buffers", [1, 2, 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", BUILDS)
def test_the_same_bits_through_staging_buffers(
    tmp_path: Path, name: str, dtype: torch.dtype, buffers: int, away: bool
) -> None:
    here = Training(BUILDS[name], dtype)
    there = Training(BUILDS[name], dtype, buffers=buffers, folder=tmp_path if away else None)
    assert len(there.values()) == 6
    assert all(torch.equal(a, b) for a, b in zip(here.values(), there.values(), strict=True))
    pieces = len(there.optimizer.pieces)
    assert pieces == 6 and (there.copier.begun, there.copier.downs, there.copier.ups) == (3, 3 * pieces, 3 * pieces)
    store = there.store
    assert store is not None and store.buffers == () and there.optimizer.state_by_tensor.persistent_bytes() == 0
    staging = [buffer.numel() for buffer in store.host_buffers][: 2 * buffers]
    assert staging == [CUT * dtype.itemsize] * (2 * buffers), "a gradient and a piece of new values each"


def test_masters_leave_the_device_also_where_they_are_the_shard() -> None:
    (group,) = (make_group(parameters([(64,)]), stage=2),)
    assert group.master is group.shard
    master_to_host(group)
    assert group.master is not group.shard and torch.equal(group.master, group.shard)
    group.master.add_(1)
    group.publish()
    assert torch.equal(group.master, group.shard)


def test_a_step_that_is_broken_off_leaves_the_staging_buffers_usable() -> None:
    training = Training(BUILDS["fused"], torch.bfloat16, buffers=2)

    def stop(pieces: Any, rounded: bool) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_update(training.optimizer, 1.0, stop)
    run_update(training.optimizer, 1.0)
    assert training.store is not None and len(training.store.host_buffers) == 4


def test_where_the_device_is_the_host() -> None:
    copier = copier_for(torch.device("cpu"), True)
    assert (
        isinstance(copier, BlockingCopier) and copier.buffer(7).shape == (7,) and copier.buffer(7).dtype == torch.uint8
    )
    copier.begin()
    source, into = torch.arange(4.0), torch.zeros(4)
    copier.copy(source, into).wait()
    assert torch.equal(source, into)
    copier.copy(source + 1, into).wait()
    assert torch.equal(source + 1, into)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("pinned", [True, False])
def test_copies_beside_the_devices_work(pinned: bool) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    copier: HostCopier = copier_for(device, pinned)
    assert isinstance(copier, StreamCopier) and copier.buffer(64).is_pinned() is pinned
    on_host = copier.buffer(4 << 20).view(torch.float32)
    for number in range(5):
        made = torch.arange(1 << 20, device=device, dtype=torch.float32) + number
        copier.begin()
        copier.copy(made, on_host).wait()
        assert torch.equal(on_host, made.cpu())
        on_host.mul_(2)
        back = torch.empty_like(made)
        copy = copier.copy(on_host, back)
        copy.order()
        doubled = back + 0  # given to the device after the copy, so it sees it
        copy.wait()
        assert torch.equal(doubled, made * 2)
