"""Forwards and backwards of one pipeline rank's chunks, by micro-batch; no messages or sharding.

At a stage boundary, received tensors enter a chunk's graph and their gradients leave it. Between
the boundary and the outputs, a backward runs as a whole or in two halves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node
from torch.utils._pytree import tree_map_only

from zero_trial.pipeline.channel import Payload


class StageBoundary:
    """The inputs of one chunk and micro-batch. :meth:`open` adds them to the graph; the backward
    pass fills ``gradients``.

    Tensors from :meth:`open` are neither leaves nor views, so the first layer may change them in
    place, without a copy.
    """

    def __init__(self, payload: Payload, anchor: torch.Tensor) -> None:
        self.anchor = anchor
        self.gradients: tuple[torch.Tensor | None, ...] = (None,) * sum(payload.differentiable)
        self.node: Node | None = None
        self._payload: Payload | None = payload

    def open(self) -> Any:
        """Return the value; add its tensors to the graph if they need gradients. Call once."""
        payload, self._payload = self._payload, None
        if payload is None:
            return None
        inside = payload.wanted()
        if not inside:
            return payload.value
        joined: Sequence[torch.Tensor] = _Join.apply(self.anchor, self, inside)  # type: ignore[no-untyped-call]
        self.node = joined[0].grad_fn
        by_id = {id(tensor): new for tensor, new in zip(inside, joined, strict=True)}
        return tree_map_only(torch.Tensor, lambda tensor: by_id.get(id(tensor), tensor), payload.value)

    def take(self) -> list[torch.Tensor | None]:
        """Return the gradients, in the order of the tensors that need them. Call once."""
        found, self.gradients = list(self.gradients), ()
        return found


class _Join(torch.autograd.Function):
    """Makes the tensors outputs of a node whose backward stores their gradients in the boundary.
    The anchor is needed only to make the node part of a graph."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, boundary: StageBoundary, tensors: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        ctx.boundary = boundary
        ctx.set_materialize_grads(False)
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[None, None, None]:
        ctx.boundary.gradients = gradients
        return None, None, None


# --- a backward in two halves ---------------------------------------------------------------------
#
# The first half computes the gradients of a chunk's inputs, which another rank waits for; the
# second half, later, those of its weights.
#
#     nodes that lead to the inputs   out ── Mul ── Addmm ── Gelu ── Addmm ── boundary  (Backward)
#     weights hang off them                          │ │              │ │
#                                                 weight bias      weight bias
#
# The first half runs the upper line; autograd skips branches that only weights need. Each node with
# weights stores its incoming gradient. The second half runs every such node again, from this
# gradient down to its weights only. The first half computes a weight that several nodes use (a
# shared weight): the second half would reach one node from the other and count it twice.
#
# Cost: the incoming gradients of such nodes, and all tensors that the forward saved, stay in memory
# until the second half. Matrix products are computed once, as zero-bubble schedules assume (Qi et
# al. 2023); the second half computes paths from a node to a weight that involve no inputs.

Gradients = Sequence[torch.Tensor | None]


@dataclass
class _Place:
    """A node that weights are attached to, and the gradients of its outputs once they are known."""

    node: Node
    weights: list[torch.Tensor]
    gradients: Gradients = ()


class SplitBackward:
    """One chunk's backward for one micro-batch, from ``boundary`` and its leaf ``anchor``."""

    def __init__(self, outputs: Sequence[torch.Tensor], boundary: Node, anchor: torch.Tensor) -> None:
        self._outputs = list(outputs)
        self._anchor = anchor
        self._places, self._shared = split_graph(outputs, boundary)

    def inputs(self, gradients: Gradients) -> None:
        """Run the first half, from the gradients of the outputs."""
        handles = [place.node.register_prehook(partial(setattr, place, "gradients")) for place in self._places]
        try:
            wanted = [self._anchor, *self._shared]
            torch.autograd.backward(self._outputs, list(gradients), inputs=wanted, retain_graph=True)
        finally:
            for handle in handles:
                handle.remove()

    def weights(self) -> None:
        """Run the second half, then release the graph. Call once."""
        self._outputs = []
        while self._places:
            place = self._places.pop()
            edges, values = [], []
            for index, gradient in enumerate(place.gradients):
                if gradient is not None:
                    edges.append(GradientEdge(place.node, index))
                    values.append(gradient)
            if edges:
                torch.autograd.backward(edges, values, inputs=place.weights)


def split_graph(outputs: Iterable[torch.Tensor], boundary: Node) -> tuple[list[_Place], list[torch.Tensor]]:
    """Return the nodes with weights, and the weights that the first half must compute. Visits every
    node of the graph once or twice."""
    roots = [output.grad_fn for output in outputs if output.grad_fn is not None]
    before: dict[Node, list[Node]] = defaultdict(list)  # node -> its predecessors
    seen = set(roots)
    stack = list(roots)
    while stack:
        node = stack.pop()
        for following, _ in node.next_functions:
            if following is not None:
                before[following].append(node)
                if following not in seen:
                    seen.add(following)
                    stack.append(following)
    path = _all_before(boundary, before) if boundary in seen else set()
    # leaf -> the nodes of the path that use it
    holders: dict[Any, list[Node]] = defaultdict(list)
    for node in path - {boundary}:
        for leaf in _leaves_off(node, path):
            holders[leaf].append(node)
    weights: dict[Node, list[torch.Tensor]] = defaultdict(list)
    shared: list[torch.Tensor] = []
    for leaf, nodes in holders.items():
        (weights[nodes[0]] if len(nodes) == 1 else shared).append(leaf.variable)
    return [_Place(node, tensors) for node, tensors in weights.items()], shared


