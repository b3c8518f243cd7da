"""Where the full gradients of a unit are while they live: kept for good, freed and revived, or in rooms that units take in turn.

    Kept      always: one buffer per unit, n elements
    Revived   until reduced, in ordinary or device memory: the buffer's storage is resized to nothing and back
    Taken     until reduced, where peers read in place: rooms for what is in flight, one being filled and one spare, used by all units in turn

Freeing means nothing for memory that peers have mapped, which is why the third kind passes it on instead. Between steps its rooms of at most
LARGEST_KEPT bytes stay, as freed memory of that size does anyway (:mod:`zero_trial.zero.heap`); larger ones are given back.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Protocol

import torch

from zero_trial.mesh import AxisComm
from zero_trial.zero.layout import Layout
from zero_trial.zero.plan import Lifetime, ZeroPlan

LARGEST_KEPT = 32 << 20


@dataclass(frozen=True)
class Place:
    """A full buffer (n,), each parameter's view of it, and what no parameter covers."""

    full: torch.Tensor
    views: list[torch.Tensor]
    padding: list[torch.Tensor]


def cut(full: torch.Tensor, layout: Layout) -> Place:
    """The place that ``layout`` makes of ``full``."""
    views = [full[slot.offset : slot.offset + slot.numel].view(slot.shape) for slot in layout.slots]
    return Place(full, views, [full[start:stop] for start, stop in layout.gaps()])


class GradientMemory(Protocol):
    """The full gradients' memory of one unit."""

    @property
    def place(self) -> Place | None:
        """None while there is none."""
        ...

    def borrow(self) -> Place:
        """A place that nobody else reads or writes, with whatever it held. May wait for peers that still read there."""
        ...

    def give_back(self) -> None:
        """Its contents are needed no more; peers may still be reading them."""
        ...


class Kept:
    """A buffer that is the unit's own for good."""

    def __init__(self, layout: Layout, dtype: torch.dtype, device: torch.device, comm: AxisComm) -> None:
        self._comm = comm
        self.place = cut(comm.buffer(layout.numel, dtype, device), layout)

    def borrow(self) -> Place:
        self._comm.settle(self.place.full)
        return self.place

    def give_back(self) -> None:
        return None


class Revived:
    """A buffer whose storage is given back to the allocator."""

    def __init__(self, layout: Layout, dtype: torch.dtype, device: torch.device) -> None:
        self.place = cut(torch.zeros(layout.numel, dtype=dtype, device=device), layout)
        self._bytes = layout.numel * dtype.itemsize
        self.give_back()

    def borrow(self) -> Place:
        self.place.full.untyped_storage().resize_(self._bytes)
        return self.place

    def give_back(self) -> None:
        self.place.full.untyped_storage().resize_(0)


class Taken:
    """A room of ``rooms``, while it is needed."""

    def __init__(self, layout: Layout, dtype: torch.dtype, rooms: Rooms) -> None:
        self._layout = layout
        self._dtype = dtype
        self._rooms = rooms
        self._room: Room | None = None
        self.place: Place | None = None

    def borrow(self) -> Place:
        nbytes = self._layout.numel * self._dtype.itemsize
        if self._room is None:
            self._room = self._rooms.take(nbytes)
        else:
            self._rooms.settle(self._room)

        def make(buffer: torch.Tensor) -> Place:
            return cut(buffer[:nbytes].view(self._dtype), self._layout)

        self.place = self._room.place(id(self), make)
        return self.place

    def give_back(self) -> None:
        room, self._room, self.place = self._room, None, None
        if room is not None:
            self._rooms.give_back(room)


@dataclass(eq=False)
class Room:
    """A buffer (bytes), and the places that units have made of it: they come again in every step."""

    buffer: torch.Tensor
    _places: dict[Hashable, Place] = field(default_factory=dict)

    def place(self, key: Hashable, make: Callable[[torch.Tensor], Place]) -> Place:
        if key not in self._places:
            self._places[key] = make(self.buffer)
        return self._places[key]


class Rooms:
    """Buffers of ``comm`` for the gradients in flight. At most ``most`` that fit a unit, unless more are in use at once."""

    def __init__(self, comm: AxisComm, most: int) -> None:
        self._comm = comm
        self._most = most
        self._taken: list[Room] = []
        self._left: list[Room] = []  # given back, the longest ago first

    def take(self, nbytes: int) -> Room:
        """A room of at least ``nbytes``, and not of more than twice that. Where there are ``most`` already and peers still read all that were
        given back, it waits for the first of those."""

        def fits(room: Room) -> bool:
            return nbytes <= room.buffer.numel() <= 2 * nbytes

        left = [room for room in self._left if fits(room)]
        found = next((room for room in left if self._comm.settled(room.buffer)), None)
        if found is None and left and len(left) + sum(map(fits, self._taken)) >= self._most:
            found = left[0]
            self.settle(found)
        if found is None:
            found = Room(self._comm.buffer(nbytes, torch.uint8, torch.device("cpu")))
        else:
            self._left.remove(found)
        self._taken.append(found)
        self._drop_large()
        return found

    def give_back(self, room: Room) -> None:
        self._taken.remove(room)
        self._left.append(room)
        self._drop_large()

    def settle(self, room: Room) -> None:
        """Returns when no peer reads in ``room``."""
        self._comm.settle(room.buffer)

    def buffers(self) -> list[torch.Tensor]:
        """All that there are now."""
        return [room.buffer for room in (*self._taken, *self._left)]

    def _drop_large(self) -> None:
        """Large rooms that nobody uses go back to the system."""
        self._left = [
            room for room in self._left if room.buffer.numel() <= LARGEST_KEPT or not self._comm.settled(room.buffer)
        ]


def gradient_memory(
    layout: Layout, dtype: torch.dtype, device: torch.device, plan: ZeroPlan, comm: AxisComm, rooms: Rooms | None
) -> GradientMemory:
    """The kind that suits: by how long full gradients live, and by whether there are rooms."""
    if plan.grads is not Lifetime.USE:
        return Kept(layout, dtype, device, comm)
    return Taken(layout, dtype, rooms) if rooms is not None else Revived(layout, dtype, device)
