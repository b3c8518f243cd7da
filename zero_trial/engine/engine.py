"""The engine: forward, backward and step of a sharded model, with DeepSpeed's names for everything
else.

The step itself is in :mod:`zero_trial.engine.step`. An engine knows nothing about experiments.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zero_trial.activation_checkpointing import offload_checkpoints
from zero_trial.checkpoint.background import BackgroundSaver
from zero_trial.checkpoint.folder import OF_TRAINER
from zero_trial.comm import Mesh
from zero_trial.device import is_accelerator
from zero_trial.ds_config.batch import BatchTriple
from zero_trial.ds_config.table import DsConfig
from zero_trial.engine import loading, saving, uneven
from zero_trial.engine.accessors import EngineAccessors
from zero_trial.engine.backward import BackwardPasses
from zero_trial.engine.compat import EngineMpu, rank_loader
from zero_trial.engine.lr_schedules import HandSteps, log_who_steps, lr_scheduler_of, stepped_by_engine
from zero_trial.engine.observe import FORWARD, STEP, Monitor, Observer
from zero_trial.engine.resolved_config import ResolvedConfig
from zero_trial.engine.start_checks import reported
from zero_trial.engine.step import StepOutcome
from zero_trial.engine.weights import FullTensors, first_rank_state, module_state, save_weights
from zero_trial.errors import TrialError
from zero_trial.sharding.build_groups import fp32_buffers
from zero_trial.sharding.guards.freed import unasked
from zero_trial.sharding.guards.model_parameters import ParameterTable
from zero_trial.sharding.model import ShardedModel
from zero_trial.sharding.optimizer import ShardedOptimizer
from zero_trial.sharding.precision import cast_floats, explain_dtypes, forward_of

log = logging.getLogger("zero_trial")


class Engine(EngineAccessors):
    """A model with its sharded optimizer: ``loss = engine(x)``, ``engine.backward(loss)``,
    ``engine.step()``.

    Every rank must make the same number of calls to ``backward`` and ``step``.

    Args:
        module: the user's model; its parameters are the sharded model's.
        optimizer: the optimizer over the shards. None: only forward and backward work.
        outcome: applies the steps; ``model`` and ``optimizer`` read the loss scale from it.
        client_mpu: the caller's model-parallel unit, which becomes ``engine.mpu``.
        collate_fn: the default for loaders that :meth:`deepspeed_io` creates.
        client_optimizer: whether the caller passed the optimizer, as an object or a callable.
    """

    observer: Observer

    def __init__(
        self,
        module: nn.Module,
        model: ShardedModel,
        optimizer: ShardedOptimizer | None,
        lr_scheduler: Any,
        outcome: StepOutcome,
        observer: Observer,
        resolved: ResolvedConfig,
        config: DsConfig,
        mesh: Mesh,
        device: torch.device,
        *,
        local_rank: int = 0,
        client_mpu: Any = None,
        training_dataloader: Any = None,
        collate_fn: Any = None,
        client_optimizer: bool = False,
    ) -> None:
        super().__init__()
        self.module = module
        self.sharded = model
        self.optimizer = optimizer
        self.outcome = outcome
        self.observer = observer
        self.resolved = resolved
        self.config = config
        self.mesh = mesh
        self.device = device
        self.mpu = client_mpu if client_mpu is not None else EngineMpu(mesh)
        self.local_rank = local_rank
        self.training_dataloader = training_dataloader
        self.collate_fn = collate_fn
        self._client_optimizer = client_optimizer
        self.global_steps = self.global_samples = self.micro_steps = 0
        self._lr_scheduler = lr_scheduler
        self._hand_steps = HandSteps()
        self._batch: BatchTriple = resolved.batch
        self._stepped = False  # the last call of step was at a boundary
        self._boundary: bool | None = None  # set by a caller who owns the boundary
        # zero_grad() has dropped an unfinished accumulation since the last step
        self._restarted = False
        self._managed = config.managed_gradient_accumulation
        wide = [name for name, param in module.named_parameters() if param.dtype == torch.float32]
        wide = [] if resolved.policy.param == torch.float32 else wide
        wide += fp32_buffers(module) if resolved.policy.mixes_constants else []
        self._call = explain_dtypes(forward_of(module, resolved.autocast, device.type), wide)
        forbidden = not config.zero_optimization.ignore_unused_parameters
        self._table = ParameterTable(module, model.grad_buffers, forbidden=forbidden)
        self._passes = BackwardPasses(self, outcome, resolved, observer)
        self._background = BackgroundSaver(mesh.world)
        self._decoupled = config.checkpoint.writer.decoupled
        self.looked_for_runs = time.time()  # for other runs that save into the same folder
        self._warned = False  # about optimizer.zero_grad() doing nothing
        if optimizer is not None:
            optimizer.guard.on_zero_grad(weakref.WeakMethod(self._zero_grad_of_optimizer))
        if observer.events is not None:
            weakref.finalize(self, observer.events.write_evaluation)  # also when the interpreter ends

    # --- one step ---------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module's forward; with 16-bit parameters, cast floating-point inputs to their
        dtype."""
        if self.sharded.moved.kinds:
            self.sharded.moved.require_here("engine.forward", ("lp_params",))
        if self.config.activation_checkpointing.cpu_checkpointing:
            offload_checkpoints(self.module, everywhere=True)  # also modules that have enabled checkpointing since
        with self.observer.phase(FORWARD, self):
            if self.resolved.policy.param != torch.float32:
                args, kwargs = cast_floats((args, kwargs), self.resolved.policy.param)
            output = self._call(*args, **kwargs)
        if torch.is_grad_enabled():
            if self._passes.hints and self._passes.total >= 3 * (self.micro_steps + 1):
                self._warn_of_missing_steps()
            self._passes.watch(output)
        if self.observer.events is not None:
            self.observer.events.saw_output(self, output)
        return output

    def backward(
        self,
        loss: torch.Tensor,
        retain_graph: bool = False,
        scale_wrt_gas: bool = True,
        *,
        weight: float | torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute the gradients of ``loss`` (a scalar), scaled by 1/accumulation and the loss
        scale, and reduce them when the plan requires it. ``loss.backward()`` does the same, unless
        there is a loss scale (fp16).

        Returns loss/accumulation, or loss/weight. Collective over the data-parallel ranks whenever
        gradients are reduced. Raises TrialError for a loss without gradients.

        Args:
            weight: the weight of ``loss`` if it is a sum, such as its number of tokens. The step
                then uses the gradient of the sum of all losses divided by the sum of all weights,
                over micro-batches and ranks. All ranks must pass weights for all losses of a step,
                or for none; 0 is a valid weight.
        """
        try:
            return self._passes.run(loss, retain_graph=retain_graph, divide=scale_wrt_gas, weight=weight)
        except RuntimeError:  # from torch, which cannot name the cause: model.half() after initialize()
            self._table.check("engine.backward")
            raise

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return ``loss`` (any shape) times the loss scale, divided by the accumulation, for
        ``engine.scale(loss).backward()``.

        If several engines share a loss, each gets its gradients in its own scale.
        """
        return self._passes.scale(loss)

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """Take an optimizer step at the accumulation boundary: clip, update, publish, advance the
        schedule. Otherwise, only count the micro-batch. Collective.

        If the caller owns the boundary (``managed_gradient_accumulation: false``), every call is a
        boundary. Raises TrialError at a boundary without gradients, because weight decay and
        momentum would still change the weights.
        """
        if not self._managed and self._boundary is False:
            raise TrialError(
                "every engine.step() updates the weights, but the accumulation boundary is set to False",
                where="engine.step",
                got="managed_gradient_accumulation: false",
                fix="Call set_gradient_accumulation_boundary(True) before the last backward, or remove the key.",
            )
        if self._passes.cut_off or not self._passes.syncs:
            self._passes.require_whole_blocks()
        self._stepped = False
        if self._managed and not self.is_gradient_accumulation_boundary():
            self.micro_steps += 1
            return
        # From here on every rank takes the same step: everything that a single rank can refuse was
        # refused above, before any collective of the step.
        if self.optimizer is not None and not self._passes.pending:
            self._passes.require_gradients()
        micro_batches = self._batch.accumulation if self._managed else self._passes.pending
        calls = 1 if self._managed else micro_batches
        self._optimizer_step(micro_batches, calls, lr_kwargs or {}, self._passes.pending)

    def _optimizer_step(self, micro_batches: int, calls: int, lr_kwargs: Mapping[str, Any], passes: int) -> None:
        """Take an optimizer step with the gradients of ``micro_batches`` micro-batches and as many
        ``passes``, after ``calls`` that :attr:`micro_steps` has not counted."""
        optimizer = self.optimizer or self._required_optimizer("engine.step")
        if self.sharded.moved.kinds:
            self.sharded.moved.require_here("engine.step")
        if (unused := self._table.before_step(self.global_steps)) is not None:
            raise reported(self, unused)
        lr_scheduler = stepped_by_engine(self._lr_scheduler, lr_kwargs) if self._lr_scheduler is not None else None
        if lr_scheduler is not None and self.mesh.rank == 0:
            self._hand_steps.see(lr_scheduler, self.global_steps)
        self.micro_steps += calls
        with self.observer.phase(STEP, self):
            self.outcome.apply(self.sharded, optimizer, self.global_steps, lr_scheduler, lr_kwargs)
            self._stepped = True
            self.global_steps += 1
            if lr_scheduler is not None and self.mesh.rank == 0:
                self._hand_steps.see(lr_scheduler, self.global_steps)
            self.global_samples += micro_batches * self._batch.micro_batch_size * self.mesh.data.size
            self._passes.forget()
            self._restarted = self._passes.hints = False
            self._table.end_step(self.global_steps, passes, logs=self.mesh.data.index == 0)
            self.mesh.heartbeat.step = self.global_steps
        self.observer.after_step(self)
        if self._background.current is not None:
            self._background.poll()

    def _warn_of_missing_steps(self) -> None:
        """Log once that :meth:`step` is not called often enough, if the engine counts the calls."""
        if not self._managed or self._boundary is not None or self.optimizer is None:
            return
        self._passes.hints = False
        if self.mesh.rank == 0:
            log.warning(
                "%d backward passes, and engine.step() was called %d times: weights change after %d calls (gradient_accumulation_steps). Call "
                "it after each micro-batch, or set managed_gradient_accumulation: false. Several losses per micro-batch are no mistake",
                *(self._passes.total, self.micro_steps, self._batch.accumulation),
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients since the last step, including those from another engine's loss (a
        GAN's discriminator).

        In the middle of an accumulation, restart the accumulation with a warning; otherwise a step
        would divide the gradients of too few micro-batches by the full count. Raises TrialError if
        that happens twice without a step in between: a loop that calls zero_grad() before every
        micro-batch would never take a step.
        """
        done = self.pending_micro_batches() if self._managed and self._boundary is None else 0
        if done:
            self._restart_accumulation(done)
        self.sharded.reset_gradients()
        self.outcome.drop_weight()
        self._passes.forget()
        with unasked():
            for param in self.module.parameters():
                param.grad = None

    def _zero_grad_of_optimizer(self) -> None:
        """Implement optimizer.zero_grad(): before the first micro-batch of a step, the same as
        :meth:`zero_grad`. Loops call it before every micro-batch, where it drops nothing."""
        if not self.pending_micro_batches():
            if self._passes.any:
                self.zero_grad()
        elif self.mesh.rank == 0 and not self._warned:
            self._warned = True
            log.warning(
                "optimizer.zero_grad() between the micro-batches of a step does nothing; call engine.zero_grad() to drop their gradients"
            )

    def _restart_accumulation(self, done: int) -> None:
        """Drop ``done`` micro-batches; refuse to do so twice without a step in between."""
        wanted = self._batch.accumulation
        if self._restarted:
            raise TrialError(
                "zero_grad() drops an unfinished accumulation for the second time without a step in between",
                where="engine.zero_grad",
                got=f"{done} of {wanted} micro-batches since step {self.global_steps}",
                expected=f"{wanted} times backward() and step() before zero_grad()",
                fix="Remove the call: engine.step() clears the gradients itself. If zero_grad() runs before every micro-batch, no optimizer step "
                "is ever taken.",
            )
        self._restarted = True
        self.micro_steps -= done
        self._passes.total -= self._passes.pending
        if self.mesh.rank == 0:
            log.warning("zero_grad() after %d of %d micro-batches: the accumulation starts over", done, wanted)

    # --- accumulation -----------------------------------------------------------------------------

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Set whether this micro-batch is the last before a step; the engine stops counting."""
        self._boundary = is_boundary

    def pending_micro_batches(self) -> int:
        """Count the micro-batches since the last step."""
        counted = self._managed and self._boundary is None
        return self.micro_steps % self._batch.accumulation if counted else self._passes.pending

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate without communication inside the block, at every ZeRO stage. The first
        backward pass after the block, or :meth:`step`, reduces the sum.

        Raises TrialError inside itself or :meth:`coalesce_grad_reduction`, and for a step inside
        the block.
        """
        return self._passes.without_sync()

    def coalesce_grad_reduction(self) -> AbstractContextManager[None]:
        """Reduce the gradients of all backward passes in the block once, at its end. Use one block
        per :meth:`step`, and call :meth:`step` after the block. Collective over data at the end.

        Raises TrialError inside :meth:`no_sync` or itself, if the caller owns the boundary, and for
        a step inside the block.
        """
        if not self._managed:
            raise TrialError(
                "coalesce_grad_reduction() has no effect if the caller sets the accumulation boundary: all gradients are reduced at step()",
                where="engine.coalesce_grad_reduction",
                got="managed_gradient_accumulation: false",
                fix="Remove the block.",
            )
        return self._passes.coalesced()

    @property
    def inside_no_sync_ctxt(self) -> bool:
        """Return whether backward passes currently skip the reduction."""
        return not self._passes.syncs

    def compile(
        self,
        backend: str | Callable[..., Any] = "inductor",
        compile_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """Compile the module in place with ``torch.compile(backend=..., **compile_kwargs,
        **options)``: as a whole, or block by block if ZeRO stage 3 gathers and frees blocks.

        Compiled blocks train bit-identically to ``torch.compile`` without an engine.
        """
        for module in self.sharded.unsharder.compilable() or [self.module]:
            module.compile(backend=backend, **(dict(compile_kwargs or {}) | options))

    @torch.no_grad()
    def generate(self, *args: Any, gather: bool | None = None, **kwargs: Any) -> Any:
        """Call the module's own ``generate``. Ranks may generate different numbers of tokens.
        Collective over shard at ZeRO stage 3: every rank must call it.

        Args:
            gather: at stage 3, gather the full parameters once for all tokens (True), or for each
                token with ``synced_gpus=True`` (False). None: once, if the model has at most
                ``max_live_parameters``.
        """
        return uneven.generate(self, args, kwargs, gather)

    def evenly(self, batches: Iterable[Any]) -> Iterator[tuple[Any, float]]:
        """Yield ``(batch, 1.0)`` for each of this rank's batches, then ``(last batch, 0.0)`` until
        every rank has finished its own batches. Multiply losses and metrics by the second value.
        Collective over data, once; per batch only if a rank's ``batches`` have no length."""
        return uneven.evenly(batches, self.mesh)

    def train(self, mode: bool = True) -> Engine:
        """Set training or evaluation mode, as torch does. Raises TrialError if parameters were
        added after the engine was built."""
        self._table.check("engine.train" if mode else "engine.eval")
        super().train(mode)
        return self

    def destroy(self, *, rank0_only: bool = True) -> None:
        """Remove all hooks, so that the module is an ordinary torch module again; close monitors;
        drop offloaded state; finish a background save. Collective over shard, and over the world
        while a background save is in progress.

        Afterward the module is on the device where it was trained. If parameters are freed (stage
        3, ``offload_param``), rank 0 (in a pipeline, the first data-parallel rank of each stage)
        has the full module in host memory, gathered group by group. On the other ranks, freed
        parameters have no values, and using them raises TrialError. You can pass such a module to
        ``initialize``, which uses rank 0's values.

        Args:
            rank0_only: False gathers the full module on every rank, in host memory.

        If a disk has failed and the module cannot be gathered, everything else is closed before
        StorageError is raised.
        """
        with ExitStack() as last_first:
            if self.optimizer is not None:
                last_first.callback(self.optimizer.close)
            last_first.callback(self.observer.close)
            last_first.callback(self.sharded.remove_hooks, rank0_only=rank0_only)
            last_first.callback(self._background.close)

    # --- optimizer and schedule -------------------------------------------------------------------

    @property
    def lr_scheduler(self) -> Any:
        return self._lr_scheduler

    @lr_scheduler.setter
    def lr_scheduler(self, lr_scheduler: Any) -> None:
        optimizer = self.optimizer.base if self.optimizer is not None else None
        if lr_scheduler is not None:
            lr_scheduler = lr_scheduler_of(optimizer, lr_scheduler, "engine.lr_scheduler")
        if self.mesh.rank == 0:
            log_who_steps(lr_scheduler)
        self._lr_scheduler = lr_scheduler

    # --- monitors ---------------------------------------------------------------------------------

    @property
    def monitor(self) -> Monitor:
        """Return the monitor that writes scalars to the configured loggers."""
        return self.observer.monitor

    # --- checkpoints ------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        *,
        asynchronous: bool | None = None,
    ) -> bool:
        """Write a checkpoint to ``save_dir/tag`` (default ``global_stepN``). Collective over the
        world: every rank must call it.

        With ``asynchronous`` (default: ds_config's ``checkpoint.writer.decoupled``), return as soon
        as this rank's parameters are copied to the host. Masters and optimizer state are copied
        before their next update, and files are written in the background. A later :meth:`step`
        completes the checkpoint, or raises CheckpointError on every rank; so do
        :meth:`wait_for_checkpoint`, the next save, a load, :meth:`destroy` and the end of the
        program.
        """
        directory = saving.folder_of(save_dir, "engine.save_checkpoint(save_dir)")
        self.outcome.compare_calls("engine.save_checkpoint")
        self._table.check("engine.save_checkpoint")
        if self._passes.pending and not self.pending_micro_batches() and self.mesh.rank == 0:
            text = "save_checkpoint after %d backward passes without a step: their gradients are not saved. Call engine.step() after each"
            log.warning(text, self._passes.pending)
        self.sharded.take_live_edits()
        if asynchronous is None:
            # Hugging Face's Trainer deletes older checkpoints when this returns
            asynchronous = self._decoupled and not OF_TRAINER.fullmatch(directory.name)
        if not asynchronous:
            self._background.wait()
        background, frozen = self._background if asynchronous else None, exclude_frozen_parameters
        saving.save_state(self, directory, tag, client_state, without_frozen=frozen, background=background)
        return True

    def wait_for_checkpoint(self) -> Path | None:
        """Wait for a background save and return its path, or None if there is none. Collective over
        the world. Raises CheckpointError on every rank if any rank could not write."""
        return self._background.wait()

    def abandon_checkpoint(self) -> None:
        """Abandon a background save, for example after an error that ends the run. Not collective.
        The next save with the same tag removes its folder."""
        self._background.abandon()

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
        """Load ``load_dir/tag`` (default: the newest checkpoint that verifies) and return ``(path,
        client_state)``, or ``(None, None)`` if there is no checkpoint. Collective."""
        loading.refuse_function(custom_load_fn, "engine.load_checkpoint")
        directory = saving.folder_of(load_dir, "engine.load_checkpoint(load_dir)")
        full = not load_module_only
        self._background.wait()
        self._restarted = False
        return loading.load_state(
            self,
            directory,
            tag,
            strict=load_module_strict,
            with_optimizer=full and load_optimizer_states,
            with_schedule=full and load_lr_scheduler_states,
            with_counters=full,
        )

    def restore_progress(self, counters: Mapping[str, int], loss_scale: Mapping[str, Any]) -> None:
        """Restore a checkpoint's counters, and the loss scale from its JSON values."""
        self.global_steps, self.global_samples = counters["global_steps"], counters["global_samples"]
        self.micro_steps = counters["micro_steps"]
        if self.micro_steps % self._batch.accumulation:  # saved with another accumulation
            self.micro_steps = self.global_steps * self._batch.accumulation
        self.outcome.restore(counters["skipped_steps"], loss_scale)

    def save_16bit_model(
        self, save_dir: str | Path, save_filename: str = "model.safetensors", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Write the weights in the parameters' dtype to one file, on rank 0. Collective."""
        directory = saving.folder_of(save_dir, "engine.save_16bit_model(save_dir)")
        return save_weights(self, directory, save_filename, without_frozen=exclude_frozen_parameters)

    def named_full_parameters(
        self, dtype: torch.dtype | None = None, merge_lora: bool = False
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Return an iterator over the names and full values of all parameters, including frozen
        ones, for a program that does not train, such as an inference server. Values are those that
        forward computes with; tied parameters are yielded once.

        Collective over the world: every rank must call it, and iterate at the same point. If a rank
        leaves the loop early, also by an exception, closing its iterator (immediate in a ``for``
        loop) makes the rank take part in the remaining gathers, so that no other rank hangs.

        In addition to the memory that lives between steps, each rank holds one full group (at ZeRO
        stage 3 or with offload_param; a view that the loop keeps also keeps its group's memory) or,
        in a pipeline, one tensor of another stage; one tensor in ``dtype``; and with
        ``merge_lora``, the adapters of one group and one merged layer.

        Args:
            dtype: the dtype of the values; None leaves each unchanged.
            merge_lora: add PEFT's LoRA adapters to the yielded weights, and use the names of the
                model without adapters. The engine's weights do not change.
        """
        return FullTensors(self, "engine.named_full_parameters", merge_lora=merge_lora).handed_out(dtype)

    def _zero3_consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, torch.Tensor] | None:
        """Return the module's whole state dict in the host's memory on rank 0, and None on the
        others; libraries for DeepSpeed call it at stage 3. Collective: every rank must call.

        After the call, ``state_dict()`` of the module and its parts has names without values, until
        the model is used again: libraries call it on only some ranks while they save.
        """
        where = "engine._zero3_consolidated_16bit_state_dict"
        state = first_rank_state(self, where, exclude_frozen_parameters)
        self.sharded.full_params.list_names()
        return state

    def module_state_dict(
        self, exclude_frozen_parameters: bool = False, *, rank0_only: bool = False
    ) -> dict[str, torch.Tensor]:
        """Return the module's full state dict, on every rank. ``rank0_only``: copies in host memory
        on the first rank of the shard axis, gathered group by group; an empty dict on the others.
        Collective over shard."""
        self.sharded.full_params.end_names()
        return module_state(self, without_frozen=exclude_frozen_parameters, rank0_only=rank0_only)

    def load_module_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, custom_load_fn: Any = None
    ) -> None:
        """Load full tensors into the sharded module. Collective: pass the same tensors on every
        rank."""
        loading.refuse_function(custom_load_fn, "engine.load_module_state_dict")
        self.module.load_state_dict(state_dict, strict=strict)

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = False,
        data_sampler: Any = None,
        collate_fn: Any = None,
        num_local_io_workers: int | None = None,
        **options: Any,
    ) -> Any:
        """Return a loader over this rank's part of ``dataset``.

        Args:
            batch_size: of this rank; default: the micro-batch size.
            route: "train" reshuffles in every epoch; "eval" and "predict" keep the order.
            data_sampler: selects the samples instead of the engine's sampler.
            collate_fn: default: the ``collate_fn`` of ``initialize``.
            num_local_io_workers: the number of worker processes; default: none.
            options: further options of torch's DataLoader.
        """
        options["pin_memory"] = pin_memory and is_accelerator(self.device)
        options["num_workers"] = num_local_io_workers or options.get("num_workers", 0)
        if (collate := collate_fn if collate_fn is not None else self.collate_fn) is not None:
            options["collate_fn"] = collate
        size = batch_size or self._batch.micro_batch_size
        return rank_loader(dataset, size, self.mesh, self.config, route=route, sampler=data_sampler, **options)
