"""Gradients in the dtype of the wire, where that is not the one in which they were added up: cast straight to where peers read them.

    rooms   where ranks read in place: taken for a reduction and given back when it has landed; no copy out follows
    else    a tensor of its own per reduction

Price: n elements of the wire's dtype per reduction in flight.
"""

from __future__ import annotations

import torch

from zero_trial.mesh import AxisComm
from zero_trial.zero.gradient_memory import Room, Rooms


class Wires:
    """Casts along ``comm``, at most about ``most`` at once."""

    def __init__(self, comm: AxisComm, most: int) -> None:
        self._comm = comm
        self._rooms = Rooms(comm, most)

    def cast(self, full: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, Room | None]:
        """``full`` (n,) in ``dtype``, and the room that it lies in."""
        if not self._comm.reads_in_place(full.device):
            return full.to(dtype), None
        nbytes = full.numel() * dtype.itemsize
        room = self._rooms.take(nbytes)
        return room.buffer[:nbytes].view(dtype).copy_(full), room

    def release(self, room: Room | None) -> None:
        """The reduction has landed; peers may still be reading."""
        if room is not None:
            self._rooms.give_back(room)
