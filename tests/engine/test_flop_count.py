"""Counted operations against formulas, the module that an operation belongs to, and the peaks of
devices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from zero_trial.engine.flop_count import FlopCount, ModuleTracker, data_sheet, measure, peak_of


def test_two_layers_forward_and_backward():
    """A product of (5 x 8) and (8 x 16) is 2*5*8*16 operations; backward has one for the weight,
    and one for the input where it needs one."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    count = FlopCount(model)
    count.resume()
    out = model(torch.ones(5, 8))
    count.pause()
    forward = count.read()
    up, down = 2 * 5 * 8 * 16, 2 * 5 * 16 * 3
    assert forward.total == up + down
    assert forward.by_module == {"": up + down, "0": up, "2": down}
    count.resume()
    out.sum().backward()
    count.close()
    both = count.read()
    assert both.by_module == {"": 2 * up + 3 * down, "0": 2 * up, "2": 3 * down}


def test_nothing_is_counted_between():
    model = nn.Linear(4, 4)
    count = FlopCount(model)
    count.resume()
    count.pause()
    model(torch.ones(1, 4))
    assert count.read().total == 0
    count.resume()
    count.resume()
    torch.ones(2, 2) @ torch.ones(2, 2)
    count.close()
    count.close()
    assert count.read().total == 16  # outside of the model, so in the total only
    assert count.read().by_module == {}
    assert not model._forward_hooks


def test_attention_is_counted_on_the_cpu_too():
    class Attention(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.scaled_dot_product_attention(x, x, x)

    batch, heads, length, width = 2, 3, 16, 8
    model, x = Attention(), torch.randn(batch, heads, length, width, requires_grad=True)
    count = FlopCount(model)
    count.resume()
    out = model(x)
    forward = count.read().total
    out.sum().backward()
    count.close()
    product = 2 * batch * heads * length * length * width
    assert forward == 2 * product  # queries with keys, weights with values
    assert (
        count.read().total - forward == 5 * product
    )  # the scores again, and four gradients (Dao et al. 2022, algorithm 4)


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
    """The input needs no gradient, so that the first layer has one product in backward; the last
    product is outside of the model."""
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


@pytest.mark.parametrize(
    ("name", "dtype", "tf32", "tera"),
    [
        ("NVIDIA H200", torch.bfloat16, False, 989.5),
        ("NVIDIA H100 80GB HBM3", torch.float32, False, 66.9),
        ("NVIDIA H100 80GB HBM3", torch.float32, True, 494.7),
        ("NVIDIA H100 PCIe", torch.float16, False, 756.0),
        ("NVIDIA A100-SXM4-40GB", torch.bfloat16, False, 312.0),
        ("NVIDIA H100 NVL", torch.bfloat16, False, 835.5),
        ("NVIDIA GH200 480GB", torch.bfloat16, False, 989.5),
        ("NVIDIA GB200", torch.bfloat16, False, 2500.0),
        ("NVIDIA L40S", torch.float16, False, 362.0),
        ("Tesla T4", torch.float16, False, 65.0),
    ],
)
def test_known_gpus(name: str, dtype: torch.dtype, tf32: bool, tera: float):
    peak = data_sheet(name, dtype, tf32=tf32)
    assert peak is not None and peak.per_second == tera * 1e12
    assert name in peak.source


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *(("Some New GPU", torch.float16), ("Tesla T4", torch.bfloat16), ("H100", torch.float64)),
        # Names that hold a known one, of GPUs that are slower, and a slice of one.
        *((name, torch.float16) for name in ("NVIDIA A10G", "NVIDIA RTX A1000", "NVIDIA T400 4GB", "NVIDIA B300")),
        *((name, torch.float16) for name in ("NVIDIA GeForce RTX 4090 D", "NVIDIA GeForce RTX 4090 Laptop GPU")),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", torch.bfloat16),
    ],
)
def test_what_is_not_on_a_data_sheet(name: str, dtype: torch.dtype):
    assert data_sheet(name, dtype) is None


def test_the_best_of_the_measured_rounds():
    ticks = iter([0.0, 1.0, 0.0, 0.5, 0.0, 2.0, 0.0, 1.0, 0.0, 1.0])
    peak = measure(torch.device("cpu"), torch.float32, clock=lambda: next(ticks))
    assert peak.per_second == 2 * 512**3 / 0.5


def test_a_cpu_is_measured_and_said_so():
    peak = peak_of(torch.device("cpu"), torch.float32)
    assert peak.per_second > 1e6
    assert peak.source.startswith("measured here: a 512 x 512 matrix product in float32 on the cpu with ")
