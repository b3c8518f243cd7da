"""Plans of many alike layers from few of them, where buffers depend on the whole model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.memory_plans import memory_plan
from zero_trial.engine.offload_config import LeftOut
from zero_trial.planning import blueprint, dry_run
from zero_trial.planning.blueprint import Blueprint, Stack, extrapolate
from zero_trial.planning.memory_plan import Figures

WIDTH, LAYERS = 256, 16


class Layer(nn.Module):
    """A square matrix, and a small one that is trained beside it where it is frozen."""

    def __init__(self, *, frozen: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH, WIDTH), requires_grad=not frozen)
        self.down = nn.Parameter(torch.empty(8, WIDTH)) if frozen else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        after = x @ self.weight
        return after if self.down is None else after + (x @ self.down.T).sum(-1, keepdim=True)


def figures(device: str, zero: dict[str, Any], *, frozen: bool = False, layers: int = LAYERS) -> Figures:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {
            "module_granularity_threshold": 1,
            "param_persistence_threshold": 0,
            "stage3_prefetch_bucket_size": WIDTH**2,
            "reshard_after": "forward",
            **zero,
        },
    }
    with torch.device("meta"):
        model = nn.Sequential(*(Layer(frozen=frozen) for _ in range(layers)))
    return memory_plan(model, config, 2, (torch.zeros(2, WIDTH),), device=device).figures


def place(device: str = "nvme", **more: Any) -> dict[str, Any]:
    return {"device": device, **({"nvme_path": "."} if device == "nvme" else {}), **more}


PARAMS = place(max_in_cpu=0, buffer_count=2, buffer_size=WIDTH**2)
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has the GPU")


@pytest.fixture
def depths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The layers of each engine that is built. Fake tensors are taken for small models, too."""
    found: list[int] = []
    build_engine = vars(dry_run)["build_engine"]

    def built(model: nn.Sequential, *arguments: Any, **options: Any) -> Any:
        found.append(len(model))
        return build_engine(model, *arguments, **options)

    monkeypatch.setattr(dry_run, "build_engine", built)
    monkeypatch.setattr(dry_run, "SMALL_WORK", 0)
    return found


@pytest.mark.parametrize(
    ("device", "frozen", "zero"),
    [
        ("cpu", True, {"stage": 3, "offload_param": PARAMS, "offload_optimizer": place(buffer_count=2)}),
        ("cpu", False, {"stage": 0, "offload_param": PARAMS, "offload_optimizer": place()}),
        ("cpu", False, {"stage": 3, "offload_param": PARAMS}),
        ("cpu", False, {"stage": 3, "offload_param": place(max_in_cpu=WIDTH**2 * LAYERS)}),
        pytest.param("cuda", True, {"stage": 3, "offload_param": PARAMS, "offload_optimizer": place()}, marks=NO_GPU),
        pytest.param("cuda", True, {"stage": 3, "offload_param": PARAMS | {"max_in_cpu": 5 * WIDTH**2}}, marks=NO_GPU),
    ],
)
def test_few_layers_know_the_sizes_of_all(
    device: str, frozen: bool, zero: dict[str, Any], depths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All is as with all layers, to the byte: files, buffers, peaks."""
    monkeypatch.setattr(blueprint, "WORTH_LAYERS", LAYERS)
    few = figures(device, zero, frozen=frozen)
    assert depths == [3, 4, 6]
    monkeypatch.setattr(blueprint, "WORTH_LAYERS", 1000)
    assert few == figures(device, zero, frozen=frozen) and depths[3:] == [LAYERS]


@pytest.mark.parametrize(
    "zero",
    [
        {"stage": 3, "offload_optimizer": place(ratio=0.9)},
        {"stage": 3, "offload_param": PARAMS | {"max_in_cpu": 5 * WIDTH**2}},
        {"stage": 3, "offload_param": PARAMS, "stage3_prefetch_bucket_size": WIDTH**2 * 100},
    ],
)
def test_layers_of_which_some_stay_in_memory_are_all_run(
    zero: dict[str, Any], depths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blueprint, "WORTH_LAYERS", LAYERS)
    found = figures("cpu", zero)
    assert depths[-1] == LAYERS
    monkeypatch.setattr(blueprint, "WORTH_LAYERS", 1000)
    assert found == figures("cpu", zero)


@NO_GPU
def test_a_limit_of_some_layers_takes_more_than_those(depths: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven layers are prefetched. Peaks are allowed a part in 500."""
    monkeypatch.setattr(blueprint, "WORTH_LAYERS", 48)
    zero = {"stage": 3, "offload_param": PARAMS, "stage3_prefetch_bucket_size": WIDTH**2 * 7}
    few = figures("cuda", zero, layers=64)
    assert depths[-3:] == [10, 11, 13]
    monkeypatch.setattr(blueprint, "WORTH_LAYERS", 1000)
    whole = figures("cuda", zero, layers=64)
    assert few.peak == pytest.approx(whole.peak, rel=1 / 500) and few == replace(whole, peak=few.peak)


def test_what_is_left_out_is_counted_once() -> None:
    """Of the whole model without the cut one, sizes and dtypes; small parameters that stay are not
    in it."""
    with torch.device("meta"):
        model = nn.Sequential(*(Layer(frozen=True) for _ in range(50)))
    cut = Blueprint(model).with_layers([3])
    sizes = [[each.numel() for each in part] for part in (cut.left_out.trained, cut.left_out.all)]
    assert sizes[0] == [8 * WIDTH] * 47 and sorted(sizes[1]) == [8 * WIDTH] * 47 + [WIDTH**2] * 47
    assert [each.numel() for each in Blueprint(model).with_layers([3], 10**4).left_out.all] == [WIDTH**2] * 47
    assert Blueprint(model).left_out == LeftOut()


@pytest.mark.parametrize(("off", "known"), [(0, True), (1 << 14, True), (1 << 16, False)])
def test_what_six_layers_are_off_counts_for_all(off: int, known: bool) -> None:
    """99 layers are 33 times as far from three as six are; a mebibyte more or less is nothing."""
    grown = extrapolate([Stack("", 0, 102)], lambda counts: {"bytes": 1000 * counts[0] + off * (counts[0] == 6)})
    assert (grown is not None) == known
    if grown is not None:
        assert grown == ({"bytes": 102_000}, frozenset({"bytes"} if not off else ()))
