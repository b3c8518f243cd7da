"""Arguments of optimizers and schedulers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zero_trial.ds_config.params import OPTIMIZERS, SCHEDULERS, TORCH_OPTIMIZERS, TORCH_SCHEDULERS, KnownParams
from zero_trial.ds_config.reader import read_ds_config
from zero_trial.errors import ConfigError


def read(section: str, name: str, given: dict[str, Any]) -> SimpleNamespace:
    """The name, the arguments, the faults and the warnings."""
    try:
        config = read_ds_config({section: {"type": name, "params": given}})
    except ConfigError as error:
        return SimpleNamespace(faults=error.faults or (error,))
    found = getattr(config, section)
    return SimpleNamespace(name=found.type, values=found.params, faults=(), warnings=list(config.warnings))


def test_known_names_are_strict_and_any_case():
    found = read("optimizer", "ADAMW", {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0})
    assert (found.name, found.values) == ("AdamW", {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.0})
    assert not found.faults and not found.warnings
    assert read("scheduler", "warmuplr", {"warmup_num_steps": 5}).name == "WarmupLR"


OPTIMIZER_FAULTS: list[tuple[str, dict[str, Any], str]] = [
    ("Adam", {"lrr": 1}, 'params.lrr: Adam has no such parameter. Did you mean "lr"?'),
    ("Lion", {"eps": 1}, "params.eps: Lion has no such parameter. It takes betas, lr, set_grad_none, weight_decay."),
    ("Adam", {"betas": [0.9, 1.0]}, "params.betas: wrong value: got [0.9, 1.0], expected a list of 2 numbers"),
    ("OneBitLamb", {"eps_inside_sqrt": True}, "params.eps_inside_sqrt: eps is added outside the square root: got true"),
    ("SGD", {"lr": "fast"}, 'params.lr: wrong value: got "fast", expected a number of at least 0'),
    ("SGD", {"max_grad_norm": 2}, "params.max_grad_norm: gradient clipping is not a parameter of the optimizer"),
    ("Admaw", {}, 'type: no such optimizer: got "Admaw". Did you mean "AdamW"?'),
    ("sgd", {}, 'type: no such optimizer: got "sgd". Did you mean "SGD"?'),
    ("MuAdam", {}, "type: MuAdam is not supported: it "),
    ("musgd", {}, "type: musgd is not supported: it "),
    ("LBFGS", {}, "type: LBFGS is not supported: it "),
]
SCHEDULER_FAULTS: list[tuple[str, dict[str, Any], str]] = [
    (
        "WarmupDecayLR",
        {},
        "params.total_num_steps: missing: WarmupDecayLR requires it: expected a positive integer. Add",
    ),
    ("WarmUpLr2", {}, 'type: no such scheduler: got "WarmUpLr2". Did you mean "WarmupLR"?'),
    ("WarmupLR", {"warmup_type": "cubic"}, 'params.warmup_type: wrong value: got "cubic", expected one of "log", "lin'),
]


@pytest.mark.parametrize(
    ("section", "name", "given", "fault"),
    [*(("optimizer", *row) for row in OPTIMIZER_FAULTS), *(("scheduler", *row) for row in SCHEDULER_FAULTS)],
)
def test_faults(section: str, name: str, given: dict[str, Any], fault: str):
    (found,) = read(section, name, given).faults
    assert str(found).startswith(f"{section}.{fault}")


def test_torchs_own_classes_take_what_torch_takes():
    found = read("optimizer", "SGD", {"lr": "1e-2", "momentum": 0.9, "nesterov": True, "dampening": "0", "x": [1, 2]})
    assert found.values == {"lr": 0.01, "momentum": 0.9, "nesterov": True, "dampening": "0", "x": (1, 2)}
    assert found.warnings == ["optimizer.params.lr: '1e-2' is a string in YAML 1.1. Write 0.01."]
    assert read("scheduler", "StepLR", {"step_size": "3e0"}).values == {"step_size": 3.0}


def test_an_unknown_name_is_left_to_torch():
    found = read("optimizer", "Zyx", {})
    assert not found.faults
    assert found.warnings == [
        'optimizer.type: "Zyx" is not known here; it is looked up in torch when the engine is built.'
    ]
    assert not read("optimizer", "muon", {}).warnings


def test_one_bit_names_are_trained_as_their_base():
    found = read("optimizer", "OneBitAdam", {"freeze_step": 10, "lr": 1e-3})
    assert not found.faults
    assert found.warnings == ["optimizer.type: gradients are not compressed; trained as AdamW."]


@pytest.mark.parametrize("named", [*OPTIMIZERS.values(), *SCHEDULERS.values()], ids=lambda named: named.name)
def test_defaults_are_of_their_kind(named: KnownParams):
    for param in named.params.values():
        if param.default is not None:
            assert param.type.read(param.default).value == param.default
        assert not (param.required and param.default is not None)


def test_torch_has_the_classes_that_are_left_to_it():
    assert [name for name in TORCH_OPTIMIZERS if name != "Muon" and not hasattr(torch.optim, name)] == []
    assert [name for name in TORCH_SCHEDULERS if not hasattr(torch.optim.lr_scheduler, name)] == []
