"""Activation checkpointing under DeepSpeed's names: ``configure``, ``checkpoint``, ``is_configured``, ``reset``.

``y = checkpoint(block, x)`` keeps x instead of the activations inside ``block``, and runs ``block`` again in backward with the random numbers of
the first time: memory of one block instead of all, for one more forward (Chen et al. 2016). The functions share one object, because DeepSpeed's
API knows no engine there; :data:`CHECKPOINTING` is all the state that there is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import checkpoint as torch_checkpoint

from zero_trial.activation.saved_inputs import ModelAxis, SavedInputs, to_host
from zero_trial.config.reader import read_ds_config
from zero_trial.config.sections import ActivationCheckpointingSection, DsConfig
from zero_trial.errors import ConfigError


@dataclass(frozen=True)
class Settings:
    """How inputs are kept. ``axis`` None: there are no other model-parallel ranks."""

    partition: bool = False
    on_host: bool = False
    axis: ModelAxis | None = None


class Checkpointing:
    """The settings of a process, and the call that uses them. ``to_host`` is how a tensor leaves the device."""

    def __init__(self, to_host: Callable[[torch.Tensor], torch.Tensor] = to_host) -> None:
        self._to_host = to_host
        self._settings: Settings | None = None

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
        """As in DeepSpeed: what is given counts, else the section ``activation_checkpointing`` of ``deepspeed_config``.

        ``contiguous_checkpointing``, ``num_checkpoints``, ``synchronize`` and ``profile`` have no effect: there are no buffers that would have
        to be contiguous, and torch.profiler shows what a block costs. Partitioning needs the mesh of an engine (``mesh.model`` in ds_config).
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
        self._settings = Settings(partition, on_host, axis)

    def configure_from(self, section: ActivationCheckpointingSection, axis: ModelAxis) -> None:
        """The section of an engine with its model axis; the engine that is initialized last counts."""
        self._settings = Settings(
            section.partition_activations, section.cpu_checkpointing, axis if axis.size > 1 else None
        )

    def is_configured(self) -> bool:
        return self._settings is not None

    def reset(self) -> None:
        """Gives back buffers: there are none. Settings stay, as in DeepSpeed, whose users call this before every evaluation."""

    def forget(self) -> None:
        """As if nothing had ever been configured."""
        self._settings = None

    def checkpoint(self, function: Callable[..., Any], *args: Any) -> Any:
        """``function(*args)``, with only ``args`` kept for backward. Works unconfigured: then they are kept whole where they are."""
        with self._keeping():
            return torch_checkpoint.checkpoint(function, *args, use_reentrant=False, preserve_rng_state=True)

    def _keeping(self) -> AbstractContextManager[Any]:
        settings = self._settings
        if settings is None or not (settings.on_host or (settings.partition and settings.axis is not None)):
            return nullcontext()
        saved = SavedInputs(settings.axis if settings.partition else None, self._to_host if settings.on_host else None)
        # torch saves the inputs under the hooks that are active here, and what the function saves under its own.
        return saved_tensors_hooks(saved.pack, saved.unpack)


CHECKPOINTING = Checkpointing()
configure = CHECKPOINTING.configure
checkpoint = CHECKPOINTING.checkpoint
is_configured = CHECKPOINTING.is_configured
reset = CHECKPOINTING.reset
