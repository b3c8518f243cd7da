"""Updates of offloaded values: gradients, masters, state and new values of pieces pass through a
ring of buffers, read before the update and written after it.

    backward   read piece 0, 1, 2
    buffer 0   update 0 | write 0        | read piece 3 ...
    buffer 1             update 1 | write 1
    buffer 2                       update 2 | write 2
                                          time -->

    slot       region                          before the update    after it
    master     file                            read                 written
    state      file                            read                 written
    rounded    file or host memory, or the     -                    written, or copied up
               device's own shard
    gradient   of the device, if updates run   copied down          -
               on the host

Whole tensors do not pass through the ring: in a step that has some, regions are mapped while their
owners update them, round by round (:mod:`zero_trial.sharding.whole_tensors`). Their state, of any
shapes, has space in the region of masters from the step that creates it on. A device's state is in
the region, or in host memory, and is copied to the device for its round.

A slot whose region is host memory is updated in place. Traffic per step of a rank with n elements:
all bytes in files, once in each direction; for Adam 2 x 12 n bytes with 16-bit parameters (master
and two moments), 2 x 8 n with fp32 parameters, which are their own masters and stay. The first step
reads masters only: there are no moments yet. If parameters are in a file, too, an update writes 2 n
more bytes if they are 16-bit, or reads and writes 4 n if they are fp32. Between a device and its
host: a gradient down and a parameter up, 2 or 4 bytes each.

Memory: the ring, at most a quarter of the bytes updated through it
(:func:`zero_trial.sharding.offload.regions.buffer_elements`).
"""

from __future__ import annotations

import enum
import functools
from collections import OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from zero_trial.errors import StorageError
from zero_trial.sharding.guards.freed import absent, is_absent
from zero_trial.sharding.layout import round_up
from zero_trial.sharding.offload.copies import Copier
from zero_trial.sharding.offload.homes import Homes, Place
from zero_trial.sharding.offload.moved_states import tensors_inside
from zero_trial.sharding.offload.region_file import BLOCK, Transfer
from zero_trial.sharding.offload.regions import Buffer, HostRegion, Region, Ring, wait_for
from zero_trial.sharding.param_group import ParamGroup
from zero_trial.sharding.pieces import ShardPiece, StateStore
from zero_trial.sharding.whole_tensors import WholeTensor

_PROBE = 96  # elements: no count or factor of a state is this long
# schedulers put wrappers of these on the object, and the wrappers would step the real optimizer
_OWN = ("step", "zero_grad")
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


@dataclass(frozen=True)
class StateColumn:
    """One kind of state with one value per element, such as ``exp_avg``."""

    kind: str
    dtype: torch.dtype


def state_columns(
    base: torch.optim.Optimizer, dtype: torch.dtype = torch.float32, opt_groups: Collection[int] | None = None
) -> list[StateColumn]:
    """Find the columns of all groups (or ``opt_groups``) of an elementwise optimizer for weights in
    ``dtype``, in the order in which the optimizer creates them.

    A copy of ``base`` takes one step on a few zeros; ``base`` does not change.
    """
    twin: torch.optim.Optimizer = object.__new__(type(base))
    twin.__dict__.update({key: value for key, value in base.__dict__.items() if key not in _OWN})
    twin.__dict__.update({key: OrderedDict() for key in _HOOKS})
    twin.state = defaultdict(dict)
    twin.param_groups = []
    for number, opt_group in enumerate(base.param_groups):
        if opt_groups is not None and number not in opt_groups:
            continue
        weight = nn.Parameter(torch.zeros(_PROBE, dtype=dtype, device="cpu"))
        weight.grad = torch.zeros_like(weight)
        twin.param_groups.append({**opt_group, "params": [weight]})
        if isinstance(base, torch.optim.Adagrad):  # the only one that creates state in its constructor
            twin.state[weight] = {"step": torch.tensor(0.0), "sum": torch.zeros_like(weight)}
    if twin.param_groups:
        twin.step()
    found: dict[str, torch.dtype] = {}
    for state in twin.state.values():
        for kind, value in state.items():
            if torch.is_tensor(value) and value.shape == (_PROBE,):
                found.setdefault(kind, value.dtype)
    return [StateColumn(kind, dtype) for kind, dtype in found.items()]


