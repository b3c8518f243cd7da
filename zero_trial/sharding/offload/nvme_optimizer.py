"""Masters and optimizer state in a file between updates: pieces go through a ring of buffers, read
ahead of the update, written behind it.

    backward   read piece 0, 1, 2
    buffer 0   update 0 | write 0        | read piece 3 ...
    buffer 1             update 1 | write 1
    buffer 2                       update 2 | write 2
                                          time -->

Traffic per step of a rank with n elements: what is in the file, once in each direction; for Adam 2
x 12 n bytes with 16-bit parameters (master and two moments), 2 x 8 n with fp32 parameters, which
are their own masters and stay. The first step reads masters only: there are no moments yet. Where
parameters are in a file, too (:mod:`zero_trial.sharding.offload.nvme_params`), an update writes 2 n
more bytes of 16-bit ones, or reads and writes 4 n of fp32 ones.

Memory: the ring, at most a quarter of what is in the file
(:func:`zero_trial.sharding.offload.swap_space.buffer_elements`).
"""

from __future__ import annotations

import functools
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from zero_trial.errors import StorageError
from zero_trial.sharding.guards.freed import absent, is_absent
from zero_trial.sharding.layout import round_up
from zero_trial.sharding.offload.nvme_params import ParamSwapper, RoundedBuffers
from zero_trial.sharding.offload.swap_space import BLOCK, DiskFailure, MappedAccess, SwapSpace, Transfer
from zero_trial.sharding.param_group import ParamGroup
from zero_trial.sharding.pieces import ShardPiece

_PROBE = 96  # elements: no count or factor of a state is so long
# schedulers put wrappers of these on the object, which would step the real one
_OWN = ("step", "zero_grad")
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")

MASTER = "master"
ROUNDED = "rounded"  # the 16-bit copy: an update writes it and never reads it


@dataclass(frozen=True)
class StateColumn:
    """One kind of state with one value per element, such as ``exp_avg``."""

    kind: str
    dtype: torch.dtype


def state_columns(base: torch.optim.Optimizer, dtype: torch.dtype = torch.float32) -> list[StateColumn]:
    """Find the columns of all groups of an elementwise optimizer for weights in ``dtype``, in the
    order in which it makes them.

    A twin of ``base`` makes one step on a few zeros; ``base`` stays as it is.
    """
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


class MasterSwapper:
    """Moves masters into ``space``, and decides whose optimizer state is kept there, too.

    Args:
        space: the file.
        budget: elements whose state goes to the file; None for all. A group goes as a whole, so
            more than was asked for may stay in memory, never less.
    """

    def __init__(self, space: SwapSpace, budget: int | None = None) -> None:
        self.space = space
        self.offsets: dict[int, int] = {}  # bytes, by id of the group
        self._budget = budget
        self._chosen: set[int] = set()

    def swap_out(self, group: ParamGroup) -> None:
        """Write the group's master to the file; it reads as NaN afterwards. Groups without one of
        their own (fp32, frozen) stay.

        It is called as soon as a group is built, so that the masters of a model are never in memory
        together.
        """
        if not self._chooses(group):
            return
        self._chosen.add(id(group))
        master = group.master
        if master is group.shard:
            return
        offset = self.offsets[id(group)] = self.space.reserve(master.nbytes)
        self.space.write(offset, master).wait()
        group.master = absent(master.shape, master.dtype, master.device)

    def keeps_state_of(self, group: ParamGroup) -> bool:
        """Return whether the group's optimizer state lives in the file."""
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


@dataclass(frozen=True)
class SwapSlot:
    """Where ``numel`` elements of one column are: in a file, and in whichever buffer their piece is
    in.

    ``offset`` (in the file) and ``start`` (in the buffer) are bytes, with the same remainder by
    BLOCK.
    """

    space: SwapSpace
    offset: int
    start: int
    dtype: torch.dtype
    numel: int

    def of_buffer(self, buffer: torch.Tensor) -> torch.Tensor:
        return buffer[self.start : self.start + self.nbytes].view(self.dtype)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


# Where a column of a group's shard begins: which file, at which byte, and its dtype.
Region = tuple[SwapSpace, int, torch.dtype]


