"""Count floating-point operations per module, and the peak of a device that they are compared with.

Forward: hooks keep the stack of modules under way. Backward: an operation belongs to the module in
whose forward its autograd node was made; nodes are known by their sequence number. (Hooks on
gradients, as torch.utils.module_tracker has them, lose modules whose inputs need no gradient.)
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count


class ModuleTracker:
    """Follows the modules of ``model`` between ``with``'s begin and end. :attr:`parents` has the
    interface that FlopCounterMode asks for."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._stack: list[str] = []
        self._made_in: dict[int, str] = {}  # sequence number of an autograd node -> module
        self._handles: list[Any] = []

    @property
    def parents(self) -> set[str]:
        """Return the names of the modules to which the operation under way belongs: "" is the
        model, and "Global" everything."""
        module = self._current()
        if module is None:
            return {"Global"}
        parts = module.split(".") if module else []
        return {"Global", "", *(".".join(parts[: end + 1]) for end in range(len(parts)))}

    def __enter__(self) -> ModuleTracker:
        for name, module in self._model.named_modules():
            self._handles.append(
                module.register_forward_pre_hook(lambda *_, name=name: self._stack.append(name), prepend=True)
            )
            self._handles.append(
                module.register_forward_hook(lambda *_, name=name: self._leave(name), always_call=True)
            )
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._stack.clear()

    def _leave(self, name: str) -> None:
        if self._stack and self._stack[-1] == name:
            self._stack.pop()

    def _current(self) -> str | None:
        node = torch._C._current_autograd_node() if torch._C._current_graph_task_id() != -1 else None
        if self._stack:  # forward, also where backward does it again
            # The node of an operation is made just before the operation runs; one that needs no
            # gradient makes none.
            self._made_in.setdefault(torch.autograd._get_sequence_nr() - 1, self._stack[-1])  # type: ignore[attr-defined]
            return self._stack[-1]
        return self._made_in.get(node._sequence_nr()) if node is not None else None


# Counting the floating-point operations of forward and backward, per module, with torch's
# FlopCounterMode.
#
# Matrix products, convolutions and attention are counted, two operations per multiply-add; what
# works element by element is not. Recomputation (activation checkpointing) is part of backward,
# because it is done there.


_GLOBAL = "Global"

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Flops:
    """Operations by module name as in ``named_modules()``; "" is the whole model, and what ran
    outside of its modules is in the totals only."""

    total: int
    by_module: Mapping[str, int]


class _ModuleFlops(FlopCounterMode):
    """torch's counter, with the modules of ``model`` by name and attention on a CPU."""

    def __init__(self, model: nn.Module) -> None:
        aten = torch.ops.aten
        formulas = {
            aten._scaled_dot_product_flash_attention_for_cpu: _attention,
            aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
        }
        super().__init__(display=False, custom_mapping=formulas)
        self.mod_tracker = ModuleTracker(model)  # type: ignore[assignment]


class FlopCount:
    """Counts between :meth:`resume` and :meth:`pause`; in between, user code runs as always.

    A module's share of backward is known only if its forward was counted by the same object. Call
    :meth:`close` at the end.
    """

    def __init__(self, model: nn.Module) -> None:
        self._counter: FlopCounterMode = _ModuleFlops(model)
        self._opened = self._running = False

    def resume(self) -> None:
        if not self._opened:
            self._opened = True
            self._counter.__enter__()
        elif not self._running and self._counter.mode is not None:
            self._counter.mode.__enter__()
        self._running = True

    def pause(self) -> None:
        """Stop counting; the module of an operation in a later backward stays known."""
        if self._running and self._counter.mode is not None:
            self._counter.mode.__exit__(None, None, None)
        self._running = False

    def close(self) -> None:
        """Take all hooks off."""
        if self._opened:
            self.resume()
            self._counter.__exit__(None, None, None)
        self._opened = self._running = False

    def read(self) -> Flops:
        """Return the counts so far."""
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


# The most floating-point operations per second that a device can do: what MFU is a fraction of.
#
# Dense peaks from the vendors' data sheets, in TFLOP/s; where a device is not in the table, and on
# CPUs, the best of a few matrix products is measured, and said so.


