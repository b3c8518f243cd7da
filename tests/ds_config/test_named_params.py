"""What optimizers and schedulers take: defaults are of their kind, and torch knows the names that
are left to it."""

from __future__ import annotations

import pytest
import torch

from zero_trial.ds_config.params import OPTIMIZERS, SCHEDULERS, TORCH_OPTIMIZERS, TORCH_SCHEDULERS, KnownParams


@pytest.mark.parametrize("named", [*OPTIMIZERS.values(), *SCHEDULERS.values()], ids=lambda named: named.name)
def test_defaults_are_of_their_kind(named: KnownParams):
    for param in named.params.values():
        if param.default is not None:
            assert param.type.read(param.default).value == param.default
        assert not (param.required and param.default is not None)


def test_names_are_found_in_any_case():
    assert OPTIMIZERS["adamw"].name == "AdamW"
    assert SCHEDULERS["warmupcosinelr"].params["cos_min_ratio"].default == 0.0001


@pytest.mark.parametrize("name", sorted(set(TORCH_OPTIMIZERS) - {"Muon"}))
def test_torch_has_the_optimizers(name: str):
    assert hasattr(torch.optim, name)


@pytest.mark.parametrize("name", TORCH_SCHEDULERS)
def test_torch_has_the_schedulers(name: str):
    assert hasattr(torch.optim.lr_scheduler, name)
