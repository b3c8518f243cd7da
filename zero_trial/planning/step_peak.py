"""The most bytes that a rank holds in a training step: a trace of the plain model, played with what
the engine gathers, frees and reduces at each moment.

    forward, reached   the block's parameters are gathered, and those of the next are prefetched
    gradient           the group's full gradients have memory from its first one on; when the last
                       has come, the group is reduced
    end                what is left is reduced, and reductions under way are waited for
    step               the optimizer updates this rank's shards; those that always live are gathered

The engine's own Unsharder decides what is gathered and freed when, over groups without memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch import nn

from zero_trial.planning.pass_trace import At, Moment, PassTrace
from zero_trial.planning.state_bytes import PlannedGroup, PlannedStates
from zero_trial.sharding.grad_buffer import SMALL
from zero_trial.sharding.param_group import GroupState
from zero_trial.sharding.plan import Lifetime, ReduceAt
from zero_trial.sharding.unshard import Unsharder

STEPS = 2  # the second is measured: from then on the order of uses is known, and so what is prefetched
_CASTS = 1 << 26  # elements whose gradients are cast at one time for an update


@dataclass
class _Held:
    """Bytes that the engines hold now beside their states and the trace's tensors, and the most of
    all together."""

    now: int = 0
    most: int = 0
    traced: int = 0  # live in the trace at this moment

    def add(self, nbytes: int) -> None:
        self.now += nbytes
        self.most = max(self.most, self.now + self.traced)


class _PaperGroup:
    """A group as the Unsharder sees it: it has sizes and no memory."""

    offloaded = None
    params = ()

    def __init__(self, planned: PlannedGroup, held: _Held) -> None:
        self.planned = planned
        self.layout, self.plan = planned.layout, planned.plan
        self.block, self.trainable = planned.block, planned.trainable
        always = planned.plan.params is Lifetime.ALWAYS
        self.state = GroupState.UNSHARDED if always else GroupState.SHARDED
        self._held = held

    @property
    def live(self) -> bool:
        return self.state is GroupState.UNSHARDED

    def unshard_async(self) -> None:
        if self.state is not GroupState.SHARDED:
            return
        self.state = GroupState.GATHERING
        self._held.add(self.planned.full_bytes)

    def finish_unshard(self) -> None:
        if self.state is GroupState.GATHERING:
            self.state = GroupState.UNSHARDED

    def reshard(self, *, stale: bool = False) -> None:
        if self.live and self.plan.params is not Lifetime.ALWAYS:
            self.state = GroupState.SHARDED
            self._held.add(-self.planned.full_bytes)


@dataclass
class _Gradients:
    """The full gradients of a group."""

    group: _PaperGroup
    full: int = 0  # bytes while they have memory of their own
    waiting: int = 0  # bytes of small gradients that are not in the buffer yet
    missing: int = 0
    reduced: bool = False  # in this pass
    wire: int = 0  # bytes of a cast, and of what other ranks send, while a reduction is under way
    summed: bool = False  # the shard of a reduced sum has memory


class _Player:
    """Plays the moments of one engine."""

    def __init__(self, states: PlannedStates, held: _Held, *, one_host: bool) -> None:
        self.states = states
        self.held = held
        self._sharding = states.resolved.sharding
        self._gloo = states.device.type == "cpu" and not one_host
        shard, replica = states.shape.shard, states.shape.replica
        spare = self._sharding.overlap and one_host and states.device.type == "cpu"
        self._deepest = (self._sharding.in_flight + spare) * ((shard > 1) + (replica > 1))
        groups = [_PaperGroup(each, held) for each in states.groups]
        freed: dict[str, list[_PaperGroup]] = {}
        for group in groups:
            if not group.live:
                freed.setdefault(group.block, []).append(group)
        self._modules = {block: states.merged.get(block, (block,)) for block in freed}
        self._block_of = {name: block for block, names in self._modules.items() for name in names}
        self._unsharder = Unsharder(
            {block: [nn.Module()] for block in freed},  # their hooks are never called
            cast("Mapping[str, Sequence[Any]]", freed),
            states.resolved.plan.reshard,
            self._sharding.live,
        )
        self._frees = bool(freed)
        self._gradients = [_Gradients(group) for group in groups if group.trainable]
        self._of_param = {slot.name: each for each in self._gradients for slot in each.group.layout.slots}
        self._groups = groups
        self._in_flight: deque[_Gradients] = deque()
        self._in_pass = self._last = False
        self._accumulation = states.settings.gradient_accumulation_steps or 1
        self._micro_steps = 0

    @property
    def at_boundary(self) -> bool:
        return (self._micro_steps + 1) % self._accumulation == 0

    def play(self, moment: Moment) -> None:
        match moment.at:
            case At.FORWARD | At.REACHED:
                if moment.at is At.REACHED and not self._in_pass:
                    self._begin()
                if (block := self._block_of.get(moment.name)) is not None:
                    self._unsharder.unshard(block)
            case At.AFTER:
                block = self._block_of.get(moment.name)
                last = block is not None and moment.name == self._modules[block][-1]
                if block is not None and last and not self._unsharder._keeps_after_forward(block):
                    self._unsharder.reshard(block)
            case At.BACKWARD:
                self._begin()
            case At.GRADIENT:
                if not self._in_pass:
                    self._begin()
                self._gradient(moment.name)
            case At.END:
                self._end()
            case At.STEP:
                self._end()
                if self.at_boundary:
                    self._step()
                self._micro_steps += 1

    # --- gradients --------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._in_pass, self._last = True, self.at_boundary
        self._unsharder.last_micro_batch = self._last
        for each in self._gradients:
            each.missing, each.reduced = len(each.group.layout.slots), False

    @property
    def _reduces(self) -> bool:
        return self._last or self.states.resolved.plan.reduce_at is ReduceAt.MICRO

    def _gradient(self, name: str) -> None:
        each = self._of_param.get(name)
        if each is None:
            return
        planned = each.group.planned
        numel = next(slot.numel for slot in planned.layout.slots if slot.name == name)
        if numel < SMALL:
            each.waiting += numel * planned.dtype.itemsize
            self.held.add(numel * planned.dtype.itemsize)
        else:
            self._allocate(each)
        each.missing -= 1
        if each.missing == 0:
            if self._frees:
                self._unsharder.reshard_after_gradients(cast("Any", each.group))
            if self._reduces:
                self._launch(each)

    def _allocate(self, each: _Gradients) -> None:
        """Give the full gradients memory, where they do not always live."""
        if each.full or each.group.plan.grads is Lifetime.ALWAYS:
            return
        wanted = each.group.planned.grad_bytes
        each.full = wanted
        self.held.add(wanted)

    def _launch(self, each: _Gradients) -> None:
        """Start the group's reduction; older ones are waited for where too many are under way."""
        self._flush(each)
        self._allocate(each)
        planned, policy, shape = each.group.planned, self.states.resolved.policy, self.states.shape
        each.reduced = True
        wire = planned.grad if policy.comm is None else policy.comm
        nbytes = planned.layout.numel * wire.itemsize
        each.wire = nbytes if wire != planned.grad else 0
        if self._gloo:
            each.wire += nbytes * (shape.data_parallel_size - 1) // shape.data_parallel_size
        self.held.add(each.wire)
        if self._sharding.grads_to_none and not each.summed:
            each.summed = True
            self.held.add(planned.grad_shard_bytes)
        self._in_flight.append(each)
        while len(self._in_flight) > self._deepest:
            self._store(self._in_flight.popleft())

    def _store(self, each: _Gradients) -> None:
        self.held.add(-each.wire)
        each.wire = 0
        self._free(each)

    def _free(self, each: _Gradients) -> None:
        self.held.add(-each.full)
        each.full = 0

    def _flush(self, each: _Gradients) -> None:
        """Move small gradients into the buffer."""
        if each.waiting:
            self._allocate(each)
            self.held.add(-each.waiting)
            each.waiting = 0

    def _end(self) -> None:
        """End a backward pass; nothing where it is over already."""
        if not self._in_pass:
            return
        for each in self._gradients:
            self._flush(each)
        if self._reduces:
            for each in self._gradients:
                if not each.reduced:
                    self._launch(each)
            while self._in_flight:
                self._store(self._in_flight.popleft())
        self._in_pass = False
        self._unsharder._end_of_backward()

    # --- the step ---------------------------------------------------------------------------------

    def _step(self) -> None:
        states, planned = self.states, self.states.groups
        casts = 0
        if not states.fuses:
            casts = min(
                sum(each.shard_numel for each in planned if each.master_bytes and each.grad_shard.itemsize < 4), _CASTS
            )
        whole = states.whole_elements * 4
        self.held.add(4 * casts + 2 * whole)
        self.held.add(-4 * casts - 2 * whole)
        for group in self._groups:
            group.finish_unshard()
            group.reshard()
        for each in self._gradients:
            if each.summed:
                self.held.add(-each.group.planned.grad_shard_bytes)
                each.summed = False
        self._unsharder.end_step()


def play(trace: PassTrace, engines: Sequence[PlannedStates], calls: int, *, one_host: bool) -> int:
    """Play ``trace``, which is run ``calls`` times in a step. Return the most bytes that a rank
    holds in addition to its states."""
    held = _Held()
    players = [_Player(states, held, one_host=one_host) for states in engines]
    for _ in range(STEPS):
        held.most = 0
        for moment in trace.moments * calls:
            held.traced = moment.live
            held.add(0)
            players[moment.engine].play(moment)
            held.traced = moment.peak
            held.add(0)
    return held.most + sum(states.unmanaged for states in engines)
