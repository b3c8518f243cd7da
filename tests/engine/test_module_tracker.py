"""Which module an operation belongs to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from zero_trial.engine.flop_count import ModuleTracker


class Products(TorchDispatchMode):
    """Where every matrix product was made, in forward and in backward."""

    def __init__(self, tracker: ModuleTracker) -> None:
        super().__init__()
        self.tracker = tracker
        self.forward: list[str] = []
        self.backward: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in ("aten::mm", "aten::addmm"):
            innermost = max(self.tracker.parents - {"Global"}, key=len, default="-")
            in_backward = torch._C._current_graph_task_id() != -1
            (self.backward if in_backward else self.forward).append(innermost)
        return func(*args, **(kwargs or {}))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.body = nn.ModuleList([nn.Linear(4, 4, bias=False) for _ in range(2)])
        self.drop = nn.Dropout(0.0)

    def forward(self, x: torch.Tensor, recompute: bool = False) -> torch.Tensor:
        x = self.drop(self.first(x))
        for layer in self.body:
            # tanh needs its own output in backward, so that the product is really done again
            x = self.drop(
                checkpoint(lambda y, layer=layer: layer(y).tanh(), x, use_reentrant=False) if recompute else layer(x)
            )
        return x


def products(recompute: bool = False) -> Products:
    model = Net()
    with ModuleTracker(model) as tracker, Products(tracker) as seen:
        out = model(torch.ones(2, 4), recompute)
        (out @ torch.ones(4, 4)).sum().backward()
    return seen


def test_forward_and_backward():
    """The input needs no gradient, so that the first layer has one product in backward; the last product is outside of the model."""
    seen = products()
    assert seen.forward == ["first", "body.0", "body.1", "-"]
    assert seen.backward == ["-", "body.1", "body.1", "body.0", "body.0", "first"]


def test_recomputation_belongs_to_the_module_that_is_recomputed():
    assert products(recompute=True).backward == [
        "-",
        "body.1",
        "body.1",
        "body.1",
        "body.0",
        "body.0",
        "body.0",
        "first",
    ]


def test_parents():
    model = Net()
    names: list[set[str]] = []
    model.body[1].register_forward_hook(lambda *_: names.append(tracker.parents))
    with ModuleTracker(model) as tracker:
        model(torch.ones(1, 4))
        assert tracker.parents == {"Global"}
    assert names == [{"Global", "", "body", "body.1"}]


def test_a_forward_that_fails_leaves_no_module_behind():
    model = nn.Sequential(nn.Linear(4, 4))
    with ModuleTracker(model) as tracker:
        with pytest.raises(RuntimeError):
            model(torch.ones(1, 5))
        assert tracker.parents == {"Global"}


def test_the_hooks_come_off():
    model = Net()
    with ModuleTracker(model):
        pass
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
