"""Files of torch.save: structure, tensors, damage."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections import OrderedDict, defaultdict
from dataclasses import replace
from enum import IntEnum
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.compat.importing.test_pickle_program import BOMBS, bomb
from zero_trial.compat.importing import torch_file
from zero_trial.compat.importing.pickle_program import PersistentId, PickledCall, PickledName, read_program
from zero_trial.compat.importing.torch_file import (
    OLD_MAGIC,
    FileStorage,
    FileTensor,
    Resolver,
    TorchFile,
    UnknownObject,
)
from zero_trial.errors import CheckpointError


def nothing(stored: FileTensor) -> torch.Tensor:
    raise AssertionError("nothing is read")


def resolve(value: Any) -> Any:
    return Resolver("test.pt", nothing).resolve(value)


def through_pickle(value: Any, protocol: int = 2) -> Any:
    return resolve(read_program(io.BytesIO(pickle.dumps(value, protocol)), "test.pt"))


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_containers(protocol: int) -> None:
    value = {
        "a": OrderedDict(x=1),
        "b": {1, 2},
        "c": b"\x00\xff",
        "d": b"",
        "e": (torch.Size([2, 3]), torch.float16),
        "f": [()],
    }
    found = through_pickle(value, protocol)
    assert found == {**value, "a": {"x": 1}, "e": ((2, 3), torch.float16)}
    assert type(found["a"]) is dict


def test_defaultdict_without_its_factory() -> None:
    assert through_pickle(defaultdict(list, a=[1])) == {"a": [1]}


def test_what_is_shared_stays_shared_and_a_ring_is_a_ring() -> None:
    shared = [1]
    first, second = through_pickle([shared, shared])
    assert first is second
    ring: dict[str, Any] = {}
    ring["self"] = ring
    found = through_pickle(ring)
    assert found["self"] is found


class Stage(IntEnum):
    """As DeepSpeed's."""

    two = 2


class Scaler:
    """As DeepSpeed's."""

    def __init__(self) -> None:
        self.cur_scale = 4.0


def test_objects_are_foreign_with_what_they_were_made_of() -> None:
    stage, scaler = through_pickle([Stage.two, Scaler()])
    assert isinstance(stage, UnknownObject) and stage.name == "Stage" and stage.args == (2,)
    assert isinstance(scaler, UnknownObject) and scaler.name == "Scaler" and scaler.state == {"cur_scale": 4.0}
    assert isinstance(through_pickle(Scaler), UnknownObject)


KEY = ("storage", PickledName("torch", "FloatStorage"), "0", "cuda:1", 12)


def rebuilt(offset: Any = 0, shape: Any = (3, 4), strides: Any = (4, 1), key: Any = KEY) -> PickledCall:
    return PickledCall(
        PickledName("torch._utils", "_rebuild_tensor_v2"),
        (PersistentId(key), offset, shape, strides, False, PickledCall(PickledName("collections", "OrderedDict"), ())),
    )


def test_tensors_lie_in_the_file() -> None:
    found = resolve(rebuilt())
    assert found.storage == FileStorage("0", torch.float32, 12) and found.shape == (3, 4) and found.numel == 12
    assert (
        found == resolve(rebuilt())
        and found != resolve(rebuilt(shape=(2, 4)))
        and hash(found) == hash(resolve(rebuilt()))
    )
    parameter = PickledCall(PickledName("torch._utils", "_rebuild_parameter"), (rebuilt(), True, None))
    assert resolve(parameter) == found
    subclass = PickledCall(
        PickledName("torch._tensor", "_rebuild_from_type_v2"),
        (rebuilt().target, PickledName("my", "Tensor"), rebuilt().args, {"x": 1}),
    )
    assert resolve(subclass) == found
    v3 = (
        PersistentId(("storage", PickledName("torch.storage", "UntypedStorage"), "1", "cpu", 24)),
        0,
        (6,),
        (1,),
        False,
        None,
        PickledName("torch", "int32"),
    )
    assert resolve(PickledCall(PickledName("torch._utils", "_rebuild_tensor_v3"), v3)).dtype == torch.int32


