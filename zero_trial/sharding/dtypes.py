"""The dtype in which each parameter and buffer of a model lives, beside what ds_config asks for, and the line that says so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch


def living_dtype(own: torch.dtype, asked: torch.dtype) -> torch.dtype:
    """Of a tensor that came in ``own``. A 16-bit ``asked`` (ds_config's bf16 or fp16) is for every floating tensor; fp32 is what a model has
    where nothing was asked for, so everything keeps its own: float64, and 16-bit parameters with fp32 masters."""
    return own if asked == torch.float32 or not own.is_floating_point else asked


def wide_dtype(living: torch.dtype, usual: torch.dtype) -> torch.dtype:
    """Of a float64 parameter's gradient and its message, which are as wide as itself; of all others', the ``usual`` one."""
    return living if living == torch.float64 else usual


def has_own_master(living: torch.dtype) -> bool:
    """Whether the optimizer updates the parameter itself; a 16-bit one has an fp32 master beside it."""
    return living in (torch.float32, torch.float64)


def describe_dtypes(params: Iterable[tuple[str, torch.dtype]], asked: torch.dtype) -> list[str]:
    """What is worth a line about the trainable floating ``params`` (name, dtype), where they are not all fp32."""
    named = [(name, dtype) for name, dtype in params if dtype.is_floating_point]
    counts = Counter(dtype for _, dtype in named)
    if not set(counts) - {torch.float32} or set(counts) == {asked}:
        return []
    listed = ", ".join(f"{count} {_short(dtype)}" for dtype, count in sorted(counts.items(), key=str))
    if asked != torch.float32:
        fix = (
            ""
            if torch.float64 in counts or len(counts) == 1
            else "; leave the section out of ds_config to keep them as they are"
        )
        return [f"parameters given as {listed} are cast to {_short(asked)}, with fp32 masters{fix}"]
    masters = "; 16-bit ones have fp32 masters" if set(counts) & {torch.float16, torch.bfloat16} else ""
    lines = [f"ds_config asks for no 16-bit training: parameters keep their dtypes ({listed}){masters}"]
    if torch.float16 in counts:
        name = next(name for name, dtype in named if dtype == torch.float16)
        lines.append(
            f"float16 parameters without fp16.enabled have no loss scale: gradients below 6e-8 are lost ({name} ...)"
        )
    return lines


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
