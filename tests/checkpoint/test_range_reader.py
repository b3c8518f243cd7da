"""Reading any ranges out of any cut, and every damage found and named."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.rank_threads import ThreadRank, on_ranks
from zero_trial.checkpoint.format import Slice
from zero_trial.checkpoint.range_reader import CheckpointReader, mismatch
from zero_trial.checkpoint.writer import save_checkpoint
from zero_trial.errors import CheckpointError

STORED = {"wte": (50257, 768), "ln": (768,), "old": (3,)}
WANTED = {"wte": (50304, 768), "ln": (768,), "head.weight": (2, 2), "head.bias": (2,)}


@pytest.mark.parametrize(
    ("stored", "wanted", "allow", "text"),
    [
        (STORED, STORED, "", None),
        (
            STORED,
            WANTED,
            "",
            "file has 3 tensors, model has 4. Missing: head.bias, head.weight. Not in the model: old. "
            "Shape differs: wte (50257, 768) vs (50304, 768)",
        ),
        ({"a": (1,)}, {"c": (1,)}, "missing", "file has 1 tensors, model has 1. Missing: c. Not in the model: a"),
        ({"a": (1,)}, {"c": (1,)}, "extra", "file has 1 tensors, model has 1. Missing: c. Not in the model: a"),
        ({"a": (1,)}, {"c": (1,)}, "missing extra", None),
        ({"a": (1,)}, {"a": (2,)}, "missing extra", "file has 1 tensors, model has 1. Shape differs: a (1,) vs (2,)"),
        (
            {},
            {f"{i:02}": (1,) for i in range(9)},
            "",
            "file has 0 tensors, model has 9. Missing: 00, 01, 02, 03, 04, 05, 06, 07 and 1 more",
        ),
    ],
)
def test_differences_in_one_text(stored: Any, wanted: Any, allow: str, text: str | None) -> None:
    assert mismatch(stored, wanted, "file", **{f"allow_{word}": True for word in allow.split()}) == text


SHAPES = {"param/wte": (7, 5), "param/ln": (5,), "state/exp_avg/wte": (7, 5), "param/s": (), "param/none": (0, 3)}


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def cut(rank: int, size: int, source: dict[str, torch.Tensor]) -> list[Slice]:
    """A flat layout of all tensors end to end, cut into ``size`` equal shards: this rank's
    slices."""
    total = sum(t.numel() for t in source.values())
    low, high = rank * -(-total // size), (rank + 1) * -(-total // size)
    out, offset = [], 0
    for name, tensor in source.items():
        start = min(max(low - offset, 0), tensor.numel())
        stop = max(min(high - offset, tensor.numel()), start)
        if start < stop or tensor.numel() == 0:
            out.append(Slice(name, tuple(tensor.shape), start, stop, tensor.reshape(-1)[start:stop].clone()))
        offset += tensor.numel()
    return out


def save(folder: Path, size: int) -> Path:
    def work(rank: ThreadRank) -> Path:
        return save_checkpoint(folder, "a", cut(rank.index, size, tensors()), step=1, ranks=rank)

    saved = on_ranks(size, work)
    assert saved == [folder / "a"] * size
    return folder / "a"


@pytest.mark.parametrize(("written", "read"), [(1, 2), (2, 4), (3, 1), (5, 2)])
def test_written_by_any_number_read_by_any_other(tmp_path: Path, written: int, read: int) -> None:
    folder = save(tmp_path, written)
    blank = {name: torch.full(shape, -1.0) for name, shape in SHAPES.items()}
    for rank in range(read):
        slices = cut(rank, read, blank)
        CheckpointReader(folder).read_into(slices)
        for got, expected in zip(slices, cut(rank, read, tensors()), strict=True):
            assert torch.equal(got.tensor, expected.tensor)


def test_tensors_that_are_not_there(tmp_path: Path) -> None:
    reader = CheckpointReader(save(tmp_path, 2))
    with pytest.raises(CheckpointError, match=r"param/wpe"):
        reader.read("param/wpe")
    with pytest.raises(CheckpointError, match="Missing: param/wpe"):
        reader.read_into([Slice.whole("param/wpe", torch.empty(3))])


def test_another_model_is_described_in_one_message(tmp_path: Path) -> None:
    reader = CheckpointReader(save(tmp_path, 1))
    wanted = {"param/wte": (8, 5), "param/ln": (5,), "param/s": (), "param/none": (0, 3), "param/head": (2,)}
    with pytest.raises(CheckpointError) as raised:
        reader.require(wanted, prefix="param/")
    assert "checkpoint has 4 tensors, model has 5. Missing: head. Shape differs: wte (7, 5) vs (8, 5)" in str(
        raised.value
    )
    with pytest.raises(CheckpointError, match=r"Shape differs"):
        reader.read_into([Slice.whole("param/wte", torch.empty(8, 5))])
    reader.require({"param/ln": (5,)}, prefix="param/l")


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda path: path.unlink(), "a file is missing"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "a file is cut short or grown"),
        (lambda path: path.write_bytes(path.read_bytes() + b"x"), "a file is cut short or grown"),
        # a pickle instead of a file is never executed
        (lambda path: path.write_bytes(b"cbuiltins\nexec\n(S'raise SystemExit(99)'\ntR."), "cut short or grown"),
    ],
)
def test_a_missing_file_and_one_of_another_size_are_named(
    tmp_path: Path, change: Callable[[Path], object], what: str
) -> None:
    path = save(tmp_path, 2) / "rank-00001.safetensors"
    change(path)
    with pytest.raises(CheckpointError, match=rf"rank-00001\.safetensors: .*{what}"):
        CheckpointReader(path.parent)


def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    folder = save(tmp_path, 2)
    chooser = random.Random(0)
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        for _ in range(20):
            at, bit = chooser.randrange(len(content)), 1 << chooser.randrange(8)
            path.write_bytes(content[:at] + bytes([content[at] ^ bit]) + content[at + 1 :])
            with pytest.raises(CheckpointError, match=path.name):
                CheckpointReader(folder).verify()
        path.write_bytes(content)
    CheckpointReader(folder).verify()


def test_ranks_can_share_the_verifying(tmp_path: Path) -> None:
    path = save(tmp_path, 3) / "rank-00001.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))
    reader = CheckpointReader(path.parent)
    reader.verify(0, 3)
    reader.verify(2, 3)
    with pytest.raises(CheckpointError, match=r"rank-00001\.safetensors: a file is damaged"):
        reader.verify(1, 3)
