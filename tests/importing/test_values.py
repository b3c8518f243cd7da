"""From records to values: what torch.save writes for containers, tensors and objects, and what does not fit."""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict, defaultdict
from dataclasses import replace
from enum import IntEnum
from typing import Any

import pytest
import torch

from zero_trial.errors import CheckpointError
from zero_trial.importing import torch_file
from zero_trial.importing.pickle_program import PersistentId, PickledCall, PickledName, read_program
from zero_trial.importing.torch_file import FileStorage, FileTensor, Resolver, UnknownObject


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


def test_a_foreign_object_is_short_in_words() -> None:
    assert repr(resolve(called("some.where", "Kind", twice_itself()))) == "<some.where.Kind>"
