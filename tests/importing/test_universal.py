"""What DeepSpeed's converter leaves, one folder per parameter; whole checkpoints of it are in test_deepspeed.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.importing.synthetic import model_content
from zero_trial.errors import CheckpointError
from zero_trial.importing.deepspeed import read_universal
from zero_trial.importing.deepspeed_files import ModelStates
from zero_trial.importing.imported import ImportOptions, fresh_state


def put(zero: Path, name: str, **kinds: Any) -> None:
    (zero / name).mkdir(parents=True)
    for kind, value in kinds.items():
        torch.save(value, zero / name / f"{kind}.pt")


def read(zero: Path, with_optimizer: bool = True) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    content = model_content({"a": torch.zeros(2, 2), "b": torch.zeros(3)}, param_shapes=[{"a": (2, 2)}, {"b": (3,)}])
    wishes, state = ImportOptions(with_optimizer), fresh_state()
    state["counters"]["global_steps"] = 7
    found = read_universal(zero, ModelStates([content], wishes, "test.pt"), wishes, state, [])
    return {part.name: part.tensor for part in found}, state


def test_both_ways_of_writing_a_tensor(tmp_path: Path) -> None:
    """In a dict with the axis of its parts, and, from stage 3, flat and bare."""
    put(
        tmp_path,
        "a",
        fp32={"cat_dim": 0, "param": torch.ones(2, 2)},
        exp_avg={"param": torch.full((2, 2), 2.0)},
        step=torch.tensor(4.0),
    )
    put(tmp_path, "b", fp32=torch.arange(3.0), exp_avg=torch.zeros(3))
    groups = [{"lr": 0.1, "params": [0]}, {"lr": 0.2, "step": 5, "params": [1]}]
    torch.save({"param_groups": groups}, tmp_path / "optimizer_state.pt")
    found, state = read(tmp_path)
    assert found.keys() == {"param/a", "state/exp_avg/a", "param/b", "state/exp_avg/b"}
    assert torch.equal(found["state/exp_avg/a"], torch.full((2, 2), 2.0)) and torch.equal(
        found["param/b"], torch.arange(3.0)
    )
    assert state["scalars"] == {"0": {"step": 4.0}, "1": {"step": 5.0}} and state["kinds"] == ["exp_avg"]
    assert [group["lr"] for group in state["groups"]] == [0.1, 0.2]
    assert read(tmp_path, with_optimizer=False)[0].keys() == {"param/a", "param/b"}


def test_a_step_that_stands_nowhere_is_the_number_of_steps(tmp_path: Path) -> None:
    put(tmp_path, "a", fp32=torch.zeros(4), exp_avg=torch.zeros(4))
    put(tmp_path, "b", fp32=torch.zeros(3), exp_avg=torch.zeros(3))
    _, state = read(tmp_path)
    assert state["scalars"] == {"0": {"step": 7.0}, "1": {"step": 7.0}} and len(state["groups"]) == 2


def test_folders_with_a_prefix(tmp_path: Path) -> None:
    put(tmp_path, "module.a", fp32=torch.ones(2))
    put(tmp_path, "b", fp32=torch.zeros(1))
    content = model_content(
        {"module.a": torch.zeros(2), "b": torch.zeros(1)}, param_shapes=[{"module.a": (2,), "b": (1,)}]
    )
    wishes, state = ImportOptions(strip="module."), fresh_state()
    found = read_universal(tmp_path, ModelStates([content], wishes, "test.pt"), wishes, state, [])
    assert {part.name for part in found} == {"param/a", "param/b"}


def test_what_does_not_fit(tmp_path: Path) -> None:
    put(tmp_path, "a", fp32=torch.zeros(4))
    with pytest.raises(CheckpointError, match=r"b: there are no values of a parameter: got no fp32\.pt"):
        read(tmp_path)
    put(tmp_path, "b", fp32=torch.zeros(4))
    with pytest.raises(CheckpointError, match=r"not this parameter's state: got shape \(4,\), expected \(3,\)"):
        read(tmp_path)
    torch.save([1], tmp_path / "optimizer_state.pt")
    with pytest.raises(CheckpointError, match="not a dict"):
        read(tmp_path)