def _all_before(boundary: Node, before: dict[Node, list[Node]]) -> set[Node]:
    path, stack = {boundary}, [boundary]
    while stack:
        for node in before[stack.pop()]:
            if node not in path:
                path.add(node)
                stack.append(node)
    return path


def _leaves_off(node: Node, path: set[Node]) -> set[Node]:
    """Return the leaves reachable from ``node`` without passing another node of the path."""
    leaves: set[Node] = set()
    visited: set[Node] = set()
    stack = [node]
    while stack:
        for following, _ in stack.pop().next_functions:
            if following is None or following in path or following in visited:
                continue
            visited.add(following)
            if hasattr(following, "variable"):
                leaves.add(following)
            else:
                stack.append(following)
    return leaves


# --- the stage ------------------------------------------------------------------------------------

Item = tuple[int, int]
"""(chunk, micro-batch)."""

Run = Callable[[int, int, Any], Any]
"""(chunk, micro-batch, its input) -> its output."""

Loss = Callable[[Any, Any], torch.Tensor]
"""(output of the last chunk, label) -> a scalar."""


@dataclass
class _Live:
    """The part of a forward that backward needs: the boundary of the inputs, and the outputs."""

    boundary: StageBoundary
    outputs: list[torch.Tensor]
    gradients: Gradients = ()  # set by the first half of a split backward
    split: SplitBackward | None = None


@dataclass
class Stage:
    """Forwards and backwards of the chunks of one rank. ``splits``: the chunks whose backward can
    be split.

    ``peak``: the largest number of activations (of one chunk and micro-batch) in memory at once.
    """

    run: Run
    splits: Callable[[int], bool]
    peak: int = 0
    _live: dict[Item, _Live] = field(default_factory=dict)
    _anchor: torch.Tensor = field(default_factory=lambda: torch.zeros((), requires_grad=True))

    def forward(self, chunk: int, micro_batch: int, payload: Payload) -> Any:
        """Return the chunk's output, inside its graph."""
        boundary = StageBoundary(payload, self._anchor)
        self._live[chunk, micro_batch] = _Live(boundary, [])
        self.peak = max(self.peak, len(self._live))
        return self.run(chunk, micro_batch, boundary.open())

    def evaluate(self, chunk: int, micro_batch: int, payload: Payload) -> Any:
        """Return the chunk's output, without a graph."""
        with torch.no_grad():
            return self.run(chunk, micro_batch, payload.value)

    def keep(self, chunk: int, micro_batch: int, outputs: Sequence[torch.Tensor]) -> None:
        """Store the output tensors that will receive gradients, in the order of those gradients."""
        self._live[chunk, micro_batch].outputs = list(outputs)

    def backward(self, chunk: int, micro_batch: int, gradients: Gradients) -> list[torch.Tensor | None]:
        """Run the whole backward; return the inputs' gradients. Hooks process weight gradients."""
        live = self._live.pop((chunk, micro_batch))
        _run_backward(live.outputs, gradients)
        return live.boundary.take()

    def backward_inputs(self, chunk: int, micro_batch: int, gradients: Gradients) -> list[torch.Tensor | None]:
        """Compute and return only the gradients of the inputs. If no input needs a gradient,
        compute nothing; if the chunk cannot be split, compute all gradients."""
        live = self._live[chunk, micro_batch]
        if live.boundary.node is None:
            live.gradients = tuple(gradients)
        elif self.splits(chunk):
            outputs, values = _with_gradients(live.outputs, gradients)
            live.split = SplitBackward(outputs, live.boundary.node, self._anchor)
            live.outputs = []
            live.split.inputs(values)
        else:
            _run_backward(live.outputs, gradients)
            live.outputs = []
        return live.boundary.take()

    def backward_weights(self, chunk: int, micro_batch: int) -> None:
        """Run the rest of the backward."""
        live = self._live.pop((chunk, micro_batch))
        if live.split is not None:
            live.split.weights()
        elif live.outputs:
            _run_backward(live.outputs, live.gradients)

    def forget(self) -> None:
        """Drop all graphs after a failed step."""
        self._live.clear()


def _with_gradients(
    outputs: Sequence[torch.Tensor], gradients: Gradients
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    pairs = [
        (output, gradient)
        for output, gradient in zip(outputs, gradients, strict=True)
        if gradient is not None and output.requires_grad
    ]
    return [output for output, _ in pairs], [gradient for _, gradient in pairs]


def _run_backward(outputs: Sequence[torch.Tensor], gradients: Gradients) -> None:
    tensors, values = _with_gradients(outputs, gradients)
    if tensors:
        torch.autograd.backward(tensors, values)
