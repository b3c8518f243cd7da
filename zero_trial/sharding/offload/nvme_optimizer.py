"""Which state an optimizer will keep with one value per element, found out by a step of its twin on a parameter of a few zeros."""

from __future__ import annotations

import functools
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from zero_trial.errors import StorageError
from zero_trial.sharding.layout import round_up
from zero_trial.sharding.offload.nvme_params import ParamSwapper
from zero_trial.sharding.offload.swap_file import BLOCK, DiskFailure, DiskTransfer, MappedAccess, SwapSpace
from zero_trial.sharding.optimizer import ShardPiece
from zero_trial.sharding.param_group import ParamGroup, absent, give_freed_memory_back, is_absent

_PROBE = 96  # elements: no count or factor of a state is so long


_OWN = ("step", "zero_grad")  # schedulers put wrappers of these on the object, which would step the real one


_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


@dataclass(frozen=True)
class StateColumn:
    """One kind of state with one value per element, such as ``exp_avg``."""

    kind: str
    dtype: torch.dtype


def state_columns(base: torch.optim.Optimizer, dtype: torch.dtype = torch.float32) -> list[StateColumn]:
    """The columns of all groups of ``base`` for weights in ``dtype``, in the order in which it makes them; ``base`` stays as it is.

    It must be elementwise. The step is a real one also where a rehearsal imagines its tensors: optimizers read their counts of steps.
    """
    with _disable_current_modes():
        return _columns_of_twin(base, dtype)


def _columns_of_twin(base: torch.optim.Optimizer, dtype: torch.dtype) -> list[StateColumn]:
    twin: torch.optim.Optimizer = object.__new__(type(base))
    twin.__dict__.update({key: value for key, value in base.__dict__.items() if key not in _OWN})
    twin.__dict__.update({key: OrderedDict() for key in _HOOKS})
    twin.state = defaultdict(dict)
    twin.param_groups = []
    for opt_group in base.param_groups:
        weight = nn.Parameter(torch.zeros(_PROBE, dtype=dtype, device="cpu"))
        weight.grad = torch.zeros_like(weight)
        twin.param_groups.append({**opt_group, "params": [weight]})
        if isinstance(base, torch.optim.Adagrad):  # the one that makes its state when it is built
            twin.state[weight] = {"step": torch.tensor(0.0), "sum": torch.zeros_like(weight)}
    if twin.param_groups:
        twin.step()
    found: dict[str, torch.dtype] = {}
    for state in twin.state.values():
        for kind, value in state.items():
            if torch.is_tensor(value) and value.shape == (_PROBE,):
                found.setdefault(kind, value.dtype)
    return [StateColumn(kind, dtype) for kind, dtype in found.items()]


# Takes each group's master away as soon as the group is built, so that the masters of a model are never in memory together.


class MasterSwap:
    """Masters on a ``shelf``, and which groups have their optimizer state there too: those whose shards have ``budget`` elements together (None:
    all). A group goes as a whole, so that what stays may be more than was asked for, never less."""

    def __init__(self, shelf: SwapSpace, budget: int | None = None) -> None:
        self.shelf = shelf
        self.offsets: dict[int, int] = {}  # by id of the group
        self._budget = budget
        self._chosen: set[int] = set()

    def take(self, group: ParamGroup) -> None:
        """The group's master goes to the file, and reads as NaN. Groups without one of their own (fp32, frozen) stay as they are."""
        if not self._chooses(group):
            return
        self._chosen.add(id(group))
        master = group.master
        if master is group.shard:
            return
        offset = self.offsets[id(group)] = self.shelf.reserve(master.numel() * master.element_size())
        self.shelf.write(offset, master).wait()
        group.master = absent(master.shape, master.dtype, master.device)
        del master
        give_freed_memory_back()

    def keeps_state_of(self, group: ParamGroup) -> bool:
        return id(group) in self._chosen

    def _chooses(self, group: ParamGroup) -> bool:
        if not group.trainable:
            return False
        if self._budget is None:
            return True
        if group.layout.shard_numel > self._budget:
            return False
        self._budget -= group.layout.shard_numel
        return True


