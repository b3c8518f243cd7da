"""A group's flat buffer: how parameters are laid out in it and split into shards, their dtypes, and
the norm over shards.

Every tensor starts at a multiple of ALIGN elements, and a shard is a multiple of ALIGN elements
long:

    |<------------- shard 0 ------------->|<------------- shard 1 ------------->|
    | wte .......... | . | h0.qkv ........ ........ | h0.out ....... | padding   |
    0                ^ALIGN               ^shard_numel

Why aligned: with 64 bytes for 16-bit and 128 bytes for fp32, all vector loads are full, so that an
element's bits do not depend on where the shards are split (a scalar tail may round differently from
the vector body), and each ALIGN-sized row belongs to one tensor. Cost: at most ALIGN-1 elements per
tensor, and at most ALIGN * shards - 1 per group.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch

from zero_trial.ops import native_on
from zero_trial.ops.dispatch import OPS

ALIGN = 32


@dataclass(frozen=True)
class ParamSlot:
    """One tensor's place in the flat buffer; ``offset`` and ``numel`` count elements."""

    name: str
    shape: tuple[int, ...]
    offset: int

    @cached_property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class SlotSlice:
    """A slot's part in one shard: elements [start, stop), at ``offset`` in the shard."""

    slot: ParamSlot
    start: int
    stop: int
    offset: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Layout:
    """Slots in order, the padded length in elements, and the number of equal shards. Pure."""

    slots: tuple[ParamSlot, ...]
    numel: int
    shards: int

    @cached_property
    def shard_numel(self) -> int:
        return self.numel // self.shards

    @property
    def payload(self) -> int:
        """Count the elements that belong to tensors, without padding."""
        return sum(slot.numel for slot in self.slots)

    def shard_range(self, index: int) -> tuple[int, int]:
        """Return [low, high) of shard ``index`` in the flat buffer."""
        return index * self.shard_numel, (index + 1) * self.shard_numel

    def pieces(self, index: int) -> list[SlotSlice]:
        """List the slices of slots in shard ``index``, in order. Empty tensors are in no shard."""
        low, high = self.shard_range(index)
        found = []
        for slot in self.slots:
            start, stop = max(slot.offset, low), min(slot.offset + slot.numel, high)
            if start < stop:
                found.append(SlotSlice(slot, start - slot.offset, stop - slot.offset, start - low))
        return found

    def gaps(self) -> list[tuple[int, int]]:
        """List [start, stop) of the padding between and after the slots."""
        starts = [slot.offset for slot in self.slots[1:]] + [self.numel]
        stops = [slot.offset + slot.numel for slot in self.slots]
        return [(stop, start) for stop, start in zip(stops, starts, strict=True) if stop < start]

    def slot_at(self, position: int) -> ParamSlot | None:
        """Return the slot that holds element ``position`` of the flat buffer; None for padding."""
        index = bisect_right([slot.offset for slot in self.slots], position) - 1
        while index >= 0 and self.slots[index].numel == 0:
            index -= 1
        slot = self.slots[index] if index >= 0 else None
        return slot if slot is not None and position < slot.offset + slot.numel else None


