"""The object that runs one step (forward, backward, reduce, clip, update, gather) and knows nothing about experiments."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from zero_trial.config.sections import DsConfig
from zero_trial.engine.autocast import forward_of
from zero_trial.engine.casting import cast_floats
from zero_trial.engine.garbage import COLLECTOR
from zero_trial.engine.monitor import Monitor
from zero_trial.engine.mpu import EngineMpu
from zero_trial.engine.phases import BACKWARD, FORWARD, REDUCE_WAIT, STEP, Phases
from zero_trial.engine.reporter import Reporter
from zero_trial.engine.saving import Saver
from zero_trial.engine.surface import EngineSurface
from zero_trial.engine.verdict import Verdict
from zero_trial.engine.wiring import Wiring
from zero_trial.errors import TrialError
from zero_trial.mesh import Mesh
from zero_trial.zero import ShardedModel, ShardedOptimizer
from zero_trial.zero.dtypes import wide_dtype

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
        wiring: Wiring,
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
        self.verdict = Verdict(model, wiring, device)
        self.lr_scheduler = lr_scheduler
        self.global_steps = self.global_samples = self.micro_steps = 0
        self._batch = wiring.batch
        self._updated = False  # the last call of step was at a boundary
        self._boundary: bool | None = None  # set by a caller who owns the boundary
        self._pending = 0  # backward passes since the last step
        self._managed = config.managed_gradient_accumulation
        self._call = forward_of(module, wiring.autocast, device.type)
        self._sync = True
        self._saver = Saver(self)
        self.monitor, self.phases, self.reporter = (
            Monitor(),
            Phases(),
            Reporter(),
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
        self.mesh.board.step = self.global_steps
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
        if not self._pending and not any(landing.touched or landing.shard_filled for landing in self.sharded.landings):
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
            last_first.callback(COLLECTOR.release, self)
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