# Where an update's new 16-bit values lie until they are on their way to a file.


class RoundedBuffers:
    """Room for the new values of each piece that is being updated."""

    def __init__(self) -> None:
        self._of: dict[int, torch.Tensor] = {}

    def open(self, piece: ShardPiece, room: torch.Tensor) -> None:
        """``room`` (numel,) takes the piece's new values from now on."""
        self._of[id(piece)] = room

    def take(self, piece: ShardPiece) -> torch.Tensor:
        """The room, which is the piece's no more."""
        return self._of.pop(id(piece))

    def clear(self) -> None:
        """Of a step that was broken off."""
        self._of.clear()

    def room(self, piece: ShardPiece) -> torch.Tensor | None:
        """None for a piece whose values are not rounded, or that is not being updated."""
        return self._of.get(id(piece))


@dataclass(frozen=True)
class SwappedPiece(ShardPiece):
    """A piece of a group whose shard may lie in a file; then new values go to the outbox."""

    outbox: RoundedBuffers

    @property
    def rounded(self) -> torch.Tensor | None:
        """In the outbox during the piece's update, or in the shard, where that is in memory."""
        return super().rounded if self.group.offloaded is None else self.outbox.room(self)


# Where each piece's part of each column is: in a file, and in whichever buffer the piece is in.


MASTER = "master"


ROUNDED = "rounded"  # the 16-bit copy: an update writes it and never reads it


@dataclass(frozen=True)
class SwapSlot:
    """``numel`` elements of one column."""

    shelf: SwapSpace
    offset: int  # bytes, in the file
    start: int  # bytes, in the buffer; the same remainder by BLOCK as in the file
    dtype: torch.dtype
    numel: int

    def of_buffer(self, buffer: torch.Tensor) -> torch.Tensor:
        return self._of(buffer, self.start)

    def of_file(self, area: torch.Tensor) -> torch.Tensor:
        return self._of(area, self.offset)

    def _of(self, area: torch.Tensor, start: int) -> torch.Tensor:
        return area[start : start + self.numel * self.dtype.itemsize].view(self.dtype)


# Where a column of a group's shard begins: which file, at which byte, and how wide it is.
Region = tuple[SwapSpace, int, torch.dtype]


def regions_of(
    group: ParamGroup,
    columns: Mapping[torch.dtype, Sequence[StateColumn]],
    masters: MasterSwap | None,
    shards: ParamSwapper | None,
) -> dict[str, Region]:
    """Everything of the group's that lies in a file, by kind; room for its state is reserved.

    A shard that is its own master is the column MASTER; else MASTER and ROUNDED are two, in whatever file each is.
    """
    found: dict[str, Region] = {}
    wide = group.master.dtype
    home = shards.offset_of(group) if shards is not None else None
    if masters is not None and id(group) in masters.offsets:
        found[MASTER] = masters.shelf, masters.offsets[id(group)], wide
    if shards is not None and home is not None:
        kind = MASTER if group.master is group.shard else ROUNDED
        found[kind] = shards.shelf, home, group.dtype
    if masters is not None and masters.keeps_state_of(group):
        for column in columns.get(wide, ()):
            offset = masters.shelf.reserve(group.layout.shard_numel * column.dtype.itemsize)
            found[column.kind] = masters.shelf, offset, column.dtype
    return found


def places_of(piece: ShardPiece, regions: Mapping[str, Region], slot_numel: int) -> tuple[dict[str, SwapSlot], int]:
    """The piece's places by kind, and the bytes of a buffer for pieces of ``slot_numel`` elements at most."""
    places, start = {}, 0
    for kind, (shelf, begin, dtype) in regions.items():
        offset = begin + piece.low * dtype.itemsize
        places[kind] = SwapSlot(shelf, offset, start + offset % BLOCK, dtype, piece.numel)
        start += room_for(slot_numel, dtype)
    return places, start


