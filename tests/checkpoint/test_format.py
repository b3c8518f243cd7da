"""Names, slices and the manifest: what a checkpoint consists of."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from zero_trial.checkpoint.format import (
    FileRecord,
    Manifest,
    Slice,
    StoredName,
    StoredPiece,
    TensorEntry,
    TensorKind,
    check_coverage,
    dtype_of,
    natural_order,
    parse_stored_name,
    safetensors_name,
    same_tensor,
    seal,
)
from zero_trial.errors import CheckpointError


def test_unknown() -> None:
    with pytest.raises(CheckpointError, match="'float31'"):
        dtype_of("float31")
    with pytest.raises(CheckpointError, match="complex128"):
        safetensors_name(torch.complex128)


@pytest.mark.parametrize(
    ("stored", "meaning"),
    [
        ("param/blocks.0.weight", StoredName(TensorKind.PARAM, "blocks.0.weight")),
        ("buffer/norm.running_mean", StoredName(TensorKind.BUFFER, "norm.running_mean")),
        ("state/exp_avg/head.weight", StoredName(TensorKind.STATE, "head.weight", "exp_avg")),
        ("part1of4/param/head.weight", StoredName(TensorKind.PARAM, "head.weight", "", 1, 4)),
        ("part0of2/state/exp_avg_sq/w", StoredName(TensorKind.STATE, "w", "exp_avg_sq", 0, 2)),
        ("param/odd/name", StoredName(TensorKind.PARAM, "odd/name")),
        ("rank0/rng/torch", StoredName(TensorKind.RUN, "rank0/rng/torch")),
        ("engine/client/t", StoredName(TensorKind.RUN, "engine/client/t")),
        ("param/", StoredName(TensorKind.RUN, "param/")),
        ("state/exp_avg", StoredName(TensorKind.RUN, "state/exp_avg")),
        ("partitioned/param/x", StoredName(TensorKind.RUN, "partitioned/param/x")),
    ],
)
def test_a_name_says_what_it_is(stored: str, meaning: StoredName) -> None:
    assert parse_stored_name(stored) == meaning


def test_numbers_count_as_numbers() -> None:
    names = ["blocks.10.w", "blocks.2.w", "head", "blocks.2.b", "10", "9"]
    assert sorted(names, key=natural_order) == ["9", "10", "blocks.2.b", "blocks.2.w", "blocks.10.w", "head"]


def test_a_whole_tensor_is_one_slice_and_shares_its_memory() -> None:
    tensor = torch.arange(6.0).view(2, 3)
    part = Slice.whole("w", tensor)
    assert (part.shape, part.start, part.stop, part.dtype) == ((2, 3), 0, 6, torch.float32)
    part.flat[5] = 9.0
    assert tensor[1, 2] == 9.0


@pytest.mark.parametrize("bounds", [(-1, 2), (3, 7), (4, 3)])
def test_outside_the_tensor(bounds: tuple[int, int]) -> None:
    with pytest.raises(CheckpointError, match="outside"):
        Slice("w", (2, 3), *bounds, torch.zeros(abs(bounds[1] - bounds[0])))


def test_memory_of_another_size_or_with_gaps() -> None:
    with pytest.raises(CheckpointError, match=r"w: .*4 elements.*3 contiguous"):
        Slice("w", (2, 3), 0, 3, torch.zeros(4))
    with pytest.raises(CheckpointError, match="not contiguous"):
        Slice("w", (2, 3), 0, 3, torch.zeros(6)[::2])


FILES = {"rank-00000.safetensors": FileRecord(64, "0" * 64), "rank-00001.safetensors": FileRecord(32, "f" * 64)}
ZERO, ONE = FILES


def manifest() -> Manifest:
    wte = TensorEntry("float32", (2, 3), (StoredPiece(ZERO, "wte[0:4]", 0, 4), StoredPiece(ONE, "wte[4:6]", 4, 6)))
    empty = TensorEntry("bfloat16", (0, 5))
    scalar = TensorEntry("float32", (), (StoredPiece(ZERO, "t[0:1]", 0, 1),))
    state = {"lr": [0.1, 1e-300], "text": "é"}
    return Manifest(7, {"param/wte": wte, "empty": empty, "t": scalar}, FILES, state, ({"seed": 1}, None), {"ranks": 2})


def test_json_there_and_back() -> None:
    text = manifest().to_json()
    assert Manifest.from_json(text) == manifest() and Manifest.from_json(text).to_json() == text
    assert json.loads(text)["tensors"]["param/wte"]["pieces"][1] == [ONE, "wte[4:6]", 4, 6]


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([(0, 4)], "missing: got no piece for 4 to 6"),
        ([(2, 6)], "missing: got no piece for 0 to 2"),
        ([(0, 2), (4, 6)], "missing: got no piece for 2 to 4"),
        ([], "missing: got no piece for 0 to 6"),
        ([(0, 4), (3, 6)], "twice: got elements 3 to 4 again"),
        ([(0, 6), (0, 6)], "twice: got elements 0 to 6 again"),
        ([(0, 6), (2, 3)], "twice: got elements 2 to 3 again"),
        ([(0, 7)], "outside"),
        ([(0, 6), (6, 6)], "outside"),
    ],
)
def test_coverage_faults_name_tensor_and_range(pieces: list[tuple[int, int]], message: str) -> None:
    entry = TensorEntry("float32", (2, 3), tuple(StoredPiece(ZERO, "k", a, b) for a, b in pieces))
    with pytest.raises(CheckpointError, match=message) as raised:
        check_coverage("param/wte", entry)
    assert raised.value.where == "param/wte"


def test_ranks_must_agree_about_a_tensor() -> None:
    one, other = TensorEntry("float32", (2, 3)), TensorEntry("float32", (3, 2))
    with pytest.raises(CheckpointError, match=r"2x3.*3x2"):
        same_tensor("w", [one, other])


Break = Callable[[dict[str, Any]], Any]

BREAKS: dict[str, Break] = {
    "format": lambda d: d.update(format=2),
    "no tensors": lambda d: d.pop("tensors"),
    "dtype": lambda d: d["tensors"]["t"].update(dtype="float31"),
    "negative shape": lambda d: d["tensors"]["t"].update(shape=[-1]),
    "piece short": lambda d: d["tensors"]["t"].update(pieces=[[ZERO, "t", 0]]),
    "piece gone": lambda d: d["tensors"]["param/wte"]["pieces"].pop(),
    "file not listed": lambda d: d["files"].pop(ONE),
    "path out": lambda d: d["files"].update({"../x.safetensors": d["files"][ONE]}),
    "absolute": lambda d: d["files"].update({"/etc/x.safetensors": d["files"][ONE]}),
    "pickle": lambda d: d["files"].update({"model.pt": d["files"][ONE]}),
    "hidden": lambda d: d["files"].update({".safetensors": d["files"][ONE]}),
    "tensors a list": lambda d: d.update(tensors=[]),
}


@pytest.mark.parametrize("name", BREAKS)
def test_anything_else_is_refused(name: str) -> None:
    document = json.loads(manifest().to_json())
    BREAKS[name](document)
    with pytest.raises(CheckpointError):
        Manifest.from_json(seal(json.dumps(document)))


def test_every_flipped_bit_is_found() -> None:
    content = manifest().to_json().encode()
    for at in range(len(content)):
        flipped = content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1 :]
        with pytest.raises((CheckpointError, UnicodeDecodeError)):
            Manifest.from_json(flipped.decode())


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"a":' * 100_000])
def test_text_that_is_no_manifest(text: str) -> None:
    for made in (text, seal(text)) if text.startswith("{") else (text,):
        with pytest.raises(CheckpointError, match="not a manifest"):
            Manifest.from_json(made)


def test_numbers_that_json_does_not_have_are_not_written() -> None:
    with pytest.raises(ValueError, match="JSON"):
        Manifest(1, {}, {}, state={"loss": float("nan")}).to_json()
