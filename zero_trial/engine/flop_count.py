"""Counting the floating-point operations of forward and backward, per module, with torch's FlopCounterMode.

Matrix products, convolutions and attention are counted, two operations per multiply-add; what works element by element is not. Recomputation
(activation checkpointing) is part of backward, because it is done there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from zero_trial.engine.module_tracker import ModuleTracker

_GLOBAL = "Global"
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Flops:
    """Operations by module name as in ``named_modules()``; "" is the whole model, and what ran outside of its modules is in the totals only."""

    total: int
    by_module: Mapping[str, int]


class FlopCount:
    """Counts between :meth:`resume` and :meth:`pause`; in between, user code runs as always.

    A module's share of backward is known only if its forward was counted by the same object. Call :meth:`close` at the end.
    """

    def __init__(self, model: nn.Module) -> None:
        aten = torch.ops.aten
        formulas = {
            aten._scaled_dot_product_flash_attention_for_cpu: _attention,
            aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
        }
        self._counter = FlopCounterMode(display=False, custom_mapping=formulas)
        self._counter.mod_tracker = ModuleTracker(model)  # type: ignore[assignment]
        self._opened = self._running = False

    def resume(self) -> None:
        if not self._opened:
            self._opened = True
            self._counter.__enter__()
        elif not self._running and self._counter.mode is not None:
            self._counter.mode.__enter__()
        self._running = True

    def pause(self) -> None:
        """Stops counting; which module an operation of a later backward belongs to is still known."""
        if self._running and self._counter.mode is not None:
            self._counter.mode.__exit__(None, None, None)
        self._running = False

    def close(self) -> None:
        """Takes all hooks off."""
        if self._opened:
            self.resume()
            self._counter.__exit__(None, None, None)
        self._opened = self._running = False

    def read(self) -> Flops:
        """What has been counted so far."""
        sums = {name: sum(kinds.values()) for name, kinds in self._counter.get_flop_counts().items()}
        total = sums.pop(_GLOBAL, 0)
        return Flops(total, sums)


def _attention(
    query: Shape, key: Shape, value: Shape, *_args: object, out_shape: object = None, **_options: object
) -> int:
    return int(sdpa_flop_count(query, key, value))


def _attention_backward(
    grad: Shape, query: Shape, key: Shape, value: Shape, *_args: object, out_shape: object = None, **_options: object
) -> int:
    return int(sdpa_backward_flop_count(grad, query, key, value))
