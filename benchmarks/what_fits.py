"""The guide's page "What fits where".

python benchmarks/what_fits.py docs/guide/what_fits_where.md   # writes it, in minutes
python benchmarks/what_fits.py --model "1.3 B"   # quick: prints that of one model

For models of six sizes, 1 to 4096 ranks and GPUs of three sizes: the cheapest ZeRO stage and
offload that fits. States are counted group by group with the engine's own layouts, exact to the
byte; the memory of a step comes from one plan per model and way, independent of the ranks.
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from zero_trial.ds_config.reader import read_ds_config
from zero_trial.ds_config.table import DsConfig
from zero_trial.engine.resolved_config import mesh_shape, resolve_config
from zero_trial.planning.blueprint import Blueprint, lone_mesh
from zero_trial.planning.planner import Planner, model_subject
from zero_trial.planning.state_bytes import TrainedModel
from zero_trial.sharding.build_groups import FirstSource, plan_groups
from zero_trial.sharding.grouping import ManualGroups
from zero_trial.sharding.living_dtypes import LivingDtypes
from zero_trial.sharding.plan import plan_for_stage
from zero_trial.util.text import format_bytes

RANKS = (1, 8, 64, 512, 4096)
GPUS = (24, 40, 80)  # GiB
_PLANNED_ON = 64  # ranks
_ROOM = 0.94  # of a GPU: the rest is the CUDA context, NCCL's buffers and what kernels need
_ON_HOST = {"device": "cpu"}
# from the least traffic to the least memory
WAYS: Mapping[str, Mapping[str, Any]] = {
    "0": {"stage": 0},
    "1": {"stage": 1},
    "2": {"stage": 2},
    "3": {"stage": 3},
    "3 + O": {"stage": 3, "offload_optimizer": _ON_HOST},
    "3 + OP": {"stage": 3, "offload_optimizer": _ON_HOST, "offload_param": _ON_HOST},
}


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama. ``inner``: width of the gated layer; ``groups``: heads of keys and
    values."""

    layers: int
    width: int
    inner: int
    heads: int
    groups: int
    words: int = 32000


SHAPES: Mapping[str, Shape] = {
    "1.3 B": Shape(24, 2048, 5504, 16, 16),
    "7 B": Shape(32, 4096, 11008, 32, 32),
    "13 B": Shape(40, 5120, 13824, 40, 40),
    "70 B": Shape(80, 8192, 28672, 64, 8),
    "405 B": Shape(126, 16384, 53248, 128, 8, 128256),
    "1 T": Shape(152, 25088, 68608, 196, 28, 128256),
}
SEQUENCE = 4096