def lay_out(tensors: Sequence[tuple[str, tuple[int, ...]]], shards: int, replicas: int = 1) -> Layout:
    """Lay out ``tensors`` (name, shape) in order, in equal shards that ``replicas`` divide."""
    slots, offset = [], 0
    for name, shape in tensors:
        slot = ParamSlot(name, tuple(shape), offset)
        slots.append(slot)
        offset = round_up(offset + slot.numel, ALIGN)
    return Layout(tuple(slots), round_up(max(offset, 1), ALIGN * shards * replicas), shards)


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is not below ``value``."""
    return -(-value // multiple) * multiple


def living_dtype(own: torch.dtype, asked: torch.dtype) -> torch.dtype:
    """Return the dtype in which a tensor of dtype ``own`` is trained.

    A 16-bit ``asked`` (ds_config's bf16 or fp16) applies to every floating tensor. fp32 means that
    ds_config sets no precision: every tensor keeps its dtype, including float64 and 16-bit
    parameters (with fp32 masters).
    """
    return own if asked == torch.float32 or not own.is_floating_point else asked


def wide_dtype(living: torch.dtype, usual: torch.dtype) -> torch.dtype:
    """Return the dtype of gradient and messages: ``usual``, or float64 for a float64 parameter."""
    return living if living == torch.float64 else usual


def widened(values: torch.Tensor) -> torch.Tensor:
    """Return ``values`` in fp32, or in float64 if they are float64."""
    return values.to(wide_dtype(values.dtype, torch.float32))


def has_own_master(living: torch.dtype) -> bool:
    """Return whether the optimizer updates the parameter itself, without an fp32 master."""
    return living in (torch.float32, torch.float64)


def describe_dtypes(params: Iterable[tuple[str, torch.dtype]], asked: torch.dtype) -> list[str]:
    """Return log lines about trainable ``params`` that are neither fp32 nor of dtype ``asked``."""
    named = [(name, dtype) for name, dtype in params if dtype.is_floating_point]
    counts = Counter(dtype for _, dtype in named)
    if not set(counts) - {torch.float32} or set(counts) == {asked}:
        return []
    listed = ", ".join(f"{count} {_short(dtype)}" for dtype, count in sorted(counts.items(), key=str))
    if asked != torch.float32:
        fix = (
            ""
            if torch.float64 in counts or len(counts) == 1
            else "; remove the section from ds_config to keep them unchanged"
        )
        return [f"parameters in {listed} are cast to {_short(asked)}, with fp32 masters{fix}"]
    masters = "; 16-bit ones have fp32 masters" if set(counts) & {torch.float16, torch.bfloat16} else ""
    lines = [f"ds_config enables no 16-bit training: parameters keep their dtypes ({listed}){masters}"]
    if torch.float16 in counts:
        name = next(name for name, dtype in named if dtype == torch.float16)
        lines.append(
            f"float16 parameters without fp16.enabled have no loss scale: gradients below 6e-8 are lost ({name} ...)"
        )
    return lines


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# The gradient norm does not depend on where shards were cut. The native kernel adds squares, exact
# in float64, in float64. Without it, rows of ALIGN elements are summed: they never cross a tensor,
# so every ZeRO stage and every number of ranks has the same rows; a row's sum of squares is made in
# fp32 and the rows are added in float64. Either way the total differs between shardings by about
# 1e-16, which the final rounding hides: stages clip by the same factor and their loss traces stay
# bit-equal. In rows, an element above 1.8e19 overflows and counts as non-finite.


def square_sum(shard: torch.Tensor) -> torch.Tensor:
    """Sum the squares of ``shard`` (n,), n a multiple of ALIGN: a float64 scalar tensor, not finite
    if any element is not.

    Reads the shard once.
    """
    if native_on(shard.device):
        exact: torch.Tensor = OPS.square_sum(shard)
        return exact
    return square_sum_of_rows(shard)


def square_sum_of_rows(shard: torch.Tensor) -> torch.Tensor:
    """Sum the squares with torch's own kernels, on any device; makes n/ALIGN fp32 row norms."""
    rows = torch.linalg.vector_norm(shard.view(-1, ALIGN), dim=1, dtype=wide_dtype(shard.dtype, torch.float32))
    total: torch.Tensor = rows.double().square_().sum()
    return total


def clip_factor(norm: float, limit: float) -> float:
    """Return the factor that brings ``norm`` to at most ``limit`` (0: no limit), as torch's
    clip_grad_norm_ does, 1e-6 included."""
    return min(1.0, limit / (norm + 1e-6)) if limit > 0 else 1.0


# A table of 64-bit words. The number of its columns is a prime, so that swapped rows of a matrix
# fall into other columns. Up to _EXACT words a copy is faster than sums.
_COLUMNS, _PARTS, _EXACT = 1021, 16, 1 << 14


def column_sums(values: torch.Tensor) -> torch.Tensor:
    """Return numbers that change with the bits of ``values``, also if elements are swapped: the
    bits themselves if there are few, else the sums of the columns of a table that the bits fill
    row by row.

    A row's weight is its place in its sixteenth of the table. Only words a multiple of both 1021
    and such a place apart could be swapped undetected. Cost: each element is read once.
    """
    raw = values.detach().contiguous().view(-1).view(torch.uint8)
    raw = raw.clone() if raw.storage_offset() % 8 else raw
    words, rest = raw[: raw.numel() // 8 * 8].view(torch.int64), raw[raw.numel() // 8 * 8 :].long()
    if words.numel() <= _EXACT:
        return torch.cat([words, rest])
    length = words.numel() // _COLUMNS // _PARTS
    table, last = words.split([_PARTS * length * _COLUMNS, words.numel() - _PARTS * length * _COLUMNS])
    rows = table.view(_PARTS, length, _COLUMNS).sum(0)
    rows *= torch.arange(1, length + 1, device=words.device)[:, None]
    return torch.cat([rows.sum(0), last, rest])
