"""Run one pipeline rank's row of the schedule with its layers alone, and measure the memory it
holds.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map

from zero_trial.engine.pipeline_build import PipelineSettings
from zero_trial.pipeline.channel import to_payload
from zero_trial.pipeline.generators import RECIPES
from zero_trial.pipeline.module import PipelineModule
from zero_trial.pipeline.schedule import Action, ActionKind, ChunkPlacement, Row, Schedule
from zero_trial.pipeline.stage import SplitBackward, StageBoundary
from zero_trial.planning.blueprint import Blueprint
from zero_trial.planning.live_bytes import LiveBytes


@dataclass(frozen=True)
class Parts:
    """``stages[r]`` is what pipeline rank r holds, a ModuleDict of its chunks by number; ``whole``
    has the chunks of all.

    ``bounds``: chunk c is layers ``bounds[c]`` to ``bounds[c + 1] - 1``. ``ties``: groups of chunks
    that share weights.
    """

    placement: ChunkPlacement
    stages: tuple[Blueprint, ...]
    whole: Blueprint
    bounds: tuple[int, ...]
    ties: tuple[tuple[int, ...], ...]
    elements: tuple[int, ...]  # trainable, of each pipeline rank
    parameters: int  # of the whole model, what is tied once
    loss_fn: Any

    def layers(self, rank: int) -> str:
        """Return the layers of a pipeline rank: ``0-3`` or ``0-1,4-5``."""
        runs = [(self.bounds[chunk], self.bounds[chunk + 1] - 1) for chunk in self.placement.of(rank)]
        return ",".join(f"{first}-{last}" if last > first else f"{first}" for first, last in runs)


def parts_of(model: PipelineModule, settings: PipelineSettings, device: torch.device | str = "cpu") -> Parts:
    """Return the parts that the run's ranks will build; ``model`` stays as it is.

    A partition by profile is measured here, with real layers.
    """
    placement = RECIPES[settings.schedule].place(settings.stages, settings.chunks_per_rank)
    method = settings.partition_method or model.partition_method
    built = []
    for rank in range(placement.stages):
        stage = model.unbuilt()
        with nullcontext() if method.strip().lower() == "profile" else torch.device("meta"):
            stage.build(
                placement,
                rank,
                partition_method=method,
                activation_checkpoint_interval=settings.activation_checkpoint_interval or None,
            )
        built.append(stage)
    chunks = [nn.ModuleDict({str(number): chunk for number, chunk in stage.chunks.items()}) for stage in built]
    whole = nn.ModuleDict(dict(chain.from_iterable(stage.items() for stage in chunks)))
    return Parts(
        placement=placement,
        stages=tuple(Blueprint(stage, device=device) for stage in chunks),
        whole=Blueprint(whole, device=device),
        bounds=tuple(built[0].parts),
        ties=tuple(built[0].ties.values()),
        elements=tuple(sum(param.numel() for param in stage.parameters() if param.requires_grad) for stage in chunks),
        parameters=model.total_parameters,
        loss_fn=model.loss_fn,
    )


# A pipeline rank's row played through with its layers alone, and what tensors it held: no other
# rank, no sharding, no messages.
#
# What comes from other ranks is a tensor of the right shape. Full parameters and gradients that
# sharding gathers and frees are counted by the row's own actions (UNSHARD, RESHARD, REDUCE), so
# each computation is seen together with what is whole at that moment.


@dataclass(frozen=True)
class HeldBytes:
    """Bytes of one pipeline rank at most: ``activations`` is what autograd saved; ``peak`` all but
    what outlives a step. ``message``: of the largest message between two chunks.
    """

    activations: int
    peak: int
    message: int = 0


@dataclass(frozen=True)
class Copies:
    """Bytes of one element while it is whole; 0 where it is never freed, because then it is among
    what outlives a step.

    Parameters of fewer than ``persistence`` elements are never freed.
    """

    parameter: int = 0
    gradient: int = 0
    persistence: int = 0


@dataclass
class _InFlight:
    """One chunk's micro-batch from its forward to its last gradient."""

    gate: StageBoundary
    outputs: list[torch.Tensor]
    split: SplitBackward | None = None


