"""Copies of a model without values."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from tests.support.models import TinyLM
from zero_trial.planning.blueprint import Blueprint, NotCopyable


def test_a_copy_has_shapes_and_no_values_and_the_model_stays_as_it_is() -> None:
    model = TinyLM()
    before = [param.clone() for param in model.parameters()]
    blueprint = Blueprint(model)
    assert blueprint.parameters == sum(param.numel() for param in model.parameters())
    twin = blueprint.options(fake=True)["model"]
    assert twin is not model and [p.shape for p in twin.parameters()] == [p.shape for p in model.parameters()]
    assert twin.head.weight is twin.embed.weight  # tied in the model, tied in the copy
    assert type(next(twin.parameters()).data).__name__ == "FakeTensor"
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_frozen_parameters_buffers_and_optimizers_keep_their_places() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model[0].weight.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    made = Blueprint(model, {"optimizer": optimizer}).options(fake=False)
    twin, other = made["model"], made["optimizer"]
    assert not twin[0].weight.requires_grad and twin[1].running_mean.shape == (4,)
    assert {id(p) for group in other.param_groups for p in group["params"]} == {
        id(p) for p in twin.parameters() if p.requires_grad
    }
    assert other.param_groups[0]["lr"] == 0.5
    assert all(torch.isfinite(p).all() for p in twin.parameters())


def test_a_model_built_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = nn.Linear(1 << 20, 1 << 12)
    twin = Blueprint(model).options(fake=True)["model"]
    assert twin.weight.device.type == "cpu" and twin.weight.shape == (1 << 12, 1 << 20)


def test_batches_keep_their_form() -> None:
    blueprint = Blueprint(nn.Linear(2, 2))
    x = torch.zeros(3, 2)
    batch = blueprint.batch({"x": x, "again": (x, 5)}, fake=True)
    assert batch["x"] is batch["again"][0] and batch["again"][1] == 5
    assert batch["x"].shape == (3, 2) and type(batch["x"]).__name__ == "FakeTensor"
    assert blueprint.batch(x, fake=False) is x


def test_what_cannot_be_copied_is_said() -> None:
    model = nn.Linear(2, 2)
    model.lock = threading.Lock()
    with pytest.raises(NotCopyable, match="Linear: the model cannot be copied"):
        Blueprint(model)
    with pytest.raises(NotCopyable, match="read only once"):
        Blueprint(nn.Linear(2, 2), {"model_parameters": iter([])})
