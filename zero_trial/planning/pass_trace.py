"""One forward and backward pass of the plain model without values, and the tensor memory between
the moments at which an engine gathers, frees or reduces.

The pass has neither ranks nor sharding: parameters do not count, and a gradient counts until its
hook is called. So a single trace is valid for all ZeRO stages: :func:`play` adds the engine's
memory at each moment.
"""

from __future__ import annotations

import warnings
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

from zero_trial.activation_checkpointing import CHECKPOINTING, HostInputs, offload_checkpoints
from zero_trial.device import is_accelerator
from zero_trial.errors import TrialError, ZeroTrialError
from zero_trial.planning.live_bytes import LiveBytes
from zero_trial.planning.memory_plan import ON_CPU
from zero_trial.planning.state_bytes import PlannedGroup, PlannedStates
from zero_trial.sharding.build_groups import exact_buffers
from zero_trial.sharding.grad_buffer import SMALL
from zero_trial.sharding.grouping import ROOT, find_blocks
from zero_trial.sharding.living_dtypes import LivingDtypes
from zero_trial.sharding.offload.copies import Copy
from zero_trial.sharding.param_group import GroupState
from zero_trial.sharding.plan import Home, Lifetime, ReduceAt
from zero_trial.sharding.precision import DtypePolicy, cast_floats, forward_of
from zero_trial.sharding.quantized import is_opaque
from zero_trial.sharding.unshard import Unsharder, tensors_in

Result = TypeVar("Result")


class At(Enum):
    """A moment of a pass."""

    START = auto()
    FORWARD = auto()  # a block starts, also for recomputation in backward
    AFTER = auto()  # its forward is over
    REACHED = auto()  # a gradient has reached an output of the block
    LEFT = auto()  # a gradient has reached an input of the block
    GRADIENT = auto()  # a parameter has its gradient
    BACKWARD = auto()
    END = auto()  # of a backward pass
    STEP = auto()


@dataclass
class Moment:
    """``live``: bytes at this moment; ``peak``: maximum until the next moment. ``name``: of a
    block's module or a parameter of engine ``engine``."""

    at: At
    engine: int
    name: str
    live: int
    peak: int = 0


@dataclass(frozen=True)
class PassTrace:
    """The moments of one call of a training function; ``how``: the kind of tensors."""

    moments: tuple[Moment, ...]
    activations: int
    how: str
    host: int = 0  # maximum bytes of activations in host memory


@dataclass
class _Recorder:
    live: LiveBytes
    moments: list[Moment] = field(default_factory=list)
    saved: int = 0  # the most

    def note(self, at: At, engine: int, name: str = "") -> None:
        self.end()
        self.live.restart()
        self.moments.append(Moment(at, engine, name, self.live.live))

    def end(self) -> None:
        """End the last moment."""
        self.saved = max(self.saved, self.live.saved_peak)
        if self.moments:
            self.moments[-1].peak = self.live.peak


