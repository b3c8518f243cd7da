"""The manifest: JSON there and back, and every way in which it can be wrong, named."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from zero_trial.checkpoint.format import (
    FileRecord,
    Manifest,
    StoredPiece,
    TensorEntry,
    check_coverage,
    same_tensor,
    seal,
)
from zero_trial.errors import CheckpointError

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
    assert Manifest.from_json(text) == manifest()
    assert Manifest.from_json(text).to_json() == text
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


def test_pieces_may_come_in_any_order() -> None:
    check_coverage("w", TensorEntry("float32", (6,), (StoredPiece(ONE, "k", 4, 6), StoredPiece(ZERO, "k", 0, 4))))


def test_ranks_must_agree_about_a_tensor() -> None:
    one, other = TensorEntry("float32", (2, 3)), TensorEntry("float32", (3, 2))
    with pytest.raises(CheckpointError, match=r"2x3.*3x2"):
        same_tensor("w", [one, other])


Break = Callable[[dict[str, Any]], Any]

BREAKS: dict[str, Break] = {
    "format": lambda d: d.update(format=2),
    "no tensors": lambda d: d.pop("tensors"),
    "step text": lambda d: d.update(step="7"),
    "step bool": lambda d: d.update(step=True),
    "dtype": lambda d: d["tensors"]["t"].update(dtype="float31"),
    "negative shape": lambda d: d["tensors"]["t"].update(shape=[-1]),
    "piece short": lambda d: d["tensors"]["t"].update(pieces=[[ZERO, "t", 0]]),
    "piece gone": lambda d: d["tensors"]["param/wte"]["pieces"].pop(),
    "file not listed": lambda d: d["files"].pop(ONE),
    "sha short": lambda d: d["files"][ONE].update(sha256="abc"),
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


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"a":' * 100_000, '{"format": 1, "format": 1}'])
def test_text_that_is_no_manifest(text: str) -> None:
    for made in (text, seal(text)) if text.startswith("{") else (text,):
        with pytest.raises(CheckpointError, match="not a manifest"):
            Manifest.from_json(made)


def test_numbers_that_json_does_not_have_are_not_written() -> None:
    with pytest.raises(ValueError, match="JSON"):
        Manifest(1, {}, {}, state={"loss": float("nan")}).to_json()
