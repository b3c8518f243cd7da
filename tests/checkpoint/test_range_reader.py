"""Reading any ranges out of any cut, and every damage found and named."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.support.thread_ranks import ThreadRank, on_ranks
from zero_trial.checkpoint import range_reader
from zero_trial.checkpoint.format import Slice
from zero_trial.checkpoint.range_reader import CheckpointReader, WeightsReader, mismatch
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
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "the file has the wrong size"),
        (lambda path: path.write_bytes(path.read_bytes() + b"x"), "the file has the wrong size"),
        # a pickle instead of a file is never executed
        (lambda path: path.write_bytes(b"cbuiltins\nexec\n(S'raise SystemExit(99)'\ntR."), "the wrong size"),
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


def test_a_range_is_read_in_chunks_and_cast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(range_reader, "_CHUNK_BYTES", 32)
    values = torch.randn(10, 7)
    save_file({"a": values, "b": values.bfloat16(), "c": torch.arange(5)}, tmp_path / "w.safetensors")
    reader = WeightsReader(tmp_path / "w.safetensors")
    assert {name: stored.shape for name, stored in reader.tensors.items()} == {"a": (10, 7), "b": (10, 7), "c": (5,)}
    flat = values.reshape(-1)
    for name, dtype, through, expected in [
        ("a", torch.float32, None, flat),
        ("a", torch.float64, torch.float16, flat.half().double()),
        ("a", torch.float32, torch.bfloat16, flat.bfloat16().float()),
        ("b", torch.bfloat16, torch.bfloat16, flat.bfloat16()),
        ("b", torch.float32, None, flat.bfloat16().float()),
    ]:
        out = torch.empty(44, dtype=dtype)
        reader.read_into(name, 13, 57, out, through)
        assert torch.equal(out, expected[13:57])
    strided = torch.zeros(5, 2, dtype=torch.int64)
    reader.read_into("c", 1, 4, strided[:3, 0])
    assert strided[:, 0].tolist() == [1, 2, 3, 0, 0]


FIRST = '"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}'


@pytest.mark.parametrize(
    ("header", "size"),
    [
        (FIRST, 9),
        (f"{FIRST}, {FIRST.replace('0, 8', '8, 16')}", 16),
        (FIRST.replace("[2]", "[-2, -1]"), 8),
        (FIRST.replace("F32", "U64").replace("[2]", "[1]"), 8),
        (f"{FIRST}, {FIRST.replace('a', 'b', 1)}", 8),
        (f"{FIRST}, {FIRST.replace('a', 'b', 1).replace('0, 8', '12, 20')}", 20),
    ],
    ids=["bytes after the end", "same key", "shape", "dtype", "shared bytes", "hole"],
)
def test_every_byte_of_a_file_belongs_to_one_tensor(header: str, size: int, tmp_path: Path) -> None:
    """As the safetensors library has it: other readers would take other values."""
    path = tmp_path / "w.safetensors"
    text = f"{{{header}}}".encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(size))
    with pytest.raises(CheckpointError, match="not a complete safetensors file"):
        WeightsReader(path)


@pytest.mark.parametrize(
    "content", [b"", b"1234567", b"\xff" * 8, b"\x02" + bytes(7) + b"[]", b"\x01" + bytes(7) + b"{"]
)
def test_a_file_without_a_header_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as error:
        WeightsReader(path)
    assert error.value.where == str(path)


def test_a_git_lfs_pointer_is_named(tmp_path: Path) -> None:
    """Also where an index leads to it; a text that only begins like one is a damaged file."""
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 548105171\n"
    file = tmp_path / "part.safetensors"
    file.write_text(pointer)
    index = {"weight_map": {"a": "part.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    for source in (file, tmp_path):
        with pytest.raises(CheckpointError, match="git-lfs pointer") as error:
            WeightsReader(source)
        assert error.value.where == str(file) and "git lfs pull" in str(error.value.fix)
    for text in ("version https://example.com/", "version ", pointer[:30]):
        file.write_text(text)
        with pytest.raises(CheckpointError, match="not a complete safetensors file"):
            WeightsReader(file)


def test_an_index_whose_file_lacks_a_tensor_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "part.safetensors")
    index = {"weight_map": {"a": "part.safetensors", "b": "part.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError) as error:
        WeightsReader(tmp_path)
    assert error.value.got == "b"


def test_a_range_that_the_file_lacks_is_refused(tmp_path: Path) -> None:
    """What follows in the file belongs to another tensor."""
    save_file({"a": torch.ones(4), "b": torch.zeros(4)}, tmp_path / "w.safetensors")
    reader, out = WeightsReader(tmp_path / "w.safetensors"), torch.full((2,), 3.0)
    with pytest.raises(CheckpointError, match=r"w\.safetensors: entry a is too short: got \(4,\), expected \(5,\)"):
        reader.read_into("a", 3, 5, out)
    with pytest.raises(CheckpointError, match=r"w\.safetensors: no entry c"):
        reader.read_into("c", 0, 2, out)
    assert out.tolist() == [3.0, 3.0]