class TracedEngine:
    """Runs the plain model for training code that calls an engine."""

    def __init__(
        self, number: int, module: nn.Module, states: PlannedStates, device: torch.device, recorder: _Recorder
    ) -> None:
        self.module = module
        self.device = device
        self.settings = states.settings
        self.micro_steps = self.global_steps = 0
        self._policy = states.resolved.policy
        self._call = forward_of(module, states.resolved.autocast, self.device.type)
        self._note = partial(recorder.note, engine=number)
        if states.resolved.plan.frees_parameters:
            states.resolved.sharding.leaf.mark(module)
        for name in (ROOT, *find_blocks(module)):
            block = module.get_submodule(name)
            block.register_forward_pre_hook(partial(self._before, name), with_kwargs=True)
            block.register_forward_hook(partial(self._after, name))
        for name, param in module.named_parameters():
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(partial(self._gradient, name))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._policy.param != torch.float32:
            args, kwargs = cast_floats((args, kwargs), self._policy.param)
        return self._call(*args, **kwargs)

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, *_: Any, **__: Any) -> torch.Tensor:
        self._note(At.BACKWARD)
        _run_backward(loss, retain_graph=retain_graph)
        self._note(At.END)
        return loss.detach()

    def step(self, *_: Any, **__: Any) -> None:
        self._note(At.STEP)
        self.micro_steps += 1
        self.global_steps = self.micro_steps // self.gradient_accumulation_steps()

    def gradient_accumulation_steps(self) -> int:
        return self.settings.gradient_accumulation_steps or 1

    def train_micro_batch_size_per_gpu(self) -> int:
        return self.settings.train_micro_batch_size_per_gpu or 1

    def is_gradient_accumulation_boundary(self) -> bool:
        return (self.micro_steps + 1) % self.gradient_accumulation_steps() == 0

    def train(self, mode: bool = True) -> None:
        self.module.train(mode)

    def eval(self) -> None:
        self.module.eval()

    def _before(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._note(At.FORWARD, name=name)
        for tensor in tensors_in((args, kwargs)):
            if tensor.requires_grad:
                tensor.register_hook(lambda _: self._note(At.LEFT, name=name))

    def _after(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if torch._C._current_graph_task_id() != -1:
            return  # recomputation: gradients follow immediately
        self._note(At.AFTER, name=name)
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(lambda _: self._note(At.REACHED, name=name))

    def _gradient(self, name: str, param: torch.Tensor) -> None:
        self._note(At.GRADIENT, name=name)
        param.grad = None  # an engine moves the gradient into its buffer


class _NoCopy(Copy):
    def __init__(self) -> None:
        """Create work that is already complete."""

    def order(self) -> None:
        """Return immediately."""


class PlannedInputs(HostInputs):
    """Counts bytes in host memory, and copies nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0

    def moves(self, tensor: torch.Tensor) -> bool:
        return True

    def host_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        kept = torch.empty_like(tensor, device="meta")
        self._add(tensor.nbytes)
        weakref.finalize(kept, self._add, -tensor.nbytes)
        return kept

    def copy(self, source: torch.Tensor, into: torch.Tensor) -> Copy:
        return _NoCopy()

    def _add(self, nbytes: int) -> None:
        self.now += nbytes
        self.most = max(self.most, self.now)


Train = Callable[[Sequence[TracedEngine], Sequence[Any]], None]
"""Runs a micro-batch, or all of a step, out of the given ones: forward, backward and step of every
engine."""


MOST_REAL = 1_000_000_000  # maximum parameters of a model that runs with real values


def without_ranks(device: torch.device, parameters: int, run: Callable[[bool, torch.device, str], Result]) -> Result:
    """Return ``run(fake, place, how)``: without values, or with real values if the model reads
    them.

    Keeps torch's random state. Raises TrialError for exceptions of the user's code.
    """
    here = device.type != "cuda" or torch.cuda.is_available()
    faults: list[Exception] = []
    for fake in (True, False) if parameters <= MOST_REAL else (True,):
        place = device if fake and here else torch.device("cpu")
        how = "real tensors" if not fake else "fake tensors" if here else ON_CPU
        mode = FakeTensorMode(allow_non_fake_inputs=True) if fake else nullcontext()
        try:
            with warnings.catch_warnings(), torch.random.fork_rng(devices=[]), mode:
                # fake tensors have no addresses, and torch warns if one is read
                warnings.simplefilter("ignore")
                with nullcontext() if here else _GpuAttention():
                    return run(fake, place, how)
        except ZeroTrialError:
            raise  # an invalid config, independent of the tensors
        except Exception as error:
            faults.append(error)
    last = faults[-1]
    raise TrialError(f"a micro-batch cannot be run: {last}", where="plan", got=type(last).__name__) from last


def trace(parts: Sequence[PlannedStates], train: Train, batches: Sequence[Any]) -> PassTrace:
    """Run ``train`` once. Raises TrialError for exceptions of the user's code."""

    on_device = is_accelerator(parts[0].blueprint.device)
    on_host = on_device and any(part.settings.activation_checkpointing.cpu_checkpointing for part in parts)

    def run(fake: bool, place: torch.device, how: str) -> PassTrace:
        host = PlannedInputs() if on_device else HostInputs()
        live = LiveBytes(place.type)
        recorder = _Recorder(live)
        given = without_values(batches, place) if fake else batches
        engines = []
        for number, part in enumerate(parts):
            module = part.blueprint.model(fake=fake, device=place).train()
            give_dtypes(module, part.blueprint.given["model"], part.resolved.policy)
            live.hold(module.buffers())
            offload_checkpoints(module, everywhere=on_host)
            engines.append(TracedEngine(number, module, part, place, recorder))
        live.hold(leaf for leaf in tree_flatten(given)[0] if isinstance(leaf, torch.Tensor))
        with live, live.saving(), CHECKPOINTING.planning(host, on_host=on_host):
            recorder.note(At.START, 0)
            train(engines, given)
            recorder.end()
        return PassTrace(
            tuple(recorder.moments), recorder.saved, how, host.most if isinstance(host, PlannedInputs) else 0
        )

    largest = max(part.blueprint.parameters for part in parts)
    return without_ranks(parts[0].blueprint.device, largest, run)


def without_values(value: Any, place: torch.device) -> Any:
    """Return nested values with tensors of the same shapes; shared tensors stay shared."""
    memo: dict[int, torch.Tensor] = {}

    def like(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) not in memo:
            made = torch.empty(leaf.shape, dtype=leaf.dtype, device=place)
            memo[id(leaf)] = made.requires_grad_(leaf.requires_grad)
        return memo[id(leaf)]

    return tree_map(like, value)


def give_dtypes(module: nn.Module, given: nn.Module, policy: DtypePolicy) -> None:
    """Set parameters and buffers to the dtypes that an engine would use for ``given``, of which
    ``module`` is a copy: fake tensors have lost their class."""
    exact, living = exact_buffers(module, policy), LivingDtypes(module, policy)
    living.cast_at_borders()
    for param, original in zip(module.parameters(), given.parameters(), strict=True):
        param.data = param.data.to(original.dtype if is_opaque(original) else living.of(param))
    for name, buffer in module.named_buffers():
        if buffer.is_floating_point() and name not in exact:
            buffer.data = buffer.data.to(living.of_buffer(buffer))


def _run_backward(root: torch.Tensor, gradient: torch.Tensor | None = None, *, retain_graph: bool = False) -> None:
    """Run backward like ``root.backward()``, but inside the TorchFunctionMode: torch disables the
    mode during a call that it intercepts."""
    gradient = torch.ones_like(root) if gradient is None else gradient
    _engine_run_backward((root,), (gradient,), retain_graph, False, (), allow_unreachable=True, accumulate_grad=True)


_ATTENTION = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


class _GpuAttention(TorchFunctionMode):
    """Selects the attention kernel that stores no scores, as on a GPU (Dao et al. 2022)."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.backward:
            with self:  # a checkpointed layer calls attention again in backward
                return _run_backward(*args, retain_graph=bool(kwargs.get("retain_graph")))
        if func is F.scaled_dot_product_attention:
            args, kwargs = (), {**dict(zip(_ATTENTION, args, strict=False)), **kwargs, "dropout_p": 0.0}
        return func(*args, **kwargs)


# --- replay a trace with the engine's memory ---
#
# The peak memory of a rank in a training step: a trace of the plain model, replayed with the
# engine's gathers, frees and reductions at each moment.
#
#     forward, reached   the block's parameters are gathered, and those of the next are prefetched
#     left               the block's frozen parameters are freed
#     gradient           the group's full gradients are allocated at its first one; at the last one,
#                        the group is reduced
#     end                the remaining groups are reduced, after waiting for reductions in flight
#     step               the optimizer updates this rank's shards; persistent ones are gathered
#
# The engine's own Unsharder decides when to gather and free, with groups without memory.

STEPS = 2  # the second is measured: then the order of uses, and so the prefetching, is known
_CASTS = 1 << 26  # elements whose gradients are cast together for an update


@dataclass
class _Held:
    """Current and peak bytes of the engines, without states and traced tensors."""

    now: int = 0
    most: int = 0
    traced: int = 0  # live in the trace at this moment

    def add(self, nbytes: int) -> None:
        self.now += nbytes
        self.most = max(self.most, self.now + self.traced)


class _PaperGroup:
    """A group for the Unsharder, with sizes but no memory. A buffer for offloaded values is always
    available."""

    params = ()

    def __init__(self, planned: PlannedGroup, held: _Held) -> None:
        self.planned = planned
        self.layout, self.plan = planned.layout, planned.plan
        self.block, self.trainable = planned.block, planned.trainable
        always = planned.plan.params is Lifetime.ALWAYS
        self.state = GroupState.UNSHARDED if always else GroupState.SHARDED
        self.offloaded = None if planned.plan.home is Home.DEVICE else planned.plan.home
        self._read = False
        self._held = held

    def start_read_or_ready(self) -> bool:
        if self.state is not GroupState.SHARDED:
            return False
        before, self._read = self._read, True
        return before

    def read_ahead(self, *, again: bool) -> bool:
        return False

    @property
    def live(self) -> bool:
        return self.state is GroupState.UNSHARDED

    def unshard_async(self) -> None:
        if self.state is not GroupState.SHARDED:
            return
        self.state, self._read = GroupState.GATHERING, False
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
    full: int = 0  # bytes while the gradients have their own memory
    waiting: int = 0  # bytes of small gradients that are not in the buffer yet
    missing: int = 0
    reduced: bool = False  # in this pass
    wire: int = 0  # bytes of a cast and of received data while a reduction is in flight
    summed: bool = False  # whether the shard of a reduced sum has memory


class _Player:
    """Replays the moments of one engine."""

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
            case At.LEFT:
                block = self._block_of.get(moment.name)
                if block is not None and moment.name == self._modules[block][0]:
                    self._unsharder.free_frozen(block)
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
        """Allocate the full gradients, unless they are permanent."""
        if each.full or each.group.plan.grads is Lifetime.ALWAYS:
            return
        wanted = each.group.planned.grad_bytes
        each.full = wanted
        self.held.add(wanted)

    def _launch(self, each: _Gradients) -> None:
        """Start the group's reduction; wait for older ones if too many are in flight."""
        self._flush(each)
        self._allocate(each)
        planned, policy, shape = each.group.planned, self.states.resolved.policy, self.states.shape
        each.reduced = True
        wire = policy.wide(planned.dtype, policy.comm)
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
        """End a backward pass; a no-op if it has already ended."""
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
                sum(
                    each.shard_numel
                    for each in planned
                    if each.flat and each.master_bytes and each.grad_shard.itemsize < 4
                ),
                _CASTS,
            )
        most = max(4 * casts, states.whole_bytes)  # never at the same time
        self.held.add(most)
        self.held.add(-most)
        for group in self._groups:
            group.finish_unshard()
            group.reshard()
        for each in self._gradients:
            if each.summed:
                self.held.add(-each.group.planned.grad_shard_bytes)
                each.summed = False
        self._unsharder.end_step()


def play(trace: PassTrace, engines: Sequence[PlannedStates], calls: int, *, one_host: bool) -> int:
    """Replay ``trace``, run ``calls`` times in a step. Return the peak bytes without states."""
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
