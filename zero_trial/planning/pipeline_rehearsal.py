"""A pipeline rank's row played through with its layers alone, and what tensors it held: no other rank, no sharding, no messages.

What comes from other ranks is a tensor of the right shape. Full parameters and gradients that sharding gathers and frees are counted by the
row's own actions (UNSHARD, RESHARD, REDUCE), so each computation is seen together with what is whole at that moment.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map

from zero_trial.pipeline.actions import Action, Kind
from zero_trial.pipeline.gate import Gate
from zero_trial.pipeline.parcel import parcel_of
from zero_trial.pipeline.schedule import Row, Schedule
from zero_trial.pipeline.split_backward import SplitBackward
from zero_trial.planning.live_bytes import LiveBytes
from zero_trial.planning.pipeline_parts import Parts


@dataclass(frozen=True)
class Held:
    """Bytes of one pipeline rank at most: ``activations`` is what autograd saved; ``peak`` all but what outlives a step."""

    activations: int
    peak: int


@dataclass(frozen=True)
class Copies:
    """Bytes of one element while it is whole; 0 where it is never freed, because then it is among what outlives a step.

    Parameters of fewer than ``persistence`` elements are never freed.
    """

    parameter: int = 0
    gradient: int = 0
    persistence: int = 0


@dataclass
class _Flight:
    """One chunk's micro-batch from its forward to its last gradient."""

    gate: Gate
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
    flights: dict[tuple[int, int], _Flight] = field(default_factory=dict)

    def perform(self, action: Action) -> None:
        kind, chunk, number, _ = action
        if kind is Kind.F:
            self._forward(chunk, number)
        elif kind is Kind.B:
            flight = self.flights.pop((chunk, number))
            torch.autograd.backward(flight.outputs, _gradients(flight.outputs))
        elif kind is Kind.I:
            flight = self.flights[chunk, number]
            if flight.gate.node is None:  # nothing to hand back: all of it is the weights'
                return
            flight.split = SplitBackward(flight.outputs, flight.gate.node, self.anchor)
            flight.split.inputs(_gradients(flight.outputs))
            flight.outputs = []
        elif kind is Kind.W:
            flight = self.flights.pop((chunk, number))
            if flight.split is not None:
                flight.split.weights()
            else:
                torch.autograd.backward(flight.outputs, _gradients(flight.outputs))

    def _forward(self, chunk: int, number: int) -> None:
        gate = Gate(parcel_of(_fresh(self.inputs[chunk]))[1], self.anchor)
        value = self.chunks[chunk](gate.open())
        if chunk == self.last:
            value = (value if self.loss_fn is None else self.loss_fn(value, self.labels)) / self.micro_batches
        outputs = [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        self.flights[chunk, number] = _Flight(gate, outputs)


def rehearse_rank(
    parts: Parts,
    schedule: Schedule,
    rank: int,
    batch: tuple[Any, Any],
    copies: Copies,
    dtype: torch.dtype = torch.float32,
    *,
    imagined: bool = True,
) -> Held:
    """What pipeline rank ``rank`` holds in one step of ``schedule`` on micro-batches like ``batch`` (inputs, labels).

    ``imagined``: tensors without values. torch's random state stays as it was. Raises TrialError where a layer cannot be run so.
    """
    live = LiveBytes()
    inputs, labels = parts.whole.batch(batch, imagined=imagined)
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]), parts.whole.without_values(imagined=imagined):
        warnings.simplefilter("ignore")  # imagined tensors have no addresses, and torch warns who asks for one
        model = parts.whole.options(imagined=imagined)["model"]
        chunks = {int(name): chunk for name, chunk in model.items()}
        for param in model.parameters():
            param.data = param.data.to(dtype)
            param.register_post_accumulate_grad_hook(_landed)
        templates = _templates(chunks, _cast(inputs, dtype))
        mine = {chunk: chunks[chunk] for chunk in parts.placement.of(rank)}
        anchor = torch.zeros((), requires_grad=True)
        player = _Player(mine, templates, labels, parts.loss_fn, parts.placement.last, schedule.micro_batches, anchor)
        return _play(player, schedule.rows[rank], live, _whole(mine, copies))


def _play(player: _Player, row: Row, live: LiveBytes, sizes: Mapping[int, Copies]) -> Held:
    """Every computation with what is whole around it."""
    parameters: dict[int, int] = {}
    gradients: dict[int, int] = {}
    activations = peak = 0
    with live:
        for action in row:
            kind, chunk = action.kind, action.chunk
            if kind is Kind.UNSHARD:
                parameters[chunk] = sizes[chunk].parameter
            elif kind is Kind.RESHARD:
                parameters.pop(chunk)
            elif kind is Kind.REDUCE:
                gradients.pop(chunk, None)
            elif kind in (Kind.F, Kind.B, Kind.I, Kind.W):
                if kind is Kind.B or kind is Kind.W:
                    gradients[chunk] = sizes[chunk].gradient
                live.restart()
                with live.saving():
                    player.perform(action)
                whole = sum(parameters.values()) + sum(gradients.values())
                activations, peak = max(activations, live.saved_peak), max(peak, live.peak + whole)
    return Held(activations, peak)


def _templates(chunks: Mapping[int, nn.Module], inputs: Any) -> dict[int, Any]:
    """What each chunk gets, by running them one after the other; floating tensors of later ones want a gradient."""
    found: dict[int, Any] = {}
    value = inputs
    for number in sorted(chunks):
        found[number] = value
        value = chunks[number](_fresh(value))
    return found


def _whole(chunks: Mapping[int, nn.Module], copies: Copies) -> dict[int, Copies]:
    """The same of each chunk as a whole; what two of them share is the first one's."""
    found: dict[int, Copies] = {}
    seen: set[nn.Parameter] = set()
    for number, chunk in chunks.items():
        sizes = [param.numel() for param in chunk.parameters() if param not in seen]
        seen.update(chunk.parameters())
        freed = sum(size for size in sizes if size >= copies.persistence)
        found[number] = Copies(freed * copies.parameter, sum(sizes) * copies.gradient)
    return found


def _fresh(value: Any) -> Any:
    """New tensors like these, as a message would bring them."""

    def made(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return torch.empty_like(leaf).copy_(leaf.detach()).requires_grad_(leaf.requires_grad)

    return tree_map(made, value)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Floating tensors in the parameters' dtype."""
    return tree_map(
        lambda leaf: leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf, value
    )


def _gradients(outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.ones_like(output) for output in outputs]


def _landed(param: torch.Tensor) -> None:
    """The gradient is in its buffer, which is counted elsewhere."""
    param.grad = None
