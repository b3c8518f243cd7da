"""A profile: how long each layer takes, forward and backward, measured once with an example input."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map

from zero_trial.errors import ConfigError
from zero_trial.mesh import agree_on
from zero_trial.pipeline.chunk import Chunk, LayerSeeds
from zero_trial.pipeline.specs import Layer

ROUNDS = 3


def layer_times(
    layers: Sequence[Layer], example: Any, seeds: LayerSeeds | None, clock: Callable[[], float] = time.perf_counter
) -> list[float]:
    """Seconds of each layer's forward and backward, the same list on every rank: rank 0's, the best of three rounds. Collective over the world.

    Builds one layer after the other and keeps none; the random state afterwards is that before. ``example``: what the first layer gets, or a
    function without arguments that makes it.
    """
    if example is None:
        raise ConfigError(
            "a partition by profile needs an example of what the first layer gets",
            where="PipelineModule(profile_input)",
            fix="Pass one micro-batch's input, or a function that makes it.",
        )
    state = torch.get_rng_state()
    value = example() if callable(example) else example
    times = []
    for index in range(len(layers)):
        chunk = Chunk(layers, index, index + 1, seeds=seeds)
        value, seconds = _measure(chunk, value, clock)
        times.append(seconds)
    torch.set_rng_state(state)
    return agree_on(times)


def _measure(chunk: Chunk, value: Any, clock: Callable[[], float]) -> tuple[Any, float]:
    best = float("inf")
    for _ in range(ROUNDS):
        leaf = tree_map(_as_leaf, value)
        begin = clock()
        output = chunk(leaf)
        tensors = [tensor for tensor in _tensors(output) if tensor.requires_grad]
        if tensors:
            torch.autograd.backward(tensors, [torch.ones_like(tensor) for tensor in tensors])
        best = min(best, clock() - begin)
    return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, output), best


def _as_leaf(leaf: Any) -> Any:
    """A copy, so that a layer may work in place."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    copy = leaf.detach().clone()
    return (copy.requires_grad_() * 1) if copy.is_floating_point() else copy


def _tensors(value: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    tree_map(lambda leaf: found.append(leaf) if isinstance(leaf, torch.Tensor) else None, value)
    return found
