"""Counted operations against formulas, by module, and the peaks of devices."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from zero_trial.engine.flop_count import data_sheet, flop_counter, flops_of, peak_of


def test_two_layers_forward_and_backward():
    """A product of (5 x 8) and (8 x 16) is 2*5*8*16 operations; backward has one for the weight,
    and one for the input where it needs one. A product outside of the model is in the total
    only."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    with flop_counter() as forward:
        out = model(torch.ones(5, 8)) @ torch.ones(3, 1)
    up, down, outside = 2 * 5 * 8 * 16, 2 * 5 * 16 * 3, 2 * 5 * 3
    assert flops_of(forward, model).total == up + down + outside
    assert flops_of(forward, model).by_module == {"": up + down, "0": up, "1": 0, "2": down}
    with flop_counter() as backward:
        out.sum().backward()
    assert backward.get_total_flops() == up + 2 * down + outside
    assert not torch.nn.modules.module._global_forward_hooks


def test_attention_is_counted_on_the_cpu_too():
    class Attention(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.scaled_dot_product_attention(x, x, x)

    batch, heads, length, width = 2, 3, 16, 8
    model, x = Attention(), torch.randn(batch, heads, length, width, requires_grad=True)
    with flop_counter() as forward:
        out = model(x)
    with flop_counter() as backward:
        out.sum().backward()
    product = 2 * batch * heads * length * length * width
    assert forward.get_total_flops() == 2 * product  # queries with keys, weights with values
    # the scores again, and four gradients (Dao et al. 2022, algorithm 4)
    assert backward.get_total_flops() == 5 * product


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


def test_a_cpu_is_measured_and_said_so():
    peak = peak_of(torch.device("cpu"), torch.float32)
    assert peak.per_second > 1e6
    assert peak.source.startswith("measured here: a 512 x 512 matrix product in float32 on the cpu with ")
