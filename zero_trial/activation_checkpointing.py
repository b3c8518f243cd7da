"""Activation checkpointing: inputs kept whole, cut over model ranks, or on the host."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import checkpoint as torch_checkpoint

from zero_trial.comm import AxisComm
from zero_trial.device import accelerator, is_accelerator, torch_module
from zero_trial.ds_config.keys_running import ActivationCheckpointingSection
from zero_trial.ds_config.reader import read_ds_config
from zero_trial.ds_config.table import DsConfig
from zero_trial.errors import ConfigError
from zero_trial.sharding.offload.copies import Copier, Copy


class SavedInput(NamedTuple):
    """``data`` is the saved tensor or this rank's part of it (``cut``), here or on the host."""

    data: torch.Tensor | OnHost
    shape: torch.Size
    cut: bool


class SavedInputs:
    """The two hooks of torch.autograd.graph.saved_tensors_hooks.

    With ``axis``, a floating tensor of n elements costs n/M on each of its M ranks, and an
    all-gather in backward: every rank of the axis must run backward through the same checkpoints.
    ``host`` moves what is left off a device.
    """

    def __init__(self, axis: AxisComm | None, host: HostInputs | None) -> None:
        self._axis = axis if axis is not None and axis.size > 1 else None
        self._host = host

    def pack(self, tensor: torch.Tensor) -> SavedInput:
        data, cut = tensor, False
        if self._axis is not None and tensor.is_floating_point() and tensor.numel() >= self._axis.size:
            length = -(-tensor.numel() // self._axis.size)
            flat = tensor.detach().reshape(-1)[self._axis.index * length :][:length]
            data, cut = torch.nn.functional.pad(flat, (0, length - flat.numel())), True
        return SavedInput(data if self._host is None else self._host.store(data), tensor.shape, cut)

    def unpack(self, kept: SavedInput) -> torch.Tensor:
        data = kept.data
        if isinstance(data, OnHost):
            data = data.owner.load(data)
        if not kept.cut or self._axis is None:
            return data
        full = torch.empty(data.numel() * self._axis.size, dtype=data.dtype, device=data.device)
        self._axis.all_gather(full, data, "saved activations").wait()
        return full[: kept.shape.numel()].view(kept.shape)


@dataclass(eq=False)
class OnHost:
    """A tensor of ``device`` that is in ``data``, pinned host memory, until backward. ``before``:
    the one that was stored before it, which backward usually needs next."""

    owner: HostInputs
    data: torch.Tensor
    device: torch.device
    before: weakref.ref[OnHost] | None
    used: bool = False


class _OnItsWay(NamedTuple):
    kept: weakref.ref[OnHost]
    tensor: torch.Tensor  # on the device
    copy: Copy


class HostInputs:
    """Saved inputs that wait on the host.

        forward    store 0   store 1   store 2            each copy starts when the tensor is saved,
                       copy 0 ....  copy 1 ....           on a stream of its own
        backward   load 2    load 1    load 0             2 has not left yet; 1 and 0 come back
                       copy 1 ....  copy 0 ....           while the block of 2 is computed again

    No more than AT_ONCE tensors are on their way in each direction. For one that has to wait, the
    compute stream waits, and never the host. A tensor is referenced until its copy is ordered
    before the compute stream: its memory may be used again from there on.
    """

    AT_ONCE = 2

    def __init__(self) -> None:
        self._copiers: dict[torch.device, Copier] = {}
        self._last: weakref.ref[OnHost] | None = None
        self._leaving: list[_OnItsWay] = []  # oldest first
        self._coming: list[_OnItsWay] = []

    def store(self, tensor: torch.Tensor) -> torch.Tensor | OnHost:
        """Start to copy ``tensor`` to the host, if needed; return :meth:`load`'s argument."""
        if not self.moves(tensor):
            return tensor
        for queue in (self._leaving, self._coming):  # of graphs that have gone without a backward
            self._drop(queue, [each for each in queue if each.kept() is None])
        tensor = tensor.detach()
        kept = OnHost(self, self.host_memory(tensor), tensor.device, self._last)
        self._last = weakref.ref(kept)
        self._leaving.append(_OnItsWay(self._last, tensor, self.copy(tensor, kept.data)))
        self._drop(self._leaving, self._leaving[: -self.AT_ONCE])
        return kept

    def load(self, kept: OnHost) -> torch.Tensor:
        """Return the tensor on its device, and start to copy those that backward needs next."""
        found = self._find(kept) or self._start(kept)
        for queue in (self._leaving, self._coming):
            self._drop(queue, [each for each in queue if each is found])
        kept.used = True
        previous = kept.before
        while previous is not None and (before := previous()) is not None and len(self._coming) < self.AT_ONCE:
            if not before.used and self._find(before) is None:
                self._start(before)
            previous = before.before
        return found.tensor

    def settle(self) -> None:
        """Order all copies that are on their way to the host before what the device does next."""
        self._drop(self._leaving, list(self._leaving))

    def moves(self, tensor: torch.Tensor) -> bool:
        return is_accelerator(tensor.device)

    def host_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(tensor, device="cpu", pin_memory=True)

    def copy(self, source: torch.Tensor, into: torch.Tensor) -> Copy:
        device = source.device if is_accelerator(source.device) else into.device
        if device not in self._copiers:
            self._copiers[device] = Copier(device, pinned=True)
        return self._copiers[device].copy(source, into)

    def _find(self, kept: OnHost) -> _OnItsWay | None:
        return next((each for each in (*self._leaving, *self._coming) if each.kept() is kept), None)

    def _start(self, kept: OnHost) -> _OnItsWay:
        # allocated on the compute stream, whose earlier work the copy waits for
        tensor = torch.empty_like(kept.data, device=kept.device, pin_memory=False)
        self._coming.append(_OnItsWay(weakref.ref(kept), tensor, self.copy(kept.data, tensor)))
        return self._coming[-1]

    def _drop(self, queue: list[_OnItsWay], these: Sequence[_OnItsWay]) -> None:
        for each in these:
            each.copy.order()
        queue[:] = [each for each in queue if all(each is not other for other in these)]


class OffloadedCheckpoint:
    """A checkpoint function of another library, with saved inputs on the host."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        saved = SavedInputs(None, CHECKPOINTING.host)
        with saved_tensors_hooks(saved.pack, saved.unpack):
            return self._call(function, *args, **kwargs)


# Where transformers' layers, and torch's CheckpointWrapper, have their checkpoint function.
_FUNCTIONS = ("_gradient_checkpointing_func", "checkpoint_fn")


def offload_checkpoints(module: nn.Module, *, everywhere: bool) -> None:
    """Let checkpointed layers of ``module`` keep their inputs on the host: all of them
    (``everywhere``), or those of transformers' ``offload=True``, whose own copies would hold up the
    compute stream."""
    for part in module.modules():
        for name in _FUNCTIONS:
            call = vars(part).get(name)
            if theirs := isinstance(call, partial) and getattr(call.func, "__name__", "") == "checkpoint_func":
                call = partial(torch_checkpoint.checkpoint, *call.args, **call.keywords)
            if call is not None and (theirs or everywhere) and not isinstance(call, OffloadedCheckpoint):
                setattr(part, name, OffloadedCheckpoint(call))


# Random numbers of model-parallel ranks: dropout inside a part of a tensor must differ between the
# ranks, dropout of what all ranks hold must not. Megatron-LM's way is a second state of the
# device's generator, which a block of code switches to.

MODEL_PARALLEL = "model-parallel-rng"


class RngStatesTracker:
    """Named states of the random generator of this process's device (current GPU, or CPU)."""

    def __init__(self) -> None:
        self._states: dict[str, torch.Tensor] = {}
        self._seeds: set[int] = set()

    def reset(self) -> None:
        """Forget all states."""
        self._states.clear()
        self._seeds.clear()

    def get_states(self) -> dict[str, torch.Tensor]:
        """Return the state of each name, as it is now."""
        return dict(self._states)

    def set_states(self, states: Mapping[str, torch.Tensor]) -> None:
        """Put ``states`` in place of all states."""
        self._states = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Make the state ``name`` from ``seed``. Raises ConfigError where either is there."""
        if name in self._states or seed in self._seeds:
            what = f"the state {name!r}" if name in self._states else f"a state of seed {seed}"
            raise ConfigError(
                "this state of the random generator was already added", where="get_cuda_rng_tracker().add", got=what
            )
        self._seeds.add(seed)
        before = _rng_state()
        _device_generator().manual_seed(seed)
        self._states[name] = _rng_state()
        _device_generator().set_state(before)

    @contextmanager
    def fork(self, name: str = MODEL_PARALLEL) -> Iterator[None]:
        """Draw random numbers from the state ``name``. Raises ConfigError if it was not added."""
        if name not in self._states:
            raise ConfigError(
                "this state of the random generator was never added",
                where="get_cuda_rng_tracker().fork",
                got=name,
                expected=", ".join(self._states) or "a state added with add()",
                fix="Call checkpointing.model_parallel_cuda_manual_seed(seed) first.",
            )
        before = _rng_state()
        _device_generator().set_state(self._states[name])
        try:
            yield
        finally:
            self._states[name] = _rng_state()
            _device_generator().set_state(before)

    @contextmanager
    def again(self, states: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Have ``states`` inside the block, and afterwards what there was before it."""
        before = self.get_states()
        self.set_states(states)
        try:
            yield
        finally:
            self.set_states(before)


def _device_generator() -> torch.Generator:
    if (kind := accelerator()) is None:
        return torch.default_generator
    module = torch_module(kind)
    module.init()
    generator: torch.Generator = module.default_generators[module.current_device()]
    return generator


def _rng_state() -> torch.Tensor:
    return _device_generator().get_state()


# Activation checkpointing under DeepSpeed's names: ``configure``, ``checkpoint``,
# ``is_configured``, ``reset`` and so on.
#
# ``y = checkpoint(block, x)`` keeps x instead of the activations inside ``block``, and runs
# ``block`` again in backward with the random numbers of the first time: memory of one block instead
# of all, for one more forward (Chen et al. 2016). The functions share one object, because
# DeepSpeed's API knows no engine there; :data:`CHECKPOINTING` is all the state that there is.


class ActivationCheckpointing:
    """The settings of a process, and the call that uses them."""

    def __init__(self) -> None:
        self.rng = RngStatesTracker()
        self.host = HostInputs()
        self.forget()

    def __deepcopy__(self, memo: dict[int, Any]) -> ActivationCheckpointing:
        return self  # layers that are copied for a plan have its methods

    def forget(self) -> None:
        """Return to the state before any configuration."""
        self._configured = self._partition = self._on_host = False
        self._axis: AxisComm | None = None  # None: there are no other model-parallel ranks
        self._part: Callable[[], int] = int  # this rank's part of a model that is parallel itself: 0
        self.rng.reset()

    def configure(
        self,
        mpu_: Any = None,
        deepspeed_config: DsConfig | Mapping[str, Any] | str | Path | None = None,
        partition_activations: bool | None = None,
        contiguous_checkpointing: bool | None = None,
        num_checkpoints: int | None = None,
        checkpoint_in_cpu: bool | None = None,
        synchronize: bool | None = None,
        profile: bool | None = None,
    ) -> None:
        """Configure as DeepSpeed does: what is given counts, else the section
        ``activation_checkpointing`` of ``deepspeed_config``.

        ``contiguous_checkpointing``, ``num_checkpoints``, ``synchronize`` and ``profile`` have no
        effect: there are no buffers that would have to be contiguous, and torch.profiler shows what
        a block costs. Partitioning needs the mesh of an engine (``mesh.model`` in ds_config).
        """
        section = ActivationCheckpointingSection()
        if mpu_ is not None:
            names = ("get_tensor_model_parallel_rank", "get_model_parallel_rank")  # new and old Megatron-LM
            self._part = next((getattr(mpu_, name) for name in names if hasattr(mpu_, name)), self._part)
        if deepspeed_config is not None:
            config = deepspeed_config if isinstance(deepspeed_config, DsConfig) else read_ds_config(deepspeed_config)
            section = config.activation_checkpointing
        partition = section.partition_activations if partition_activations is None else partition_activations
        if partition and self._axis is None and mpu_ is not None and mpu_.get_model_parallel_world_size() > 1:
            raise ConfigError(
                "activations can be partitioned only over the model axis of an engine's mesh",
                where="checkpointing.configure(partition_activations)",
                fix="Set mesh.model and activation_checkpointing.partition_activations in ds_config, and call initialize() first.",
            )
        self._on_host = section.cpu_checkpointing if checkpoint_in_cpu is None else checkpoint_in_cpu
        self._configured, self._partition = True, partition

    def configure_from(self, section: ActivationCheckpointingSection, axis: AxisComm) -> None:
        """Take the section of an engine and its model axis; the last initialized engine counts."""
        self._configured, self._axis = True, axis if axis.size > 1 else None
        self._partition, self._on_host = section.partition_activations, section.cpu_checkpointing
        self._part = partial(getattr, axis, "index")

    @contextmanager
    def planning(self, host: HostInputs, *, on_host: bool) -> Iterator[None]:
        """Have ``host`` in place of the real one inside the block."""
        before = self.host, self._on_host
        self.host, self._on_host = host, on_host
        try:
            yield
        finally:
            self.host, self._on_host = before

    def is_configured(self) -> bool:
        return self._configured

    def reset(self) -> None:
        """Do nothing: there are no buffers to free. Settings stay, as in DeepSpeed, whose users
        call this before every evaluation."""

    def partition_activations_in_checkpoint(self, partition_activation: bool) -> None:
        """Set whether the last engine's inputs are cut over its model axis."""
        self._configured, self._partition = True, bool(partition_activation)

    def set_num_layers(self, nlayers: int) -> None:
        """Do nothing: there are no buffers for the inputs of so many layers."""

    def model_parallel_cuda_manual_seed(self, seed: int) -> None:
        """Seed the device's generator with ``seed``, and the state ``model-parallel-rng`` of
        ``get_cuda_rng_tracker()`` with a seed that differs between the model-parallel ranks, as
        Megatron-LM does: ``seed + 2718 + rank``."""
        self.rng.reset()
        _device_generator().manual_seed(seed)
        self.rng.add(MODEL_PARALLEL, seed + 2718 + self._part())

    def get_cuda_rng_tracker(self) -> RngStatesTracker:
        """Return the named states of the random generator."""
        return self.rng

    def checkpoint(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return ``function(*args, **kwargs)``, with only these kept for backward. Unconfigured,
        they are kept whole on their device. Named states of the random generator are in the second
        run what they were in the first."""
        states = self.rng.get_states()
        if states:  # torch.compile takes no contexts
            kwargs["context_fn"] = lambda: (nullcontext(), self.rng.again(states))
        # torch saves the inputs under the hooks that are active here, and what the function saves
        # under its own.
        saved = SavedInputs(self._axis if self._partition else None, self.host if self._on_host else None)
        kept = self._on_host or (self._partition and self._axis is not None)
        with saved_tensors_hooks(saved.pack, saved.unpack) if kept else nullcontext():
            return torch_checkpoint.checkpoint(function, *args, use_reentrant=False, preserve_rng_state=True, **kwargs)


CHECKPOINTING = ActivationCheckpointing()

configure = CHECKPOINTING.configure
checkpoint = CHECKPOINTING.checkpoint
is_configured = CHECKPOINTING.is_configured
reset = CHECKPOINTING.reset
partition_activations_in_checkpoint = CHECKPOINTING.partition_activations_in_checkpoint
set_num_layers = CHECKPOINTING.set_num_layers
model_parallel_cuda_manual_seed = CHECKPOINTING.model_parallel_cuda_manual_seed
get_cuda_rng_tracker = CHECKPOINTING.get_cuda_rng_tracker
