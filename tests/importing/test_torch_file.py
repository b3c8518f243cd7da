"""Files of torch.save, both formats: the values that torch.load gives, and damage that is found."""

from __future__ import annotations

import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.importing.test_program import BOMBS, bomb
from zero_trial.errors import CheckpointError
from zero_trial.importing.torch_file import OLD_MAGIC, FileTensor, TorchFile

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
]
DTYPES += [torch.bool, torch.complex64]


def save(path: Path, value: Any, new: bool = True) -> Path:
    torch.save(value, path, _use_new_zipfile_serialization=new)
    return path


@pytest.mark.parametrize("new", [True, False])
def test_every_kind_of_tensor(tmp_path: Path, new: bool) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    value = {str(dtype): (torch.arange(7) % 2).to(dtype) for dtype in DTYPES}
    value |= {"view": base[1:3, 2:4], "transposed": base.t(), "scalar": torch.tensor(2.5), "empty": torch.empty(0, 3)}
    value |= {"parameter": nn.Parameter(torch.ones(3)), "row": torch.arange(5).expand(1, -1), "plain": [1, "two"]}
    found = TorchFile(save(tmp_path / "a.pt", value, new)).content
    assert found.pop("plain") == value.pop("plain")
    for name, expected in value.items():
        assert isinstance(found[name], FileTensor) and torch.equal(found[name].tensor(), expected), name
        assert found[name].tensor().dtype == expected.dtype


def test_two_names_of_one_tensor_are_equal(tmp_path: Path) -> None:
    model = nn.ModuleDict({"a": nn.Linear(3, 3, bias=False), "b": nn.Linear(3, 3, bias=False)})
    model["b"].weight = model["a"].weight
    found = TorchFile(save(tmp_path / "a.pt", OrderedDict(model.state_dict()))).content
    assert found["a.weight"] == found["b.weight"]


def test_f8_through_an_untyped_storage(tmp_path: Path) -> None:
    value = torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn)
    found = TorchFile(save(tmp_path / "a.pt", [value])).content[0].tensor()
    assert found.dtype == value.dtype and torch.equal(found.float(), value.float())


def test_a_flipped_bit_is_found_when_the_tensor_is_read(tmp_path: Path) -> None:
    path = save(tmp_path / "a.pt", {"x": torch.full((64,), 1.0), "y": torch.zeros(4)})
    data = bytearray(path.read_bytes())
    data[data.index(torch.full((4,), 1.0).numpy().tobytes())] ^= 1
    path.write_bytes(data)
    content = TorchFile(path).content
    assert torch.equal(content["y"].tensor(), torch.zeros(4))
    with pytest.raises(CheckpointError, match=r"a\.pt: this file is damaged: got storage 0 has another CRC-32"):
        content["x"].tensor()


@pytest.mark.parametrize("new", [True, False])
def test_every_cut_is_found(tmp_path: Path, new: bool) -> None:
    data = save(tmp_path / "a.pt", {"x": torch.arange(64.0)}, new).read_bytes()
    for length in (0, 1, 3, 5, 40, len(data) // 2, len(data) - 200 if new else len(data) - 20, len(data) - 1):
        (tmp_path / "b.pt").write_bytes(data[:length])
        with pytest.raises(CheckpointError):
            TorchFile(tmp_path / "b.pt").content["x"].tensor()


def archive(path: Path, entries: dict[str, bytes], how: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", how) as file:
        for name, content in entries.items():
            file.writestr(f"x/{name}", content)
    return path


def test_archives_of_another_kind(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"without data\.pkl"):
        TorchFile(archive(tmp_path / "a.pt", {"constants.pkl": b"\x80\x02]."}))
    with pytest.raises(CheckpointError, match="compressed"):
        TorchFile(archive(tmp_path / "b.pt", {"data.pkl": b"\x80\x02]."}, zipfile.ZIP_DEFLATED))
    with pytest.raises(CheckpointError, match="another byte order"):
        TorchFile(archive(tmp_path / "c.pt", {"data.pkl": b"\x80\x02].", "byteorder": b"big"}))
    assert TorchFile(archive(tmp_path / "d.pt", {"data.pkl": b"\x80\x02].", "byteorder": b"little"})).content == []


def test_a_storage_that_is_not_there(tmp_path: Path) -> None:
    save(tmp_path / "a.pt", torch.ones(3))
    with zipfile.ZipFile(tmp_path / "a.pt") as file:
        program = file.read("a/data.pkl")
    for entries in ({"data.pkl": program}, {"data.pkl": program, "data/0": b"\0" * 8}):
        with pytest.raises(CheckpointError, match="for storage 0 of 12 bytes"):
            TorchFile(archive(tmp_path / "b.pt", entries)).content.tensor()


@pytest.mark.parametrize("content", [b"hello", b"\x93NUMPY\x01\x00", b"\x80\x02K\x01.", b"PK\x05\x06" + b"\0" * 18])
def test_other_files(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"a\.pt"):
        TorchFile(tmp_path / "a.pt")


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        TorchFile(tmp_path / "none.pt")


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("kind", sorted(BOMBS))
def test_bombs_in_files(kind: str, old: bool, tmp_path: Path) -> None:
    program = bomb(kind, tmp_path / "mark")
    if old:
        head = b"".join(pickle.dumps(value, 2) for value in (OLD_MAGIC, 1001, {}))
        (tmp_path / "a.pt").write_bytes(head + program)
    else:
        archive(tmp_path / "a.pt", {"data.pkl": program})
    with pytest.raises(CheckpointError, match="would run a program"):
        TorchFile(tmp_path / "a.pt")
    assert not (tmp_path / "mark").exists()
