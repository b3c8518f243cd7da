"""Tests for zero_trial/sharding/offload/host.py."""

from __future__ import annotations

import pytest
import torch

from zero_trial.sharding.offload.host import BlockingCopier, HostCopier, StreamCopier, copier_for


def test_where_the_device_is_the_host() -> None:
    mover = copier_for(torch.device("cpu"), True)
    assert isinstance(mover, BlockingCopier) and mover.buffer(7).shape == (7,) and mover.buffer(7).dtype == torch.uint8
    mover.begin()
    source, into = torch.arange(4.0), torch.zeros(4)
    mover.down(source, into)()
    assert torch.equal(source, into)
    mover.up(source + 1, into)()
    assert torch.equal(source + 1, into)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("pinned", [True, False])
def test_copies_beside_the_devices_work(pinned: bool) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    mover: HostCopier = copier_for(device, pinned)
    assert isinstance(mover, StreamCopier) and mover.buffer(64).is_pinned() is pinned
    on_host = mover.buffer(4 << 20).view(torch.float32)
    for number in range(5):
        made = torch.arange(1 << 20, device=device, dtype=torch.float32) + number
        mover.begin()
        mover.down(made, on_host)()
        assert torch.equal(on_host, made.cpu())
        on_host.mul_(2)
        back = torch.empty_like(made)
        wait = mover.up(on_host, back)
        doubled = back + 0  # given to the device after the copy, so it sees it
        wait()
        assert torch.equal(doubled, made * 2)
