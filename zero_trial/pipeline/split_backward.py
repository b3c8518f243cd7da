"""A backward pass in two halves: first the gradient of a chunk's inputs, which another rank waits for; later those of its weights.

    nodes that lead to the inputs       out ── MulBackward ── AddmmBackward ── GeluBackward ── AddmmBackward ── gate
    weights hang off them                                        │ │                              │ │
                                                              weight bias                      weight bias

The first half runs the upper line; autograd skips what only weights need. Each node with weights keeps the gradient that came to it. The second
half runs every such node once more, from that gradient and down to its weights only. A weight that hangs off several nodes (a shared one) is
done in the first half: from one node the other would be met again, and counted twice.

Price: the gradients that came to such nodes, and all that the forward saved, live until the second half. As zero-bubble schedules assume it
(Qi et al. 2023), matrix products are computed once; what leads from a node to a weight without touching inputs is computed in the second half.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node

Gradients = Sequence[torch.Tensor | None]


@dataclass
class _Place:
    """A node with weights of its own, and the gradients of its outputs once they are known."""

    node: Node
    weights: list[torch.Tensor]
    gradients: Gradients = ()


@dataclass(frozen=True)
class Anatomy:
    """Of a graph: the nodes with weights, and the weights that must be done together with the inputs."""

    places: list[_Place] = field(default_factory=list)
    shared: list[torch.Tensor] = field(default_factory=list)


class SplitBackward:
    """One chunk's backward for one micro-batch. ``gate`` is the node where its inputs enter, ``anchor`` the leaf behind it."""

    def __init__(self, outputs: Sequence[torch.Tensor], gate: Node, anchor: torch.Tensor) -> None:
        self._outputs = list(outputs)
        self._anchor = anchor
        self._anatomy = anatomy(outputs, gate)

    def inputs(self, gradients: Gradients) -> None:
        """The first half, from the gradients of the outputs."""
        places = self._anatomy.places
        handles = [place.node.register_prehook(_keeper(place)) for place in places]
        try:
            wanted = [self._anchor, *self._anatomy.shared]
            torch.autograd.backward(self._outputs, list(gradients), inputs=wanted, retain_graph=True)
        finally:
            for handle in handles:
                handle.remove()

    def weights(self) -> None:
        """The second half. Once; afterwards nothing of the graph is kept."""
        places, self._outputs = self._anatomy.places, []
        while places:
            place = places.pop()
            edges, values = [], []
            for index, gradient in enumerate(place.gradients):
                if gradient is not None:
                    edges.append(GradientEdge(place.node, index))
                    values.append(gradient)
            if edges:
                torch.autograd.backward(edges, values, inputs=place.weights)


def anatomy(outputs: Iterable[torch.Tensor], gate: Node) -> Anatomy:
    """Which weights hang off which node. Visits every node of the graph once or twice."""
    roots = [output.grad_fn for output in outputs if output.grad_fn is not None]
    before: dict[Node, list[Node]] = defaultdict(list)  # node -> those that lead to it
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
    path = _all_before(gate, before) if gate in seen else set()
    holders: dict[Node, list[Node]] = defaultdict(list)  # leaf -> the nodes of the path that it hangs off
    for node in path - {gate}:
        for leaf in _leaves_off(node, path):
            holders[leaf].append(node)
    found = Anatomy()
    weights: dict[Node, list[torch.Tensor]] = defaultdict(list)
    for leaf, nodes in holders.items():
        if len(nodes) == 1:
            weights[nodes[0]].append(_variable(leaf))
        else:
            found.shared.append(_variable(leaf))
    found.places.extend(_Place(node, tensors) for node, tensors in weights.items())
    return found


def _all_before(gate: Node, before: dict[Node, list[Node]]) -> set[Node]:
    path, stack = {gate}, [gate]
    while stack:
        for node in before[stack.pop()]:
            if node not in path:
                path.add(node)
                stack.append(node)
    return path


def _leaves_off(node: Node, path: set[Node]) -> set[Node]:
    """The leaves that are reached from ``node`` without another node of the path."""
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


def _variable(leaf: Any) -> torch.Tensor:
    tensor: torch.Tensor = leaf.variable
    return tensor


def _keeper(place: _Place) -> Any:
    def keep(gradients: Gradients) -> None:
        place.gradients = tuple(gradients)

    return keep
