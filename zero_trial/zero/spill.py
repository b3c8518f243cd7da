"""Masters and moments in a file between updates: pieces go through a ring of buffers, read ahead of the update and written behind it.

    buffer 0   read piece 0 | update 0 | write 0        | read piece 3 ...
    buffer 1        read piece 1       | update 1 | write 1
    buffer 2             read piece 2             | update 2 | write 2
                                          time -->

Traffic per step of a rank with n elements: what is spilled, once in each direction; for Adam 2 x 12 n bytes with 16-bit parameters (master and two
moments), 2 x 8 n with fp32 parameters, which are their own masters and stay. The first step reads masters only: there are no moments yet.
Memory: the ring, which is at most a quarter of what is spilled (:func:`slot_elements`).
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from zero_trial.errors import StorageError
from zero_trial.zero.absent import absent, is_absent
from zero_trial.zero.heap import give_freed_memory_back
from zero_trial.zero.layout import round_up
from zero_trial.zero.spill_file import BLOCK, Shelf, Ticket
from zero_trial.zero.state_columns import Column
from zero_trial.zero.store import ShardPiece
from zero_trial.zero.unit import Unit

MASTER = "master"
CUT = BLOCK  # elements: pieces are cut at multiples of it, so that for every dtype cuts lie between blocks of the disk
MOST = 1 << 22  # elements of a buffer: 16 MiB of fp32, where disks have long reached their best


def slot_elements(total: int, sub_group: int, count: int) -> int:
    """Elements per buffer: at most ``sub_group``, and so few that ``count`` buffers hold no more than a quarter of ``total``; CUT at least."""
    wanted = min(sub_group, MOST, total // (4 * count))
    return max(wanted // CUT, 1) * CUT


class MasterShelf:
    """Takes each unit's master away as soon as the unit is built, so that the masters of a model are never in memory together."""

    def __init__(self, shelf: Shelf) -> None:
        self.shelf = shelf
        self.offsets: dict[int, int] = {}  # by id of the unit

    def take(self, unit: Unit) -> None:
        """The unit's master goes to the file, and reads as NaN. Units without one of their own (fp32, frozen) stay as they are."""
        master = unit.master
        if master is unit.shard:
            return
        offset = self.offsets[id(unit)] = self.shelf.reserve(master.numel() * master.element_size())
        self.shelf.write(offset, master).wait()
        unit.master = absent(master.shape, master.dtype, master.device)
        del master
        give_freed_memory_back()


@dataclass
class _Place:
    """Where a piece's part of one column is: in the file, and in whichever buffer the piece is in."""

    offset: int  # bytes, in the file
    start: int  # bytes, in the buffer; the same remainder by BLOCK as in the file
    dtype: torch.dtype
    numel: int

    def of(self, area: torch.Tensor, start: int) -> torch.Tensor:
        return area[start : start + self.numel * self.dtype.itemsize].view(self.dtype)


@dataclass
class _Loaded:
    """A piece whose tensors are in a buffer, or on the way there."""

    piece: ShardPiece
    slot: torch.Tensor
    tickets: list[Ticket] = field(default_factory=list)