class _Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        head = shape.width // shape.heads
        self.heads, self.groups = shape.heads, shape.groups
        self.before, self.between = nn.RMSNorm(shape.width), nn.RMSNorm(shape.width)
        self.query = nn.Linear(shape.width, shape.width, bias=False)
        self.key = nn.Linear(shape.width, head * shape.groups, bias=False)
        self.value = nn.Linear(shape.width, head * shape.groups, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)
        self.gate = nn.Linear(shape.width, shape.inner, bias=False)
        self.up = nn.Linear(shape.width, shape.inner, bias=False)
        self.down = nn.Linear(shape.inner, shape.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.before(x)
        q = self.query(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k = self.key(normed).unflatten(-1, (self.groups, -1)).transpose(1, 2)
        v = self.value(normed).unflatten(-1, (self.groups, -1)).transpose(1, 2)
        k, v = (each.repeat_interleave(self.heads // self.groups, 1) for each in (k, v))
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        normed = self.between(x)
        inner: torch.Tensor = self.down(functional.silu(self.gate(normed)) * self.up(normed))
        return x + inner


class Llama(nn.Module):
    """A Llama on the meta device; each layer is computed again in backward."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        with torch.device("meta"):
            self.embed = nn.Embedding(shape.words, shape.width)
            self.layers = nn.ModuleList(_Layer(shape) for _ in range(shape.layers))
            self.norm = nn.RMSNorm(shape.width)
            self.head = nn.Linear(shape.width, shape.words, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embed(words)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), words.flatten())


def settings_of(way: str) -> DsConfig:
    """Return the ds_config of a way: bf16, AdamW, one sequence per rank and step."""
    return read_ds_config(
        {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "zero_optimization": dict(WAYS[way]),
        }
    )


def state_bytes(model: nn.Module, way: str, ranks: int) -> int:
    """Return the bytes that one of ``ranks`` keeps on its GPU between steps, from the layouts of
    the engine's parameter groups.

    For a group of n elements, padded for N ranks, in bf16 with AdamW:

        stage 0      16 n           stage 2      2 n + 14 n/N
        stage 1      4 n + 12 n/N   stage 3      16 n/N, and as at stage 2 where it always lives

    Offload of the optimizer takes 12 n/N away, that of parameters the 2 n or 2 n/N, too.
    """
    settings = settings_of(way)
    shape = mesh_shape(settings, ranks)
    resolved = resolve_config(settings, shape.data_parallel_size, "cuda")
    stage, source = settings.zero_optimization.stage, FirstSource(lone_mesh(shape), ManualGroups())
    plan = plan_for_stage(stage)
    living = LivingDtypes(model, resolved.policy)
    made = plan_groups(model, [list(model.parameters())], plan, living, resolved.sharding, source)
    total = 0
    for spec, layout, _ in made.groups:
        whole, part = layout.numel, layout.shard_numel
        low = whole if stage < 3 or spec.always else part
        total += 2 * low * ("P" not in way) + 2 * (whole if stage < 2 else part) + 12 * part * ("O" not in way)
    return total


def step_bytes(model: nn.Module, way: str) -> int:
    """Return the most bytes that a step holds in addition to its states."""
    words = torch.zeros(1, SEQUENCE, dtype=torch.long)
    settings = settings_of(way)
    subject = model_subject(TrainedModel(Blueprint(model, device="cuda"), settings), words)
    figures = Planner(subject, settings, _PLANNED_ON).plan().figures
    # the rings through which offloaded parameters come count as a step's
    return (figures.peak or 0) - state_bytes(model, way, _PLANNED_ON)


@dataclass(frozen=True)
class Fit:
    """Bytes that one of ``ranks`` needs in each way: states, and what a step holds in addition."""

    model: str
    ranks: int
    states: Mapping[str, int]
    step: Mapping[str, int]

    def cheapest(self, gpu: int) -> str:
        """Return the first way that fits a GPU of this many GiB, or a dash."""
        room = int(gpu * 2**30 * _ROOM)
        return next((way for way in self.states if self.states[way] + self.step[way] <= room), "–")


def fits(name: str) -> Iterator[Fit]:
    """Yield a model's needs by ranks. A way whose states fit nowhere is not planned."""
    model = Llama(SHAPES[name])
    states = {ranks: {way: state_bytes(model, way, ranks) for way in WAYS} for ranks in RANKS}
    most = int(GPUS[-1] * 2**30 * _ROOM)
    step = {way: step_bytes(model, way) if min(each[way] for each in states.values()) <= most else 0 for way in WAYS}
    for ranks in RANKS:
        yield Fit(name, ranks, states[ranks], step)


def page(models: Iterable[str] = SHAPES) -> str:
    """Return the guide's page."""
    found = [list(fits(name)) for name in models]
    rows = [[fit.model, str(fit.ranks), *(fit.cheapest(gpu) for gpu in GPUS)] for each in found for fit in each]
    lines = [
        "# What fits where",
        "",
        _wrapped(
            "The table shows, for each GPU size, the option that fits with the least communication: ZeRO stage 0, 1, 2 or "
            "3, `3 + O` (optimizer state in host memory), or `3 + OP` (optimizer state and parameters in host memory). A "
            "dash means that no option fits. The models are Llamas in bf16 with AdamW and activation checkpointing, with "
            f"one sequence of {SEQUENCE} tokens per rank and step, sharded over all ranks without other parallelism. "
            f"{1 - _ROOM:.0%} of each GPU is reserved for its context, NCCL and kernels. To plan your own model, run "
            "[`zero-trial plan EXPERIMENT.yaml MODEL_DIR --ranks N --gpu-memory 80GiB`](offload.md). "
            "`python benchmarks/what_fits.py` writes this page."
        ),
        "",
        *_table(["model", "ranks", *(f"{gpu} GiB" for gpu in GPUS)], rows),
        "",
        "## States",
        "",
        _wrapped(
            "The bytes on each rank's GPU between steps, including padding. For Ψ parameters on N ranks: 16 Ψ at stage 0, "
            "4 Ψ + 12 Ψ/N at stage 1, 2 Ψ + 14 Ψ/N at stage 2, and 16 Ψ/N at stage 3, at which parameters below "
            "`param_persistence_threshold` cost as much as at stage 2. `O` moves 12 Ψ/N to the host, and `P` the parameters."
        ),
        "",
        *_table(
            ["model", "ranks", *WAYS],
            [[fit.model, str(fit.ranks), *(f"{fit.states[way]:,}" for way in WAYS)] for each in found for fit in each],
        ),
        "",
        "## A step",
        "",
        _wrapped(
            "The peak memory of a step in addition to the states, on any number of ranks: saved layer inputs, the current "
            "layer's activations, gathered parameters, and gradients in flight. A dash means that the states alone do not fit."
        ),
        "",
        *_table(
            ["model", *WAYS],
            [
                [each[0].model, *(format_bytes(size) if (size := each[0].step[way]) else "–" for way in WAYS)]
                for each in found
            ],
        ),
    ]
    return "\n".join(lines) + "\n"


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False)


def main() -> int:
    """Write the page, or print a part of it."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("page", nargs="?", type=Path, help="the file to write (default: print)")
    options.add_argument("--model", choices=SHAPES, action="append", help="this one only (default: all)")
    given = options.parse_args()
    text = page(given.model or SHAPES)
    if given.page is None:
        print(text)
    else:
        given.page.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
