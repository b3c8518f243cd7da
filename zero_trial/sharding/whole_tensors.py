"""Tensors that an optimizer must update whole: each has one owner, which updates it.

    gradients   every rank sends its parts to the tensors' owners     all-to-all
    masters     and its parts of the master weights                   all-to-all
    update      each owner steps its tensors, in their true shapes
    masters     owners send the new values back to where parts live   all-to-all

Between steps a tensor's master is in the shards, like every other master, where checkpoints and
GatheredParameters read and write it; its optimizer state is only on its owner. A tensor that is
completely in its owner's shard is updated in place. Without sharding, that is every tensor.

Tensors are updated in rounds of at most :data:`ROUND` elements per owner, if the optimizer can step
with some of its tensors. They are updated on the device that computes the model, also if masters
and state are offloaded, so the bits do not depend on where these are between steps.

Cost, with Psi elements in such tensors and N ranks on the shard axis. A rank sends its parts of
other ranks' tensors twice, and other ranks' parts of its own tensors once:

    elements per step       2 (held here, owned elsewhere) + (owned here, held elsewhere)
                            on average 3 Psi (N-1)/N^2 for random owners; less in fact, because a
                            rank owns what it holds: 0.35 Psi on 2 ranks, 0.21 on 8 for GPT-2's
                                blocks
    bytes during a step     8 R for weights and gradients in fp32, 16 R for messages, with
                            R = Psi/N or, in rounds, at most max(ROUND, the largest tensor)
    bytes between steps     the state of Psi/N elements; nothing else
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from zero_trial.comm import AxisComm
from zero_trial.errors import TrialError
from zero_trial.sharding.grad_buffer import GradBuffer
from zero_trial.sharding.guards.freed import absent
from zero_trial.sharding.layout import Layout, ParamSlot
from zero_trial.sharding.param_group import ParamGroup

ROUND = 1 << 26  # elements

# The work of updating a tensor of this shape, in any unit.
Work = Callable[[tuple[int, ...]], float]


def assign_owners(
    work: Sequence[float], ranks: int, held: Sequence[Mapping[int, int]] = (), kinds: Sequence[int] = ()
) -> list[int]:
    """Return the owner of each tensor: the tensor with the most work first, each to the rank with
    the least work (Graham 1969, longest processing time first: at most 4/3 of the optimum). Pure.

    Args:
        work: of each tensor.
        held: for each tensor, how many of its elements each rank holds: among tensors of equal work
            a rank gets the one that it holds most of, to minimize traffic.
        kinds: for each tensor, its optimizer group. Rank 0 first gets the smallest tensor of each
            group, so that every group steps there, because rank 0 saves a group's own counters.
    """
    owners, load = [0] * len(work), [0.0] * ranks
    lightest: dict[int, int] = {}
    for index, kind in enumerate(kinds):
        if kind not in lightest or work[index] < work[lightest[kind]]:
            lightest[kind] = index
    load[0] = sum(work[index] for index in lightest.values())
    alike: dict[float, list[int]] = {}
    for index in sorted(range(len(work)), key=lambda index: -work[index]):
        if index not in lightest.values():
            alike.setdefault(work[index], []).append(index)
    for weight, left in alike.items():
        while left:
            owner = load.index(min(load))
            chosen = max(left, key=lambda index: held[index].get(owner, 0) if held else 0)
            left.remove(chosen)
            owners[chosen] = owner
            load[owner] += weight
    return owners


def owners_of(
    rows: Sequence[tuple[Layout, ParamSlot, int]], ranks: int, work: Work, *, one_owner: bool = False
) -> list[int]:
    """Return the owner of each tensor of ``rows``, (its group's layout, the tensor, its optimizer
    group), in the model's order within an optimizer group. Pure."""
    if one_owner:
        return [0] * len(rows)
    held = [{rank: stop - start for rank, start, stop, _ in parts_of(layout, slot)} for layout, slot, _ in rows]
    return assign_owners([work(slot.shape) for _, slot, _ in rows], ranks, held, [row[2] for row in rows])


@dataclass(frozen=True, eq=False)
class WholeTensor:
    """A tensor that is updated whole by ``owner`` (an index on the shard axis).

    ``weight`` has its shape; its values, and its gradient's, are valid only inside
    :meth:`WholeTensors.at_hand` on the owner. ``in_place``: they are views of what the owner
    holds.
    """

    group: ParamGroup
    grad_buffer: GradBuffer
    slot: ParamSlot
    opt_group: int
    owner: int
    weight: nn.Parameter
    in_place: bool

    def of_shard(self, shard: torch.Tensor) -> torch.Tensor:
        """Return the tensor as a view of the owner's shard."""
        start = self.slot.offset % self.group.layout.shard_numel
        return shard[start : start + self.slot.numel].view(self.slot.shape)

    def rest(self) -> None:
        """Restore ``weight`` to its state between steps."""
        group, weight = self.group, self.weight
        stays = self.in_place and group.lender is None
        weight.data = self.of_shard(group.master) if stays else absent(weight.shape, weight.dtype, weight.device)


