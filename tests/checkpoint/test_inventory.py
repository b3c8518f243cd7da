"""What a checkpoint holds, in the model's words."""

from __future__ import annotations

from typing import Any

import pytest

from zero_trial.checkpoint.export import take_inventory
from zero_trial.checkpoint.format import FileRecord, Manifest, StoredPiece, TensorEntry

NAMES = (
    "param/blocks.10.w",
    "param/blocks.2.w",
    "buffer/mean",
    "state/exp_avg/blocks.2.w",
    "state/max/blocks.2.w",
    "rank0/x",
)


def manifest(names: tuple[str, ...] = NAMES, dtype: str = "float32", **state: Any) -> Manifest:
    tensors = {name: TensorEntry(dtype, (2, 3), (StoredPiece("a.safetensors", name, 0, 6),)) for name in names}
    return Manifest(3, tensors, {"a.safetensors": FileRecord(1, "0" * 64)}, state=state)


def test_parameters_buffers_and_their_state() -> None:
    found = take_inventory(manifest(aliases={"head.w": "blocks.2.w"}, dtypes={"blocks.2.w": "bfloat16"}))
    assert [(held.name, held.stored) for held in found.params] == [
        ("blocks.2.w", "param/blocks.2.w"),
        ("blocks.10.w", "param/blocks.10.w"),
    ]
    assert [held.name for held in found.buffers] == ["mean"]
    assert found.params[0].states == {"exp_avg": "float32", "max": "float32"} and found.params[1].states == {}
    assert [held.lives for held in found.params] == ["bfloat16", "float32"]
    assert [held.is_master for held in (*found.params, *found.buffers)] == [True, False, False]
    assert (found.elements, found.parts, dict(found.aliases)) == (12, 1, {"head.w": "blocks.2.w"})


@pytest.mark.parametrize(
    ("state", "lives"),
    [
        ({"ds_config": {"bf16": {"enabled": True}}}, "bfloat16"),
        ({"ds_config": {"fp16": {"enabled": True}, "bf16": {"enabled": False}}}, "float16"),
        ({"ds_config": {}}, "float32"),
        ({}, None),
    ],
)
def test_checkpoints_that_do_not_note_dtypes(state: dict[str, Any], lives: str | None) -> None:
    assert {held.lives for held in take_inventory(manifest(**state)).params} == {lives}


def test_whole_numbers_are_no_masters() -> None:
    (held,) = take_inventory(manifest(("param/n",), dtype="int64", dtypes={})).params
    assert held.lives == "int64" and not held.is_master


def test_parts() -> None:
    found = take_inventory(manifest(("part0of2/param/w", "part1of2/param/w", "part1of2/buffer/b")))
    assert found.parts == 2
    assert [[held.stored for held in found.in_part(part)] for part in (0, 1)] == [
        ["part0of2/param/w"],
        ["part1of2/param/w", "part1of2/buffer/b"],
    ]