class SpillStore:
    """The :class:`StateStore` of pieces whose masters (those on ``masters``) and state ``columns`` (by the weight's dtype) live on its shelf.

    Pieces go one by one, in their order, in every step. Between steps their tensors keep shape and dtype and read as NaN; inside
    :meth:`lent` they are whole. State that is in no column stays in memory.
    """

    def __init__(
        self,
        masters: MasterShelf,
        pieces: Sequence[ShardPiece],
        state: Mapping[torch.Tensor, dict[str, Any]],
        columns: Mapping[torch.dtype, Sequence[Column]],
        *,
        slot_numel: int,
        slots: int,
    ) -> None:
        self._shelf = masters.shelf
        self._pieces = list(pieces)
        self._state = state
        self._columns = {dtype: {column.kind: column.dtype for column in those} for dtype, those in columns.items()}
        self._units = list({id(piece.unit): piece.unit for piece in pieces}.values())
        self._regions: dict[tuple[int, str], int] = {}
        for unit in self._units:
            if id(unit) in masters.offsets:
                self._regions[id(unit), MASTER] = masters.offsets[id(unit)]
                unit.lend = self.lent
            for kind, dtype in self._columns[unit.master.dtype].items():
                self._regions[id(unit), kind] = self._shelf.reserve(unit.layout.shard_numel * dtype.itemsize)
        self._places = {id(piece): self._places_of(piece, slot_numel) for piece in self._pieces}
        self._written: dict[int, list[Ticket]] = {}  # by id of the piece: its writes that may be under way
        self._stored: set[tuple[int, str]] = set()  # (id of the piece, kind) that the file holds
        self._free = deque(self._shelf.buffer(self._slot_bytes(slot_numel)) for _ in range(slots))
        self._loaded: deque[_Loaded] = deque()
        self._writing: deque[tuple[torch.Tensor, list[Ticket]]] = deque()
        self._coming: deque[ShardPiece] = deque()
        self._depth = 0
        self._lost: StorageError | None = None
        self.buffer_bytes = sum(slot.numel() for slot in self._free)
        for piece in self._pieces:
            if id(piece.unit) in masters.offsets:
                self._stored.add((id(piece), MASTER))
        with self.lent():  # an optimizer that makes its state when it is built
            pass

    @property
    def shelf(self) -> Shelf:
        return self._shelf

    @property
    def buffers(self) -> list[torch.Tensor]:
        """The ring, between steps."""
        return [*self._free, *(slot for slot, _ in self._writing)]

    # --- one step -------------------------------------------------------------------------------------------------

    def batches(self) -> Iterator[Sequence[ShardPiece]]:
        self._require_whole()
        if self._loaded:  # the step before was broken off
            self._drain()
        self._coming = deque(self._pieces)
        for piece in self._pieces:
            yield [piece]

    def borrow(self, batch: Sequence[ShardPiece]) -> None:
        """The batch's tensors are in a buffer when this returns; the next ones are on their way. Raises StorageError."""
        self._read_ahead()
        now = self._loaded[0]
        self._wait(now.tickets)
        for kind, place in self._places[id(now.piece)].items():
            if self._keeps(now.piece, kind):
                self._tensor(now.piece, kind).data = place.of(now.slot, place.start)

    def give_back(self, batch: Sequence[ShardPiece], rounded: bool) -> bool:
        """Starts to write what the update changed; whether the 16-bit copies are up to date now."""
        now = self._loaded.popleft()
        piece = now.piece
        if not rounded and piece.rounded is not None:
            piece.rounded.copy_(piece.weight.detach())  # later the master is away
            rounded = True
        kinds = [kind for kind in self._places[id(piece)] if self._has(piece, kind)]
        is_new = any((id(piece), kind) not in self._stored for kind in kinds)
        tickets = []
        for kind in kinds:
            place = self._places[id(piece)][kind]
            tickets.append(self._shelf.write(place.offset, self._put(piece, kind, place.of(now.slot, place.start))))
        if is_new:  # the optimizer made its state outside of the buffer, in memory that has just been freed
            give_freed_memory_back()
        self._written[id(piece)] = tickets
        self._writing.append((now.slot, tickets))
        return rounded

    def _read_ahead(self) -> None:
        """Reads as many pieces as there are free buffers; waits for a buffer that is being written only if nothing else is left."""
        while self._coming:
            if not self._free and self._writing and (not self._loaded or _done(self._writing[0][1])):
                self._wait(self._writing[0][1])  # which may be interrupted
                self._free.append(self._writing.popleft()[0])
            if not self._free:
                return
            # What the step before wrote must be there before it is read.
            self._wait(self._written.get(id(self._coming[0]), []))
            self._read(self._coming.popleft(), self._free.popleft())

    def _read(self, piece: ShardPiece, slot: torch.Tensor) -> None:
        self._written.pop(id(piece), None)
        loaded = _Loaded(piece, slot)
        for kind, place in self._places[id(piece)].items():
            if self._keeps(piece, kind):
                loaded.tickets.append(self._shelf.read(place.offset, place.of(slot, place.start)))
        self._loaded.append(loaded)

    def wait(self) -> None:
        """Returns when all that was given back is on the disk; nothing needs that but a clock."""
        for _, tickets in self._writing:
            self._wait(tickets)

    def _wait(self, tickets: Sequence[Ticket]) -> None:
        """For all of them. Raises StorageError, and remembers it: what did not reach the disk, or a step that ended there, is not to be mended."""
        fault: StorageError | None = None
        for ticket in tickets:
            try:
                ticket.wait()
            except StorageError as found:
                fault = fault or found
        if fault is not None:
            self._lost = self._lost or fault
            raise fault

    def _require_whole(self) -> None:
        """A checkpoint of half a step, or a step from it, would be wrong without a word."""
        if self._lost is not None:
            raise StorageError(
                "the disk has failed, and offloaded state is lost",
                where=self._lost.where,
                got=self._lost.got,
                fix="Mend the disk or name another one in nvme_path, and go on from the last checkpoint in a new engine.",
            ) from self._lost

    # --- between steps --------------------------------------------------------------------------------------------

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Inside, all masters and all state are whole, to read and to write, in pages that the kernel may drop. May be nested.

        Raises StorageError, also if the disk has failed before.
        """
        self._depth += 1
        if self._depth > 1:
            try:
                yield
            finally:
                self._depth -= 1
            return
        edited = False
        try:
            self._require_whole()
            self._drain()
            with self._shelf.mapped() as area:
                self._lay_open(area)
                try:
                    yield
                finally:
                    self._put_away(area)
                    edited = True
        except StorageError as fault:
            if edited:  # what was edited may not have reached the disk
                self._lost = self._lost or fault
            raise
        finally:
            self._depth -= 1

    def zeros(self, piece: ShardPiece, kind: str) -> torch.Tensor | None:
        """State of zeros for a piece, where it will be kept; None if there is no such column. Only inside :meth:`lent`."""
        place = self._places[id(piece)].get(kind)
        if place is None:
            return None
        return place.of(self._area, place.offset).zero_()

    def resident_bytes(self, value: torch.Tensor, kind: str) -> int:
        """Bytes of memory that a state tensor takes between steps."""
        return 0 if is_absent(value) else value.numel() * value.element_size()

    def close(self) -> None:
        """Waits for what is under way and gives the disk's space back; masters and state read as NaN from now on."""
        try:
            self._drain()
        except StorageError:
            pass  # nobody needs any more what did not get there
        finally:
            self._shelf.close()

    def _drain(self) -> None:
        """Nothing is under way afterwards, and all buffers are free."""
        self._coming.clear()
        under_way = [(left.slot, left.tickets) for left in self._loaded]  # only where a step was broken off
        under_way += self._writing
        self._wait([ticket for _, tickets in under_way for ticket in tickets])
        self._free.extend(slot for slot, _ in under_way)
        self._loaded.clear()
        self._writing.clear()
        self._written.clear()

    def _lay_open(self, area: torch.Tensor) -> None:
        self._area = area
        for unit in self._units:
            if (id(unit), MASTER) in self._regions:
                start = self._regions[id(unit), MASTER]
                dtype = unit.master.dtype
                unit.master = area[start : start + dtype.itemsize * unit.layout.shard_numel].view(dtype)
        for piece in self._pieces:
            for kind, place in self._places[id(piece)].items():
                if self._keeps(piece, kind):
                    self._tensor(piece, kind).data = place.of(area, place.offset)

    def _put_away(self, area: torch.Tensor) -> None:
        """State may have been made, replaced or forgotten since it was laid open."""
        self._stored.clear()
        for piece in self._pieces:
            for kind, place in self._places[id(piece)].items():
                if self._has(piece, kind):
                    self._put(piece, kind, place.of(area, place.offset))
        for unit in self._units:
            if (id(unit), MASTER) in self._regions:
                unit.master = absent((unit.layout.shard_numel,), unit.master.dtype, unit.master.device)
        del self._area

    # --- one tensor -----------------------------------------------------------------------------------------------

    def _tensor(self, piece: ShardPiece, kind: str) -> torch.Tensor:
        tensor: torch.Tensor = piece.weight if kind == MASTER else self._state[piece.weight][kind]
        return tensor

    def _keeps(self, piece: ShardPiece, kind: str) -> bool:
        """Whether the file holds it, and somebody still wants it: state may be cleared between steps."""
        return (id(piece), kind) in self._stored and self._has(piece, kind)

    def _has(self, piece: ShardPiece, kind: str) -> bool:
        if kind == MASTER:
            return True
        value = self._state.get(piece.weight, {}).get(kind)
        return (
            torch.is_tensor(value)
            and value.shape == piece.weight.shape
            and value.dtype == self._places[id(piece)][kind].dtype
        )

    def _put(self, piece: ShardPiece, kind: str, place: torch.Tensor) -> torch.Tensor:
        """The tensor's values are in ``place``, and it holds nothing itself any more. Returns ``place``."""
        tensor = self._tensor(piece, kind)
        held = tensor.detach()
        if not _same_memory(held, place):
            place.copy_(held)
        tensor.data = self._nothing(tuple(held.shape), held.dtype, held.device)
        self._stored.add((id(piece), kind))
        return place

    @functools.cached_property
    def _nothing(self) -> Any:
        return functools.cache(absent)

    def _places_of(self, piece: ShardPiece, slot_numel: int) -> dict[str, _Place]:
        places, start = {}, 0
        kinds = {MASTER: piece.weight.dtype} if (id(piece.unit), MASTER) in self._regions else {}
        for kind, dtype in (kinds | self._columns[piece.weight.dtype]).items():
            offset = self._regions[id(piece.unit), kind] + piece.low * dtype.itemsize
            places[kind] = _Place(offset, start + offset % BLOCK, dtype, piece.numel)
            start += _room(slot_numel, dtype)
        return places

    def _slot_bytes(self, slot_numel: int) -> int:
        away = any(kind == MASTER for _, kind in self._regions)
        widths = [
            sum(_room(slot_numel, each) for each in [*([dtype] if away else []), *own.values()])
            for dtype, own in self._columns.items()
        ]
        return max(widths, default=0)


def _room(numel: int, dtype: torch.dtype) -> int:
    """Bytes for that many elements, wherever in a block they begin."""
    return round_up(numel * dtype.itemsize, BLOCK) + BLOCK


def _done(tickets: Sequence[Ticket]) -> bool:
    return all(ticket.done() for ticket in tickets)


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Compared by storage, because imagined tensors have no addresses."""
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata and a.storage_offset() == b.storage_offset()
