"""The parameters that a model had when its engine was made: what is put into it later is trained by nobody, and saved by nobody."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from zero_trial.comm import Mesh
from zero_trial.ds_config.batch import BatchTriple, solve_batch
from zero_trial.ds_config.table import DsConfig
from zero_trial.engine.compat import EngineMpu, sharded_loader
from zero_trial.engine.monitors import Monitor
from zero_trial.engine.observe import COLLECTOR_PAUSE, StepReporter
from zero_trial.engine.profile import BACKWARD, FORWARD, REDUCE_WAIT, STEP, Phases
from zero_trial.engine.resolved_config import ResolvedConfig
from zero_trial.engine.saving import StateSaver
from zero_trial.engine.step import StepOutcome
from zero_trial.errors import TrialError
from zero_trial.precision import LossScale, cast_floats, forward_of
from zero_trial.sharding.dtypes import wide_dtype
from zero_trial.zero import ShardedModel, ShardedOptimizer

if TYPE_CHECKING:
    from zero_trial.engine.step import NonFiniteStep

SHOWN = 3  # names in a message


class ParameterCheck:
    """Of one module. It keeps no parameter alive."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._trained = WeakTensorKeyDictionary()  # parameter -> whether it was to be trained
        self._names = frozenset(name for name, _ in module.named_parameters())
        for param in module.parameters():
            self._trained[param] = param.requires_grad

    def check(self, where: str) -> None:
        """Raises TrialError for parameters that came, or were unfrozen, after the engine was made. Reads names and flags only.

        Frozen ones under names of their own may come: nobody is to train them (a moving average, a metric's network), and a checkpoint has them.
        """
        fresh, unfrozen = [], []
        for name, param in self._module.named_parameters():
            if param not in self._trained:
                if param.requires_grad or name in self._names:
                    fresh.append(name)
            elif param.requires_grad and not self._trained[param]:
                unfrozen.append(name)
        if fresh:
            raise TrialError(
                "the model has parameters that came after its engine was made, and that nobody trains",
                where=where,
                got=_listed(fresh),
                fix="Change the model before initialize(); to change it later, save a checkpoint and initialize() anew.",
            )
        if unfrozen:
            raise TrialError(
                "parameters were unfrozen after the engine was made, and nobody trains them",
                where=where,
                got=_listed(unfrozen),
                fix="Set requires_grad before initialize(); to unfreeze later, save a checkpoint and initialize() anew.",
            )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


# The engine's questions, values and checkpoint calls under DeepSpeed's names: nothing here takes part in a step.


class EngineSurface(nn.Module):
    """What user code asks of an engine besides stepping it. :class:`Engine` sets the attributes.

    What depends on whether the last step was skipped is asked of the verdict, which may have to wait for the device (on CUDA).
    """

    module: nn.Module
    optimizer: ShardedOptimizer | None
    config: DsConfig
    mesh: Mesh
    device: torch.device
    verdict: StepOutcome
    micro_steps: int
    local_rank: int
    _batch: BatchTriple
    _lr_scheduler: Any
    _saver: StateSaver
    _updated: bool
    roster: ParameterCheck | None = None  # of the module, from initialize() on

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
    def last_nonfinite(self) -> NonFiniteStep | None:
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
        return self.mesh.heartbeat.waited if self.device.type == "cpu" else None

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


# The object that runs one step (forward, backward, reduce, clip, update, gather) and knows nothing about experiments.


log = logging.getLogger("zero_trial")


