"""Plans for GPUs that this machine does not have: many equal layers, offload, and links."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.what_fits import Llama, Shape
from tests.planning.measured import model_module
from tests.support.memory_plans import memory_plan, planner_of
from zero_trial.cli.main import _parse as parse
from zero_trial.cli.main import build_parser
from zero_trial.ds_config.reader import read_ds_config
from zero_trial.planning.memory_plan import Figures

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has the GPU")
WIDTH = 256


class Layer(nn.Module):
    def __init__(self, place: int, bias: bool = True) -> None:
        super().__init__()
        self.place = place
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=bias), nn.Linear(4 * WIDTH, WIDTH, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = x.view(1, 1, *x.shape)
        return x + self.down(self.up(self.norm(nn.functional.scaled_dot_product_attention(q, q, q)[0, 0])).relu())


class Deep(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(500, WIDTH)
        self.layers = nn.ModuleList(Layer(place) for place in range(layers))
        self.head = nn.Linear(WIDTH, 500)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + torch.arange(WIDTH)  # made on the host
        for layer in self.layers:
            x = layer(x)
        return self.head(x).float().mean()


def config(stage: int, **zero: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": stage, **zero},
    }


def deep(layers: int) -> Deep:
    with torch.device("meta"):
        return Deep(layers)


def figures(layers: int, stage: int, **zero: Any) -> Figures:
    tokens = torch.zeros(64, dtype=torch.long)
    found = memory_plan(deep(layers), config(stage, **zero), 8, (tokens,), device="cuda")
    assert found.how == "fake tensors on the CPU"
    return found.figures


@pytest.mark.parametrize("place", ["cpu", pytest.param("nvme", marks=pytest.mark.slow)])
def test_offloaded_state_is_not_the_gpus(place: str) -> None:
    """Masters and Adam's moments, 12 bytes per parameter and rank, are on the host or its disk."""
    offload = {"device": place, **({"nvme_path": "."} if place == "nvme" else {})}
    model, tokens = deep(2), torch.zeros(64, dtype=torch.long)
    count = sum(param.numel() for param in model.parameters())
    settings = replace(read_ds_config(config(2, offload_optimizer=offload)), train_batch_size=8)
    planner = planner_of(model, settings, 8, (tokens,), device="cuda")
    plan = planner.plan()
    assert plan.figures.optimizer == 0
    assert plan.figures.parameters + plan.figures.gradients == pytest.approx(count * (2 + 2 / 8), rel=0.001)
    away = plan.figures.host if place == "cpu" else plan.figures.disk
    assert 12 / 8 <= away / count < 12 / 8 * 1.4  # staging buffers
    assert ("host memory" if place == "cpu" else "NVMe") in plan.table()
    back = planner.plan(away=False)
    assert back.figures.optimizer == pytest.approx(count * 8 / 8, rel=0.001) and back.figures.disk == 0


def test_layers_that_are_computed_again_are_planned_on_the_gpu() -> None:
    """Their attention is the same kernel in backward, so that no other way of the dry run is
    needed."""
    plan = memory_plan(
        Llama(Shape(2, 64, 128, 4, 2, 100)), config(3), 8, torch.zeros(1, 32, dtype=torch.long), device="cuda"
    )
    assert plan.how == "fake tensors on the CPU"


def test_settings_may_follow_options() -> None:
    words = ["plan", "a.yaml", "folder", "a=1", "--ranks", "8", "b=2", "--stage", "3", "c=3"]
    options = parse(build_parser(), words)
    assert (options.experiment_path, options.model_dir, options.settings) == ("a.yaml", "folder", ["a=1", "b=2", "c=3"])
    assert (options.slots, options.stage) == (8, 3)
    with pytest.raises(SystemExit):
        parse(build_parser(), [*words, "--stages", "3"])
    with pytest.raises(SystemExit):
        parse(build_parser(), ["resume", "a", "b=2"])


COMMAND = """import json, resource, sys
from zero_trial.cli.main import main
code = main(sys.argv[1:])
used = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps([code, used.ru_maxrss * 1024]))
"""


@pytest.mark.slow
def test_a_trillion_parameters_on_4096_ranks() -> None:
    """The command in a process of its own, which needs less than a gigabyte. States are 16 Psi / N:
    no small parameter always lives in this experiment."""
    sizes = {"sequence": 2048, "vocabulary": 50304, "layers": 128, "heads": 200, "width": 25600}
    root = Path(__file__).parents[2]
    words = ["experiments/gpt_zero3_bf16/const.yaml", "model_defs/gpt", f"data.source={root / 'zero_trial/sharding'}"]
    words += [f"hyperparameters.model.{name}={size}" for name, size in sizes.items()]
    words += ["hyperparameters.global_batch_size=4096", "gradient_accumulation_steps=1"]
    command = ["plan", *words, "--ranks", "4096", "--gpu-memory", "80GiB", "--json"]
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, *command], cwd=root, capture_output=True, text=True, timeout=300, check=True
    )
    found, (code, peak) = map(json.loads, done.stdout.splitlines())
    assert code == 3 and not found["fits"], "activations alone are 200 GiB"
    assert peak < 10**9, peak
    plan = found["plan"]
    assert (plan["ranks"], plan["stage"], plan["how"]) == (4096, 3, "fake tensors on the CPU")
    with torch.device("meta"):
        gpt = model_module("gpt")
        count = sum(param.numel() for param in gpt.GPT(gpt.GPTConfig(**sizes)).parameters())
    assert plan["parameter_count"] == count > 10**12
    exact = 16 * count / 4096
    # each group is padded to a multiple of 64 elements of every rank
    assert exact <= plan["figures"]["states"] <= exact * 1.001
