"""One forward and backward pass of the plain model without values, and what tensors it holds
between the moments at which an engine gathers, frees or reduces something.

The pass has neither ranks nor sharding: parameters count nothing, and a gradient counts until its
hook is called. So one trace serves every ZeRO stage: :mod:`zero_trial.planning.step_peak` adds what
the engine holds at each moment.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

from zero_trial.errors import TrialError, ZeroTrialError
from zero_trial.planning.live_bytes import LiveBytes
from zero_trial.planning.memory_plan import ON_CPU
from zero_trial.planning.state_bytes import PlannedStates
from zero_trial.sharding.build_groups import fp32_buffers
from zero_trial.sharding.grouping import ROOT, find_blocks
from zero_trial.sharding.layout import living_dtype
from zero_trial.sharding.precision import DtypePolicy, cast_floats, forward_of
from zero_trial.sharding.unshard import tensors_in

Result = TypeVar("Result")


class At(Enum):
    """A moment of a pass."""

    START = auto()
    FORWARD = auto()  # a block is used, also when it is computed again in backward
    AFTER = auto()  # its forward is over
    REACHED = auto()  # a gradient has reached an output of the block
    GRADIENT = auto()  # a parameter has its gradient
    BACKWARD = auto()
    END = auto()  # of a backward pass
    STEP = auto()


@dataclass
class Moment:
    """``live``: bytes at this moment; ``peak``: the most until the next one. ``name``: of a block's
    module or a parameter of engine ``engine``."""

    at: At
    engine: int
    name: str
    live: int
    peak: int = 0


@dataclass(frozen=True)
class PassTrace:
    """The moments of one call of a training function; ``how``: on which kind of tensors."""

    moments: tuple[Moment, ...]
    activations: int
    how: str


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
        """End what the last moment has begun."""
        self.saved = max(self.saved, self.live.saved_peak)
        if self.moments:
            self.moments[-1].peak = self.live.peak


class TracedEngine:
    """The plain model behind the calls of an engine that training code makes."""

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

    def _after(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if torch._C._current_graph_task_id() != -1:
            return  # computed again: its gradients follow at once
        self._note(At.AFTER, name=name)
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(partial(self._reached, name))

    def _reached(self, name: str, grad: torch.Tensor) -> None:
        self._note(At.REACHED, name=name)

    def _gradient(self, name: str, param: torch.Tensor) -> None:
        self._note(At.GRADIENT, name=name)
        param.grad = None  # an engine moves it into its buffer


Train = Callable[[Sequence[TracedEngine], Sequence[Any]], None]
"""Runs a micro-batch, or all of a step, out of the given ones: forward, backward and step of every
engine."""


MOST_REAL = 1_000_000_000  # parameters of a model that is run with real numbers


def without_ranks(device: torch.device, parameters: int, run: Callable[[bool, torch.device, str], Result]) -> Result:
    """Return ``run(fake, place, how)``: without values, or with real numbers where the model reads
    values.

    torch's random state is left as it was. Raises TrialError with what the user's code raises.
    """
    here = device.type != "cuda" or torch.cuda.is_available()
    faults: list[Exception] = []
    for fake in (True, False) if parameters <= MOST_REAL else (True,):
        place = device if fake and here else torch.device("cpu")
        how = "real tensors" if not fake else "fake tensors" if here else ON_CPU
        mode = FakeTensorMode(allow_non_fake_inputs=True) if fake else nullcontext()
        try:
            with warnings.catch_warnings(), torch.random.fork_rng(devices=[]), mode:
                # fake tensors have no addresses, and torch warns who asks for one
                warnings.simplefilter("ignore")
                with nullcontext() if here else _GpuAttention():
                    return run(fake, place, how)
        except ZeroTrialError:
            raise  # a config that cannot be used, on any tensors
        except Exception as error:
            faults.append(error)
    last = faults[-1]
    raise TrialError(f"a micro-batch cannot be run: {last}", where="plan", got=type(last).__name__) from last


def trace(parts: Sequence[PlannedStates], train: Train, batches: Sequence[Any]) -> PassTrace:
    """Run ``train`` once. Raises TrialError with what the user's code raises."""

    def run(fake: bool, place: torch.device, how: str) -> PassTrace:
        live = LiveBytes(place.type)
        recorder = _Recorder(live)
        given = without_values(batches, place) if fake else batches
        engines = []
        for number, part in enumerate(parts):
            module = part.blueprint.model(fake=fake, device=place)
            _give_dtypes(module, part.resolved.policy)
            live.hold(module.buffers())
            engines.append(TracedEngine(number, module, part, place, recorder))
        live.hold(leaf for leaf in tree_flatten(given)[0] if isinstance(leaf, torch.Tensor))
        with live, live.saving():
            recorder.note(At.START, 0)
            train(engines, given)
            recorder.end()
        return PassTrace(tuple(recorder.moments), recorder.saved, how)

    largest = max(part.blueprint.parameters for part in parts)
    return without_ranks(parts[0].blueprint.device, largest, run)


def without_values(value: Any, place: torch.device) -> Any:
    """Return nested values with tensors of the same forms; what is one tensor stays one."""
    memo: dict[int, torch.Tensor] = {}

    def like(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) not in memo:
            made = torch.empty(leaf.shape, dtype=leaf.dtype, device=place)
            memo[id(leaf)] = made.requires_grad_(leaf.requires_grad)
        return memo[id(leaf)]

    return tree_map(like, value)


def _give_dtypes(module: nn.Module, policy: DtypePolicy) -> None:
    """Give parameters and buffers the dtypes that an engine gives them."""
    exact = fp32_buffers(module) if policy.keep_constants else ()
    for param in module.parameters():
        param.data = param.data.to(living_dtype(param.dtype, policy.param))
    for name, buffer in module.named_buffers():
        if buffer.is_floating_point() and name not in exact:
            buffer.data = buffer.data.to(policy.buffer or living_dtype(buffer.dtype, policy.param))


def _run_backward(root: torch.Tensor, gradient: torch.Tensor | None = None, *, retain_graph: bool = False) -> None:
    """Run a backward pass as ``root.backward()`` does, inside of a TorchFunctionMode: torch leaves
    the mode for a call that it has shown."""
    gradient = torch.ones_like(root) if gradient is None else gradient
    _engine_run_backward((root,), (gradient,), retain_graph, False, (), allow_unreachable=True, accumulate_grad=True)


_ATTENTION = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


class _GpuAttention(TorchFunctionMode):
    """Chooses the attention kernel that keeps no scores, as a GPU does (Dao et al. 2022). The CPU's
    cannot drop out."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.backward:
            with self:  # a checkpointed layer calls attention again there
                return _run_backward(*args, retain_graph=bool(kwargs.get("retain_graph")))
        if func is F.scaled_dot_product_attention:
            args, kwargs = (), {**dict(zip(_ATTENTION, args, strict=False)), **kwargs, "dropout_p": 0.0}
        return func(*args, **kwargs)