# The flat tensor, whole or this rank's shard, from which or into which parts are copied.
Column = Callable[[WholeTensor], torch.Tensor]


def parts_of(layout: Layout, slot: ParamSlot) -> Iterator[tuple[int, int, int, int]]:
    """Yield for each shard that holds some of ``slot``: its index, the elements [start, stop) of
    the flattened tensor, and where they begin in the shard."""
    size, end = layout.shard_numel, slot.offset + slot.numel
    for shard in range(slot.offset // size, -(-end // size)):
        low, high = max(slot.offset, shard * size), min(end, (shard + 1) * size)
        if low < high:
            yield shard, low - slot.offset, high - slot.offset, low - shard * size


class _Part(NamedTuple):
    """Elements [start, stop) of a flattened tensor, at ``offset`` in the shard of ``rank``."""

    tensor: WholeTensor
    rank: int
    start: int
    stop: int
    offset: int


class _Route:
    """All-to-all plan between shard layout and owner layout, for one dtype in each column."""

    def __init__(self, tensors: Sequence[WholeTensor], comm: AxisComm) -> None:
        self._comm, self._first = comm, tensors[0]
        parts = [_Part(each, *part) for each in tensors for part in parts_of(each.group.layout, each.slot)]
        self._here = [part for part in parts if part.rank == comm.index]
        self._staying = [part for part in self._here if part.tensor.owner == comm.index and not part.tensor.in_place]
        leaving = [part for part in parts if part.rank == comm.index != part.tensor.owner]
        coming = [part for part in parts if part.tensor.owner == comm.index != part.rank]
        self._leaving = sorted(leaving, key=lambda part: part.tensor.owner)
        self._coming = sorted(coming, key=lambda part: part.rank)
        self._counts = [[0] * comm.size for _ in range(comm.size)]
        for part in parts:
            if part.rank != part.tensor.owner:
                self._counts[part.rank][part.tensor.owner] += part.stop - part.start

    def exchange(self, shards: Column, whole: Column, label: str, *, back: bool = False) -> Callable[[], None]:
        """Start to send parts of shards to their tensors' owners, or ``back``; return a function
        that waits for this rank's tensors, or its parts, and writes them. Collective over shard."""

        def in_shard(part: _Part) -> torch.Tensor:
            return shards(part.tensor)[part.offset : part.offset + part.stop - part.start]

        def in_tensor(part: _Part) -> torch.Tensor:
            return whole(part.tensor)[part.start : part.stop]

        source, target = (in_tensor, in_shard) if back else (in_shard, in_tensor)
        for part in self._staying:
            target(part).copy_(source(part))
        sends, receives = (self._coming, self._leaving) if back else (self._leaving, self._coming)
        counts = [list(column) for column in zip(*self._counts, strict=True)] if back else self._counts
        leaving, coming = list(map(source, sends)), list(map(target, receives))
        dtype, device = shards(self._first).dtype, self._first.weight.device
        sent = (torch.cat(leaving) if leaving else torch.empty(0, dtype=dtype)).to(device)
        received = torch.empty(sum(part.numel() for part in coming), dtype=dtype, device=device)
        pending = self._comm.all_to_all(sent, received, counts, label)

        def finish() -> None:
            pending.wait()
            if coming:
                torch._foreach_copy_(coming, list(received.split([part.numel() for part in coming])))

        return finish

    def round(self) -> None:
        """Round this rank's parts of the masters into its shards."""
        for part in self._here:
            group, low, high = part.tensor.group, part.offset, part.offset + part.stop - part.start
            if group.master is not group.shard:
                group.shard[low:high].copy_(group.master[low:high])


class Round:
    """Tensors that are exchanged and updated together; ``own`` are this rank's."""

    def __init__(self, tensors: Sequence[WholeTensor], comm: AxisComm) -> None:
        self.own = [tensor for tensor in tensors if tensor.owner == comm.index]
        alike: dict[tuple[torch.dtype, torch.dtype], list[WholeTensor]] = {}
        for tensor in tensors:
            alike.setdefault((tensor.group.master.dtype, tensor.grad_buffer.shard.dtype), []).append(tensor)
        self._routes = [_Route(each, comm) for each in alike.values()]

    @contextmanager
    def at_hand(self, *, gradients: bool) -> Iterator[None]:
        """Load this rank's own tensors inside the block, with their reduced gradients in ``.grad``;
        then send the new values to the ranks that hold the masters, and with ``gradients`` round
        them into the shards. Collective over shard; no peer may still read the masters
        (:meth:`ShardedModel.wait_before_writing`)."""
        for tensor in self.own:
            weight, place = tensor.weight, tensor.in_place
            weight.data = (
                tensor.of_shard(tensor.group.master)
                if place
                else torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
            )
            if gradients:
                reduced = tensor.of_shard(tensor.grad_buffer.reduced()).to(weight.dtype) if place else None
                weight.grad = torch.empty_like(weight) if reduced is None else reduced
        try:
            for finish in [
                *(route.exchange(_gradients, _gradient, "whole gradients") for route in self._routes if gradients),
                *(route.exchange(_masters, _weight, "whole weights") for route in self._routes),
            ]:
                finish()
            yield
            for finish in [route.exchange(_masters, _weight, "updated weights", back=True) for route in self._routes]:
                finish()
            for route in self._routes if gradients else ():
                route.round()
        finally:
            for tensor in self.own:
                tensor.weight.grad = None
                tensor.rest()


class WholeTensors:
    """The tensors of one model that are updated whole, the same on every rank; ``own`` are this
    rank's. ``most``: elements per owner in a round."""

    def __init__(self, tensors: Sequence[WholeTensor], comm: AxisComm, most: float = math.inf) -> None:
        self.tensors = list(tensors)
        self.own = [tensor for tensor in tensors if tensor.owner == comm.index]
        last, rounds = [(0, 0)] * comm.size, list[list[WholeTensor]]()  # the round and its elements, by owner
        for tensor in tensors:
            number, elements = last[tensor.owner]
            if elements and elements + tensor.slot.numel > most:
                number, elements = number + 1, 0
            last[tensor.owner] = number, elements + tensor.slot.numel
            rounds += [[]] * (number == len(rounds))
            rounds[number] = [*rounds[number], tensor]
        self.rounds = [Round(each, comm) for each in rounds]
        for tensor in self.own:
            tensor.rest()

    @contextmanager
    def at_hand(self, *, gradients: bool) -> Iterator[None]:
        """Load all tensors as in their :meth:`Round.at_hand`. Collective over shard."""
        with ExitStack() as stack:
            for each in self.rounds:
                stack.enter_context(each.at_hand(gradients=gradients))
            yield


def _gradients(tensor: WholeTensor) -> torch.Tensor:
    return tensor.grad_buffer.reduced()


def _masters(tensor: WholeTensor) -> torch.Tensor:
    return tensor.group.master


def _weight(tensor: WholeTensor) -> torch.Tensor:
    return tensor.weight.detach().view(-1)


def _gradient(tensor: WholeTensor) -> torch.Tensor:
    if tensor.weight.grad is None:
        raise TrialError("the gradient of a tensor that is updated whole is on another rank", where=tensor.slot.name)
    return tensor.weight.grad.view(-1)


def own_tensors(
    grad_buffers: Sequence[GradBuffer],
    opt_groups: Collection[int],
    names: Sequence[str],
    comm: AxisComm,
    work: Work,
    *,
    one_owner: bool = False,
    most: float = math.inf,
) -> WholeTensors | None:
    """Assign an owner to each tensor of ``opt_groups``; return None if there is no such tensor.

    Args:
        names: of the model's parameters in its own order, which is that of the tensors in their
            optimizer group.
        work: of updating a tensor of a shape.
        one_owner: rank 0 owns all of them.
        most: elements of an owner that are updated together.
    """
    order = {name: index for index, name in enumerate(names)}
    found: list[tuple[GradBuffer, ParamSlot, int, nn.Parameter]] = []
    for grad_buffer in grad_buffers:
        for slot, param in zip(grad_buffer.group.layout.slots, grad_buffer.group.params, strict=True):
            if slot.numel and (opt_group := opt_group_of(grad_buffer.group.runs, slot)) in opt_groups:
                found.append((grad_buffer, slot, opt_group, param))
    found.sort(key=lambda row: (row[2], order.get(row[1].name, len(order))))
    rows = [(buffer.group.layout, slot, opt_group) for buffer, slot, opt_group, _ in found]
    owners = owners_of(rows, comm.size, work, one_owner=one_owner)
    tensors = []
    for (buffer, slot, opt_group, param), owner in zip(found, owners, strict=True):
        master, device = buffer.group.master, buffer.shard.device
        weight = weight_for(param, absent(slot.shape, master.dtype, device))
        parts = list(parts_of(buffer.group.layout, slot))
        in_place = [rank for rank, *_ in parts] == [owner] and master.device == device
        tensors.append(WholeTensor(buffer.group, buffer, slot, opt_group, owner, weight, in_place))
    return WholeTensors(tensors, comm, most) if tensors else None


def weight_for(param: nn.Parameter, values: torch.Tensor) -> nn.Parameter:
    """Return a weight that replaces ``param`` in an optimizer, with the attributes that user code
    has set on ``param``, because the optimizer may read them."""
    weight = nn.Parameter(values)
    vars(weight).update(vars(param))
    return weight


def opt_group_of(runs: Mapping[int, tuple[int, int]], slot: ParamSlot) -> int:
    """Return the optimizer group of a tensor. ``runs``: of its group."""
    return next(opt_group for opt_group, (start, stop) in runs.items() if start <= slot.offset < stop)