def room_for(numel: int, dtype: torch.dtype) -> int:
    """Bytes for that many elements, wherever in a block they begin."""
    return round_up(numel * dtype.itemsize, BLOCK) + BLOCK


# Masters and moments in a file between updates: pieces go through a ring of buffers, read ahead of the update and written behind it.
#
#     backward   read piece 0, 1, 2
#     buffer 0   update 0 | write 0        | read piece 3 ...
#     buffer 1             update 1 | write 1
#     buffer 2                       update 2 | write 2
#                                           time -->
#
# Traffic per step of a rank with n elements: what is spilled, once in each direction; for Adam 2 x 12 n bytes with 16-bit parameters (master and two
# moments), 2 x 8 n with fp32 parameters, which are their own masters and stay. The first step reads masters only: there are no moments yet.
# Where parameters are in a file, too (:mod:`zero_trial.sharding.offload.nvme_params`), an update writes 2 n more
# bytes of 16-bit ones, or reads and writes 4 n
# of fp32 ones. Memory: the ring, which is at most a quarter of what is spilled (:func:`zero_trial.sharding.offload.swap_file.slot_elements`).


@dataclass
class _Loaded:
    """A piece whose tensors are in a buffer, or on the way there."""

    piece: ShardPiece
    slot: torch.Tensor
    tickets: list[DiskTransfer] = field(default_factory=list)


