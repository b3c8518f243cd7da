"""Tests for zero_trial/preflight/fake_comm.py."""

from __future__ import annotations

from pathlib import Path

import torch

from zero_trial.ds_config.keys_zero import AioSection
from zero_trial.preflight.fake_comm import FAKE_SWAP
from zero_trial.sharding.offload.swap_file import BLOCK, SwapSpace


def test_it_counts_and_keeps_nothing(tmp_path: Path) -> None:
    shelf: SwapSpace = FAKE_SWAP.shelf(tmp_path / "none", 1 << 50, AioSection(), "nvme_path")
    assert [shelf.reserve(nbytes) for nbytes in (1, BLOCK + 1, 3)] == [0, BLOCK, 3 * BLOCK]
    buffer = shelf.buffer(100)
    assert buffer.dtype == torch.uint8 and buffer.tolist() == [0] * 100
    into = torch.full((5,), 2.0)
    shelf.read(0, into).wait()
    assert into.tolist() == [2.0] * 5 and shelf.bytes_read == 20
    assert shelf.write(0, into).done() and shelf.bytes_written == 20
    with shelf.mapped() as area:
        assert area.shape == (4 * BLOCK,)
    shelf.close()
    assert list(tmp_path.iterdir()) == []
