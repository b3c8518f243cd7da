"""Profiles: timers, a model's profile and its text, and the profile of one step of an engine."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import zero_trial
from tests.support.models import TinyLM, make_engine, tokens
from zero_trial.engine.profile import (
    Flops,
    ModelProfile,
    ModuleRow,
    Peak,
    StepProfiler,
    build_profile,
    data_sheet,
    flop_counter,
    flops_of,
    peak_of,
    render,
)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 3)


PARAMETERS = 8 * 16 + 16 + 16 * 3 + 3


def test_the_arithmetic():
    """330 operations in 10 ms are 33 000 per second, half of the peak; recomputing half of forward
    (50) leaves 280 for the model."""
    forward = Flops(100, {"": 100, "up": 60, "down": 40})
    found = build_profile(Net(), forward, 230, {"up": 1.0}, (4.0, 6.0), Peak(66_000.0, "made up"))
    assert (found.forward_flops, found.backward_flops, found.parameters) == (100, 230, PARAMETERS)
    assert found.achieved == pytest.approx(33_000.0) and found.utilisation() == pytest.approx(0.5)
    assert found.model_flops(0.5) == 280 and found.utilisation(0.5) == pytest.approx(0.5 * 280 / 330)
    assert found.rows[1] == ModuleRow("up", "Linear", 8 * 16 + 16, 60, 1.0) and found.rows[0].milliseconds is None
    empty = build_profile(nn.Identity(), Flops(0, {}), 0, {}, (0.0, 0.0), Peak(1.0, ""))
    assert empty.achieved == empty.utilisation() == 0.0


PROFILE = ModelProfile(
    rows=(
        ModuleRow("", "Net", 1000, 3_000_000, 2.5),
        ModuleRow("body", "ModuleList", 900, 2_000_000, None),
        ModuleRow("body.0", "Block", 900, 2_000_000, 1.5),
        ModuleRow("head", "Linear", 100, 1_000_000, 0.5),
    ),
    parameters=1000,
    forward_flops=3_000_000,
    backward_flops=6_000_000,
    forward_ms=3.0,
    backward_ms=6.0,
    peak=Peak(4e9, "made up"),
)


def test_the_whole_report():
    assert render(PROFILE, title="FLOPs profile of rank 0") == (
        "FLOPs profile of rank 0\n"
        "  parameters   1,000\n"
        "  forward      3 MFLOP in 3.000 ms: 1 GFLOP/s\n"
        "  backward     6 MFLOP in 6.000 ms: 1 GFLOP/s\n"
        "  achieved     1 GFLOP/s\n"
        "  MFU          25.0% of 4 GFLOP/s (made up)\n"
        "  Matrix products, convolutions and attention are counted, a multiply-add as two.\n"
        "  heaviest kinds of modules (top 1 per depth; operations of forward, parameters, ms of forward):\n"
        "    depth 0: Net x 1: 3 MFLOP, 1,000, 2.500 ms\n"
        "    depth 1: ModuleList x 1: 2 MFLOP, 900, 0.000 ms\n"
        "    depth 2: Block x 1: 2 MFLOP, 900, 1.500 ms\n"
        "    module              parameters  forward   share     ms\n"
        "    Net                      1,000  3 MFLOP  100.0%  2.500\n"
        "      body: ModuleList         900  2 MFLOP   66.7%      -\n"
        "        0: Block               900  2 MFLOP   66.7%  1.500\n"
        "      head: Linear             100  1 MFLOP   33.3%  0.500"
    )


def profiled(zero: dict[str, Any] | None = None, **section: Any) -> zero_trial.Engine:
    config = {"train_batch_size": 4, "flops_profiler": {"enabled": True} | section}
    return make_engine(TinyLM, config | ({"zero_optimization": zero} if zero else {}))


def train(engine: zero_trial.Engine, step: int) -> None:
    engine.backward(engine(tokens(step, 4 // engine.dp_world_size)))
    engine.step()


def of(engine: zero_trial.Engine) -> StepProfiler:
    assert engine.observer.profiler is not None
    return engine.observer.profiler


# (samples x 8 positions) x weights of all products: three blocks of 48 x 192 twice, and the head
WEIGHTS = 3 * 2 * 48 * 192 + 48 * 50
FORWARD_OF_STEP = 2 * 4 * 8 * WEIGHTS


@pytest.mark.parametrize("stage", [0, 3])
def test_counted_in_one_step_and_timed_in_the_next(stage: int, caplog: pytest.LogCaptureFixture):
    engine = profiled({"stage": stage, "param_persistence_threshold": 0}, profile_step=2)
    train(engine, 0)
    train(engine, 1)
    assert of(engine).profile is None
    with caplog.at_level(logging.INFO, "zero_trial"):
        train(engine, 2)
        train(engine, 3)
    profile = of(engine).profile
    assert profile is not None and profile.forward_flops == FORWARD_OF_STEP
    # The embedding's output needs a gradient, so that every product has two in backward.
    assert profile.backward_flops == 2 * FORWARD_OF_STEP and profile.forward_ms > 0 and profile.backward_ms > 0
    assert profile.parameters == sum(param.numel() for param in engine.module.parameters())
    reports = [record.getMessage() for record in caplog.records if "FLOPs profile" in record.getMessage()]
    assert len(reports) == 1 and reports[0].startswith("FLOPs profile of rank 0, step 2, one micro-batch of 4 samples")
    assert "blocks: ModuleList" in reports[0]
    assert not any(module._forward_hooks for module in engine.module.blocks.modules() if stage == 0)


def test_evaluations_are_passed_by():
    engine = profiled()
    engine.eval()
    engine(tokens(5, 4))
    engine.train()
    loss = engine(tokens(0, 4))
    engine.eval()
    engine(tokens(6, 4))
    engine.train()
    engine.backward(loss)
    engine.step()
    train(engine, 1)
    profile = of(engine).profile
    assert profile is not None and profile.forward_flops == FORWARD_OF_STEP


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
    assert backward.get_total_flops() == up + 2 * down + outside and not torch.nn.modules.module._global_forward_hooks


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
        ("NVIDIA H100 80GB HBM3", torch.float32, True, 494.7),
        ("NVIDIA A100-SXM4-40GB", torch.bfloat16, False, 312.0),
        ("NVIDIA GB200", torch.bfloat16, False, 2500.0),
        ("Tesla T4", torch.float16, False, 65.0),
    ],
)
def test_known_gpus(name: str, dtype: torch.dtype, tf32: bool, tera: float):
    peak = data_sheet(name, dtype, tf32=tf32)
    assert peak is not None and peak.per_second == tera * 1e12 and name in peak.source


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
