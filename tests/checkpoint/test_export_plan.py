"""What an export writes: which weights, in which dtype, into which file."""

from __future__ import annotations

import pytest
import torch

from tests.checkpoint.test_inventory import manifest
from zero_trial.checkpoint.export import (
    Inventory,
    WeightSource,
    describe_dtypes,
    exported_dtype,
    plan_export,
    take_inventory,
)
from zero_trial.errors import CheckpointError, ConfigError

BF16 = {"dtypes": {"blocks.2.w": "bfloat16", "blocks.10.w": "bfloat16"}}


def inventory(**state: object) -> Inventory:
    return take_inventory(manifest(**state))


def test_masters_are_what_is_taken_unless_the_models_weights_are_asked_for() -> None:
    plan = plan_export(inventory(**BF16))
    assert [(item.name, item.dtype) for item in plan.items] == [
        ("blocks.2.w", torch.float32),
        ("blocks.10.w", torch.float32),
        ("mean", torch.float32),
    ]
    assert plan.took == "float32 masters of 2 of 2 parameters; the model computes in bfloat16"
    plan = plan_export(inventory(**BF16), weights=WeightSource.MODEL)
    assert {item.name: item.dtype for item in plan.items} == {
        "blocks.2.w": torch.bfloat16,
        "blocks.10.w": torch.bfloat16,
        "mean": torch.float32,
    }
    assert plan.took == "weights as the model computes with them, bfloat16, rounded from their masters"
    assert describe_dtypes(plan.items) == "bfloat16, float32"
    assert plan_export(inventory(dtypes={})).took == (
        "weights as they are stored, float32; there are no masters beside them"
    )
    assert "does not say in which dtype" in plan_export(inventory()).took
    assert plan_export(inventory(without_frozen=True)).took.endswith(
        "; frozen parameters were left out when it was saved"
    )


def test_a_dtype_for_all_comes_last() -> None:
    plan = plan_export(inventory(**BF16), weights=WeightSource.MODEL, dtype=torch.float32)
    assert {(item.through, item.dtype) for item in plan.items if item.name != "mean"} == {
        (torch.bfloat16, torch.float32)
    }
    whole = take_inventory(manifest(("buffer/n",), dtype="int64"))
    assert plan_export(whole, dtype=torch.bfloat16).items[0].dtype == torch.int64


def test_tied_names_of_what_is_written() -> None:
    aliases = {"head": "blocks.2.w", "gone": "left.out", "mean": "blocks.2.w"}
    assert plan_export(inventory(aliases=aliases)).aliases == {"head": "blocks.2.w"}


@pytest.mark.parametrize(("limit", "counts"), [(None, [3]), (1, [1, 1, 1]), (48, [2, 1]), (71, [2, 1]), (72, [3])])
def test_shards_hold_at_most_the_limit_or_one_tensor(limit: int | None, counts: list[int]) -> None:
    plan = plan_export(inventory(), shard_bytes=limit)  # 24 bytes each
    assert [len(shard) for shard in plan.shards] == counts and plan.bytes == 72


def test_every_tensor_begins_at_a_multiple_of_its_elements_size() -> None:
    plan = plan_export(inventory(dtypes={"blocks.2.w": "bfloat16"}), weights=WeightSource.MODEL)
    assert [item.name for item in plan.shards[0]] == ["blocks.10.w", "mean", "blocks.2.w"]


def test_parts_are_exported_one_by_one() -> None:
    parted = take_inventory(manifest(("part0of2/param/w", "part1of2/param/w")))
    with pytest.raises(
        ConfigError, match=r"parallel itself.*got 2 parts\. Export each by itself: --part 0 to --part 1"
    ):
        plan_export(parted)
    assert [plan_export(parted, part=part).items[0].stored for part in (0, 1)] == [
        "part0of2/param/w",
        "part1of2/param/w",
    ]
    for part, found in ((2, parted), (-1, parted), (1, inventory())):
        with pytest.raises(ConfigError, match="no such part"):
            plan_export(found, part=part)


def test_nothing_to_write() -> None:
    with pytest.raises(CheckpointError, match="no weights"):
        plan_export(take_inventory(manifest(("rank0/x",))))


def test_dtypes_by_name() -> None:
    words = {"keep": None, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    assert {word: exported_dtype(word) for word in words} == words
    with pytest.raises(ConfigError, match="expected keep, fp32"):
        exported_dtype("int8")
