"""The flat buffers of stages 1 to 3 in all forms that DeepSpeed has given them, made here by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.importing.synthetic import stored
from zero_trial.errors import CheckpointError
from zero_trial.importing.imported import ImportOptions
from zero_trial.importing.torch_file import UnknownObject
from zero_trial.importing.zero_shards import FlatGroup, flat_groups, one_number, param_groups, stage_of

SHAPES = {"a": (3,), "b": (2, 2)}  # 7 elements: 4 and 3 on two ranks, one of padding
WHOLE = torch.arange(8.0)


def rank_of_stage_2(rank: int, *, lean: bool = True, **more: Any) -> dict[str, Any]:
    part = WHOLE[rank * 4 : rank * 4 + 4]
    masters = part[:3] if lean and rank == 1 else part
    state = {"step": stored(torch.tensor(5.0)), "exp_avg": stored(part + 100)}
    return {
        "zero_stage": UnknownObject("deepspeed.ZeroStageEnum", (2,)),
        "partition_count": [2],
        "single_partition_of_fp32_groups": [stored(masters)],
        "base_optimizer_state": {"state": {0: state}, "param_groups": [{"lr": 0.1, "params": [0]}]},
    } | more


MODEL = {"param_shapes": [SHAPES]}


def groups_of(optimizers: list[dict[str, Any]], model: dict[str, Any] = MODEL) -> list[FlatGroup]:
    return flat_groups(model, optimizers, ImportOptions(), "test")


def joined(groups: list[FlatGroup], ranks: int) -> dict[str, torch.Tensor]:
    """Every tensor put together from its slices."""
    found: dict[str, torch.Tensor] = {}
    for rank in range(ranks):
        for group in groups:
            for part in group.slices(rank, True, "test"):
                whole = found.setdefault(part.name, torch.full(part.shape, -1.0))
                whole.view(-1)[part.start : part.stop] = part.tensor
    return found


def expect(found: dict[str, torch.Tensor], add: float = 100) -> None:
    assert torch.equal(found["param/a"], WHOLE[:3]) and torch.equal(found["param/b"], WHOLE[3:7].reshape(2, 2))
    assert torch.equal(found["state/exp_avg/a"], WHOLE[:3] + add) and torch.equal(
        found["state/exp_avg/b"].view(-1), WHOLE[3:7] + add
    )


@pytest.mark.parametrize("lean", [True, False])
def test_stage_2(lean: bool) -> None:
    (group,) = found = groups_of([rank_of_stage_2(rank, lean=lean) for rank in range(2)])
    expect(joined(found, 2))
    assert group.scalars == {"step": 5.0} and group.group == 0
    assert not any(part.name.startswith("state") for part in group.slices(0, False, "test"))


def test_the_elastic_form() -> None:
    """State in a list, without padding and without hyperparameters."""
    rows = []
    for rank in range(2):
        part = WHOLE[rank * 4 : rank * 4 + 4 - rank]
        rows.append(rank_of_stage_2(rank, base_optimizer_state=[{"exp_avg": stored(part + 100)}]))
    expect(joined(groups_of(rows), 2))
    assert param_groups(rows[0], "here") == []


def test_deepspeeds_bf16_optimizer_does_not_say_its_stage() -> None:
    rows = [rank_of_stage_2(rank, lean=False) for rank in range(2)]
    for row in rows:
        del row["zero_stage"]
    assert stage_of(rows[0]) == 1
    expect(joined(groups_of(rows), 2))


def test_parameters_that_begin_at_aligned_places() -> None:
    flat = torch.tensor([0.0, 1, 2, -9, 3, 4, 5, 6])
    rows = [
        rank_of_stage_2(
            rank,
            single_partition_of_fp32_groups=[stored(flat[rank * 4 : rank * 4 + 4])],
            base_optimizer_state={
                "state": {0: {"exp_avg": stored(flat[rank * 4 : rank * 4 + 4] + 100)}},
                "param_groups": [],
            },
            param_alignment_paddings=[[1, 0]],
        )
        for rank in range(2)
    ]
    expect(joined(groups_of(rows), 2))


def rank_of_stage_3(rank: int) -> dict[str, Any]:
    """Each parameter in two halves: a is 2 + 1 and one of padding; the second buffer is of the same group."""
    first, second = torch.tensor([[0.0, 1], [2, -9]])[rank], torch.tensor([[3.0, 4], [5, 6]])[rank]
    state = {index: {"exp_avg": stored(part + 100)} for index, part in enumerate((first, second))}
    return {
        "zero_stage": 3,
        "partition_count": 2,
        "fp32_flat_groups": [stored(first), stored(second)],
        "optimizer_state_dict": {"state": state, "param_groups": [{"lr": 0.1, "step": 4, "params": [0, 1]}]},
    }


def test_stage_3_in_several_buffers() -> None:
    found = groups_of([rank_of_stage_3(rank) for rank in range(2)], {"param_shapes": [{"a": (3,)}, {"b": (2, 2)}]})
    expect(joined(found, 2))
    assert [group.group for group in found] == [0, 0]
    assert [group.scalars for group in found] == [{"step": 4.0}, {"step": 4.0}]


def test_the_step_of_a_tensor_goes_before_the_groups() -> None:
    """Newer FusedAdam leaves a 0 in the group."""
    rows = [rank_of_stage_2(rank) for rank in range(2)]
    for row in rows:
        row["base_optimizer_state"]["param_groups"][0]["step"] = 0
    assert groups_of(rows)[0].scalars == {"step": 5.0}


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"partition_count": [3]}, "some ranks' files are missing"),
        ({"partition_count": 4}, "some ranks' files are missing"),
        ({"zero_stage": 7}, "unknown ZeRO stage"),
        ({"zero_stage": UnknownObject("x")}, "unknown ZeRO stage"),
        (
            {"single_partition_of_fp32_groups": None},
            "single_partition_of_fp32_groups: unexpected content: got NoneType",
        ),
        ({"single_partition_of_fp32_groups": []}, "do not match the model's shapes"),
        ({"single_partition_of_fp32_groups": [UnknownObject("my.Tensor")]}, r"unexpected content: got my\.Tensor"),
        ({"single_partition_of_fp32_groups": [stored(torch.zeros(9))]}, "do not fit the parameters' shapes"),
        ({"base_optimizer_state": {"state": {0: {"exp_avg": stored(torch.zeros(2))}}}}, "a flat buffer is too short"),
        ({"base_optimizer_state": {"state": {0: {"other": stored(torch.zeros(4))}}}}, "ranks have different kinds"),
    ],
)
def test_what_does_not_fit(change: dict[str, Any], word: str) -> None:
    rows = [rank_of_stage_2(rank) for rank in range(2)]
    rows[0] |= change
    if "short" in word:
        rows[1]["base_optimizer_state"] = change["base_optimizer_state"]
    with pytest.raises(CheckpointError, match=word):
        joined(groups_of(rows), 2)


def test_shapes_of_another_kind() -> None:
    with pytest.raises(CheckpointError, match="param_shapes, a: unexpected content: got int 3"):
        groups_of([rank_of_stage_2(rank) for rank in range(2)], {"param_shapes": [{"a": 3}]})


def test_numbers() -> None:
    assert one_number("step", stored(torch.tensor(3.0))) == {"step": 3.0}
    assert one_number("step", 3) == {"step": 3.0}
    assert one_number("step", True) == one_number("step", "3") == one_number("x", stored(torch.zeros(2))) == {}
