"""Tests for zero_trial/preflight/fake_comm.py."""

from __future__ import annotations

from pathlib import Path

import torch

from zero_trial.ds_config.keys_zero import AioSection
from zero_trial.preflight.fake_comm import FAKE_SWAP
from zero_trial.sharding.offload.swap_file import BLOCK, SwapSpace


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
