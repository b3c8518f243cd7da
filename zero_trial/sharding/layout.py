"""How named parameters lie end to end in one padded flat buffer that is cut into equal shards. Pure.

Every tensor starts at a multiple of ALIGN elements, and a shard is a multiple of ALIGN elements long:

    |<------------- shard 0 ------------->|<------------- shard 1 ------------->|
    | wte .......... | . | h0.qkv ........ ........ | h0.out ....... | padding   |
    0                ^ALIGN               ^shard_numel

Why aligned: 64 bytes for 16-bit and 128 bytes for fp32 keep vector loads whole, so that an element's bits do not depend on where its shard was cut
(a scalar tail may round differently from the vector body), and any ALIGN-sized row belongs to one tensor. Price: at most ALIGN-1 elements per
tensor, and at most ALIGN * shards - 1 per group.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

ALIGN = 32


@dataclass(frozen=True)
class ParamSlot:
    """One tensor's place in the flat buffer; ``offset`` and ``numel`` count elements."""

    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class SlotSlice:
    """The part of a slot that lies in one shard: elements [start, stop) of the flattened tensor, at ``offset`` within the shard."""

    slot: ParamSlot
    start: int
    stop: int
    offset: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Layout:
    """Slots in order, the padded length, and the number of equal shards."""

    slots: tuple[ParamSlot, ...]
    numel: int
    shards: int

    @property
    def shard_numel(self) -> int:
        return self.numel // self.shards

    @property
    def payload(self) -> int:
        """Elements that belong to tensors, padding left out."""
        return sum(slot.numel for slot in self.slots)

    def shard_range(self, index: int) -> tuple[int, int]:
        return index * self.shard_numel, (index + 1) * self.shard_numel

    def pieces(self, index: int) -> list[SlotSlice]:
        """What shard ``index`` holds, in order. Empty tensors are pieces of no shard."""
        low, high = self.shard_range(index)
        found = []
        for slot in self.slots:
            start, stop = max(slot.offset, low), min(slot.offset + slot.numel, high)
            if start < stop:
                found.append(SlotSlice(slot, start - slot.offset, stop - slot.offset, start - low))
        return found

    def gaps(self) -> list[tuple[int, int]]:
        """[start, stop) of the padding between and after the slots."""
        starts = [slot.offset for slot in self.slots[1:]] + [self.numel]
        stops = [slot.offset + slot.numel for slot in self.slots]
        return [(stop, start) for stop, start in zip(stops, starts, strict=True) if stop < start]

    def slot_at(self, position: int) -> ParamSlot | None:
        """The slot that holds element ``position`` of the flat buffer; None for padding."""
        index = bisect_right([slot.offset for slot in self.slots], position) - 1
        while index >= 0 and self.slots[index].numel == 0:
            index -= 1
        slot = self.slots[index] if index >= 0 else None
        return slot if slot is not None and position < slot.offset + slot.numel else None


def lay_out(tensors: Sequence[tuple[str, tuple[int, ...]]], shards: int, replicas: int = 1) -> Layout:
    """The layout of ``tensors`` (name, shape) in the given order, cut into ``shards`` equal parts that ``replicas`` can divide again."""
    slots, offset = [], 0
    for name, shape in tensors:
        slot = ParamSlot(name, tuple(shape), offset)
        slots.append(slot)
        offset = round_up(offset + slot.numel, ALIGN)
    return Layout(tuple(slots), round_up(max(offset, 1), ALIGN * shards * replicas), shards)


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is not below ``value``."""
    return -(-value // multiple) * multiple
