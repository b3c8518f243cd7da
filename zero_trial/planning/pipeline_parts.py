"""The memory of a pipeline's ranks: each chunk runs one micro-batch without values, and a row of
the schedule multiplies the result by the micro-batches in flight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map

from zero_trial.activation_checkpointing import CHECKPOINTING, HostInputs, offload_checkpoints
from zero_trial.engine.pipeline_build import PipelineSettings
from zero_trial.pipeline.channel import to_payload
from zero_trial.pipeline.module import PipelineModule
from zero_trial.pipeline.schedule import RECIPES, ActionKind, ChunkPlacement, Row
from zero_trial.pipeline.stage import SplitBackward, StageBoundary
from zero_trial.planning.blueprint import Blueprint
from zero_trial.planning.live_bytes import LiveBytes
from zero_trial.planning.pass_trace import PlannedInputs, without_ranks, without_values
from zero_trial.sharding.living_dtypes import LivingDtypes
from zero_trial.sharding.precision import DtypePolicy, cast_floats


@dataclass(frozen=True)
class Parts:
    """``stages[r]`` is a ModuleDict of pipeline rank r's chunks by number; ``whole`` has the chunks
    of all ranks.

    ``bounds``: chunk c is layers ``bounds[c]`` to ``bounds[c + 1] - 1``. ``ties``: groups of chunks
    that share weights.
    """

    placement: ChunkPlacement
    stages: tuple[Blueprint, ...]
    whole: Blueprint
    bounds: tuple[int, ...]
    ties: tuple[tuple[int, ...], ...]
    elements: tuple[int, ...]  # trainable elements of each pipeline rank
    others: tuple[int, ...]  # bytes of layers passed as modules that each rank holds but does not train
    parameters: int  # of the whole model; tied ones count once
    loss_fn: Any

    def layers(self, rank: int) -> str:
        """Return the layers of a pipeline rank: ``0-3`` or ``0-1,4-5``."""
        runs = [(self.bounds[chunk], self.bounds[chunk + 1] - 1) for chunk in self.placement.of(rank)]
        return ",".join(f"{first}-{last}" if last > first else f"{first}" for first, last in runs)


def parts_of(model: PipelineModule, settings: PipelineSettings, device: torch.device | str = "cpu") -> Parts:
    """Return the parts that the run's ranks will build; does not change ``model``.

    For a partition by profile, measures real layers.
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
    others = []
    for stage in built:
        own = {id(param) for param in stage.parameters()}
        rest = {
            id(param): param.nbytes
            for layer in model.layers_as_modules
            for param in layer.parameters()
            if id(param) not in own
        }
        others.append(sum(rest.values()))
    chunks = [nn.ModuleDict({str(number): chunk for number, chunk in stage.chunks.items()}) for stage in built]
    whole = nn.ModuleDict(dict(chain.from_iterable(stage.items() for stage in chunks)))
    return Parts(
        placement=placement,
        stages=tuple(Blueprint(stage, device=device) for stage in chunks),
        whole=Blueprint(whole, device=device),
        bounds=tuple(built[0].parts),
        ties=tuple(built[0].ties.values()),
        elements=tuple(sum(param.numel() for param in stage.parameters() if param.requires_grad) for stage in chunks),
        others=tuple(others),
        parameters=model.total_parameters,
        loss_fn=model.loss_fn,
    )


@dataclass(frozen=True)
class _Phase:
    """Bytes of one micro-batch of a chunk: during an action, after it, saved for backward, and in
    host memory afterwards."""

    peak: int
    after: int
    saved_peak: int
    saved_after: int
    host: int


@dataclass(frozen=True)
class ChunkBytes:
    """Memory of a chunk for one micro-batch, by action, and the bytes that the chunk receives: of a
    message, of the first chunk's inputs, and of the last chunk's labels. Ranks read inputs and
    labels before the step."""

    phases: Mapping[ActionKind, _Phase]
    message: int
    inputs: int
    labels: int


def chunk_bytes(
    parts: Parts, batch: tuple[Any, Any], policy: DtypePolicy, micro_batches: int, *, on_host: bool
) -> dict[int, ChunkBytes]:
    """Return the memory of each chunk for a micro-batch like ``batch`` (inputs, labels), one of
    ``micro_batches``. Keeps torch's random state. Raises TrialError if a layer cannot run."""

    def run(fake: bool, place: torch.device, _: str) -> dict[int, ChunkBytes]:
        inputs, labels = without_values(batch, place) if fake else batch
        model = parts.whole.model(fake=fake, device=place)
        offload_checkpoints(model, everywhere=on_host)
        living = LivingDtypes(model, policy)
        living.cast_at_borders()
        for param in model.parameters():
            param.data = param.data.to(living.of(param))
            param.register_post_accumulate_grad_hook(_drop_grad)
        chunks = {int(name): chunk for name, chunk in model.named_children()}
        given = _templates(chunks, cast_floats(inputs, policy.param))
        found = {}
        for number, chunk in chunks.items():
            loss = (parts.loss_fn, labels, micro_batches) if number == parts.placement.last else None
            phases: dict[ActionKind, _Phase] = {}
            for split in (False, True):
                host = PlannedInputs() if on_host else HostInputs()
                with CHECKPOINTING.planning(host, on_host=on_host):
                    phases |= _phases(chunk, given[number], loss, host, place, first=not number, split=split)
            received = _bytes(given[number])
            sizes = (received, 0) if number else (0, received)
            found[number] = ChunkBytes(phases, *sizes, _bytes(labels) if loss is not None else 0)
        return found

    return without_ranks(parts.whole.device, parts.parameters, run)


