"""The engine's questions, values and checkpoint calls under DeepSpeed's names: nothing here takes part in a step."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zero_trial.config.batch import BatchTriple, solve_batch
from zero_trial.config.sections import DsConfig
from zero_trial.engine.data import sharded_loader
from zero_trial.errors import TrialError
from zero_trial.precision.loss_scale import LossScale
from zero_trial.zero import ShardedOptimizer

if TYPE_CHECKING:
    from zero_trial.engine.nonfinite import NonFinite
    from zero_trial.engine.roster import Roster
    from zero_trial.engine.saving import Saver
    from zero_trial.engine.verdict import Verdict
    from zero_trial.mesh import Mesh


class EngineSurface(nn.Module):
    """What user code asks of an engine besides stepping it. :class:`Engine` sets the attributes.

    What depends on whether the last step was skipped is asked of the verdict, which may have to wait for the device (on CUDA).
    """

    module: nn.Module
    optimizer: ShardedOptimizer | None
    config: DsConfig
    mesh: Mesh
    device: torch.device
    verdict: Verdict
    micro_steps: int
    local_rank: int
    _batch: BatchTriple
    _lr_scheduler: Any
    _saver: Saver
    _updated: bool
    roster: Roster | None = None  # of the module, from initialize() on

    def train(self, mode: bool = True) -> EngineSurface:
        """torch's own. Raises TrialError for parameters that the model did not have when the engine was made."""
        self._check_roster("engine.train" if mode else "engine.eval")
        super().train(mode)
        return self

    def _check_roster(self, where: str) -> None:
        if self.roster is not None:
            self.roster.check(where)

    # --- values that wait for the last step -------------------------------------------------------------------------

    def get_global_grad_norm(self) -> float | None:
        """The norm of the last step's gradient before clipping; None before the first."""
        return self.verdict.known().norm

    def was_step_applied(self) -> bool:
        """Did the last :meth:`step` change the parameters?"""
        return self._updated and self.verdict.known().applied

    @property
    def skipped_steps(self) -> int:
        return self.verdict.known().skipped

    @skipped_steps.setter
    def skipped_steps(self, count: int) -> None:
        self.verdict.known().skipped = count

    def skipped_between(self, first: int, end: int) -> int:
        """How many of the steps number ``first`` to ``end`` - 1 (as :attr:`global_steps` counts) were skipped, of the last thousand skipped ones
        since the engine was built."""
        return sum(first <= step < end for step in self.verdict.known().skipped_at)

    @property
    def last_nonfinite(self) -> NonFinite | None:
        """Whose gradient was to blame for the last skipped step. On CUDA with several ranks it is named with the next backward pass."""
        return self.verdict.known().nonfinite

    @property
    def loss_scaler(self) -> LossScale:
        return self.verdict.known().scaler

    @loss_scaler.setter
    def loss_scaler(self, scaler: LossScale) -> None:
        self.verdict.known().scaler = scaler

    @property
    def lr_scheduler(self) -> Any:
        self.verdict.known()
        return self._lr_scheduler

    @lr_scheduler.setter
    def lr_scheduler(self, schedule: Any) -> None:
        self._lr_scheduler = schedule

    def seconds_waited(self) -> float | None:
        """Seconds that this process has spent in collectives so far, most of them waiting for other ranks; None on CUDA, where the device waits."""
        return self.mesh.board.waited if self.device.type == "cpu" else None

    # --- values ---------------------------------------------------------------------------------------------------

    def get_lr(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups] if self.optimizer is not None else []

    def get_mom(self) -> list[Any]:
        """Each group's betas, or momentum."""
        groups = self.optimizer.param_groups if self.optimizer is not None else []
        return [group.get("betas", group.get("momentum")) for group in groups]

    def get_type(self) -> list[str]:
        return [type(self.optimizer.base).__name__] if self.optimizer is not None else []

    @property
    def loss_scale(self) -> float:
        return self.loss_scaler.scale

    @property
    def cur_scale(self) -> float:
        return self.loss_scaler.scale

    def comms_summary(self) -> dict[str, dict[str, int]]:
        """Calls, elements and bytes that this rank had to send since construction, by ``collective/axis``.

        ``comms_logger.prof_all: false`` leaves those whose collective is in ``prof_ops``.
        """
        logger, table = self.config.comms_logger, self.mesh.counters.table()
        return {
            name: entry for name, entry in table.items() if logger.prof_all or name.partition("/")[0] in logger.prof_ops
        }

    # --- batch ----------------------------------------------------------------------------------------------------

    def train_batch_size(self) -> int:
        return self._batch.train_batch_size

    def train_micro_batch_size_per_gpu(self) -> int:
        return self._batch.micro_batch_size

    def gradient_accumulation_steps(self) -> int:
        return self._batch.accumulation

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Another number of micro-batches per step; the micro-batch stays. Between steps only; the gradient buffers keep their dtype."""
        if self.micro_steps % self._batch.accumulation:
            raise TrialError("the batch size can change only between steps", where="engine.set_train_batch_size")
        self._batch = solve_batch(train_batch_size, self._batch.micro_batch_size, None, self.dp_world_size)
        self.micro_steps = 0

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Another micro-batch size; the accumulation steps stay and the global batch follows."""
        self._batch = solve_batch(None, micro_batch_size, self._batch.accumulation, self.dp_world_size)

    # --- questions ------------------------------------------------------------------------------------------------

    def zero_optimization_stage(self) -> int:
        return self.config.zero_optimization.stage

    def fp16_enabled(self) -> bool:
        return self.config.fp16.enabled

    def bfloat16_enabled(self) -> bool:
        return self.config.bf16.enabled

    @property
    def global_rank(self) -> int:
        return self.mesh.rank

    @property
    def world_size(self) -> int:
        return self.mesh.world.size

    @property
    def dp_world_size(self) -> int:
        return self.mesh.data.size

    @property
    def mp_world_size(self) -> int:
        return self.mesh.shape.model

    @property
    def data_parallel_group(self) -> Any:
        return self.mesh.data.group

    # --- checkpoints ----------------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Writes ``save_dir/tag`` (default ``global_stepN``). Collective over the world: every rank must call. See :class:`Saver`."""
        self.verdict.conclude()
        self._check_roster("engine.save_checkpoint")
        if client_state is not None and not isinstance(client_state, Mapping):
            raise TrialError(
                "client_state is not a dict",
                where="engine.save_checkpoint",
                got=type(client_state).__name__,
                expected="a dict or None",
            )
        return self._saver.save(Path(save_dir), tag, dict(client_state or {}), save_latest, exclude_frozen_parameters)

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Reads ``load_dir/tag`` (default: the newest that verifies). ``(path, client_state)``, or ``(None, None)`` if there is none. Collective."""
        if custom_load_fn is not None:
            raise TrialError(
                "custom_load_fn is not supported",
                where="engine.load_checkpoint",
                fix="Load into engine.module inside GatheredParameters instead.",
            )
        full = not load_module_only
        self.verdict.conclude()
        return self._saver.load(
            Path(load_dir),
            tag,
            load_module_strict,
            full and load_optimizer_states,
            full and load_lr_scheduler_states,
            full,
        )

    def save_16bit_model(
        self, save_dir: str | Path, save_filename: str = "model.safetensors", exclude_frozen_parameters: bool = False
    ) -> bool:
        """The model's weights in the parameters' dtype as one safetensors file, written by rank 0. Collective."""
        return self._saver.save_weights(Path(save_dir), save_filename, exclude_frozen_parameters)

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, torch.Tensor]:
        """The module's whole state dict on every rank. Collective over shard."""
        state = self.module.state_dict()
        if exclude_frozen_parameters:
            frozen = {
                name for name, param in self.module.named_parameters(remove_duplicate=False) if not param.requires_grad
            }
            state = {name: value for name, value in state.items() if name not in frozen}
        return dict(state)

    def load_module_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, custom_load_fn: Any = None
    ) -> None:
        """Loads whole tensors into the sharded module; shapes are the full ones. Collective: every rank passes the same values."""
        self.module.load_state_dict(state_dict, strict=strict)

    def deepspeed_io(self, dataset: Any, batch_size: int | None = None, **kwargs: Any) -> Any:
        """A loader over this rank's part of ``dataset``."""
        size = batch_size or self.train_micro_batch_size_per_gpu()
        return sharded_loader(
            dataset,
            size,
            self.mesh.data.index,
            self.mesh.data.size,
            drop_last=self.config.dataloader_drop_last,
            **kwargs,
        )