# Parts of torch's device name -> TFLOP/s in fp16, bf16, tf32 and fp32. The first row whose words
# all occur counts; 0: not offered.
_TERA: dict[str, tuple[float, float, float, float]] = {
    "gb200": (2500.0, 2500.0, 1250.0, 80.0),
    "b200": (2250.0, 2250.0, 1125.0, 75.0),
    "h200 nvl": (835.5, 835.5, 417.5, 60.0),
    "h200": (989.5, 989.5, 494.7, 66.9),
    "gh200": (989.5, 989.5, 494.7, 66.9),
    "h100 pcie": (756.0, 756.0, 378.0, 51.2),
    "h100 nvl": (835.5, 835.5, 417.5, 60.0),
    "h100": (989.5, 989.5, 494.7, 66.9),
    "a100": (312.0, 312.0, 156.0, 19.5),
    "v100 pcie": (112.0, 0.0, 0.0, 14.0),
    "v100": (125.0, 0.0, 0.0, 15.7),
    "l40s": (362.0, 362.0, 183.0, 91.6),
    "l40": (181.0, 181.0, 90.5, 90.5),
    "l4": (121.0, 121.0, 60.0, 30.3),
    "a10": (125.0, 125.0, 62.5, 31.2),
    "t4": (65.0, 0.0, 0.0, 8.1),
    "rtx 4090": (165.2, 165.2, 82.6, 82.6),
    "rtx 3090": (71.0, 71.0, 35.6, 35.6),
    "mi300x": (1307.4, 1307.4, 653.7, 163.4),
    "mi250x": (383.0, 383.0, 0.0, 47.9),
}

# A slice of a GPU, or a slower one of the same name: the data sheet's number would be wrong.
_OTHERS = frozenset({"mig", "laptop", "mobile", "max", "d", "ti"})

_SIDE, _ROUNDS = 512, 5


@dataclass(frozen=True)
class Peak:
    """``per_second`` operations, and where the number comes from."""

    per_second: float
    source: str


def peak_of(device: torch.device, dtype: torch.dtype) -> Peak:
    """Return the peak of matrix products in ``dtype`` on ``device``; may run some to find out."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        tf32 = dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest"
        known = data_sheet(name, dtype, tf32=tf32)
        if known is not None:
            return known
        return measure(device, dtype, synchronize=lambda: torch.cuda.synchronize(device))
    return measure(device, dtype)


def data_sheet(name: str, dtype: torch.dtype, *, tf32: bool = False) -> Peak | None:
    """Return the dense peak of the GPU called ``name``; None if it is not in the table."""
    column = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2 if tf32 else 3}.get(dtype)
    words = set(re.split(r"[^a-z0-9]+", name.lower()))
    row = next((tera for key, tera in _TERA.items() if words.issuperset(key.split())), None)
    if row is None or column is None or not row[column] or words & _OTHERS:
        return None
    what = "tf32" if tf32 else str(dtype).removeprefix("torch.")
    return Peak(row[column] * 1e12, f"data sheet of {name}, dense {what}")


def measure(
    device: torch.device,
    dtype: torch.dtype,
    *,
    synchronize: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> Peak:
    """Return the best of a few square matrix products, with as many threads as torch has now."""
    side = _SIDE if device.type == "cpu" else 16 * _SIDE
    # Random numbers: products of ones use less power, so that a GPU runs them at a higher clock
    # than anybody's.
    a, b = (torch.randn(side, side, dtype=dtype, device=device) for _ in range(2))
    best = float("inf")
    for _ in range(_ROUNDS):
        synchronize()
        start = clock()
        torch.mm(a, b)
        synchronize()
        best = min(best, clock() - start)
    threads = f" with {torch.get_num_threads()} threads" if device.type == "cpu" else ""
    what = str(dtype).removeprefix("torch.")
    return Peak(
        2 * side**3 / best, f"measured here: a {side} x {side} matrix product in {what} on the {device.type}{threads}"
    )