def _phases(
    chunk: nn.Module,
    given: Any,
    loss: tuple[Any, Any, int] | None,
    host: HostInputs,
    place: torch.device,
    *,
    first: bool,
    split: bool,
) -> dict[ActionKind, _Phase]:
    """Run forward and backward of one micro-batch; ``split``: the backward in two halves.
    ``first``: the chunk's input is already in memory."""
    anchor, live = torch.zeros((), requires_grad=True), LiveBytes(place.type)
    found: dict[ActionKind, _Phase] = {}

    def end(kind: ActionKind) -> None:
        host.settle()
        found[kind] = _Phase(live.peak, live.live, live.saved_peak, live.saved, getattr(host, "now", 0))
        live.restart()

    with live, live.saving():
        gate = StageBoundary(to_payload(given if first else _fresh(given))[1], anchor)
        value = chunk(gate.open())
        if loss is not None:
            loss_fn, labels, micro_batches = loss
            value = (value if loss_fn is None else loss_fn(value, labels)) / micro_batches
        outputs = [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        del value
        end(ActionKind.F)
        if split and gate.node is not None:
            halves = SplitBackward(outputs, gate.node, anchor)
            halves.inputs(_gradients(outputs))
            outputs = []
            end(ActionKind.I)
            halves.weights()
            end(ActionKind.W)
            return found
        if split:  # no gradient to send back: backward is only for the weights
            end(ActionKind.I)
        torch.autograd.backward(outputs, _gradients(outputs))
        end(ActionKind.W if split else ActionKind.B)
    return found


def play_row(row: Row, held: Mapping[int, ChunkBytes], sizes: Mapping[int, tuple[int, int]]) -> tuple[int, int, int]:
    """Return the peak bytes of a pipeline rank in its row of the schedule: saved by autograd, all
    memory that does not outlive a step, and saved inputs in host memory. Pure.

    The row's own actions (UNSHARD, RESHARD, REDUCE) count full parameters and gradients, so each
    computation is counted with those that exist at that moment.

    Args:
        sizes: bytes of each chunk's full parameters and gradients; 0 if they are never freed.
    """
    parameters: dict[int, int] = {}
    gradients: dict[int, int] = {}
    flying: dict[tuple[int, int], _Phase] = {}
    arrived: dict[tuple[int, int], int] = {}  # bytes of messages until they are used
    reducing = 0  # bytes of gradients in reduction
    sent = 0  # bytes of messages: no rank waits for a send before the step ends
    sends = {(action.kind, action.chunk) for action in row}
    activations = peak = host = 0
    for action in row:
        kind, chunk, number = action
        at = chunk, number
        if kind is ActionKind.UNSHARD:
            parameters[chunk] = sizes[chunk][0]
        elif kind is ActionKind.RESHARD:
            parameters.pop(chunk)
        elif kind is ActionKind.REDUCE:
            reducing = gradients.pop(chunk, 0)
        elif kind is ActionKind.RECV_F:
            arrived[at] = held[chunk].message
        elif kind is ActionKind.RECV_B:
            arrived[at] = held[chunk + 1].message
        elif kind in (ActionKind.F, ActionKind.B, ActionKind.I, ActionKind.W):
            flying.pop(at, None)
            arrived.pop(at, None)
            own = held[chunk].phases[kind]
            others = sum(each.after for each in flying.values()) + sum(parameters.values()) + sum(arrived.values())
            others += sent + reducing
            peak = max(peak, own.peak + others + sum(gradients.values()))
            activations = max(activations, own.saved_peak + sum(each.saved_after for each in flying.values()))
            if kind is ActionKind.F or kind is ActionKind.I:
                flying[at] = own
                host = max(host, sum(each.host for each in flying.values()))
                continue
            # full gradients are allocated while the first backward frees its saved tensors
            gradients[chunk] = sizes[chunk][1]
            peak = max(peak, own.after + others + sum(gradients.values()))
            # its output, and the gradient of its input
            sent += held[chunk + 1].message if (ActionKind.SEND_F, chunk) in sends else 0
            sent += held[chunk].message if (ActionKind.SEND_B, chunk) in sends else 0
    return activations, peak, host


def whole_bytes(
    chunks: Mapping[int, nn.Module], parameter: int, gradient: int, persistence: int
) -> dict[int, tuple[int, int]]:
    """Return the bytes of each chunk's full parameters and gradients, with ``parameter`` and
    ``gradient`` bytes per element; tensors that two chunks share count for the first. Parameters
    with fewer than ``persistence`` elements are never freed."""
    found: dict[int, tuple[int, int]] = {}
    seen: set[nn.Parameter] = set()
    for number, chunk in chunks.items():
        sizes = [param.numel() for param in chunk.parameters() if param not in seen]
        seen.update(chunk.parameters())
        freed = sum(size for size in sizes if size >= persistence)
        found[number] = freed * parameter, sum(sizes) * gradient
    return found


def _bytes(value: Any) -> int:
    """Return the bytes of the tensors in a nested value."""
    return sum(leaf.numel() * leaf.element_size() for leaf in tree_flatten(value)[0] if isinstance(leaf, torch.Tensor))


def _templates(chunks: Mapping[int, nn.Module], inputs: Any) -> dict[int, Any]:
    """Return each chunk's input by running all in order; floats after the first need gradients."""
    found: dict[int, Any] = {}
    value = inputs
    for number in sorted(chunks):
        found[number] = value
        value = chunks[number](_fresh(value))
    return found


def _fresh(value: Any) -> Any:
    """Return new tensors like these, as received from a message."""

    def made(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return torch.empty_like(leaf).copy_(leaf.detach()).requires_grad_(leaf.requires_grad)

    return tree_map(made, value)


def _gradients(outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.ones_like(output) for output in outputs]


def _drop_grad(param: torch.Tensor) -> None:
    """Drop the gradient: on a rank it is in a buffer that is counted elsewhere."""
    param.grad = None