class Engine(EngineSurface):
    """A model with its sharded optimizer: ``loss = engine(x)``, ``engine.backward(loss)``, ``engine.step()``.

    The text below never names a ZeRO stage: what lives how long is in the plan. Every rank must call ``backward`` and ``step`` equally often.
    """

    def __init__(
        self,
        module: nn.Module,
        model: ShardedModel,
        optimizer: ShardedOptimizer | None,
        lr_scheduler: Any,
        wiring: ResolvedConfig,
        config: DsConfig,
        mesh: Mesh,
        device: torch.device,
        *,
        local_rank: int = 0,
        client_mpu: Any = None,
    ) -> None:
        super().__init__()
        self.module = module
        self.sharded = model
        self.optimizer = optimizer
        self.wiring = wiring
        self.config = config
        self.mesh = mesh
        self.device = device
        self.mpu = client_mpu if client_mpu is not None else EngineMpu(mesh)
        self.local_rank = local_rank
        self.training_dataloader: Any = None
        self.verdict = StepOutcome(model, wiring, device)
        self.lr_scheduler = lr_scheduler
        self.global_steps = self.global_samples = self.micro_steps = 0
        self._batch = wiring.batch
        self._updated = False  # the last call of step was at a boundary
        self._boundary: bool | None = None  # set by a caller who owns the boundary
        self._pending = 0  # backward passes since the last step
        self._managed = config.managed_gradient_accumulation
        self._call = forward_of(module, wiring.autocast, device.type)
        self._sync = True
        self._saver = StateSaver(self)
        self.monitor, self.phases, self.reporter = (
            Monitor(),
            Phases(),
            StepReporter(),
        )  # null objects, until somebody watches
        model.optimizer = optimizer
        model.gradient_multiplier = lambda: self.verdict.unscale()

    # --- one step -------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward. Floating inputs are cast to the parameters' dtype when that is 16-bit."""
        self.phases.begin(FORWARD)
        if self.wiring.policy.param != torch.float32:
            args, kwargs = cast_floats((args, kwargs), self.wiring.policy.param)
        output = self._call(*args, **kwargs)
        self.phases.end(FORWARD)
        return output

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Gradients of ``loss`` (a scalar), scaled by 1/accumulation and the loss scale; reduced where the plan says so. Returns loss/accumulation.

        Collective over the data-parallel ranks whenever gradients are reduced.
        """
        self._check_loss(loss)
        self.verdict.conclude()  # the loss scale is known, and old gradients are needed no more
        self.reporter.saw_loss(loss)
        self.phases.begin(BACKWARD)
        steps = self._batch.accumulation if scale_wrt_gas else 1
        last = self.is_gradient_accumulation_boundary()
        reduce = self._sync and (last or self.sharded.plan.reduces_every_micro_batch)
        self.sharded.begin_backward(reduce=reduce, last=last)
        factor = self.verdict.scaler.scale / steps
        (loss if factor == 1.0 else loss.to(wide_dtype(loss.dtype, torch.float32)) * factor).backward(
            retain_graph=retain_graph
        )
        self.phases.end(BACKWARD)
        self.phases.begin(REDUCE_WAIT)
        self.sharded.end_backward()
        self.phases.end(REDUCE_WAIT)
        self._pending += 1
        return loss.detach() if steps == 1 else loss.detach() / steps

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """At the accumulation boundary: clip, update, publish, advance the schedule; before it: nothing but counting. Collective.

        Where the caller owns the boundary (``managed_gradient_accumulation: false``) every call is one. Raises TrialError at a boundary to
        which no gradient has come: weight decay and momentum would move the weights all the same.
        """
        boundary = not self._managed or self.is_gradient_accumulation_boundary()
        if boundary and self.optimizer is not None:
            self._require_gradients()
        micro_batches = self._batch.accumulation if self._managed else self._pending
        self.micro_steps += 1 if self._managed else micro_batches
        self._updated = False
        if boundary:
            self._update(micro_batches, lr_kwargs or {})

    def _update(self, micro_batches: int, lr_kwargs: Mapping[str, Any]) -> None:
        """The update itself, after ``micro_batches`` backward passes."""
        if self.optimizer is None:
            raise TrialError(
                "there is no optimizer to step", where="engine.step", fix='Add "optimizer" to ds_config or pass one.'
            )
        self.phases.begin(STEP)
        self.verdict.conclude()
        self.sharded.reducer.ensure_reduced()
        self.verdict.decide(self.global_steps, self._lr_scheduler, lr_kwargs)
        self._updated = True
        self.global_steps += 1
        self.global_samples += micro_batches * self._batch.micro_batch_size * self.dp_world_size
        self._pending = 0
        self.mesh.heartbeat.step = self.global_steps
        self.phases.end(STEP)
        self.reporter.after_step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients since the last step, also those that another engine's loss left here (a GAN's discriminator).

        In the middle of an accumulation it starts again: a step would otherwise divide the gradients of too few micro-batches by all.
        """
        self.sharded.reducer.reset()
        self._pending = 0
        done = self.micro_steps % self._batch.accumulation if self._managed and self._boundary is None else 0
        if done:
            self.micro_steps -= done
            if self.mesh.rank == 0:
                log.warning(
                    "zero_grad() after %d of %d micro-batches: the accumulation starts again",
                    done,
                    self._batch.accumulation,
                )
        for param in self.module.parameters():
            param.grad = None

    def _require_gradients(self) -> None:
        """Of this engine's own losses since the last step, or of another's."""
        if not self._pending and not any(
            landing.touched or landing.shard_filled for landing in self.sharded.grad_buffers
        ):
            raise TrialError(
                "there are no gradients to step with",
                where="engine.step",
                got=f"no backward pass since step {self.global_steps}",
                fix="Call engine.backward(loss) on every rank before it, or leave this step() out.",
            )

    def _check_loss(self, loss: Any) -> None:
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise TrialError(
                "the loss is not a scalar",
                where="engine.backward",
                got=got,
                expected="a tensor with one element",
                fix="Use loss.mean().",
            )
        if not loss.requires_grad:
            raise TrialError(
                "the loss has no history",
                where="engine.backward",
                fix="Compute it with gradients enabled, from a parameter that requires grad.",
            )

    # --- accumulation ---------------------------------------------------------------------------------------------

    def is_gradient_accumulation_boundary(self) -> bool:
        """Is the micro-batch under way the last one before an update? A caller who owns the boundary has said so, or it is not known to be."""
        if self._boundary is not None or not self._managed:
            return bool(self._boundary)
        return (self.micro_steps + 1) % self._batch.accumulation == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """From now on the caller says where the boundary is."""
        self._boundary = is_boundary

    def pending_micro_batches(self) -> int:
        """Micro-batches whose gradients wait for a step."""
        counted = self._managed and self._boundary is None
        return self.micro_steps % self._batch.accumulation if counted else self._pending

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside only accumulate, at every ZeRO stage; the first one outside reduces the sum. No communication of gradients."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def persistent_bytes(self) -> dict[str, int]:
        """Bytes per kind that outlive a step on this rank: parameters (with masters), gradients, optimizer state."""
        states = self.optimizer.persistent_bytes() if self.optimizer is not None else 0
        return self.sharded.persistent_bytes() | {"optimizer": states}

    def destroy(self) -> None:
        """Takes all hooks off; the module is an ordinary one again, monitors are closed, and offloaded state is gone. Collective over shard.

        All that can be closed is closed, also where a disk has failed and the module cannot be whole again: then StorageError comes at the end.
        """
        with ExitStack() as last_first:
            last_first.callback(COLLECTOR_PAUSE.release, self)
            if self.optimizer is not None:
                last_first.callback(self.optimizer.close)
            last_first.callback(self.monitor.close)
            last_first.callback(self.reporter.close)
            last_first.callback(self.sharded.remove_hooks)
            last_first.callback(self.verdict.close)

    def __getattr__(self, name: str) -> Any:
        """Falls through to the module, so that ``engine.generate(...)`` works."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            modules = self.__dict__.get("_modules", {})
            if "module" in modules and hasattr(modules["module"], name):
                return getattr(modules["module"], name)
            raise
