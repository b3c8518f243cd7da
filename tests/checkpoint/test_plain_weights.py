"""Ranges of safetensors files, read without mapping them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from zero_trial.checkpoint import range_reader
from zero_trial.checkpoint.range_reader import WeightsReader
from zero_trial.errors import CheckpointError


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
    with pytest.raises(CheckpointError, match="not a whole safetensors file"):
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
        with pytest.raises(CheckpointError, match="not a whole safetensors file"):
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
