"""What our optimizers share: a closure, moments made when first needed, pieces without gradients
left alone."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import torch

from zero_trial.ops.optimizers.shard_step import ShardOptimizer, ShardUpdate


class Halving(ShardOptimizer):
    """p -= multiplier * g / 2, counting steps in a moment."""

    def __init__(self, params: list[torch.nn.Parameter]) -> None:
        super().__init__(params, {})

    def update(self, updates: Sequence[ShardUpdate], multiplier: float) -> None:
        for weight, gradient, *_ in updates:
            self.moments_of(weight, ["count"])[0].add_(1)
            weight.add_(gradient, alpha=-multiplier / 2)


def test_the_closure_runs_with_gradients_and_its_loss_is_returned() -> None:
    p = torch.nn.Parameter(torch.tensor([3.0]))
    optimizer = Halving([p])

    def closure() -> torch.Tensor:
        loss = (p * 2).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 6.0 and p.item() == 2.0


def test_hooks_of_torch_still_run() -> None:
    seen = []
    p = torch.nn.Parameter(torch.ones(1))
    optimizer = Halving([p])
    optimizer.register_step_post_hook(lambda *_: seen.append("post"))
    p.grad = torch.ones(1)
    optimizer.step()
    assert seen == ["post"]


def test_our_optimizers_do_not_load_torchs_compiler() -> None:
    """It costs every rank a second of CPU, and torch loads it when one of its own optimizers is
    made."""
    code = (
        "import sys, torch; from zero_trial.ops import FusedAdagrad, FusedAdam, FusedLamb, FusedLion, FusedSGD\n"
        "for made in (FusedAdagrad, FusedAdam, FusedLamb, FusedLion, FusedSGD):\n"
        "    p = torch.nn.Parameter(torch.ones(3)); p.grad = torch.ones(3); made([p]).step()\n"
        "print('torch._dynamo' in sys.modules, 'torch._dynamo' in sys.modules or float(p[0]) < 1)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.split() == ["False", "True"], done.stderr
