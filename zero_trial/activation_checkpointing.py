"""Activation checkpointing: recompute in backward; inputs kept whole, cut over model-parallel
ranks, or on the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import checkpoint as torch_checkpoint

from zero_trial.ds_config.keys_running import ActivationCheckpointingSection
from zero_trial.ds_config.reader import read_ds_config
from zero_trial.ds_config.table import DsConfig
from zero_trial.errors import ConfigError


class ModelAxis(Protocol):
    """The model-parallel ranks, whose inputs are equal: what partitioning needs of a mesh axis."""

    @property
    def size(self) -> int: ...

    @property
    def index(self) -> int: ...

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, label: str) -> Any:
        """Put every rank's ``shard`` in rank order into ``full``; the result has ``wait()``."""


@dataclass(frozen=True)
class SavedInput:
    """One saved tensor: ``data`` is the tensor itself, or this rank's part of it, perhaps on the
    host."""

    data: torch.Tensor
    shape: torch.Size
    device: torch.device
    cut: bool


class SavedInputs:
    """The two hooks of torch.autograd.graph.saved_tensors_hooks.

    With ``axis``, a floating tensor of n elements costs n/M on each of its M ranks, and an
    all-gather in backward: every rank of the axis must run backward through the same checkpoints.
    ``to_host`` moves what is left off the device.
    """

    def __init__(self, axis: ModelAxis | None, to_host: Callable[[torch.Tensor], torch.Tensor] | None) -> None:
        self._axis = axis if axis is not None and axis.size > 1 else None
        self._to_host = to_host

    def pack(self, tensor: torch.Tensor) -> SavedInput:
        data, cut = tensor, False
        if self._axis is not None and tensor.is_floating_point() and tensor.numel() >= self._axis.size:
            data, cut = self._part(tensor, self._axis), True
        if self._to_host is not None:
            data = self._to_host(data)
        return SavedInput(data, tensor.shape, tensor.device, cut)

    def unpack(self, kept: SavedInput) -> torch.Tensor:
        data = kept.data.to(kept.device, non_blocking=True)
        if not kept.cut or self._axis is None:
            return data
        full = torch.empty(data.numel() * self._axis.size, dtype=data.dtype, device=data.device)
        self._axis.all_gather(full, data, "saved activations").wait()
        return full[: kept.shape.numel()].view(kept.shape)

    def _part(self, tensor: torch.Tensor, axis: ModelAxis) -> torch.Tensor:
        """Return this rank's slice of the flat values, padded so that all slices are equally
        long."""
        flat = tensor.detach().reshape(-1)
        length = -(-flat.numel() // axis.size)
        own = flat[axis.index * length : (axis.index + 1) * length]
        part = torch.zeros(length, dtype=tensor.dtype, device=tensor.device)
        part[: own.numel()].copy_(own)
        return part


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in pinned memory; a tensor that is on the host stays as it is. Ordered by the
    current stream, without waiting for it."""
    if tensor.device.type == "cpu":
        return tensor
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor.detach(), non_blocking=True)


# Activation checkpointing under DeepSpeed's names: ``configure``, ``checkpoint``,
# ``is_configured``, ``reset``.
#
# ``y = checkpoint(block, x)`` keeps x instead of the activations inside ``block``, and runs
# ``block`` again in backward with the random numbers of the first time: memory of one block instead
# of all, for one more forward (Chen et al. 2016). The functions share one object, because
# DeepSpeed's API knows no engine there; :data:`CHECKPOINTING` is all the state that there is.


@dataclass(frozen=True)
class CheckpointingOptions:
    """How inputs are kept. ``axis`` None: there are no other model-parallel ranks."""

    partition: bool = False
    on_host: bool = False
    axis: ModelAxis | None = None


class ActivationCheckpointing:
    """The settings of a process, and the call that uses them. ``to_host`` is how a tensor leaves
    the device."""

    def __init__(self, to_host: Callable[[torch.Tensor], torch.Tensor] = to_host) -> None:
        self._to_host = to_host
        self._settings: CheckpointingOptions | None = None

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
        if deepspeed_config is not None:
            config = deepspeed_config if isinstance(deepspeed_config, DsConfig) else read_ds_config(deepspeed_config)
            section = config.activation_checkpointing
        partition = section.partition_activations if partition_activations is None else partition_activations
        axis = self._settings.axis if self._settings is not None else None
        if partition and axis is None and mpu_ is not None and mpu_.get_model_parallel_world_size() > 1:
            raise ConfigError(
                "activations can be partitioned only over the model axis of an engine's mesh",
                where="checkpointing.configure(partition_activations)",
                fix="Set mesh.model and activation_checkpointing.partition_activations in ds_config, and call initialize() first.",
            )
        on_host = section.cpu_checkpointing if checkpoint_in_cpu is None else checkpoint_in_cpu
        self._settings = CheckpointingOptions(partition, on_host, axis)

    def configure_from(self, section: ActivationCheckpointingSection, axis: ModelAxis) -> None:
        """Return the section of an engine with its model axis; the engine that is initialized last
        counts."""
        self._settings = CheckpointingOptions(
            section.partition_activations, section.cpu_checkpointing, axis if axis.size > 1 else None
        )

    def is_configured(self) -> bool:
        return self._settings is not None

    def reset(self) -> None:
        """Do nothing: there are no buffers to free. Settings stay, as in DeepSpeed, whose users
        call this before every evaluation."""

    def forget(self) -> None:
        """Return to the state before any configuration."""
        self._settings = None

    def checkpoint(self, function: Callable[..., Any], *args: Any) -> Any:
        """Return ``function(*args)``, with only ``args`` kept for backward. Unconfigured, they are
        kept whole on their device."""
        with self._keeping():
            return torch_checkpoint.checkpoint(function, *args, use_reentrant=False, preserve_rng_state=True)

    def _keeping(self) -> AbstractContextManager[Any]:
        settings = self._settings
        if settings is None or not (settings.on_host or (settings.partition and settings.axis is not None)):
            return nullcontext()
        saved = SavedInputs(settings.axis if settings.partition else None, self._to_host if settings.on_host else None)
        # torch saves the inputs under the hooks that are active here, and what the function saves
        # under its own.
        return saved_tensors_hooks(saved.pack, saved.unpack)


CHECKPOINTING = ActivationCheckpointing()


configure = CHECKPOINTING.configure


checkpoint = CHECKPOINTING.checkpoint


is_configured = CHECKPOINTING.is_configured


reset = CHECKPOINTING.reset
