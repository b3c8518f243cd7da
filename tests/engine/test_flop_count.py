"""Counted operations against formulas."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from zero_trial.engine.flop_count import FlopCount


def test_two_layers_forward_and_backward():
    """A product of (5 x 8) and (8 x 16) is 2*5*8*16 operations; backward has one for the weight, and one for the input where it needs one."""
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
