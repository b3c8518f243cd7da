"""Changes of a model's parameters after its engine was built, and parameters without a gradient."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero_trial
from zero_trial import Engine
from zero_trial.errors import TrialError

CONFIG: dict[str, Any] = {"train_batch_size": 4, "optimizer": {"type": "SGD", "params": {"lr": 0.5}}}


FRESH = r"parameters that were added after its engine was built, and that are not trained: got "


def make_engine(stage: int = 0) -> Engine:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].bias.requires_grad_(False)
    optimizer = {"type": "AdamW", "params": {"lr": 0.1}}
    config = {"train_batch_size": 4, "optimizer": optimizer, "zero_optimization": {"stage": stage}}
    return zero_trial.initialize(model=model, config=config)[0]


class Adapted(nn.Module):
    """A layer with another one beside it, as LoRA does it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.adapter = layer, nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.adapter(x)


CHANGES: dict[str, tuple[Callable[[nn.Module], object], str]] = {
    "a new layer": (lambda model: model.append(nn.Linear(4, 4)), "2.weight, 2.bias"),  # type: ignore[operator]
    "an adapter": (lambda model: setattr(model, "1", Adapted(model.get_submodule("1"))), "1.adapter.weight"),
    "a parameter": (lambda model: setattr(model[1], "scale", nn.Parameter(torch.ones(4))), "1.scale"),  # type: ignore[index]
    "tied weights torn": (
        lambda model: setattr(model[1], "weight", nn.Parameter(torch.ones(4, 4))),  # type: ignore[index]
        "1.weight",
    ),
    "a tie": (lambda model: setattr(model[1], "weight", model[0].weight), "1.weight is 0.weight"),  # type: ignore[index]
    "a shared layer": (lambda model: setattr(model, "1", model.get_submodule("0")), "1.bias is 0.bias, 1.weight is"),
    "another dtype": (lambda model: model.double(), "0.weight, 1.weight, 1.bias"),
    "many": (lambda model: model.append(nn.Sequential(*map(nn.Linear, [1] * 4, [1] * 4))), "2.0.weight.* and 5 more"),  # type: ignore[operator]
    "unfrozen": (lambda model: model.requires_grad_(True), "0.bias"),
}


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_is_an_error(stage: int, change: str, tmp_path: Path) -> None:
    engine = make_engine(stage)
    engine.backward(engine(torch.ones(4, 4)).sum())
    make, names = CHANGES[change]
    if stage == 3 and change == "another dtype":
        return  # of freed parameters that is an error at once
    with torch.no_grad():
        make(engine.module)
    for where, act in {
        "step": engine.step,
        "eval": engine.eval,
        "train": engine.train,
        "save_checkpoint": lambda: engine.save_checkpoint(tmp_path),
    }.items():
        with pytest.raises(TrialError, match=f"engine.{where}: .*got {names}"):
            act()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("stage", [0, 3])
def test_a_frozen_part_that_comes_later_is_no_fault(stage: int, tmp_path: Path) -> None:
    """A moving average, say: it computes, no one is to train it, and a checkpoint has it."""
    engine = make_engine(stage)
    engine.module.add_module("average", nn.Linear(4, 4).requires_grad_(False))
    engine.train()
    engine.save_checkpoint(tmp_path)
    average = engine.module.average.weight
    assert isinstance(average, torch.Tensor)
    saved = average.clone()
    average.zero_()
    engine.load_checkpoint(tmp_path)
    assert torch.equal(average, saved)
    # under the name of a trained one: the checkpoint would hold both
    engine.module[1] = nn.Linear(4, 4).requires_grad_(False)
    with pytest.raises(TrialError, match=FRESH + "1.weight, 1.bias"):
        engine.save_checkpoint(tmp_path)


