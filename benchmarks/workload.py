"""What is trained in a benchmark: a model and its batches, the same on every contender and a function of the seed."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
from torch import nn

SEED = 7
BLOCK = 10  # tiny layers per block


@dataclass(frozen=True)
class Workload:
    """``model``: "gpt" or "tiny"; sizes below are read by the one that has them."""

    model: str
    micro_batch: int
    sequence: int = 64
    layers: int = 6
    width: int = 384

    def build(self) -> nn.Module:
        if self.model == "tiny":
            return TinyLayers(self.layers, self.width)
        gpt = _gpt_module()
        heads = max(1, self.width // 64)
        config = gpt.GPTConfig(sequence=self.sequence, layers=self.layers, heads=heads, width=self.width)
        return gpt.GPT(config, seed=SEED)

    def batch(self, rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Micro-batch ``step`` of rank ``rank``: random, but always the same."""
        generator = torch.Generator().manual_seed(SEED + 1000 * step + rank)
        if self.model == "tiny":
            return (
                torch.randn(self.micro_batch, self.width, generator=generator),
                torch.randn(self.micro_batch, self.width, generator=generator),
            )
        window = torch.randint(0, 64, (self.micro_batch, self.sequence + 1), generator=generator)
        return window[:, :-1], window[:, 1:]


class TinyBlock(nn.Module):
    """A few small linear layers in a row: what an engine may treat as one unit."""

    def __init__(self, layers: int, width: int, scale: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x) * self.scale
        return x


class TinyLayers(nn.Module):
    """``layers`` small linear layers in blocks of ``BLOCK``: two parameter tensors each, next to no arithmetic."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        sizes = [min(BLOCK, layers - start) for start in range(0, layers, BLOCK)]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            self.blocks = nn.ModuleList(TinyBlock(size, width, 1.0 / layers) for size in sizes)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return (x - target).square().mean()


def _gpt_module() -> ModuleType:
    path = Path(__file__).parents[1] / "model_defs" / "gpt" / "model.py"
    spec = importlib.util.spec_from_file_location("benchmark_gpt", path)
    if spec is None or spec.loader is None:
        raise RuntimeError("model_defs/gpt/model.py cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
