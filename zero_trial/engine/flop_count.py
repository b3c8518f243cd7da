"""Count floating-point operations with torch's FlopCounterMode, and find the peak of a device.

Matrix products, convolutions and attention are counted, two operations per multiply-add. Operations
that work element by element are not counted. Recomputation (activation checkpointing) is part of
backward, because it runs there.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from zero_trial.device import torch_module


@dataclass(frozen=True)
class Flops:
    """Operations by module name as in ``named_modules()``; "" is the whole model. Operations
    outside of its modules are in the total only."""

    total: int
    by_module: Mapping[str, int]


def flop_counter() -> FlopCounterMode:
    """Return torch's counter; it counts attention on a CPU too."""
    aten, counter = torch.ops.aten, FlopCounterMode(display=False)
    for suffix in ("", "_backward"):
        formula = counter.flop_registry[getattr(aten, f"_scaled_dot_product_flash_attention{suffix}")]
        counter.flop_registry[getattr(aten, f"_scaled_dot_product_flash_attention_for_cpu{suffix}")] = formula
    return counter


def flops_of(counter: FlopCounterMode, model: nn.Module) -> Flops:
    """Return what ``counter`` counted while ``model`` ran forward.

    torch tracks modules of a backward pass by hooks on their inputs and outputs. It loses modules
    whose inputs need no gradient and modules that are recomputed, so that only the total of a
    backward pass can be relied on.
    """
    counted = {name: sum(kinds.values()) for name, kinds in counter.get_flop_counts().items()}
    by_module: dict[str, int] = {}

    def add(name: str, module: nn.Module) -> int:
        inner = sum(add(f"{name}.{child}".lstrip("."), part) for child, part in module.named_children())
        by_module[name] = counted.get(f"{type(model).__name__}.{name}".rstrip("."), inner)  # a container never runs
        return by_module[name]

    add("", model)
    return Flops(counter.get_total_flops(), by_module)


# --- the peak of a device, which MFU is a fraction of ---------------------------------------------
#
# Dense peaks from the vendors' data sheets, in TFLOP/s. For a device that the table does not list,
# and for CPUs, the best of a few matrix products is measured, and the report says so.

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


def measure(device: torch.device, dtype: torch.dtype) -> Peak:
    """Return the best of a few square matrix products, with as many threads as torch has now."""
    side = _SIDE if device.type == "cpu" else 16 * _SIDE
    # Random numbers: products of ones use less power, so that a GPU runs them at a higher clock
    # than anybody's.
    a, b = (torch.randn(side, side, dtype=dtype, device=device) for _ in range(2))
    best = float("inf")
    for _ in range(_ROUNDS):
        torch_module(device).synchronize(device)
        start = time.perf_counter()
        torch.mm(a, b)
        torch_module(device).synchronize(device)
        best = min(best, time.perf_counter() - start)
    threads = f" with {torch.get_num_threads()} threads" if device.type == "cpu" else ""
    what = str(dtype).removeprefix("torch.")
    return Peak(
        2 * side**3 / best, f"measured here: a {side} x {side} matrix product in {what} on the {device.type}{threads}"
    )
