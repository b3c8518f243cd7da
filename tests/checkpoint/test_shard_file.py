"""The file that we write is the one that the safetensors library reads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from zero_trial.checkpoint.format import Slice
from zero_trial.checkpoint.reader import read_digest
from zero_trial.checkpoint.writer import DurableFiles, piece_key, shard_chunks

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool]


def test_every_dtype_comes_back_bit_for_bit(tmp_path: Path) -> None:
    raw = torch.arange(48, dtype=torch.uint8).remainder(2)
    slices = [Slice.whole(f"t/{dtype}", raw.to(dtype).view(6, 8)) for dtype in DTYPES]
    record = DurableFiles().write(tmp_path / "x.safetensors", shard_chunks(slices))
    assert record == read_digest(tmp_path / "x.safetensors")
    with safe_open(tmp_path / "x.safetensors", framework="pt") as file:
        assert set(file.keys()) == {piece_key(part) for part in slices}
        for part in slices:
            read = file.get_tensor(piece_key(part))
            assert read.dtype == part.dtype
            assert torch.equal(read, part.flat)


@pytest.mark.parametrize("pattern", [float("nan"), float("inf"), -0.0, 1e-45])
def test_odd_floats_keep_their_bits(tmp_path: Path, pattern: float) -> None:
    part = Slice.whole("t", torch.full((3,), pattern))
    DurableFiles().write(tmp_path / "x.safetensors", shard_chunks([part]))
    with safe_open(tmp_path / "x.safetensors", framework="pt") as file:
        assert torch.equal(file.get_tensor("t[0:3]").view(torch.int32), part.flat.view(torch.int32))


def test_parts_of_one_tensor_have_different_keys(tmp_path: Path) -> None:
    flat = torch.arange(10.0)
    slices = [Slice("w", (20,), 0, 4, flat[:4]), Slice("w", (20,), 10, 16, flat[4:])]
    DurableFiles().write(tmp_path / "x.safetensors", shard_chunks(slices))
    with safe_open(tmp_path / "x.safetensors", framework="pt") as file:
        assert file.get_slice("w[10:16]")[1:3].tolist() == [5.0, 6.0]


def test_names_with_any_characters(tmp_path: Path) -> None:
    part = Slice.whole('a "quoted" é/名\\', torch.ones(2))
    DurableFiles().write(tmp_path / "x.safetensors", shard_chunks([part]))
    with safe_open(tmp_path / "x.safetensors", framework="pt") as file:
        assert file.get_tensor(piece_key(part)).tolist() == [1.0, 1.0]


def test_memory_is_not_copied() -> None:
    tensor = torch.zeros(1000)
    chunks = shard_chunks([Slice.whole("t", tensor)])
    next(chunks)
    view = next(chunks)
    tensor[0] = 1.0
    assert bytes(view[:4]) == b"\x00\x00\x80\x3f"
