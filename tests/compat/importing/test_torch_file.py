"""Files of torch.save: structure, tensors, damage, and files that would run a program."""

from __future__ import annotations

import os
import pickle
import zipfile
from collections import OrderedDict, defaultdict
from enum import IntEnum
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from zero_trial.compat.importing.torch_file import (
    UnknownObject,
    read_metadata,
    read_part,
    read_torch_file,
    same_elements,
)
from zero_trial.errors import CheckpointError


def save(path: Path, value: Any, **options: Any) -> Path:
    torch.save(value, path, **options)
    return path


def through(tmp_path: Path, value: Any) -> Any:
    return read_torch_file(save(tmp_path / "a.pt", value))


def test_containers(tmp_path: Path) -> None:
    value = {
        "a": OrderedDict(x=1),
        "b": {1, 2},
        "c": b"\x00\xff",
        "d": defaultdict(list, a=[1]),
        "e": (torch.Size([2, 3]), torch.float16),
        "f": [()],
    }
    found = through(tmp_path, value)
    assert found == {**value, "d": {"a": [1]}} and type(found["d"]) is dict


class Stage(IntEnum):
    """As DeepSpeed's."""

    two = 2


class Scaler:
    """As DeepSpeed's."""

    def __init__(self) -> None:
        self.cur_scale = 4.0


def test_objects_are_unknown_with_what_they_were_made_of(tmp_path: Path) -> None:
    stage, scaler = through(tmp_path, [Stage.two, Scaler()])
    assert isinstance(stage, UnknownObject) and stage.name == "Stage" and stage.args == (2,)
    assert isinstance(scaler, UnknownObject) and scaler.name == "Scaler" and scaler.state == {"cur_scale": 4.0}


DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16]
DTYPES += [torch.int8, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn]


def test_every_kind_of_tensor(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    value = {str(dtype): (torch.arange(7) % 2).to(dtype) for dtype in DTYPES}
    value |= {"view": base[1:3, 2:4], "transposed": base.t(), "scalar": torch.tensor(2.5), "empty": torch.empty(0, 3)}
    value |= {"parameter": nn.Parameter(torch.ones(3)), "row": torch.arange(5).expand(1, -1), "plain": [1, "two"]}
    found = through(tmp_path, value)
    assert found.pop("plain") == value.pop("plain")
    for name, expected in value.items():
        assert found[name].dtype == expected.dtype and torch.equal(found[name].float(), expected.float()), name


def test_two_names_of_one_tensor_are_known(tmp_path: Path) -> None:
    model = nn.ModuleDict({name: nn.Linear(3, 3, bias=False) for name in "abc"})
    model["b"].weight = model["a"].weight
    a, b, c = map(same_elements, through(tmp_path, OrderedDict(model.state_dict())).values())
    assert a == b != c


@pytest.mark.parametrize("value", [torch.arange(24.0).reshape(4, 6)[1:3, 2:4], torch.empty(0, 3), [1, torch.ones(2)]])
def test_a_part_of_a_file(tmp_path: Path, value: Any) -> None:
    content = save(tmp_path / "a.pt", value).read_bytes()
    part = memoryview(bytearray(b"before" + content + b"behind"))[6:-6]
    found = read_part(tmp_path / "b.distcp", part)
    assert torch.equal(found, value) if isinstance(value, torch.Tensor) else found[0] == 1


def test_damage_and_other_files_are_found(tmp_path: Path) -> None:
    path = save(tmp_path / "a.pt", {"x": torch.arange(64.0)})
    data = path.read_bytes()
    flipped = bytearray(data)
    flipped[data.index(torch.arange(64.0).numpy().tobytes())] ^= 1
    path.write_bytes(flipped)
    with pytest.raises(CheckpointError, match=r"a\.pt: this file is damaged: got a different CRC-32 of a/data/0"):
        read_torch_file(path)
    with pytest.raises(CheckpointError, match="a different CRC-32"):
        read_part(path, memoryview(flipped))
    for length in (0, 1, 3, 5, 40, len(data) // 2, len(data) - 200, len(data) - 1):
        path.write_bytes(data[:length])
        with pytest.raises(CheckpointError, match=r"a\.pt"):
            read_torch_file(path)
    for content in (b"hello", b"\x93NUMPY\x01\x00", b"PK\x05\x06" + b"\0" * 18):
        path.write_bytes(content)
        for read in (read_torch_file, read_metadata):
            with pytest.raises(CheckpointError, match=r"a\.pt"):
                read(path)
    with zipfile.ZipFile(path, "w") as file:  # an archive without a structure
        file.writestr("x/constants.pkl", b"\x80\x02].")
    with pytest.raises(CheckpointError, match=r"a\.pt"):
        read_torch_file(path)
    # files of older torch and newer pickle are refused with what to do
    old = save(tmp_path / "old.pt", {"x": torch.ones(2)}, _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match=r"torch before 1\.6 with python -c"):
        read_torch_file(old)
    new = save(tmp_path / "new.pt", {"x": {1, 2}}, pickle_protocol=4)
    with pytest.raises(CheckpointError, match="protocol 2"):
        read_torch_file(new)


class Bomb:
    """Runs a program when it is unpickled."""

    def __init__(self, call: Any, *args: Any) -> None:
        self.call = call, args

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("how", ["os.system", "eval", "Path.touch"])
def test_nothing_of_a_file_is_run(how: str, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    bomb = {
        "os.system": Bomb(os.system, f"touch {mark}"),
        "eval": Bomb(eval, f"open({str(mark)!r}, 'w')"),
        "Path.touch": Bomb(Path.touch, mark),
    }[how]
    path = save(tmp_path / "a.pt", {"x": bomb})
    try:
        found = read_torch_file(path)["x"]
    except CheckpointError as refusal:
        assert "a.pt" in str(refusal)
    else:
        assert isinstance(found, UnknownObject)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(bomb))
    assert isinstance(read_metadata(tmp_path / ".metadata"), UnknownObject)
    assert not mark.exists()