class SwappedStore:
    """The :class:`StateStore` of pieces whose masters (those on ``masters``) and state ``columns`` (by the weight's dtype) live on its shelf,
    and whose parameters, where they are on ``shards``, live on theirs; new 16-bit values leave through ``outbox``.

    Pieces go one by one, in their order, in every step. Between steps their tensors keep shape and dtype and read as NaN; inside
    :meth:`lent` they are whole. State that is in no column stays in memory. One of ``masters`` and ``shards`` must be there.
    """

    def __init__(
        self,
        masters: MasterSwap | None,
        pieces: Sequence[ShardPiece],
        state: Mapping[torch.Tensor, dict[str, Any]],
        columns: Mapping[torch.dtype, Sequence[StateColumn]],
        *,
        slot_numel: int,
        slots: int,
        shards: ParamSwapper | None = None,
        outbox: RoundedBuffers | None = None,
    ) -> None:
        self._masters = masters
        self._shards = shards
        self._outbox = outbox if outbox is not None else RoundedBuffers()
        self._trouble = shards.trouble if shards is not None else DiskFailure()
        self._pieces = list(pieces)
        self._state = state
        self._groups = list({id(piece.group): piece.group for piece in pieces}.values())
        regions = {id(group): regions_of(group, columns, masters, shards) for group in self._groups}
        found = {id(piece): places_of(piece, regions[id(piece.group)], slot_numel) for piece in self._pieces}
        self._outs = {key: out for key, (places, _) in found.items() if (out := places.pop(ROUNDED, None)) is not None}
        self._places = {key: places for key, (places, _) in found.items()}
        self._written: dict[int, list[DiskTransfer]] = {}  # by id of the piece: its writes that may be under way
        # (id of the piece, kind) that the file holds
        self._stored = {(key, MASTER) for key, places in self._places.items() if MASTER in places}
        size = max((size for _, size in found.values()), default=0)
        self._free = deque(self._some_shelf.buffer(size) for _ in range(slots))
        self._loaded: deque[_Loaded] = deque()
        self._writing: deque[tuple[torch.Tensor, list[DiskTransfer]]] = deque()
        self._coming: deque[ShardPiece] = deque()
        self._expected = False  # what is loaded is for the step that comes
        self._under_way = False  # a step has begun, and has not ended
        self._area: torch.Tensor | None = None
        self._opening = MappedAccess(
            masters.shelf.mapped if masters is not None else nullcontext,
            self._trouble,
            self._drain,
            self._lay_open,
            self._put_away,
        )
        self.buffer_bytes = sum(slot.numel() for slot in self._free)
        for group in self._groups:
            if MASTER in regions[id(group)] or ROUNDED in regions[id(group)]:
                group.materialized = self.lent
        with self.lent():  # an optimizer that makes its state when it is built
            pass

    @property
    def shelf(self) -> SwapSpace | None:
        """That of masters and state; None where only parameters are in a file."""
        return self._masters.shelf if self._masters is not None else None

    @property
    def staying(self) -> int:
        """Elements whose optimizer state is in memory."""
        masters = self._masters
        return sum(piece.numel for piece in self._pieces if masters is None or not masters.keeps_state_of(piece.group))

    @property
    def buffers(self) -> list[torch.Tensor]:
        """The ring, between steps."""
        return [*self._free, *(left.slot for left in self._loaded), *(slot for slot, _ in self._writing)]

    @property
    def _some_shelf(self) -> SwapSpace:
        if self._masters is not None:
            return self._masters.shelf
        if self._shards is not None:
            return self._shards.shelf
        raise StorageError("there is no file for offloaded state", where="SpillStore")

    # --- one step -------------------------------------------------------------------------------------------------

    def expect(self) -> None:
        """A step is coming: reads what it needs first, into the buffers that there are. A step that is skipped leaves that to the next one."""
        if self._under_way:  # it was broken off
            self._drain()
        if not self._expected and self._trouble.first is None:
            self._expected = True
            self._coming = deque(self._pieces)
            self._read_ahead()

    def batches(self) -> Iterator[Sequence[ShardPiece]]:
        self._trouble.require_none()
        if self._under_way:
            self._drain()
        if not self._expected:
            self._coming = deque(self._pieces)
        self._expected, self._under_way = False, True
        for piece in self._pieces:
            yield [piece]
        self._under_way = False

    def borrow(self, batch: Sequence[ShardPiece]) -> None:
        """The batch's tensors are in a buffer when this returns; the next ones are on their way. Raises StorageError."""
        self._read_ahead()
        now = self._loaded[0]
        self._trouble.wait(now.tickets)
        for kind, place in self._places[id(now.piece)].items():
            if self._keeps(now.piece, kind):
                self._tensor(now.piece, kind).data = place.of_buffer(now.slot)
        if (out := self._outs.get(id(now.piece))) is not None:
            self._outbox.open(now.piece, out.of_buffer(now.slot))

    def give_back(self, batch: Sequence[ShardPiece], rounded: bool) -> bool:
        """Starts to write what the update changed; whether the 16-bit copies are up to date now."""
        now = self._loaded.popleft()
        piece = now.piece
        if not rounded and piece.rounded is not None:
            piece.rounded.copy_(piece.weight.detach())  # later the master is away
            rounded = True
        kinds = [kind for kind in self._places[id(piece)] if self._has(piece, kind)]
        is_new = any((id(piece), kind) not in self._stored for kind in kinds)
        tickets, of_shard = [], []
        for kind in kinds:
            place = self._places[id(piece)][kind]
            tickets.append(place.shelf.write(place.offset, self._put(piece, kind, place.of_buffer(now.slot))))
            if kind == MASTER and piece.group.master is piece.group.shard:
                of_shard.append(tickets[-1])
        if (out := self._outs.get(id(piece))) is not None:
            tickets.append(out.shelf.write(out.offset, self._outbox.take(piece)))
            of_shard.append(tickets[-1])
        if self._shards is not None and of_shard:
            self._shards.wrote(piece.group, of_shard)
        if is_new:  # the optimizer made its state outside of the buffer, in memory that has just been freed
            give_freed_memory_back()
        self._written[id(piece)] = tickets
        self._writing.append((now.slot, tickets))
        return rounded

    def _read_ahead(self) -> None:
        """Reads as many pieces as there are free buffers; waits for a buffer that is being written only if nothing else is left."""
        while self._coming:
            if not self._free and self._writing and (not self._loaded or _done(self._writing[0][1])):
                self._trouble.wait(self._writing[0][1])  # which may be interrupted
                self._free.append(self._writing.popleft()[0])
            if not self._free:
                return
            # What the step before wrote must be there before it is read.
            self._trouble.wait(self._written.get(id(self._coming[0]), []))
            self._read(self._coming.popleft(), self._free.popleft())

    def _read(self, piece: ShardPiece, slot: torch.Tensor) -> None:
        self._written.pop(id(piece), None)
        loaded = _Loaded(piece, slot)
        for kind, place in self._places[id(piece)].items():
            if self._keeps(piece, kind):
                loaded.tickets.append(place.shelf.read(place.offset, place.of_buffer(slot)))
        self._loaded.append(loaded)

    def wait(self) -> None:
        """Returns when all that was given back is on the disk; nothing needs that but a clock."""
        for _, tickets in self._writing:
            self._trouble.wait(tickets)

    # --- between steps --------------------------------------------------------------------------------------------

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Inside, all masters and all state are whole, and parameters that are in a file; to read and to write, in pages that the kernel may
        drop. May be nested. Raises StorageError, also if the disk has failed before."""
        if not self._opening.is_open:
            self._trouble.require_none()
            self._drain()  # before the shards open, which waits for their writes only
        with self._shards.lent() if self._shards is not None else nullcontext(), self._opening():
            yield

    def zeros(self, piece: ShardPiece, kind: str) -> torch.Tensor | None:
        """State of zeros for a piece, where it will be kept; None if there is no such column. Only inside :meth:`lent`."""
        place = self._places[id(piece)].get(kind)
        return None if place is None else self._in_file(place).zero_()

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
            for keeper in (self._masters, self._shards):
                if keeper is not None:
                    keeper.shelf.close()

    def _drain(self) -> None:
        """Nothing is under way afterwards, and all buffers are free."""
        self._coming.clear()
        self._expected = self._under_way = False
        under_way = [(left.slot, left.tickets) for left in self._loaded]  # read ahead, or of a step that was broken off
        under_way += self._writing
        self._trouble.wait([ticket for _, tickets in under_way for ticket in tickets])
        self._free.extend(slot for slot, _ in under_way)
        self._loaded.clear()
        self._writing.clear()
        self._written.clear()
        self._outbox.clear()

    def _in_file(self, place: SwapSlot) -> torch.Tensor:
        shards = self._shards
        area = shards.area if shards is not None and place.shelf is shards.shelf else self._area
        if area is None:
            raise StorageError("offloaded state is not at hand", where="SpillStore", expected="inside lent()")
        return place.of_file(area)

    def _lay_open(self, area: torch.Tensor | None) -> None:
        self._area = area
        for group in self._groups:
            if self._masters is not None and area is not None and id(group) in self._masters.offsets:
                start, dtype = self._masters.offsets[id(group)], group.master.dtype
                group.master = area[start : start + dtype.itemsize * group.layout.shard_numel].view(dtype)
        for piece in self._pieces:
            for kind, place in self._places[id(piece)].items():
                if self._keeps(piece, kind):
                    self._tensor(piece, kind).data = self._in_file(place)

    def _put_away(self, area: torch.Tensor | None) -> None:
        """State may have been made, replaced or forgotten since it was laid open."""
        self._stored.clear()
        for piece in self._pieces:
            for kind, place in self._places[id(piece)].items():
                if self._has(piece, kind):
                    self._put(piece, kind, self._in_file(place))
        for group in self._groups:
            if self._masters is not None and id(group) in self._masters.offsets:
                group.master = absent((group.layout.shard_numel,), group.master.dtype, group.master.device)
        self._area = None

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


def _done(tickets: Sequence[DiskTransfer]) -> bool:
    return all(ticket.done() for ticket in tickets)


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Compared by storage, because imagined tensors have no addresses."""
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata and a.storage_offset() == b.storage_offset()