def regions_of(
    group: ParamGroup,
    columns: Mapping[torch.dtype, Sequence[StateColumn]],
    masters: MasterSwapper | None,
    shards: ParamSwapper | None,
) -> dict[str, Region]:
    """Return all of the group that is in a file, by kind, and reserve room for its state.

    A shard that is its own master is the column MASTER; else MASTER and ROUNDED are two, in
    whatever file each is.
    """
    found: dict[str, Region] = {}
    master_dtype = group.master.dtype
    if masters is not None and id(group) in masters.offsets:
        found[MASTER] = masters.space, masters.offsets[id(group)], master_dtype
    if shards is not None and (offset := shards.offset_of(group)) is not None:
        kind = MASTER if group.master is group.shard else ROUNDED
        found[kind] = shards.update_space, offset, group.dtype
    if masters is not None and masters.keeps_state_of(group):
        for column in columns.get(master_dtype, ()):
            offset = masters.space.reserve(group.layout.shard_numel * column.dtype.itemsize)
            found[column.kind] = masters.space, offset, column.dtype
    return found


def slots_of(piece: ShardPiece, regions: Mapping[str, Region], buffer_numel: int) -> tuple[dict[str, SwapSlot], int]:
    """Return the piece's slots by kind, and the bytes of a buffer for pieces of ``buffer_numel``
    elements at most."""
    slots, start = {}, 0
    for kind, (space, begin, dtype) in regions.items():
        offset = begin + piece.low * dtype.itemsize
        slots[kind] = SwapSlot(space, offset, start + offset % BLOCK, dtype, piece.numel)
        # wherever in a block they begin
        start += round_up(buffer_numel * dtype.itemsize, BLOCK) + BLOCK
    return slots, start


@dataclass
class _Loaded:
    """A piece whose tensors are in a buffer, or on the way there."""

    piece: ShardPiece
    buffer: torch.Tensor
    transfers: list[Transfer] = field(default_factory=list)