@pytest.mark.parametrize(
    "change",
    [
        {"offset": 1},
        {"offset": -1},
        {"shape": (3, 5)},
        {"strides": (5, 1)},
        {"strides": (-4, 1)},
        {"shape": (-3, 4)},
        {"shape": (1000, 1000), "strides": (0, 0)},  # a million million numbers out of twelve
        {"strides": (1,)},
    ],
)
def test_a_tensor_that_its_storage_does_not_hold(change: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError):
        resolve(rebuilt(**change))


@pytest.mark.parametrize(
    "broken",
    [
        rebuilt(offset="0"),
        rebuilt(shape=None),
        rebuilt(key=("module", 1, 2, 3, 4)),
        rebuilt(key=(*KEY, ("view", 0, 2))),
        PickledCall(PickledName("torch._utils", "_rebuild_tensor_v2"), ()),
        PickledCall(PickledName("torch._utils", "_rebuild_tensor_v2"), (3, 0, (1,), (1,))),
        [rebuilt(), rebuilt(key=(*KEY[:4], 13))],
        PickledCall(PickledName("collections", "OrderedDict"), ([1, 2],)),
    ],
)
def test_what_torch_does_not_write(broken: Any) -> None:
    with pytest.raises(CheckpointError, match=r"test\.pt: "):
        resolve(broken)


@pytest.mark.parametrize("kind", [PickledName("my", "FloatStorage"), PickledName("torch", "QInt8Storage"), "float"])
def test_a_tensor_of_another_dtype_is_foreign(kind: Any) -> None:
    found = resolve([rebuilt(key=("storage", kind, "0", "cpu", 12)), 1])
    assert isinstance(found[0], UnknownObject) and found[0].path.startswith("a tensor of ") and found[1] == 1


def test_an_expanded_single_row_is_fine() -> None:
    assert resolve(rebuilt(shape=(1, 12), strides=(0, 1))).numel == 12


def test_deep_nesting_is_one_clean_error() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(CheckpointError, match="RecursionError"):
        resolve(deep)


def test_a_stored_tensor_reads_through_its_file() -> None:
    found = replace(resolve(rebuilt()), read=lambda stored: torch.zeros(stored.shape))
    assert found.tensor().shape == (3, 4)


def called(module: str, name: str, *args: Any) -> PickledCall:
    return PickledCall(PickledName(module, name), args)


def twice_itself(count: int = 45) -> Any:
    """Written out it would have 2 ** count parts."""
    found: Any = ()
    for _ in range(count):
        found = (found, found)
    return found


@pytest.mark.parametrize(
    "value",
    [
        called("_codecs", "encode", twice_itself()),
        called("torch", "device", twice_itself()),
        called("builtins", "set", [twice_itself()]),
        called("collections", "OrderedDict", [[twice_itself(), 1]]),
        {called("torch", "Size", twice_itself()): 1},
        PersistentId(twice_itself()),
        PersistentId(("storage", PickledName("torch", "FloatStorage"), twice_itself(), "cpu", 4)),
        PersistentId(("storage", PickledName("torch", "FloatStorage"), "0", "cpu", 1 << 80)),
    ],
)
def test_a_small_file_that_would_be_endless_written_out(value: Any) -> None:
    with pytest.raises(CheckpointError, match="not a structure that"):
        resolve(value)


def test_what_many_places_share_is_not_made_anew_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_file, "MOST_COPIED", 1 << 20)
    pairs, text, sizes = [[number, 0] for number in range(1000)], "x" * 10_000, list(range(10_000))
    for one in (
        lambda: called("collections", "OrderedDict", pairs),
        lambda: called("_codecs", "encode", text),
        lambda: called("torch", "Size", sizes),
        lambda: called("builtins", "set", sizes),
    ):
        resolve([one()])
        with pytest.raises(CheckpointError, match="repeated"):
            resolve([one() for _ in range(1000)])


def test_a_foreign_object_has_a_short_text() -> None:
    assert repr(resolve(called("some.where", "Kind", twice_itself()))) == "<some.where.Kind>"


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