# kinds of slots in addition to those of the optimizer's state
MASTER, ROUNDED, GRADIENT = "<master>", "<rounded>", "<gradient>"


@dataclass(frozen=True)
class Slot:
    """Where the elements of one kind of a piece are: in a region (None: on the device), and in the
    piece's buffer.

    ``offset`` (in the region) and ``start`` (in the buffer) are bytes, and equal modulo BLOCK.
    """

    region: Region | None
    offset: int
    start: int
    dtype: torch.dtype
    numel: int

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def in_buffer(self, buffer: Buffer) -> torch.Tensor:
        return buffer.near[self.start : self.start + self.nbytes].view(self.dtype)

    def in_region(self) -> torch.Tensor | None:
        """Return the values between steps; if in a file, only inside :meth:`Homes.lent`."""
        return None if self.region is None else self.region.view(self.offset, self.nbytes).view(self.dtype)


@dataclass(frozen=True)
class OffloadedPiece(ShardPiece):
    """A piece with offloaded values.

    ``slots``: its values that pass through a buffer, by kind, set by UpdateStore. ``borrowed``: its
    gradient and new 16-bit values, while they are in a buffer.
    """

    slots: dict[str, Slot] = field(default_factory=dict, compare=False)
    borrowed: dict[str, torch.Tensor] = field(default_factory=dict, compare=False)

    @property
    def reduced(self) -> torch.Tensor:
        return self.borrowed[GRADIENT] if GRADIENT in self.borrowed else super().reduced

    @property
    def rounded(self) -> torch.Tensor | None:
        """The buffer for new 16-bit values during the piece's update; the shard, if updates run
        where it is; None if nothing is rounded."""
        return self.borrowed.get(ROUNDED) if ROUNDED in self.slots else super().rounded


@dataclass(frozen=True, eq=False)
class _WholeState:
    """A state tensor of a whole tensor, and its home between steps: a place in a region, or host
    memory."""

    value: torch.Tensor
    home: Place | torch.Tensor
    strides: tuple[int, ...]

    def values(self) -> torch.Tensor:
        """Return the values; if in a file, only inside :meth:`Homes.lent`."""
        if isinstance(self.home, torch.Tensor):
            return self.home
        return self.home.view(self.value.numel()).as_strided(self.value.shape, self.strides)


@dataclass
class _Loaded:
    """A piece whose slots are in a buffer, or being read into it."""

    piece: OffloadedPiece
    buffer: Buffer
    transfers: list[Transfer] = field(default_factory=list)


class _Step(enum.Enum):
    """The state of an update. ``prefetch`` changes IDLE to EXPECTED, ``batches`` changes it to
    UNDER_WAY and at its end to IDLE; ``_drain`` changes any state to IDLE."""

    IDLE = enum.auto()
    EXPECTED = enum.auto()  # pieces are loaded for the coming step
    UNDER_WAY = enum.auto()