class SwappedStore:
    """The :class:`StateStore` of pieces whose masters and state are in a file, and their parameters
    where those are swapped, too.

    Pieces go one by one, in their order, in every step. Between steps their tensors keep shape and
    dtype and read as NaN; inside :meth:`lent` they can be read and written. State that is in no
    column stays in memory.

    Args:
        masters, shards: what moved masters and parameters away; at least one of them.
        state: the optimizer's, by weight.
        columns: of the optimizer, by the weight's dtype.
        buffer_numel: elements of a piece at most.
        buffer_count: buffers in the ring.
        rounded_buffers: where the new 16-bit values of swapped parameters are until they are
            written.
    """

    def __init__(
        self,
        masters: MasterSwapper | None,
        pieces: Sequence[ShardPiece],
        state: Mapping[torch.Tensor, dict[str, Any]],
        columns: Mapping[torch.dtype, Sequence[StateColumn]],
        *,
        buffer_numel: int,
        buffer_count: int,
        shards: ParamSwapper | None = None,
        rounded_buffers: RoundedBuffers | None = None,
    ) -> None:
        space = masters.space if masters is not None else shards.update_space if shards is not None else None
        if space is None:
            raise StorageError("there is no file for offloaded state", where="SwappedStore")
        self._masters = masters
        self._shards = shards
        self._rounded_buffers = rounded_buffers if rounded_buffers is not None else RoundedBuffers()
        self._failure = shards.failure if shards is not None else DiskFailure()
        self._pieces = list(pieces)
        self._state = state
        self._groups = list({id(piece.group): piece.group for piece in pieces}.values())
        regions = {id(group): regions_of(group, columns, masters, shards) for group in self._groups}
        found = {id(piece): slots_of(piece, regions[id(piece.group)], buffer_numel) for piece in self._pieces}
        self._rounded = {
            key: slot for key, (slots, _) in found.items() if (slot := slots.pop(ROUNDED, None)) is not None
        }
        self._slots = {key: slots for key, (slots, _) in found.items()}
        # by id of the piece: its writes that may be under way
        self._written: dict[int, list[Transfer]] = {}
        # (id of the piece, kind) that the file holds
        self._stored = {(key, MASTER) for key, slots in self._slots.items() if MASTER in slots}
        size = max((size for _, size in found.values()), default=0)
        self._free = deque(space.buffer(size) for _ in range(buffer_count))
        self._loaded: deque[_Loaded] = deque()
        self._writing: deque[tuple[torch.Tensor, list[Transfer]]] = deque()
        self._coming: deque[ShardPiece] = deque()
        self._expected = False  # what is loaded is for the step that comes
        self._under_way = False  # a step has begun, and has not ended
        self._area: torch.Tensor | None = None
        self._access = MappedAccess(
            masters.space.mapped if masters is not None else nullcontext,
            self._failure,
            self._drain,
            self._map,
            self._unmap,
        )
        self.buffer_bytes = sum(buffer.numel() for buffer in self._free)
        for group in self._groups:
            if MASTER in regions[id(group)] or ROUNDED in regions[id(group)]:
                group.lender = self
        with self.lent():  # an optimizer that makes its state when it is built
            pass

    @property
    def space(self) -> SwapSpace | None:
        """The file of masters and state; None where only parameters are in a file."""
        return self._masters.space if self._masters is not None else None

    @property
    def resident_elements(self) -> int:
        """Elements whose optimizer state is in memory."""
        masters = self._masters
        return sum(piece.numel for piece in self._pieces if masters is None or not masters.keeps_state_of(piece.group))

    @property
    def buffers(self) -> list[torch.Tensor]:
        """The ring, between steps."""
        return [*self._free, *(left.buffer for left in self._loaded), *(buffer for buffer, _ in self._writing)]

    # --- one step ---------------------------------------------------------------------------------

    def prefetch(self) -> None:
        """Read what the coming step needs first, into the buffers that there are. After a skipped
        step it is still there for the next."""
        if self._under_way:  # it was broken off
            self._drain()
        if not self._expected and self._failure.first is None:
            self._expected = True
            self._coming = deque(self._pieces)
            self._read_ahead()

    def batches(self) -> Iterator[Sequence[ShardPiece]]:
        self._failure.require_none()
        if self._under_way:
            self._drain()
        if not self._expected:
            self._coming = deque(self._pieces)
        self._expected, self._under_way = False, True
        for piece in self._pieces:
            yield [piece]
        self._under_way = False

    def borrow(self, batch: Sequence[ShardPiece]) -> None:
        """Bring the batch's tensors into a buffer and start to read the next ones. Raises
        StorageError."""
        self._read_ahead()
        now = self._loaded[0]
        self._failure.wait(now.transfers)
        for kind, slot in self._slots[id(now.piece)].items():
            if self._keeps(now.piece, kind):
                self._tensor(now.piece, kind).data = slot.of_buffer(now.buffer)
        if (rounded := self._rounded.get(id(now.piece))) is not None:
            self._rounded_buffers.assign(now.piece, rounded.of_buffer(now.buffer))

    def give_back(self, batch: Sequence[ShardPiece], rounded: bool) -> bool:
        """Start to write what the update changed; return whether the 16-bit copies are up to date
        now."""
        now = self._loaded.popleft()
        piece = now.piece
        if not rounded and piece.rounded is not None:
            piece.rounded.copy_(piece.weight.detach())  # later the master is away
            rounded = True
        kinds = [kind for kind in self._slots[id(piece)] if self._has(piece, kind)]
        transfers, of_shard = [], []
        for kind in kinds:
            slot = self._slots[id(piece)][kind]
            with self._failure.noted():
                transfers.append(slot.space.write(slot.offset, self._put(piece, kind, slot.of_buffer(now.buffer))))
            if kind == MASTER and piece.group.master is piece.group.shard:
                of_shard.append(transfers[-1])
        if (slot_of_rounded := self._rounded.get(id(piece))) is not None:
            source = self._rounded_buffers.release(piece)
            with self._failure.noted():
                transfers.append(slot_of_rounded.space.write(slot_of_rounded.offset, source))
            of_shard.append(transfers[-1])
        if self._shards is not None and of_shard:
            self._shards.add_writes(piece.group, of_shard)
        self._written[id(piece)] = transfers
        self._writing.append((now.buffer, transfers))
        return rounded

    def _read_ahead(self) -> None:
        """Read as many pieces as there are free buffers; wait for a buffer that is being written
        only if nothing else is left."""
        while self._coming:
            if not self._free and self._writing and (not self._loaded or _done(self._writing[0][1])):
                self._failure.wait(self._writing[0][1])  # which may be interrupted
                self._free.append(self._writing.popleft()[0])
            if not self._free:
                return
            # What the step before wrote must be there before it is read.
            self._failure.wait(self._written.get(id(self._coming[0]), []))
            self._read(self._coming.popleft(), self._free.popleft())

    def _read(self, piece: ShardPiece, buffer: torch.Tensor) -> None:
        self._written.pop(id(piece), None)
        loaded = _Loaded(piece, buffer)
        for kind, slot in self._slots[id(piece)].items():
            if self._keeps(piece, kind):
                with self._failure.noted():
                    loaded.transfers.append(slot.space.read(slot.offset, slot.of_buffer(buffer)))
        self._loaded.append(loaded)

    def wait(self) -> None:
        """Return when all that was given back is on the disk. Only a measurement needs it."""
        for _, transfers in self._writing:
            self._failure.wait(transfers)

    # --- between steps ----------------------------------------------------------------------------

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Make all masters, all state and swapped parameters readable and writable inside the
        block, in pages that the kernel may drop.

        May be nested. Raises StorageError, also if the disk has failed before.
        """
        if not self._access.is_open:
            self._failure.require_none()
            self._drain()  # before the shards are mapped, which waits for their writes only
        with self._shards.lent() if self._shards is not None else nullcontext(), self._access():
            yield

    def zeros(self, piece: ShardPiece, kind: str) -> torch.Tensor | None:
        """Return state of zeros for a piece, where it will be kept; None if there is no such
        column. Only inside :meth:`lent`."""
        slot = self._slots[id(piece)].get(kind)
        return None if slot is None else self._in_file(slot).zero_()

    def resident_bytes(self, value: torch.Tensor, kind: str) -> int:
        """Return the bytes of memory that a state tensor takes between steps."""
        return 0 if is_absent(value) else value.nbytes

    def close(self) -> None:
        """Wait for what is under way and give the disk's space back; masters and state read as NaN
        from now on."""
        try:
            self._drain()
        except StorageError:
            pass  # what was not written is not needed any more
        finally:
            for keeper in (self._masters, self._shards):
                if keeper is not None:
                    keeper.space.close()

    def _drain(self) -> None:
        """Wait until nothing is under way and all buffers are free."""
        self._coming.clear()
        self._expected = self._under_way = False
        # read ahead, or of a step that was broken off
        under_way = [*((left.buffer, left.transfers) for left in self._loaded), *self._writing]
        self._failure.wait([transfer for _, transfers in under_way for transfer in transfers])
        self._free.extend(buffer for buffer, _ in under_way)
        self._loaded.clear()
        self._writing.clear()
        self._written.clear()
        self._rounded_buffers.clear()

    def _in_file(self, slot: SwapSlot) -> torch.Tensor:
        shards, found = self._shards, None
        if shards is not None and slot.space is shards.update_space:
            found = shards.mapped_part(slot.offset, slot.nbytes)
        elif self._area is not None:
            found = self._area[slot.offset : slot.offset + slot.nbytes]
        if found is None:
            raise StorageError(
                "offloaded state is not mapped into memory", where="SwappedStore", expected="inside lent()"
            )
        return found.view(slot.dtype)

    def _map(self, area: torch.Tensor | None) -> None:
        self._area = area
        for group in self._groups:
            if self._masters is not None and area is not None and id(group) in self._masters.offsets:
                start, dtype = self._masters.offsets[id(group)], group.master.dtype
                group.master = area[start : start + dtype.itemsize * group.layout.shard_numel].view(dtype)
        for piece in self._pieces:
            for kind, slot in self._slots[id(piece)].items():
                if self._keeps(piece, kind):
                    self._tensor(piece, kind).data = self._in_file(slot)

    def _unmap(self, area: torch.Tensor | None) -> None:
        """Put everything back; state may have been made, replaced or cleared since it was
        mapped."""
        self._stored.clear()
        for piece in self._pieces:
            for kind, slot in self._slots[id(piece)].items():
                if self._has(piece, kind):
                    self._put(piece, kind, self._in_file(slot))
        for group in self._groups:
            if self._masters is not None and id(group) in self._masters.offsets:
                group.master = absent((group.layout.shard_numel,), group.master.dtype, group.master.device)
        self._area = None

    # --- one tensor -------------------------------------------------------------------------------

    def _tensor(self, piece: ShardPiece, kind: str) -> torch.Tensor:
        tensor: torch.Tensor = piece.weight if kind == MASTER else self._state[piece.weight][kind]
        return tensor

    def _keeps(self, piece: ShardPiece, kind: str) -> bool:
        """Return whether the file holds it and it is still wanted: state may be cleared between
        steps."""
        return (id(piece), kind) in self._stored and self._has(piece, kind)

    def _has(self, piece: ShardPiece, kind: str) -> bool:
        if kind == MASTER:
            return True
        value = self._state.get(piece.weight, {}).get(kind)
        return (
            torch.is_tensor(value)
            and value.shape == piece.weight.shape
            and value.dtype == self._slots[id(piece)][kind].dtype
        )

    def _put(self, piece: ShardPiece, kind: str, target: torch.Tensor) -> torch.Tensor:
        """Copy the tensor's values into ``target``, unless they are there, free the tensor's own
        memory, and return ``target``."""
        tensor = self._tensor(piece, kind)
        held = tensor.detach()
        if not _same_memory(held, target):
            target.copy_(held)
        tensor.data = self._absent(tuple(held.shape), held.dtype, held.device)
        self._stored.add((id(piece), kind))
        return target

    @functools.cached_property
    def _absent(self) -> Any:
        return functools.cache(absent)


def _done(transfers: Sequence[Transfer]) -> bool:
    return all(transfer.done() for transfer in transfers)


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Compare by storage, because fake tensors have no addresses."""
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata and a.storage_offset() == b.storage_offset()
