"""Activation checkpointing: recompute in backward; inputs kept whole, cut over model-parallel
ranks, or on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import checkpoint as torch_checkpoint

from zero_trial.comm import AxisComm
from zero_trial.device import accelerator, torch_module
from zero_trial.ds_config.keys_running import ActivationCheckpointingSection
from zero_trial.ds_config.reader import read_ds_config
from zero_trial.ds_config.table import DsConfig
from zero_trial.errors import ConfigError


class SavedInput(NamedTuple):
    """``data`` is the saved tensor, or this rank's part of it (``cut``), perhaps on the host."""

    data: torch.Tensor
    shape: torch.Size
    device: torch.device
    cut: bool


class SavedInputs:
    """The two hooks of torch.autograd.graph.saved_tensors_hooks.

    With ``axis``, a floating tensor of n elements costs n/M on each of its M ranks, and an
    all-gather in backward: every rank of the axis must run backward through the same checkpoints.
    ``on_host`` moves what is left off the device.
    """

    def __init__(self, axis: AxisComm | None, *, on_host: bool) -> None:
        self._axis = axis if axis is not None and axis.size > 1 else None
        self._on_host = on_host

    def pack(self, tensor: torch.Tensor) -> SavedInput:
        data, cut = tensor, False
        if self._axis is not None and tensor.is_floating_point() and tensor.numel() >= self._axis.size:
            length = -(-tensor.numel() // self._axis.size)
            flat = tensor.detach().reshape(-1)[self._axis.index * length :][:length]
            data, cut = torch.nn.functional.pad(flat, (0, length - flat.numel())), True
        return SavedInput(to_host(data) if self._on_host else data, tensor.shape, tensor.device, cut)

    def unpack(self, kept: SavedInput) -> torch.Tensor:
        data = kept.data.to(kept.device, non_blocking=True)
        if not kept.cut or self._axis is None:
            return data
        full = torch.empty(data.numel() * self._axis.size, dtype=data.dtype, device=data.device)
        self._axis.all_gather(full, data, "saved activations").wait()
        return full[: kept.shape.numel()].view(kept.shape)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in pinned memory; a tensor that is on the host stays as it is. Ordered by the
    current stream, without waiting for it."""
    if tensor.device.type == "cpu":
        return tensor
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor.detach(), non_blocking=True)


# Random numbers of model-parallel ranks: dropout inside a part of a tensor must differ between the
# ranks, dropout of what all ranks hold must not. Megatron-LM's way is a second state of the
# device's generator, which a block of code switches to.

MODEL_PARALLEL = "model-parallel-rng"


class RngStatesTracker:
    """Named states of the random generator of this process's device (the current GPU, or the
    CPU)."""

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
                "there is such a state of the random generator", where="get_cuda_rng_tracker().add", got=what
            )
        self._seeds.add(seed)
        before = _rng_state()
        _device_generator().manual_seed(seed)
        self._states[name] = _rng_state()
        _device_generator().set_state(before)

    @contextmanager
    def fork(self, name: str = MODEL_PARALLEL) -> Iterator[None]:
        """Draw random numbers from the state ``name`` inside the block. Raises ConfigError for a
        name that was not added."""
        if name not in self._states:
            raise ConfigError(
                "there is no such state of the random generator",
                where="get_cuda_rng_tracker().fork",
                got=name,
                expected=", ".join(self._states) or "one that add() has made",
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
        self.forget()

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
        """Take the section of an engine and its model axis; the engine that is initialized last
        counts."""
        self._configured, self._axis = True, axis if axis.size > 1 else None
        self._partition, self._on_host = section.partition_activations, section.cpu_checkpointing
        self._part = partial(getattr, axis, "index")

    def is_configured(self) -> bool:
        return self._configured

    def reset(self) -> None:
        """Do nothing: there are no buffers to free. Settings stay, as in DeepSpeed, whose users
        call this before every evaluation."""

    def partition_activations_in_checkpoint(self, partition_activation: bool) -> None:
        """Set whether inputs are cut over the model axis of the engine that was initialized last;
        without one they are kept whole."""
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
        saved = SavedInputs(self._axis if self._partition else None, on_host=self._on_host)
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