class UpdateStore(StateStore):
    """The store of pieces with offloaded values.

    A step updates the pieces one by one, in order. Between steps their tensors in regions keep
    shape and dtype and read as NaN; inside :meth:`lent` they can be read and written. State that is
    in no column stays in memory, where updates run.

    Args:
        homes: holds the offloaded parameters and masters.
        state: the optimizer's state, by weight.
        columns: the optimizer's columns, by the weight's dtype.
        buffer_numel: most elements of a piece.
        buffer_count: buffers in the ring.
        copier: between the host, where updates run, and the device of gradients and parameters;
            None: they run where those are.
        whole: this rank's tensors that are updated whole.
    """

    def __init__(
        self,
        homes: Homes,
        pieces: Sequence[OffloadedPiece],
        state: Mapping[torch.Tensor, dict[str, Any]],
        columns: Mapping[torch.dtype, Sequence[StateColumn]],
        *,
        buffer_numel: int,
        buffer_count: int,
        copier: Copier | None = None,
        whole: Sequence[WholeTensor] = (),
    ) -> None:
        self.homes = homes
        self._pieces = pieces
        self._whole = whole
        self._states: dict[WholeTensor, list[_WholeState]] = {tensor: [] for tensor in whole}
        self._state = state
        self._copier = copier
        places = {group: self._places_of(group, columns) for group in dict.fromkeys(piece.group for piece in pieces)}
        size = max((self._lay_out(piece, places[piece.group], buffer_numel) for piece in pieces), default=0)
        # (id of the piece, kind) that a region holds
        self._stored = {(id(piece), MASTER) for piece in pieces if MASTER in piece.slots}
        self._ring = Ring(
            homes.buffer(size) if copier is None else Buffer(copier.buffer(size))
            for _ in range(buffer_count if pieces else 0)
        )
        self._loaded: deque[_Loaded] = deque()
        self._coming: deque[OffloadedPiece] = deque()
        self._step = _Step.IDLE
        self._begun: torch.Event | None = None  # the device's work before the step's copies
        homes.lend_state = self._lent
        with self.lent():  # for an optimizer that creates state in its constructor
            pass

    def _places_of(
        self, group: ParamGroup, columns: Mapping[torch.dtype, Sequence[StateColumn]]
    ) -> dict[str, Place | torch.dtype]:
        """Return the group's values that pass through buffers, by kind, and reserve space for its
        state. For values on the device, return only the dtype.

        A shard that is its own master is MASTER; else MASTER and ROUNDED are separate, each in its
        own region.
        """
        homes, found = self.homes, dict[str, Place | torch.dtype]()
        if (master := homes.master_of(group)) is not None:
            found[MASTER] = master
        if group.master is not group.shard:
            if (shard := homes.shard_of(group)) is not None:
                found[ROUNDED] = shard
            elif self._copier is not None:
                found[ROUNDED] = group.shard.dtype
        if homes.masters is not None and homes.keeps_state_of(group):
            for column in columns.get(group.master.dtype, ()):
                offset = homes.masters.reserve(group.layout.shard_numel * column.dtype.itemsize)
                found[column.kind] = Place(homes.masters, offset, column.dtype)
        return found

    def _lay_out(self, piece: OffloadedPiece, places: Mapping[str, Place | torch.dtype], buffer_numel: int) -> int:
        """Fill the piece's slots; return the bytes of a buffer for at most ``buffer_numel``."""
        if self._copier is not None:
            places = {**places, GRADIENT: piece.grad_buffer.shard.dtype}
        start = 0
        for kind, place in places.items():
            dtype = place.dtype if isinstance(place, Place) else place
            region, offset = (place.region, place.offset) if isinstance(place, Place) else (None, 0)
            offset += piece.low * dtype.itemsize
            slot = piece.slots[kind] = Slot(region, offset, start + offset % BLOCK, dtype, piece.numel)
            if not self._in_place(slot):
                start += round_up(buffer_numel * dtype.itemsize, BLOCK) + BLOCK  # wherever in a block they begin
        return start

    def _in_place(self, slot: Slot) -> bool:
        """Return whether updates on a device's host use the slot's values in its region."""
        return self._copier is not None and isinstance(slot.region, HostRegion)

    def _values(self, slot: Slot, buffer: Buffer) -> torch.Tensor:
        """Return the slot's values during an update."""
        here = slot.in_region() if self._in_place(slot) else None
        return slot.in_buffer(buffer) if here is None else here

    @property
    def resident_elements(self) -> int:
        """Elements whose optimizer state is in memory."""
        parts = [(piece.group, piece.numel) for piece in self._pieces]
        parts += [(tensor.group, tensor.slot.numel) for tensor in self._whole]
        return sum(numel for group, numel in parts if not self.homes.keeps_state_of(group))

    @property
    def ring(self) -> list[Buffer]:
        """The buffers, between steps."""
        return [*self._ring.buffers, *(loaded.buffer for loaded in self._loaded)]

    @property
    def buffers(self) -> list[torch.Tensor]:
        """The ring's memory where the model computes: without host memory if that is a device."""
        return [] if self._copier is not None else [buffer.near for buffer in self.ring]

    # --- one step ---------------------------------------------------------------------------------

    # The order for each piece and its buffer:
    #
    #   1. Read what regions hold as soon as a buffer is free. This may be during backward.
    #   2. Copy the gradient down, but not before batches() has begun: only then is it final.
    #   3. borrow() waits for both, and lets weight and state point into the buffer. Update.
    #   4. give_back() moves them back to their regions, starts the writes and the copy of new
    #      values to the device, and gives the buffer to the ring, which hands it out after those.
    #
    # Regions are read again only after the ring has drained (prefetch), so that no step reads
    # values that the previous step has not written yet. An exception between 3 and 4 leaves the
    # step UNDER_WAY: the next prefetch(), batches() or lent() drains and uses the regions' values.

    def prefetch(self) -> None:
        """Read the first pieces of the coming step into all buffers. After a skipped step they are
        still there for the next. If whole tensors are updated first, nothing is read."""
        if not self._whole:
            self._expect()

    def _expect(self) -> None:
        if self.homes.failure.first is not None:
            return
        if self._step is _Step.UNDER_WAY:  # the step was interrupted
            self._drain()
        if self._step is _Step.IDLE:
            self._ring.drain()  # the previous step's writes must end before reads
            self._coming = deque(self._pieces)
            self._step = _Step.EXPECTED
            self._read_ahead()

    def batches(self) -> Iterator[Sequence[OffloadedPiece]]:
        self.homes.failure.require_none()
        self._expect()
        self._step = _Step.UNDER_WAY
        if self._copier is not None:
            # Host memory is updated in place: the device must not copy from it any more.
            if self.homes.copier is not None:
                self.homes.copier.settle()
            # Gradients are final now, unlike before a step. Copies need not wait for later work.
            self._begun = self._copier.now()
            for loaded in self._loaded:
                self._fetch_gradient(loaded, self._copier)
        for piece in self._pieces:
            yield [piece]
        self._step = _Step.IDLE

    def borrow(self, batch: Sequence[ShardPiece]) -> None:
        """Load the batch into a buffer and start to read the next one. Raises StorageError."""
        self._read_ahead()
        now = self._loaded[0]
        wait_for(now.transfers)
        for kind, slot in now.piece.slots.items():
            # updates make 16-bit copies only
            if kind == GRADIENT or (kind == ROUNDED and slot.dtype != now.piece.weight.dtype):
                now.piece.borrowed[kind] = self._values(slot, now.buffer)
            elif self._keeps(now.piece, kind):
                self._tensor(now.piece, kind).data = self._values(slot, now.buffer)

    def give_back(self, batch: Sequence[ShardPiece], rounded: bool) -> bool:
        """Start writing the updated values; return whether 16-bit copies are up to date."""
        now = self._loaded[0]
        piece, buffer = now.piece, now.buffer
        # After this the master is not in memory. If it is rounded elsewhere, do that now.
        copy = self._values(piece.slots[ROUNDED], buffer) if ROUNDED in piece.slots else piece.rounded
        if copy is not None and not (rounded and piece.rounded is not None):
            copy.copy_(piece.weight.detach())
            rounded = True
        transfers: list[Transfer] = []
        self._loaded.popleft()
        for kind, slot in piece.slots.items():
            if kind != ROUNDED:
                if not self._has(piece, kind):
                    continue
                self._put(piece, kind, self._values(slot, buffer))
            if slot.region is None and self._copier is not None:
                copied = self._copier.copy(
                    slot.in_buffer(buffer), piece.group.shard[piece.low : piece.high], self._begun
                )
                copied.order()  # the device's later work, such as the gather of the new values, sees them
                transfers.append(copied)
            elif slot.region is not None and not self._in_place(slot):
                writing = buffer.write(slot.region, slot.offset, slot.start, slot.nbytes)
                transfers.append(writing)
                of_shard = kind == ROUNDED or (kind == MASTER and piece.group.master is piece.group.shard)
                if of_shard and piece.group.offloaded is not None:
                    self.homes.add_write(piece.group, writing)
        piece.borrowed.clear()
        self._ring.give(buffer, transfers)
        return rounded or self._copier is not None

    def _read_ahead(self) -> None:
        """Read into all free buffers; wait for one being written only if nothing is loaded."""
        while self._coming and (buffer := self._ring.take(wait=not self._loaded)) is not None:
            loaded = _Loaded(self._coming[0], buffer)
            self._loaded.append(loaded)
            self._coming.popleft()
            for kind, slot in loaded.piece.slots.items():
                if slot.region is not None and self._keeps(loaded.piece, kind) and not self._in_place(slot):
                    loaded.transfers.append(buffer.read(slot.region, slot.offset, slot.start, slot.nbytes))
            if self._copier is not None and self._step is _Step.UNDER_WAY:
                self._fetch_gradient(loaded, self._copier)

    def _fetch_gradient(self, loaded: _Loaded, copier: Copier) -> None:
        """Start copying the piece's gradient to the host."""
        piece = loaded.piece
        source = piece.grad_buffer.reduced()[piece.low : piece.high]
        loaded.transfers.append(copier.copy(source, piece.slots[GRADIENT].in_buffer(loaded.buffer), self._begun))

    def wait(self) -> None:
        """Wait until everything given back is on the disk. Only measurements need this."""
        self._ring.drain()

    # --- between steps ----------------------------------------------------------------------------

    def lent(self) -> AbstractContextManager[None]:
        """Make masters, state and offloaded parameters writable inside; see :meth:`Homes.lent`."""
        return self.homes.lent()

    @contextmanager
    def _lent(self) -> Iterator[None]:
        """Make weights and state point into the regions, where state may be created or replaced."""
        self._drain()
        for piece, kind, values in self._in_regions():
            if self._keeps(piece, kind):
                self._tensor(piece, kind).data = values
        for states in self._states.values():
            for state in states:
                state.value.data = state.values()
        try:
            yield
        finally:
            for tensor in self._whole:
                self._put_state(tensor)
            self._stored.clear()
            for piece, kind, values in self._in_regions():
                if self._has(piece, kind):
                    self._put(piece, kind, values)

    @contextmanager
    def state_at_hand(self, tensors: Sequence[WholeTensor]) -> Iterator[None]:
        """Move the state of whole tensors to where they are updated, and back after the block;
        only inside :meth:`lent`."""
        for tensor in tensors:
            for value in tensors_inside(self._state.get(tensor.weight)):
                value.data = value.to(tensor.weight.device)
        yield
        for tensor in tensors:
            self._put_state(tensor)

    def _put_state(self, tensor: WholeTensor) -> None:
        """Move the state of a whole tensor to its place between steps. New tensors reuse the space
        of those that the optimizer has replaced."""
        region = self.homes.masters if self.homes.keeps_state_of(tensor.group) else None
        if region is None and self._copier is None:
            return
        values = {id(value): value for value in tensors_inside(self._state.get(tensor.weight))}
        known = {id(state.value): state for state in self._states[tensor]}
        spare = [state for key, state in known.items() if key not in values]
        self._states[tensor] = []
        for key, value in values.items():
            away = self._absent(tuple(value.shape), value.dtype, torch.device("cpu"))
            if (state := known.get(key)) is None:
                dense = torch.empty_like(value, device="cpu")
                like = value.shape, dense.stride(), value.dtype
                same = (each for each in spare if (each.value.shape, each.strides, each.value.dtype) == like)
                if (unused := next(same, None)) is not None:
                    spare.remove(unused)
                    state = replace(unused, value=value)
                elif region is None:
                    state = _WholeState(value, dense, dense.stride())
                else:
                    place = Place(region, region.reserve(value.nbytes), value.dtype)
                    state = _WholeState(value, place, dense.stride())
                    flat = dense.copy_(value).as_strided((value.numel(),), (1,))
                    region.write(place.offset, flat).wait()  # mappings lack space reserved after them
                    value.data = away
            self._states[tensor].append(state)
            if value.data_ptr() != away.data_ptr() and value.data_ptr() != (target := state.values()).data_ptr():
                target.copy_(value)
            value.data = away if region is not None else state.values()

    def _in_regions(self) -> Iterator[tuple[OffloadedPiece, str, torch.Tensor]]:
        """Yield (piece, kind, values in a region) of all masters and state."""
        for piece in self._pieces:
            for kind, slot in piece.slots.items():
                if kind != ROUNDED and (values := slot.in_region()) is not None:
                    yield piece, kind, values

    def zeros(self, piece: ShardPiece, kind: str) -> torch.Tensor | None:
        """Return state of zeros for a piece, where it will be kept; None if there is no such
        column. Only inside :meth:`lent`."""
        slot = piece.slots.get(kind) if isinstance(piece, OffloadedPiece) else None
        values = slot.in_region() if slot is not None else None
        return None if values is None else values.zero_()

    def resident_bytes(self, value: torch.Tensor) -> int:
        """Return the bytes that a state tensor takes on the model's device between steps."""
        return 0 if is_absent(value) or self._copier is not None else value.nbytes

    def close(self) -> None:
        """Wait for transfers in flight and free the regions; masters and state then read as NaN."""
        try:
            self._drain()
        except StorageError:
            pass  # values that were not written are no longer needed
        finally:
            self.homes.close()

    def _drain(self) -> None:
        """Wait until all buffers are free, including those of an interrupted step."""
        self._coming.clear()
        self._step = _Step.IDLE
        wait_for(transfer for loaded in self._loaded for transfer in loaded.transfers)
        while self._loaded:
            loaded = self._loaded.popleft()
            loaded.piece.borrowed.clear()
            self._ring.give(loaded.buffer)
        self._ring.drain()

    # --- one tensor -------------------------------------------------------------------------------

    def _tensor(self, piece: ShardPiece, kind: str) -> torch.Tensor:
        tensor: torch.Tensor = piece.weight if kind == MASTER else self._state[piece.weight][kind]
        return tensor

    def _keeps(self, piece: OffloadedPiece, kind: str) -> bool:
        """Return whether a region holds this kind and it is still needed: state may be cleared."""
        return (id(piece), kind) in self._stored and self._has(piece, kind)

    def _has(self, piece: OffloadedPiece, kind: str) -> bool:
        if kind == MASTER:
            return True
        value = self._state.get(piece.weight, {}).get(kind)
        shape, dtype = piece.weight.shape, piece.slots[kind].dtype
        return torch.is_tensor(value) and (value.shape, value.dtype) == (shape, dtype)

    def _put(self, piece: ShardPiece, kind: str, target: torch.Tensor) -> None:
        """Copy the tensor's values into ``target`` and free the tensor's own memory."""
        tensor = self._tensor(piece, kind)
        held = tensor.detach()
        if held.data_ptr() != target.data_ptr():
            target.copy_(held)
        tensor.data = self._absent(tuple(held.shape), held.dtype, held.device)
        self._stored.add((id(piece), kind))

    @functools.cached_property
    def _absent(self) -> Any:
        return functools.cache(absent)
