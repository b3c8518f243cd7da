"""The engine of a pipeline: whole batches under DeepSpeed's names, run by a schedule."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn, cast

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from zero_trial.engine.compat import PipelineParallelGrid, RepeatingLoader
from zero_trial.engine.engine import Engine
from zero_trial.engine.observe import REDUCE_WAIT
from zero_trial.engine.pipeline_build import ChunkShards, ResolvedPipeline, training_schedule
from zero_trial.errors import TrialError
from zero_trial.pipeline.executor import Executor, LastStageResult, StepInput, StepOptions, read_step
from zero_trial.pipeline.lowering import forwards_of, lower
from zero_trial.pipeline.module import PipelineModule
from zero_trial.pipeline.schedule import Schedule
from zero_trial.pipeline.simulator import validate
from zero_trial.pipeline.stage import Stage
from zero_trial.sharding.precision import cast_floats, forward_of

log = logging.getLogger("zero_trial")


class PipelineEngine(Engine):
    """Trains a :class:`PipelineModule`: ``loss = engine.train_batch(data_iter)``.

    ``micro_batches`` is the accumulation, the number of micro-batches per step. The schedule
    determines when gradients are reduced, and when parameters are gathered and freed.
    """

    is_pipe_parallel = True

    def __init__(self, *args: Any, resolved_pipeline: ResolvedPipeline, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.settings = resolved_pipeline.settings
        self.policy = resolved_pipeline.policy
        self.price = resolved_pipeline.price
        self._chunks = self.pipeline.chunks
        self.grid = PipelineParallelGrid(self.mesh)
        if kwargs.get("client_mpu") is None:
            self.mpu = self.grid
        self._shards = ChunkShards(
            self.sharded, self.pipeline, every_micro_batch=self.sharded.plan.reduces_every_micro_batch
        )
        self.stage = Stage(self._run_chunk, lambda chunk: not self._chunks[chunk].recomputes)
        me = cast("Engine", weakref.proxy(self))  # the engine owns the executor
        self.executor = Executor(
            self.mesh.pipe,
            self.stage,
            self._shards,
            self.device,
            lambda phase: me.observer.phase(phase, me),
            channel=resolved_pipeline.channel,
        )
        self._schedules: dict[tuple[int, bool], Schedule] = {}
        self._iterator: Iterator[Any] | None = None
        self._split_batch: Callable[[Any], Any] | None = None
        self._failed = ""  # why no step can follow

    @property
    def pipeline(self) -> PipelineModule:
        return cast("PipelineModule", self.module)

    def _compilable(self) -> list[nn.Module]:
        """List the layers of this rank's chunks, which a schedule calls one by one."""
        return [layer for chunk in self._chunks.values() for layer in chunk.children()]

    # --- a step -----------------------------------------------------------------------------------

    def train_batch(self, data_iter: Iterable[Any] | None = None) -> torch.Tensor:
        """Take one optimizer step over ``gradient_accumulation_steps()`` micro-batches; return the
        mean loss, a scalar that is the same on all ranks.

        A micro-batch is ``(inputs, labels)``. A short micro-batch is weighted by its number of
        samples; with the module's ``loss_weight``, each micro-batch is weighted by that. If the
        data of all ranks ends within a batch, the step uses the remaining micro-batches. Raises
        StopIteration on all ranks when the data has ended. Collective over the world.

        Args:
            data_iter: an iterator over micro-batches; or a loader, which continues where the last
                call with it stopped, and restarts whenever it ends. None: use the previous iterator
                or loader.
        """
        self.sharded.moved.require_here("engine.train_batch")
        if data_iter is not None:
            self._iterator = self._as_iterator(data_iter)
        if self.optimizer is not None:
            self.optimizer.require_trained_weights("engine.train_batch")
        self.module.train()
        batch = self._read(self.gradient_accumulation_steps())
        scale = self.outcome.loss_scale
        schedule = self.schedule(batch.micro_batches)
        self._shards.start_step()
        self.sharded.full_params.end_names()
        if self.optimizer is not None:
            self.optimizer.store.prefetch()
        weight = self.pipeline.loss_weight
        scale *= batch.lines if weight is None else 1
        found = self._perform(schedule, batch, StepOptions(loss=self._loss, weight=weight, scale=scale))
        with self.observer.phase(REDUCE_WAIT, self):
            self.sharded.reducer.wait()
        loss = self._mean(batch, found)
        if weight is not None:
            zero = torch.zeros((), dtype=torch.float64, device=self.device)
            self.outcome.add_weight(sum(found.weights.values(), zero))
        if self.observer.events is not None:
            self.observer.events.saw_loss(self, loss)
        self._optimizer_step(batch.micro_batches, self.gradient_accumulation_steps(), {}, batch.micro_batches)
        self.executor.finish()
        return loss

    def eval_batch(
        self,
        data_iter: Iterable[Any] | None = None,
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """Run only forwards; return the mean loss, the same on all ranks, or with ``reduce_output``
        None the list of this pipeline's losses.

        ``return_logits``: return ``(loss, logits)``. ``logits`` is the list of every micro-batch's
        output on the rank that holds the last layer, and None elsewhere. ``compute_loss=False``:
        return only that list. All ranks always get the losses, whatever ``bcast_loss`` is.
        Collective over the world.
        """
        self.sharded.moved.require_here("engine.eval_batch", ("lp_params",))
        before = self._iterator
        if data_iter is not None:
            self._iterator = cast("Iterator[Any]", data_iter if hasattr(data_iter, "__next__") else iter(data_iter))
        was_training = self.module.training
        self.module.eval()
        try:
            batch = self._read(num_micro_batches or self.gradient_accumulation_steps())
            schedule = self.schedule(batch.micro_batches, training=False)
            self._shards.start_step()
            self.sharded.full_params.end_names()
            options = StepOptions(
                False,
                self._loss if compute_loss else None,
                self.pipeline.loss_weight,
                return_logits or not compute_loss,
            )
            found = self._perform(schedule, batch, options)
            self.executor.finish()
        finally:
            self._iterator = before
            self.module.train(was_training)
        outputs = [found.outputs[number] for number in sorted(found.outputs)] if self.is_last_stage() else None
        if not compute_loss:
            return outputs
        if reduce_output is None:
            losses = self._losses(batch, found)
            return (losses, outputs) if return_logits else losses
        loss = self._mean(batch, found)
        if self.observer.events is not None:
            self.observer.events.saw_evaluation(self, loss)
        return (loss, outputs) if return_logits else loss

    def schedule(self, micro_batches: int, *, training: bool = True) -> Schedule:
        """Return the schedule of all pipeline ranks for ``micro_batches``, validated once."""
        key = (micro_batches, training)
        if key not in self._schedules:
            ties = list(self.pipeline.ties.values())
            made = training_schedule(self.settings, self.policy, micro_batches, ties)
            if not training:
                made = lower(forwards_of(made), parameters=self.policy.parameters)
            validate(made)
            self._schedules[key] = made
        return self._schedules[key]

    def _perform(self, schedule: Schedule, batch: StepInput, options: StepOptions) -> LastStageResult:
        """Run the schedule. After a failure, nothing can run anymore."""
        try:
            return self.executor.run(schedule, batch, options)
        except Exception as error:
            self._failed = str(error)
            raise

    def _run_chunk(self, number: int, micro_batch: int, value: Any) -> Any:
        chunk, dtype = self._chunks[number], self.resolved.policy.param
        seed_number = self.global_steps * self.gradient_accumulation_steps() + micro_batch + 1
        if number == 0 and dtype != torch.float32:
            value = cast_floats(value, dtype)
        return forward_of(chunk, self.resolved.autocast, self.device.type)(value, seed_number)

    def _loss(self, output: Any, label: Any) -> torch.Tensor:
        function: Any = self.pipeline.loss_fn
        loss: torch.Tensor = output
        if function is not None:
            loss = forward_of(function, self.resolved.autocast, self.device.type)(output, label)
        return loss

    def _mean(self, batch: StepInput, found: LastStageResult) -> torch.Tensor:
        """Return the mean loss over all samples, or over the weights. Collective over the world."""
        weighted = self.pipeline.loss_weight is not None
        total = torch.zeros(1 + weighted, dtype=torch.float64, device=self.device)
        for number, loss in found.losses.items():
            total[0] += loss.double().reshape(()) * (1.0 if weighted else batch.share(found.samples[number]))
        for weight in found.weights.values():
            total[1] += weight
        self.mesh.world.all_reduce_small(total, "mean loss")
        return (total[0] / total[1] if weighted else total[0]).float()

    def _losses(self, batch: StepInput, found: LastStageResult) -> list[torch.Tensor]:
        """Return this pipeline's losses by micro-batch. Collective over pipe."""
        values = torch.zeros(batch.micro_batches, dtype=torch.float64, device=self.device)
        for number, loss in found.losses.items():
            values[number] = loss.double() / found.weights.get(number, 1.0)
        self.mesh.pipe.all_reduce_small(values, "losses")
        return list(values.float())

    # --- data -------------------------------------------------------------------------------------

    def set_dataiterator(self, iterator: Iterator[Any] | None) -> None:
        """Set the iterator that :meth:`train_batch` reads if it is called without one."""
        self._iterator = iterator

    def set_dataloader(self, loader: Iterable[Any] | None) -> None:
        """Read from a loader, which restarts whenever it ends; ``None``: this rank reads
        nothing."""
        self.training_dataloader = loader
        self._iterator = RepeatingLoader(loader) if loader is not None else None

    def set_batch_fn(self, fn: Callable[[Any], Any]) -> None:
        """Split each batch with ``fn(batch)``, which returns ``(inputs, labels)``."""
        self._split_batch = fn

    def _as_iterator(self, data: Iterable[Any]) -> Iterator[Any]:
        """Return ``data`` itself, or for a loader, one endless iterator for all calls with it."""
        if hasattr(data, "__next__"):
            return cast("Iterator[Any]", data)
        if not isinstance(self._iterator, RepeatingLoader) or self._iterator.loader is not data:
            return RepeatingLoader(data)
        return self._iterator

    def _read(self, wanted: int) -> StepInput:
        if self._failed:
            raise TrialError("this pipeline failed in an earlier call", where="PipelineEngine", got=self._failed)
        iterator = self._iterator
        if iterator is None and self.training_dataloader is not None:
            self.set_dataloader(self.training_dataloader)
            iterator = self._iterator
        placement = self.pipeline.placement
        if placement is None:
            raise TrialError("the layers are not built", where="PipelineEngine")
        return read_step(iterator, wanted, self.mesh, placement, self._split)

    def _split(self, batch: Any) -> tuple[Any, Any]:
        batch = self._split_batch(batch) if self._split_batch is not None else batch
        batch = tree_map_only(torch.Tensor, lambda tensor: tensor.to(self.device), batch)
        return (batch[0], batch[1]) if isinstance(batch, (tuple, list)) and len(batch) == 2 else (batch, None)

    # --- stages -----------------------------------------------------------------------------------

    def is_first_stage(self) -> bool:
        """Return whether this rank holds the first layer, and therefore reads the inputs."""
        return 0 in self._chunks

    def is_last_stage(self) -> bool:
        """Return whether this rank holds the last layer, and so computes losses and logits (with
        ``zb_v``, pipeline rank 0)."""
        return len(self.pipeline.parts) - 2 in self._chunks

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return True: every batch ends with a step."""
        return True

    def pending_micro_batches(self) -> int:
        """Return 0: a batch is always trained as a whole."""
        return 0

    @property
    def micro_batches(self) -> int:
        return self.gradient_accumulation_steps()

    @property
    def num_stages(self) -> int:
        return self.mesh.shape.pipe

    @property
    def stage_id(self) -> int:
        return self.mesh.coordinates["pipe"]

    @property
    def is_data_parallel(self) -> bool:
        return self.dp_world_size > 1

    @property
    def is_model_parallel(self) -> bool:
        return self.mp_world_size > 1

    def reset_activation_shape(self) -> None:
        """Do nothing: shapes travel with every message."""

    # --- what a pipeline cannot do ----------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse("forward")

    def backward(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse("backward")

    def scale(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse("scale")

    def step(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse("step")

    def generate(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse("generate")


def _refuse(verb: str) -> NoReturn:
    raise TrialError(
        "only train_batch() and eval_batch() are accessible in pipeline mode",
        where=f"PipelineEngine.{verb}",
        fix="A pipeline runs whole batches: loss = engine.train_batch(data_iter).",
    )