@pytest.mark.parametrize("stage", [0, 3])
def test_what_is_no_new_tie(stage: int, tmp_path: Path) -> None:
    """Ties of before, another name for a layer, a layer that was taken out, one that moved up."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    config = {"train_batch_size": 4, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": stage}}
    engine, batch = zero_trial.initialize(model=model, config=config)[0], torch.ones(4, 4)
    engine.module.alias = engine.module[1]
    engine.backward(engine(batch).mean())
    engine.step()
    engine.save_checkpoint(tmp_path)
    del engine.module.alias, engine.module[0]
    assert engine(batch).shape == (4, 4)
    assert [name for name, _ in engine.module.named_parameters()] == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_a_parameter_that_is_frozen_for_a_while_is_no_fault() -> None:
    engine = make_engine()
    engine.module[1].weight.requires_grad_(False)
    engine.eval()
    engine.module[1].weight.requires_grad_(True)
    engine.train()


class Branches(nn.Module):
    """Two layers, of which a forward uses those that it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(3, 1), nn.Linear(3, 1)

    def forward(self, x: torch.Tensor, *names: str) -> torch.Tensor:
        return torch.stack([getattr(self, name)(x).sum() for name in names]).sum()


def branches(stage: int, ignore: bool = False, **config: Any) -> zero_trial.Engine:
    zero = {"stage": stage, "param_persistence_threshold": 0, "ignore_unused_parameters": ignore}
    return zero_trial.initialize(model=Branches(), config=CONFIG | {"zero_optimization": zero} | config)[0]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_unused_parameter_ends_the_step_where_ds_config_forbids_it(stage: int) -> None:
    found, x = branches(stage), torch.ones(4, 3)
    found.backward(found(x, "left", "right"))
    found.step()
    before = found.module_state_dict()
    found.backward(found(x, "right"))
    with pytest.raises(
        TrialError, match=r"engine\.step: unused parameters.* got left\.weight, left\.bias since step 1"
    ):
        found.step()
    assert all(torch.equal(before[name], value) for name, value in found.module_state_dict().items())
    found.zero_grad()
    found.backward(found(x, "left", "right"))
    found.step()
    assert found.global_steps == 2


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_parameter_is_used_if_one_micro_batch_uses_it(stage: int) -> None:
    found, x = branches(stage, gradient_accumulation_steps=2), torch.ones(2, 3)
    for name in ("left", "right"):
        found.backward(found(x, name))
        found.step()
    assert found.global_steps == 1


@pytest.mark.parametrize(("stage", "accumulation"), [(0, 1), (1, 2), (2, 2), (3, 1)])
def test_unused_parameters_are_named_once(stage: int, accumulation: int, caplog: pytest.LogCaptureFixture) -> None:
    """The first step that has some says so: a gradient of 0 is not torch's None."""

    def step(*used: str) -> list[str]:
        caplog.clear()
        for turn in range(accumulation):
            found.backward(found(x, *(used if turn == 0 else used[-1:])))
            found.step()
        return [line for line in caplog.messages if "no gradient has reached" in line]

    caplog.set_level(logging.INFO, logger="zero_trial")
    found, x = branches(stage, ignore=True, gradient_accumulation_steps=accumulation), torch.ones(4 // accumulation, 3)
    assert step("left", "right") == []
    (line,) = step("right")
    assert "left.weight, left.bias in a step" in line and "weight decay" in line and step("right") == []
    assert found.global_steps == 3
    caplog.clear()
    for _ in range(accumulation):
        found.backward(found(x, "left", "right"))
        found.module.zero_grad()
        found.step()
    assert "no gradient has reached any of the" in caplog.text  # that is another line


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_gradient_that_user_code_takes_away_is_named(stage: int, caplog: pytest.LogCaptureFixture) -> None:
    """torch would skip the parameter."""
    caplog.set_level(logging.INFO, logger="zero_trial")
    found, x = branches(stage, ignore=True), torch.ones(4, 3)
    for taken in (False, True):
        found.backward(found(x, "left", "right"))
        if taken:
            found.module.left.weight.grad = None
        found.step()
        lines = [line for line in caplog.messages if "no gradient has reached" in line]
        assert ["left.weight in a step" in line for line in lines] == [True] * taken


def test_a_parameter_that_was_frozen_in_training_is_named(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="zero_trial")
    found, x = branches(1, ignore=True), torch.ones(4, 3)
    found.module.left.requires_grad_(False)
    found.backward(found(x, "left", "right"))
    found.step()
    assert any("left.weight, left.bias (2 frozen after initialize())" in line for line in caplog.messages)
