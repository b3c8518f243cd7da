"""Tests for zero_trial/planning/fake_comm.py."""

from __future__ import annotations

from pathlib import Path

import torch

from zero_trial.ds_config.keys_zero import AioSection
from zero_trial.planning.fake_comm import FAKE_SWAP, SWAP_IN_MEMORY
from zero_trial.sharding.offload.swap_space import BLOCK, SwapSpace


def test_it_counts_and_keeps_nothing(tmp_path: Path) -> None:
    space: SwapSpace = FAKE_SWAP.swap_file([tmp_path / "none"], 1 << 50, AioSection(), "nvme_path")
    assert [space.reserve(nbytes) for nbytes in (1, BLOCK + 1, 3)] == [0, BLOCK, 3 * BLOCK]
    buffer = space.buffer(100)
    assert buffer.dtype == torch.uint8 and buffer.tolist() == [0] * 100
    into = torch.full((5,), 2.0)
    space.read(0, into).wait()
    assert into.tolist() == [2.0] * 5 and space.bytes_read == 20
    assert space.write(0, into).done() and space.bytes_written == 20
    with space.mapped() as area:
        assert area.shape == (4 * BLOCK,)
    space.close()
    assert list(tmp_path.iterdir()) == []


def test_one_in_memory_keeps_what_is_written(tmp_path: Path) -> None:
    space: SwapSpace = SWAP_IN_MEMORY.swap_file([tmp_path / "none"], 10, AioSection(), "nvme_path")
    first, second = space.reserve(16), space.reserve(3 * BLOCK)
    space.write(second, torch.arange(4.0)).wait()
    space.reserve(20 * BLOCK)
    into = torch.full((2,), 9.0)
    space.read(second + 8, into).wait()
    assert into.tolist() == [2.0, 3.0]
    with space.mapped() as area:
        area[first : first + 4] = torch.tensor([5.0]).view(torch.uint8)
    space.read(first, into[:1]).wait()
    assert into.tolist() == [5.0, 3.0] and list(tmp_path.iterdir()) == []
