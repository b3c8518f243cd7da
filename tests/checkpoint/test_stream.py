"""Tensors read in chunks are the tensors that were written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.checkpoint.test_damage import saved_by_two
from zero_trial.checkpoint import CheckpointReader, Slice, save_checkpoint
from zero_trial.checkpoint.export import TensorStream


@pytest.mark.parametrize("chunk_bytes", [1, 8, 20, 1 << 20])
def test_pieces_of_several_ranks_in_order(tmp_path: Path, chunk_bytes: int) -> None:
    with TensorStream(CheckpointReader(saved_by_two(tmp_path)), chunk_bytes) as stream:
        chunks = list(stream.chunks("param/w"))
    assert torch.equal(torch.cat(chunks), torch.arange(10.0))
    assert max(chunk.numel() for chunk in chunks) <= max(1, chunk_bytes // 4)


def test_scalars_and_empty_tensors(tmp_path: Path) -> None:
    slices = [Slice.whole("param/s", torch.tensor(3.0)), Slice.whole("param/e", torch.zeros(0, 2))]
    folder = save_checkpoint(tmp_path, "a", slices, step=1)
    with TensorStream(CheckpointReader(folder)) as stream:
        assert [chunk.tolist() for chunk in stream.chunks("param/s")] == [[3.0]]
        assert list(stream.chunks("param/e")) == []


def test_few_files_are_open_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zero_trial.checkpoint.export.OPEN_FILES", 1)
    with TensorStream(CheckpointReader(saved_by_two(tmp_path)), 4) as stream:
        for _ in range(2):
            assert torch.cat(list(stream.chunks("param/w"))).tolist() == list(range(10))
            assert len(stream._open) == 1
    assert len(stream._open) == 0
