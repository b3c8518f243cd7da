"""Engine methods other than its steps: settings, ranks and counts under DeepSpeed's names,
offloaded states, measurements."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch
from torch import nn

from zero_trial.checkpoint.background import BackgroundSaver
from zero_trial.comm import Mesh
from zero_trial.device import is_accelerator, torch_module
from zero_trial.ds_config.batch import BatchTriple, solve_batch
from zero_trial.ds_config.table import DsConfig
from zero_trial.engine.resolved_config import ResolvedConfig
from zero_trial.engine.step import NonFiniteStep, StepOutcome
from zero_trial.errors import TrialError
from zero_trial.sharding.model import ShardedModel
from zero_trial.sharding.optimizer import ShardedOptimizer
from zero_trial.sharding.precision import DynamicScale, dtype_from_name


class EngineAccessors(nn.Module):
    """An engine's settings, under DeepSpeed's names (also those of :data:`SETTINGS`), and its
    progress. Reading step counts may wait for the device."""

    module: nn.Module
    sharded: ShardedModel
    optimizer: ShardedOptimizer | None
    outcome: StepOutcome
    config: DsConfig
    resolved: ResolvedConfig
    mesh: Mesh
    device: torch.device
    observer: Any
    global_steps: int
    global_samples: int
    micro_steps: int
    looked_for_runs: float
    _background: BackgroundSaver
    _batch: BatchTriple
    _managed: bool
    _boundary: bool | None
    _stepped: bool
    _client_optimizer: bool

    # --- batch ------------------------------------------------------------------------------------

    def train_batch_size(self) -> int:
        return self._batch.train_batch_size

    def train_micro_batch_size_per_gpu(self) -> int:
        return self._batch.micro_batch_size

    def gradient_accumulation_steps(self) -> int:
        return self._batch.accumulation

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return whether the current micro-batch is the last one before an update, or the value
        that the caller set if the caller owns the boundary."""
        if self._boundary is not None or not self._managed:
            return bool(self._boundary)
        return (self.micro_steps + 1) % self._batch.accumulation == 0

    # --- ds_config --------------------------------------------------------------------------------

    @property
    def _config(self) -> DsConfig:
        """Return the ds_config with the batch sizes in use, under DeepSpeed's name."""
        return self._batch.filled(self.config)

    # --- ranks ------------------------------------------------------------------------------------

    pipeline_parallelism = False
    has_moe_layers = False
    sparse_tensor_module_names: frozenset[str] = frozenset()  # gradients are dense
    enable_backward_allreduce = True

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

    seq_data_parallel_group = data_parallel_group

    # --- the last step ----------------------------------------------------------------------------

    def get_global_grad_norm(self) -> float | None:
        """Return the gradient norm before clipping, of the last step that was not skipped (see
        :attr:`skipped_steps`); None before the first step."""
        return self.outcome.result.applied_norm

    def was_step_applied(self) -> bool:
        """Return whether the last ``step`` changed the parameters."""
        return self._stepped and self.outcome.result.applied

    @property
    def skipped_steps(self) -> int:
        return self.outcome.result.skipped

    def skipped_between(self, first: int, end: int) -> int:
        """Count the skipped steps from number ``first`` to ``end`` - 1 (as ``global_steps``
        counts). Only the last thousand skipped steps since the engine was built are counted."""
        return sum(first <= step < end for step in self.outcome.result.skipped_at)

    @property
    def last_nonfinite(self) -> NonFiniteStep | None:
        """Return the gradient that caused the last skipped step."""
        return self.outcome.result.nonfinite

    @property
    def loss_scale(self) -> float:
        """Return the factor that scales the loss of the next backward pass."""
        return self.outcome.loss_scale

    cur_scale = loss_scale

    # --- batch ------------------------------------------------------------------------------------

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the number of micro-batches per step; the micro-batch size does not change. Only
        between steps; the gradient buffers keep their dtype."""
        if self.pending_micro_batches():
            raise TrialError("the batch size can change only between steps", where="engine.set_train_batch_size")
        self._batch = solve_batch(train_batch_size, self._batch.micro_batch_size, None, self.mesh.data.size)
        self.micro_steps = 0

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the micro-batch size; the accumulation does not change, and the global batch size
        follows."""
        self._batch = solve_batch(None, micro_batch_size, self._batch.accumulation, self.mesh.data.size)

    # --- optimizer and schedule -------------------------------------------------------------------

    @property
    def basic_optimizer(self) -> torch.optim.Optimizer | None:
        """Return the optimizer that updates this rank's shards."""
        return self.optimizer.optimizer if self.optimizer is not None else None

    def get_lr(self) -> list[Any]:
        """Return each group's learning rate."""
        return _of_groups(self, "lr")

    # --- states that are away, or averages, for a while -------------------------------------------

    def _required_optimizer(self, where: str) -> ShardedOptimizer:
        if self.optimizer is None:
            raise TrialError("there is no optimizer", where=where, fix='Add "optimizer" to ds_config or pass one.')
        return self.optimizer

    def ema_weights(self) -> AbstractContextManager[None]:
        """Replace parameters and masters by the moving averages of the weights (ds_config's
        ``ema``) inside the block, and restore the weights bit-identically afterward. Collective
        over shard; may be nested.

        Inside the block, ``save_16bit_model`` and ``module_state_dict`` return averages, and
        buffers stay the model's. Training, and saving or loading a checkpoint, raises TrialError.
        """
        return self._required_optimizer("engine.ema_weights").ema_weights()

    def offload_states(
        self,
        include: Collection[Any] | None = None,
        device: Any = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Move states from this rank's device to host memory until :meth:`reload_states`, for
        example between generation and training. On a rank that computes on the CPU, this is a
        no-op. Values that a script assigns to a parameter (``param.data = new``), before or after
        the move, are kept. Every rank must call it at the same point, outside :meth:`ema_weights`.

        Using an offloaded state raises TrialError: a step needs all states, a forward pass needs
        parameters, a checkpoint needs masters and moments.

        Args:
            include: any of optim_states, hp_params, lp_params, lp_grads, contiguous_grad_buffer, as
                strings or as DeepSpeed's OffloadStateTypeEnum; None: all. Memory that two kinds
                share moves only if both are included.
            device: "cpu".
            pin_memory: use page-locked memory, which makes copies to and from the device faster.
            non_blocking: return before the copies on the device have finished.
        """
        optimizer = self._required_optimizer("engine.offload_states")
        optimizer.offload_states(include, device, pin_memory, non_blocking)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Move back the states that :meth:`offload_states` moved; a no-op if there are none."""
        self._required_optimizer("engine.reload_states").reload_states(non_blocking)

    def empty_partition_cache(self) -> None:
        """Free the parameters that stage 3 keeps unsharded for later use, and torch's cached GPU
        memory. Only between steps or evaluations; every rank must call it at the same point."""
        self.sharded.unsharder.reshard_all()
        if is_accelerator(self.device):
            torch_module(self.device).empty_cache()

    # --- measurements -----------------------------------------------------------------------------

    def persistent_bytes(self) -> dict[str, int]:
        """Return this rank's bytes that live between steps: parameters, gradients, optimizer
        state."""
        states = self.optimizer.state_by_tensor.persistent_bytes() if self.optimizer is not None else 0
        return self.sharded.persistent_bytes() | {"optimizer": states}

    def seconds_waited(self) -> float | None:
        """Return the seconds that this process has waited in collectives; None on CUDA, where the
        device waits."""
        return self.mesh.heartbeat.waited if self.device.type == "cpu" else None

    def get_mfu(self, samples_per_second: float) -> float | None:
        """Return rank 0's MFU (model operations as a fraction of the device's peak) for the given
        number of samples per second over all ranks. None on other ranks, and until
        ``flops_profiler`` has counted a micro-batch."""
        profiler = self.observer.profiler
        return profiler.mfu(samples_per_second / self.mesh.data.size) if profiler is not None else None

    def comms_summary(self) -> dict[str, dict[str, int]]:
        """Return the calls, elements and bytes that this rank has sent since construction, by
        ``collective/axis``.

        With ``comms_logger.prof_all: false``, only the collectives in ``prof_ops`` are included.
        """
        logger, table = self.config.comms_logger, self.mesh.counters.table()
        return {
            name: entry for name, entry in table.items() if logger.prof_all or name.partition("/")[0] in logger.prof_ops
        }

    @property
    def checkpoint_under_way(self) -> bool:
        """Return whether a background save is not yet a complete checkpoint; the same on all
        ranks."""
        return self._background.current is not None

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Raise TrialError: neither pickle nor copy can include the parts on other ranks."""
        raise TrialError(
            "an engine cannot be pickled or copied, as by torch.save(engine)",
            fix="Call engine.save_checkpoint(folder) on every rank to resume, engine.save_16bit_model(folder) for the weights.",
        )

    def __getattr__(self, name: str) -> Any:
        """Return the names in :data:`SETTINGS` and :data:`ANSWERS`; otherwise ask the module."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if (path := SETTINGS.get(name)) is not None:
                return lambda: functools.reduce(getattr, path.split("."), self._config)
            if (answer := ANSWERS.get(name)) is not None:
                return functools.partial(answer, self)
            modules = self.__dict__.get("_modules", {})
            if "module" in modules and hasattr(modules["module"], name):
                return getattr(modules["module"], name)
            if (why := _REFUSED.get(name)) is not None:
                raise AttributeError(f"engine.{name} does not exist in zero_trial: {why}") from None
            raise


def _of_groups(engine: EngineAccessors, name: str) -> list[Any]:
    groups = engine.optimizer.param_groups if engine.optimizer is not None else []
    return [group.get(name, 0.0) for group in groups]


def _momenta(engine: EngineAccessors) -> list[Any]:
    """Return each group's betas, or momentum; 0.0 if it has neither."""
    both = zip(_of_groups(engine, "betas"), _of_groups(engine, "momentum"), strict=True)
    return [beta if beta != 0.0 else momentum for beta, momentum in both]


def _optimizer_names(engine: EngineAccessors) -> list[str]:
    return [type(engine.optimizer.base).__name__] if engine.optimizer is not None else []


def _optimizer_name(engine: EngineAccessors) -> str | None:
    """Return the class name of a client's optimizer, else ds_config's ``optimizer.type`` (in lower
    case if it is one of DeepSpeed's own names)."""
    if engine._client_optimizer:
        return next(iter(_optimizer_names(engine)), None)
    named = engine.config.optimizer.type if engine.config.optimizer is not None else None
    return named.lower() if named is not None and named.lower() in _DEEPSPEED_OPTIMIZERS else named


def _data_types(engine: EngineAccessors) -> tuple[torch.dtype, torch.dtype]:
    model = dtype_from_name(engine.config.precision, "precision")
    summed = engine.config.data_types.grad_accum_dtype
    return model, dtype_from_name(summed, "data_types.grad_accum_dtype") if summed is not None else model


def _offload_device(engine: EngineAccessors) -> str:
    section = engine.config.zero_optimization.offload_optimizer
    return section.device if section is not None else "none"


def _params_of(section: Any) -> dict[str, Any] | None:
    return dict(section.params) if section is not None else None


ANSWERS: dict[str, Callable[[EngineAccessors], Any]] = {
    "get_batch_info": lambda e: (e._batch.train_batch_size, e._batch.micro_batch_size, e._batch.accumulation),
    "zero_optimization_stage": lambda e: e.config.zero_optimization.stage,
    "zero_optimization": lambda e: e.config.zero_optimization.stage > 0,
    "zero_optimization_partition_gradients": lambda e: e.config.zero_optimization.stage >= 2,
    "zero_optimization_partition_weights": lambda e: e.config.zero_optimization.stage >= 3,
    "zero_use_cpu_optimizer": lambda e: _offload_device(e) in ("cpu", "nvme"),
    "zero_cpu_offload": lambda e: _offload_device(e) == "cpu",
    "zero_nvme_offload_optimizer": lambda e: _offload_device(e) == "nvme",
    "dynamic_loss_scale": lambda e: isinstance(e.resolved.policy.loss_scale, DynamicScale),
    "initial_dynamic_scale": lambda e: e.resolved.policy.loss_scale.scale,
    "get_data_types": _data_types,  # of the model's computation, and of gradient accumulation
    "checkpoint_tag_validation_enabled": lambda e: e.config.checkpoint.tag_validation.lower() != "ignore",
    "checkpoint_tag_validation_fail": lambda e: e.config.checkpoint.tag_validation.lower() == "fail",
    "postscale_gradients": lambda e: not e.config.prescale_gradients,
    "get_data_parallel_rank": lambda e: e.mesh.data.index,
    "get_model_parallel_rank": lambda e: e.mesh.coordinates["model"],
    "get_tensor_parallel_rank": lambda e: e.mesh.coordinates["model"],
    "get_mom": _momenta,
    "get_type": _optimizer_names,
    "optimizer_name": _optimizer_name,
    "optimizer_params": lambda e: _params_of(e.config.optimizer),
    "scheduler_name": lambda e: e.config.scheduler.type if e.config.scheduler is not None else None,
    "scheduler_params": lambda e: _params_of(e.config.scheduler),
}
"""Methods of DeepSpeed's engine without arguments, and their return values."""


SETTINGS = {
    "fp16_enabled": "fp16.enabled",
    "fp16_auto_cast": "fp16.auto_cast",
    "fp16_master_weights_and_gradients": "fp16.fp16_master_weights_and_grads",
    "bfloat16_enabled": "bf16.enabled",
    "bf16_master_weights_and_gradients": "bf16.bf16_master_weights_and_grads",
    "bf16_optimizer_states": "bf16.bf16_optimizer_states",
    "torch_autocast_enabled": "torch_autocast.enabled",
    "zero_gather_16bit_weights_on_model_save": "zero_optimization.gather_16bit_weights_on_model_save",
    "load_universal_checkpoint": "checkpoint.load_universal",
    "use_node_local_storage": "checkpoint.use_node_local_storage",
    **{
        name: name
        for name in (
            *("gradient_clipping", "gradient_predivide_factor", "managed_gradient_accumulation", "steps_per_print"),
            *("wall_clock_breakdown", "memory_breakdown", "dump_state", "dataloader_drop_last", "log_level"),
            *("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"),
        )
    },
    **{
        f"flops_profiler_{name}": f"flops_profiler.{name}"
        for name in (
            *("enabled", "profile_step", "module_depth", "top_modules", "detailed", "output_file"),
            "recompute_fwd_factor",
        )
    },
    **{
        f"zero_{name.removeprefix('zero_')}": f"zero_optimization.{name}"
        for name in (
            *("offload_optimizer", "offload_param", "reduce_scatter", "overlap_comm", "contiguous_gradients"),
            *("sub_group_size", "reduce_bucket_size", "allgather_bucket_size", "prefetch_bucket_size"),
            *("max_live_parameters", "max_reuse_distance", "param_persistence_threshold"),
            *("model_persistence_threshold", "module_granularity_threshold", "ignore_unused_parameters"),
            *("load_from_fp32_weights", "zero_hpz_partition_size", "zero_quantized_weights"),
            *("zero_quantized_nontrainable_weights", "zero_quantized_gradients"),
        )
    },
}
"""Methods of DeepSpeed's engine that return a ds_config value, and the path of its key."""

_DEEPSPEED_OPTIMIZERS = {
    *("adam", "adamw", "lamb", "lion", "adagrad", "muon", "muadam", "muadamw", "musgd"),
    *("onebitadam", "onebitlamb", "zerooneadam"),
}

_REFUSED = {
    "allreduce_gradients": "the engine reduces gradients itself, at the accumulation boundary",
    "clip_fp32_gradients": "set gradient_clipping in ds_config, or clip with torch before engine.step() at ZeRO 0 and 1",
    "save_fp16_model": "use save_16bit_model",
}
