"""A layer that is put into a model after its engine was made is named, before anything is lost by it."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from torch import nn

import zero_trial
from zero_trial.engine.engine import Engine, ParameterCheck
from zero_trial.errors import TrialError

FRESH = r"parameters that were added after its engine was built, and that are not trained: got "


def make_engine(stage: int = 0) -> Engine:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].bias.requires_grad_(False)
    optimizer = {"type": "AdamW", "params": {"lr": 0.1}}
    config = {"train_batch_size": 4, "optimizer": optimizer, "zero_optimization": {"stage": stage}}
    return zero_trial.initialize(model=model, config=config)[0]


@pytest.mark.parametrize("stage", range(4))
def test_a_replaced_layer(stage: int, tmp_path: Path) -> None:
    """Without this it computed with the new weight, trained the old one, and the checkpoint had both."""
    engine = make_engine(stage)
    engine.eval()
    engine.train()
    engine.module[1] = nn.Linear(4, 4)
    with pytest.raises(TrialError, match="engine.eval: the model has " + FRESH + "1.weight, 1.bias"):
        engine.eval()
    with pytest.raises(TrialError, match="engine.save_checkpoint: the model has " + FRESH + "1.weight, 1.bias"):
        engine.save_checkpoint(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("stage", [0, 3])
def test_a_frozen_part_that_comes_later_is_no_fault(stage: int, tmp_path: Path) -> None:
    """A moving average, say: it computes, nobody is to train it, and a checkpoint has it."""
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


def test_many_are_counted() -> None:
    engine = make_engine()
    engine.module.append(nn.Sequential(*(nn.Linear(1, 1) for _ in range(4))))
    with pytest.raises(TrialError, match=r"2.0.weight, 2.0.bias, 2.1.weight and 5 more"):
        engine.train()


def test_what_was_frozen_then_stays_frozen() -> None:
    engine = make_engine()
    engine.module[0].bias.requires_grad_(True)
    with pytest.raises(TrialError, match=r"unfrozen after the engine was built, and are not trained: got 0.bias"):
        engine.eval()


def test_a_parameter_that_is_frozen_for_a_while_is_no_fault() -> None:
    engine = make_engine()
    engine.module[1].weight.requires_grad_(False)
    engine.eval()
    engine.module[1].weight.requires_grad_(True)
    engine.train()


def test_another_value_in_the_same_parameter_is_no_fault() -> None:
    engine = make_engine(3)
    engine.module.load_state_dict({name: torch.ones_like(value) for name, value in engine.module.state_dict().items()})
    engine.train()


def test_nothing_is_kept_alive() -> None:
    module = nn.ModuleDict({"a": nn.Linear(2, 2)})
    roster = ParameterCheck(module)
    gone = [torch.utils.weak.WeakTensorKeyDictionary({module["a"].weight: True})]
    del module["a"]
    gc.collect()
    assert len(gone[0]) == 0
    roster.check("here")
