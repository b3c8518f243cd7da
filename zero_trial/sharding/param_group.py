"""Parameters that are gathered, freed and reduced together: a Layout plus its live buffers.

Memory of one group of n elements on N shards (p bytes per parameter element: 2 for fp16 and bf16, 4
for fp32):

    full     n p        always, or while the group computes
    shard    n/N p      part of full while full always lives
    master   4 n/N      fp32; the shard itself when parameters are fp32

If the plan offloads parameters, ``home`` is the offloaded tensor: the shard at stage 3, all n
elements at stages 0 to 2, of which ``shard`` is a part. Outside of ``materialized`` it reads as
NaN, like an offloaded master.

Life cycle of the full values:

                 unshard_async               finish_unshard
    SHARDED ─────────────────────► GATHERING ─────────────────► UNSHARDED
     │   ▲  ▲                                                       │
     │   │  └────────────── reshard, by the Unsharder ──────────────┘
     │   └──────────── finish_publish ───────────── PUBLISHING
     └──── publish, if the home has the full copy ──────▲

Parameters that always live are UNSHARDED all the time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd import profiler as torch_profiler
from torch.profiler import record_function

from zero_trial.comm import AxisComm, Pending
from zero_trial.comm.waits import DONE
from zero_trial.errors import TrialError
from zero_trial.sharding.guards.edits import EditWatch, KeptViews
from zero_trial.sharding.guards.freed import (
    absent,
    freed_class,
    is_absent,
    lost_edits,
    plain_class,
    refuse_transforms,
    set_data,
    sharded_class,
)
from zero_trial.sharding.layout import Layout, has_own_master
from zero_trial.sharding.offload.region_file import transfer_buffer
from zero_trial.sharding.plan import Home, Lifetime, OffloadedShard, ZeroPlan


class Lender(Protocol):
    """Loads the values of a group that are offloaded between steps."""

    def lent(self) -> AbstractContextManager[None]: ...


class GroupState(Enum):
    """Where the full values of a group are. Shard and master exist in every state, also if they are
    offloaded.

    | state      | memory of ``full``       | the parameters are                            |
    | ---------- | ------------------------ | --------------------------------------------- |
    | SHARDED    | none                     | placeholders: a use is an error that names it |
    | GATHERING  | allocated, being filled  | placeholders                                  |
    | UNSHARDED  | complete                 | views of ``full``                             |
    | PUBLISHING | allocated, being filled  | placeholders; ``full`` is offloaded next      |
    """

    SHARDED = "sharded"
    GATHERING = "gathering"
    UNSHARDED = "unsharded"
    PUBLISHING = "publishing"


class ParamGroup:
    """One flat buffer and its parameters, which are views of ``full``, or freed between uses,
    depending on their lifetime.

    Args:
        params: ``params[i]`` is the tensor of ``layout.slots[i]``.
        runs: for each optimizer group, its [start, stop) in the flat buffer.
        counts: whether this rank counts the group in the norm over the model axis, whose ranks may
            all hold the same parameters.
        fill: fills a tensor (n/N,) with this rank's first values; collective.
    """

    def __init__(
        self,
        name: str,
        layout: Layout,
        params: Sequence[nn.Parameter],
        *,
        plan: ZeroPlan,
        dtype: torch.dtype,
        device: torch.device,
        comm: AxisComm,
        runs: Mapping[int, tuple[int, int]],
        block: str = "",
        trainable: bool = True,
        counts: bool = True,
        fill: Callable[[torch.Tensor], None],
    ) -> None:
        self.name = name
        self.layout = layout
        self.params, self.plan = list(params), plan
        self.block = block
        self.runs = runs
        self.trainable = trainable
        self.counts = counts
        self.comm = comm
        always = plan.params is Lifetime.ALWAYS
        # Parameters that always live are sent in every step, so they use a buffer that peers can
        # read directly. Freed parameters use ordinary memory, allocated at the first gather. First
        # values for a file use separate pages, which are returned to the system: holes in malloc's
        # heap are not, and could become as large as the model.
        if always:
            self.full = comm.buffer(layout.numel, dtype, device)
        elif plan.home is Home.NVME and device.type == "cpu":
            self.full = transfer_buffer(layout.numel * dtype.itemsize).view(dtype)
        else:
            self.full = torch.empty(layout.numel, dtype=dtype, device=device)
        self.attached = AttachedParams(self.params, self.full, layout, always=always, real=self.real)
        # offloaded parameters stay in ``full`` until set_offloaded() moves them out and frees it
        away = plan.home is not Home.DEVICE
        in_full = always or away
        if not in_full:
            self.full.untyped_storage().resize_(0)
        self.state = GroupState.UNSHARDED
        self._gathering = DONE
        self.lender: Lender | None = None  # loads master and shard if they are offloaded
        self.offloaded: OffloadedShard | None = None
        self._copy: Callable[[], None] | None = None  # copies master and state for a checkpoint
        self.shard, self.master = self._first_values(fill, in_full)
        self.home = self._kept if in_full else self.shard
        self.attached.attach()  # only after their first values were read
        self.edits = EditWatch(layout, self.params, self.attached.views, always=always, real=self.real)
        if not away:
            self.reshard()

    @property
    def dtype(self) -> torch.dtype:
        return self.full.dtype

    @property
    def real(self) -> bool:
        """Whether tensors have memory, unlike in a dry run (meta or fake tensors)."""
        return type(self.full) is torch.Tensor and not self.full.is_meta

    @property
    def own(self) -> torch.Tensor:
        """This rank's part of ``full``; only valid while the group is UNSHARDED."""
        low, high = self.layout.shard_range(self.comm.index)
        return self.full[low:high]

    @property
    def _kept(self) -> torch.Tensor:
        """The part of ``full`` that ``home`` stores."""
        return self.full if self.plan.whole_home else self.own

    def materialized(self) -> AbstractContextManager[None]:
        """Make master and shard readable and writable inside a block; only between steps."""
        return self.lender.lent() if self.lender is not None else nullcontext()

    def replace_home(self, home: torch.Tensor) -> None:
        """Use ``home`` for the shard or the full copy, and for the master if it is the shard."""
        start = self.layout.shard_range(self.comm.index)[0] if self.plan.whole_home else 0
        shard = home[start : start + self.layout.shard_numel]
        if self.master is self.shard:
            self.master = shard
        self.home, self.shard = home, shard

    def set_offloaded(self, shard: OffloadedShard) -> None:
        """Read the values of :attr:`home` from ``shard`` from now on; free the parameters."""
        self.offloaded = shard
        self.reshard()

    def _first_values(self, fill: Callable[[torch.Tensor], None], in_full: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Return shard and master with their first values. ``in_full``: the shard is a part of
        ``full``, which gets all values if it always lives or if ``home`` is the full copy."""
        layout, comm = self.layout, self.comm
        # fp32 and fp64 parameters are their own masters; frozen ones need none.
        own_master = has_own_master(self.dtype) or not self.trainable
        shard = self.own if in_full else comm.buffer(layout.shard_numel, self.dtype, self.full.device)
        master = shard if own_master else torch.empty_like(shard, dtype=torch.float32)
        fill(master)  # unrounded
        if master is not shard:
            shard.copy_(master)
        if comm.size > 1 and (self.plan.params is Lifetime.ALWAYS or self.plan.whole_home):
            comm.all_gather(self.full, self.own, f"first values of {self.name}").wait()
        return shard, master

    def unshard_async(self) -> None:
        """Start the all-gather of the full parameters; :meth:`finish_unshard` completes it. Moves n
        (N-1)/N elements. Collective over shard; local if ``home`` is the full copy."""
        if self.state is not GroupState.SHARDED:
            return
        refuse_transforms(self.layout.slots[0].name)
        if not self.shard.untyped_storage().nbytes():
            with self.materialized():  # raises an error that names what has moved the shard
                pass
        with trace_range("unshard"):
            self._allocate()
            if self.offloaded is not None:
                self.offloaded.fetch(self._kept)
            shard = self.shard if self.offloaded is None else self.own
            whole = self.plan.whole_home
            self._gathering = DONE if whole else self.comm.all_gather(self.full, shard, f"parameters of {self.name}")
            self.state = GroupState.GATHERING

    def _allocate(self) -> None:
        self.full.untyped_storage().resize_(self.layout.numel * self.full.element_size())

    def _free(self) -> None:
        self.full.untyped_storage().resize_(0)

    def start_read_or_ready(self) -> bool:
        """Return whether to call :meth:`unshard_async` now for a use that follows soon.

        The first call for an offloaded shard only starts to read it. The result depends only on the
        order of calls, so that it is the same on all ranks of the axis.
        """
        if self.state is not GroupState.SHARDED:
            return False
        return self.offloaded is None or self.offloaded.start_read()

    def read_ahead(self, *, again: bool) -> bool:
        """Start to read an offloaded shard for a later use if a buffer is free; return whether more
        buffers are free. ``again``: also if the shard is in use and will be freed after that."""
        if self.offloaded is None or not (again or self.state is GroupState.SHARDED):
            return True
        return self.offloaded.read_ahead()

    def unshard(self) -> None:
        """Gather the full parameters and wait for them. Collective over shard."""
        self.unshard_async()
        self.finish_unshard()

    def finish_unshard(self) -> None:
        """Wait until the full parameters have arrived, and make the parameters views of them."""
        if self.state is GroupState.GATHERING:
            self._gathering.wait()
            self._gathering = DONE
            self.attached.kept.begin()
            self.attached.attach()
            self.edits.show()
            self.state = GroupState.UNSHARDED

    def copy_before_write(self, copy: Callable[[], None]) -> None:
        """Run ``copy``, which copies master and state for a checkpoint, before the next write."""
        self._copy = copy

    def wait_for_copies(self) -> None:
        """Wait until a checkpoint has copied master and state. Call before every write to them."""
        copy, self._copy = self._copy, None
        if copy is not None:
            copy()

    def wait_before_writing(self) -> None:
        self.wait_for_copies()
        self.end_gather()

    def end_gather(self) -> None:
        """Wait until the shard may be written: until a gather in flight has ended on all ranks.
        Drop values that were read ahead.

        All ranks call this at the same place between their collectives.
        """
        if self.state is GroupState.GATHERING:
            self.finish_unshard()
        if self.offloaded is not None:
            self.offloaded.forget()

    @property
    def live(self) -> bool:
        """Whether the parameters have their full values."""
        return self.state is GroupState.UNSHARDED

    def reshard(self, *, stale: bool = False) -> None:
        """Free the full buffer's memory; the :class:`Unsharder` decides when. ``stale``: the shard
        has newer values, so edits of the old ones are not reported. Views of the buffer that user
        code holds keep the memory alive; then the next gather allocates new memory.

        The parameters keep their shapes; using one while it is freed raises an error that names it.
        Tensors that autograd saved as views of ``full`` stay valid: they share the storage, which
        the next gather refills.
        """
        if self.state is not GroupState.UNSHARDED or self.plan.params is Lifetime.ALWAYS:
            return
        self.state = GroupState.SHARDED
        if not stale:
            self.edits.note_replaced()  # possible only before the parameters are detached
        if self.attached.detach():
            self.edits.hide()
        try:
            self._free()
        except RuntimeError as fault:
            raise TrialError(
                "the memory of a parameter cannot be freed because a numpy array uses it",
                where=self.layout.slots[0].name,
                got=f"{fault} ({len(self.params)} parameters share it)",
                fix="Create the array from a copy: param.detach().clone().numpy().",
            ) from fault

    def publish(self, *, rounded: bool = False) -> Pending | None:
        """Round an updated master into the shard, and start to send the new full copy to every rank
        if parameters always live, or ``home`` is the full copy. Old full values are already freed.

        Moves n (N-1)/N elements if parameters always live, or ``home`` is the full copy, and
        updates are sharded; otherwise nothing. Returns the pending all-gather. ``rounded``: the
        shard already holds the rounded values.
        """
        self.edits.writes += 1
        if self.master is not self.shard and not rounded:
            with self.materialized():
                self.shard.copy_(self.master)
        if self.plan.params is not Lifetime.ALWAYS:
            return self._publish_home() if self.plan.whole_home and self.comm.size > 1 else None
        if self.comm.size == 1:
            return None
        return self.comm.all_gather(self.full, self.shard, self.name)

    def _publish_home(self) -> Pending:
        """Start to gather all ranks' updated shards; :meth:`finish_publish` must follow."""
        if self.offloaded is None:
            raise TrialError("parameters have no home", where=self.name, expected="set_offloaded() before publish()")
        self.offloaded.forget()
        self._allocate()
        self.state = GroupState.PUBLISHING
        self.offloaded.fetch_part(self.own, self.layout.shard_range(self.comm.index)[0])
        return self.comm.all_gather(self.full, self.own, self.name)

    def finish_publish(self) -> None:
        """Store gathered full values in ``home``, and free them here. Must follow :meth:`publish`
        if ``home`` is the full copy."""
        if self.offloaded is not None:
            self.offloaded.store(self.full)
        self._free()
        self.state = GroupState.SHARDED

    def load_full(self, params: Collection[int] | None = None) -> None:
        """Copy the full values, which are equal on all ranks, into home and master. ``params``
        (ids): only the elements of these parameters."""
        self.wait_before_writing()
        if params is None:
            parts = whole = [slice(None)]
        else:
            slots = zip(self.layout.slots, self.params, strict=True)
            chosen = {slot.name: slice(slot.offset, slot.offset + slot.numel) for slot, p in slots if id(p) in params}
            pieces = self.layout.pieces(self.comm.index)
            parts = [slice(piece.offset, piece.offset + piece.numel) for piece in pieces if piece.slot.name in chosen]
            whole = list(chosen.values())
        self.edits.writes += 1
        self.edits.accept()
        with self.materialized():
            if self.plan.params is not Lifetime.ALWAYS:
                for part in whole if self.plan.whole_home else parts:
                    self.home[part].copy_(self._kept[part])
            for part in parts:
                if self.master is not self.shard:
                    self.master[part].copy_(self.shard[part])

    def apply_edits(self) -> None:
        """Copy edits of the full values, equal on all ranks, into shard and master. Masters of
        other elements keep all their bits."""
        self.wait_before_writing()
        self.edits.accept()
        with self.materialized():
            if self.master is not self.shard:
                master = self.master.to(self.own.device)
                edited = self.own != master.to(self.dtype)
                self.master.copy_(torch.where(edited, self.own.to(master.dtype), master))
            if self.plan.params is not Lifetime.ALWAYS:
                self.home.copy_(self._kept)

    def take_edits(self) -> None:
        """Copy edits of the parameters into separate masters; call :func:`take_replaced` first.
        Raises TrialError if the parameters do not always live, because their edits are lost."""
        if self.plan.params is not Lifetime.ALWAYS:
            raise lost_edits(self.edits.names(whole=self.live), "between steps")
        if self.master is not self.shard:
            self.apply_edits()
        else:
            self.edits.accept()

    def persistent_bytes(self) -> int:
        """Count the bytes of parameters and masters that outlive a step on this rank's device."""
        low = self.shard.element_size() * (
            self.layout.numel if self.plan.params is Lifetime.ALWAYS else self.layout.shard_numel
        )
        elsewhere = self.master is self.shard or is_absent(self.master) or self.master.device != self.shard.device
        # the buffers of offloaded shards are shared; the model counts them once
        low = low if self.offloaded is None else 0
        return low + (0 if elsewhere else self.master.numel() * 4)


class AttachedParams:
    """Switches the parameters of a group between views of its full buffer and placeholders of the
    same shapes, each with the matching tensor class."""

    def __init__(
        self, params: Sequence[nn.Parameter], full: torch.Tensor, layout: Layout, *, always: bool, real: bool
    ) -> None:
        self._params, self._full, self._layout = params, full, layout
        self.views = self._cut(full)
        self._placeholders = [] if always else [absent(s.shape, full.dtype, full.device) for s in layout.slots]
        kinds = [type(param) for param in params]
        self._live_classes = list(map(plain_class if always else sharded_class, kinds))
        self._freed_classes = list(map(freed_class, kinds))
        self.kept = KeptViews([full, *self.views], real=real)

    def _cut(self, full: torch.Tensor) -> list[torch.Tensor]:
        return [full[s.offset : s.offset + s.numel].view(s.shape) for s in self._layout.slots]

    def attach(self) -> None:
        """Make the parameters views of the full buffer, which has been filled again."""
        for param, view, live in zip(self._params, self.views, self._live_classes, strict=True):
            param.__class__ = live
            set_data(param, view)

    def detach(self) -> bool:
        """Make the parameters placeholders, before the full buffer's memory is freed. Return
        whether other views of it exist. If user code holds such views, they keep the old memory,
        and the buffer gets new memory."""
        for param, placeholder, freed in zip(self._params, self._placeholders, self._freed_classes, strict=True):
            set_data(param, placeholder)
            param.__class__ = freed
        exist = self.kept.exist()
        if exist and self.kept.held():
            full = torch.empty_like(self._full)
            for view, new in zip(self.views, self._cut(full), strict=True):
                view.data = new
            self._full.data = full
        return exist


def trace_range(name: str) -> AbstractContextManager[Any]:
    """Record ``zero_trial.NAME`` in the traces of torch.profiler if the profiler is running."""
    return record_function(f"zero_trial.{name}") if torch_profiler._is_profiler_enabled else _NO_RANGE


_NO_RANGE: AbstractContextManager[Any] = nullcontext()
