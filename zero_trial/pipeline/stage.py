"""A stage: what one pipeline rank computes with its chunks, micro-batch by micro-batch; it knows nothing of messages and of sharding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from zero_trial.pipeline.gate import Gate
from zero_trial.pipeline.parcel import Parcel
from zero_trial.pipeline.split_backward import Gradients, SplitBackward

Item = tuple[int, int]
"""(chunk, micro-batch)."""

Run = Callable[[int, int, Any], Any]
"""(chunk, micro-batch, its input) -> its output."""

Loss = Callable[[Any, Any], torch.Tensor]
"""(output of the last chunk, label) -> a scalar."""


@dataclass
class _Live:
    """What a backward pass needs of a forward: where the inputs came in, and the outputs that gradients come back to."""

    gate: Gate
    outputs: list[torch.Tensor]
    gradients: Gradients = ()  # given with the first half of a split backward
    split: SplitBackward | None = None


@dataclass
class Stage:
    """Forwards and backwards of the chunks of one rank. ``splits`` are the chunks whose backward can be cut in two.

    ``peak`` is the most activations (one chunk, one micro-batch) that lived at once.
    """

    run: Run
    splits: Callable[[int], bool]
    peak: int = 0
    _live: dict[Item, _Live] = field(default_factory=dict)
    _anchor: torch.Tensor = field(default_factory=lambda: torch.zeros((), requires_grad=True))

    def forward(self, chunk: int, micro_batch: int, parcel: Parcel) -> Any:
        """The chunk's output, inside its graph."""
        gate = Gate(parcel, self._anchor)
        self._live[chunk, micro_batch] = _Live(gate, [])
        self.peak = max(self.peak, len(self._live))
        return self.run(chunk, micro_batch, gate.open())

    def evaluate(self, chunk: int, micro_batch: int, parcel: Parcel) -> Any:
        """The chunk's output, without a graph."""
        with torch.no_grad():
            return self.run(chunk, micro_batch, parcel.value)

    def keep(self, chunk: int, micro_batch: int, outputs: Sequence[torch.Tensor]) -> None:
        """The tensors that gradients will come back to, in the order of those gradients."""
        self._live[chunk, micro_batch].outputs = list(outputs)

    def backward(self, chunk: int, micro_batch: int, gradients: Gradients) -> list[torch.Tensor | None]:
        """The whole backward: the gradients of the inputs that wanted one; the weights' have landed where their hooks bring them."""
        live = self._live.pop((chunk, micro_batch))
        _run_backward(live.outputs, gradients)
        return live.gate.take()

    def backward_inputs(self, chunk: int, micro_batch: int, gradients: Gradients) -> list[torch.Tensor | None]:
        """The gradients of the inputs only. Where there are none to be had, nothing happens; where the chunk cannot be split, everything."""
        live = self._live[chunk, micro_batch]
        if live.gate.node is None:
            live.gradients = tuple(gradients)
        elif self.splits(chunk):
            outputs, values = _with_gradients(live.outputs, gradients)
            live.split = SplitBackward(outputs, live.gate.node, self._anchor)
            live.outputs = []
            live.split.inputs(values)
        else:
            _run_backward(live.outputs, gradients)
            live.outputs = []
        return live.gate.take()

    def backward_weights(self, chunk: int, micro_batch: int) -> None:
        """The rest of the backward."""
        live = self._live.pop((chunk, micro_batch))
        if live.split is not None:
            live.split.weights()
        elif live.outputs:
            _run_backward(live.outputs, live.gradients)

    def forget(self) -> None:
        """Drops all graphs (a step that failed)."""
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