@dataclass
class _Player:
    """Performs a row on the rank's chunks; ``inputs[c]`` is like what chunk c gets."""

    chunks: Mapping[int, nn.Module]
    inputs: Mapping[int, Any]
    labels: Any
    loss_fn: Any
    last: int
    micro_batches: int
    anchor: torch.Tensor
    in_flight: dict[tuple[int, int], _InFlight] = field(default_factory=dict)

    def perform(self, action: Action) -> None:
        kind, chunk, number, _ = action
        if kind is ActionKind.F:
            self._forward(chunk, number)
        elif kind is ActionKind.B:
            current = self.in_flight.pop((chunk, number))
            torch.autograd.backward(current.outputs, _gradients(current.outputs))
        elif kind is ActionKind.I:
            current = self.in_flight[chunk, number]
            if current.gate.node is None:  # nothing to hand back: all of it is the weights'
                return
            current.split = SplitBackward(current.outputs, current.gate.node, self.anchor)
            current.split.inputs(_gradients(current.outputs))
            current.outputs = []
        elif kind is ActionKind.W:
            current = self.in_flight.pop((chunk, number))
            if current.split is not None:
                current.split.weights()
            else:
                torch.autograd.backward(current.outputs, _gradients(current.outputs))

    def _forward(self, chunk: int, number: int) -> None:
        gate = StageBoundary(to_payload(_fresh(self.inputs[chunk]))[1], self.anchor)
        value = self.chunks[chunk](gate.open())
        if chunk == self.last:
            value = (value if self.loss_fn is None else self.loss_fn(value, self.labels)) / self.micro_batches
        outputs = [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        self.in_flight[chunk, number] = _InFlight(gate, outputs)


def dry_run_rank(
    parts: Parts,
    schedule: Schedule,
    rank: int,
    batch: tuple[Any, Any],
    copies: Copies,
    dtype: torch.dtype = torch.float32,
    *,
    fake: bool = True,
) -> HeldBytes:
    """Return what pipeline rank ``rank`` holds in one step of ``schedule`` on micro-batches like
    ``batch`` (inputs, labels).

    ``fake``: tensors without values. torch's random state stays as it was. Raises TrialError where
    a layer cannot be run so.
    """
    live = LiveBytes()
    inputs, labels = parts.whole.batch(batch, fake=fake)
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]), parts.whole.without_values(fake=fake):
        # fake tensors have no addresses, and torch warns who asks for one
        warnings.simplefilter("ignore")
        model = parts.whole.options(fake=fake)["model"]
        chunks = {int(name): chunk for name, chunk in model.items()}
        for param in model.parameters():
            param.data = param.data.to(dtype)
            param.register_post_accumulate_grad_hook(_drop_grad)
        templates = _templates(chunks, _cast(inputs, dtype))
        mine = {chunk: chunks[chunk] for chunk in parts.placement.of(rank)}
        anchor = torch.zeros((), requires_grad=True)
        player = _Player(mine, templates, labels, parts.loss_fn, parts.placement.last, schedule.micro_batches, anchor)
        sent = [_bytes(value) for chunk, value in templates.items() if chunk > 0]
        return replace(_play(player, schedule.rows[rank], live, _whole(mine, copies)), message=max(sent, default=0))


def _bytes(value: Any) -> int:
    """Return the bytes of the tensors in a nested value."""
    return sum(leaf.numel() * leaf.element_size() for leaf in tree_flatten(value)[0] if isinstance(leaf, torch.Tensor))


def _play(player: _Player, row: Row, live: LiveBytes, sizes: Mapping[int, Copies]) -> HeldBytes:
    """Perform the row; return the most bytes of any computation, with what is whole around it."""
    parameters: dict[int, int] = {}
    gradients: dict[int, int] = {}
    activations = peak = 0
    with live:
        for action in row:
            kind, chunk = action.kind, action.chunk
            if kind is ActionKind.UNSHARD:
                parameters[chunk] = sizes[chunk].parameter
            elif kind is ActionKind.RESHARD:
                parameters.pop(chunk)
            elif kind is ActionKind.REDUCE:
                gradients.pop(chunk, None)
            elif kind in (ActionKind.F, ActionKind.B, ActionKind.I, ActionKind.W):
                if kind is ActionKind.B or kind is ActionKind.W:
                    gradients[chunk] = sizes[chunk].gradient
                live.restart()
                with live.saving():
                    player.perform(action)
                whole = sum(parameters.values()) + sum(gradients.values())
                activations, peak = max(activations, live.saved_peak), max(peak, live.peak + whole)
    return HeldBytes(activations, peak)


def _templates(chunks: Mapping[int, nn.Module], inputs: Any) -> dict[int, Any]:
    """Return what each chunk gets, by running them one after the other; floating tensors of later
    ones want a gradient.
    """
    found: dict[int, Any] = {}
    value = inputs
    for number in sorted(chunks):
        found[number] = value
        value = chunks[number](_fresh(value))
    return found


def _whole(chunks: Mapping[int, nn.Module], copies: Copies) -> dict[int, Copies]:
    """Return the same of each chunk as a whole; what two of them share is the first one's."""
    found: dict[int, Copies] = {}
    seen: set[nn.Parameter] = set()
    for number, chunk in chunks.items():
        sizes = [param.numel() for param in chunk.parameters() if param not in seen]
        seen.update(chunk.parameters())
        freed = sum(size for size in sizes if size >= copies.persistence)
        found[number] = Copies(freed * copies.parameter, sum(sizes) * copies.gradient)
    return found


def _fresh(value: Any) -> Any:
    """Return new tensors like these, as a message would bring them."""

    def made(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return torch.empty_like(leaf).copy_(leaf.detach()).requires_grad_(leaf.requires_grad)

    return tree_map(made, value)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Return the value with its floating tensors in ``dtype``."""
    return tree_map(
        lambda leaf: leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf, value
    )


def _gradients(outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.ones_like(output) for output in outputs]


def _drop_grad(param: torch.Tensor) -> None:
    """Drop the gradient: it is in its buffer, which is counted elsewhere."""
    param.grad = None
