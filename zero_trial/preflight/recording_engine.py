"""A stand-in engine for ``zero-trial check``: rank 0 of the run over the plain model on the CPU; it trains nothing."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from zero_trial.ds_config.reader import read_ds_config
from zero_trial.ds_config.reconcile import AxisSizes, Reconciliation, reconcile
from zero_trial.ds_config.table import DsConfig
from zero_trial.errors import ConfigError, TrialError


class NotInDryRun(AttributeError):
    """The trial asks for something that only the real engine has."""


class FakeGrid:
    """The ``mpu`` of the first data-parallel rank."""

    def __init__(self, axes: AxisSizes) -> None:
        self._axes = axes

    def get_data_parallel_rank(self) -> int:
        return 0

    def get_data_parallel_world_size(self) -> int:
        return self._axes.data_parallel

    def get_pipe_parallel_rank(self) -> int:
        """The last one's, which sees labels and reports."""
        return self._axes.pipe - 1

    def get_pipe_parallel_world_size(self) -> int:
        return self._axes.pipe

    def get_model_parallel_rank(self) -> int:
        return 0

    def get_model_parallel_world_size(self) -> int:
        return self._axes.model

    get_slice_parallel_rank = get_model_parallel_rank
    get_slice_parallel_world_size = get_model_parallel_world_size


class RecordingEngine:
    """Calls go to the model; ``backward`` and ``step`` count and change nothing. Fp32, whatever the ds_config says."""

    def __init__(self, model: torch.nn.Module, config: DsConfig, batch: Reconciliation, optimizer: Any) -> None:
        self.module = model
        self.config = config
        self.device = torch.device("cpu")
        self.global_rank, self.local_rank = 0, 0
        self.world_size = batch.axes.data_parallel * batch.axes.pipe * batch.axes.model
        self.dp_world_size = batch.axes.data_parallel
        self.mpu = FakeGrid(batch.axes)
        self.optimizer, self.lr_scheduler = optimizer, None
        self.global_steps = self.global_samples = self.micro_steps = self.skipped_steps = 0
        self._batch = batch.batch

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        return self.module(*inputs, **named)

    def __getattr__(self, name: str) -> Any:
        raise NotInDryRun(f"engine.{name}")

    def backward(self, loss: torch.Tensor, **_: Any) -> torch.Tensor:
        return loss

    def step(self) -> None:
        self.micro_steps += 1
        self.global_steps = self.micro_steps // self._batch.accumulation

    def train(self, mode: bool = True) -> RecordingEngine:
        self.module.train(mode)
        return self

    def eval(self) -> RecordingEngine:
        return self.train(False)

    def zero_grad(self, **_: Any) -> None:
        self.module.zero_grad()

    def parameters(self) -> Iterable[torch.nn.Parameter]:
        return self.module.parameters()

    def train_batch_size(self) -> int:
        return self._batch.train_batch_size

    def train_micro_batch_size_per_gpu(self) -> int:
        return self._batch.micro_batch_size

    def gradient_accumulation_steps(self) -> int:
        return self._batch.accumulation

    def is_gradient_accumulation_boundary(self) -> bool:
        return (self.micro_steps + 1) % self._batch.accumulation == 0

    def no_sync(self) -> Any:
        return nullcontext()

    def fp16_enabled(self) -> bool:
        """False, as this engine is in fp32: a trial that casts its batches itself casts them for the engine that it has."""
        return False

    bfloat16_enabled = fp16_enabled

    def zero_optimization_stage(self) -> int:
        return self.config.zero_optimization.stage

    def was_step_applied(self) -> bool:
        return self.micro_steps > 0

    def get_lr(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def get_global_grad_norm(self) -> float | None:
        return None


class RecordingPipelineEngine(RecordingEngine):
    """Stands for a whole pipeline: all layers are here, without values until a batch comes, and micro-batches go through one after the other."""

    is_pipe_parallel = True

    def __init__(self, model: Any, config: DsConfig, batch: Reconciliation, optimizer: Any) -> None:
        super().__init__(model, config, batch, optimizer)
        self._model = model
        self._has_values = False
        self._batches: Any = None
        with torch.device("meta"):
            model.build_whole()

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        raise _by_batches("engine(...)")

    def backward(self, loss: torch.Tensor, **_: Any) -> torch.Tensor:
        raise _by_batches("engine.backward")

    def step(self) -> None:
        raise _by_batches("engine.step")

    def train_batch(self, data_iter: Any = None) -> torch.Tensor:
        """The mean loss of a step's micro-batches; nothing is trained."""
        loss = self._losses(data_iter, self._batch.accumulation)[0]
        self.micro_steps += self._batch.accumulation
        self.global_steps += 1
        return loss.mean()

    def eval_batch(
        self,
        data_iter: Any = None,
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """As the engine's."""
        losses, outputs = self._losses(data_iter, num_micro_batches or self._batch.accumulation, compute_loss)
        if not compute_loss:
            return outputs
        loss = losses.mean() if reduce_output else list(losses)
        return (loss, outputs) if return_logits else loss

    def set_dataiterator(self, iterator: Any) -> None:
        self._batches = iterator

    def set_dataloader(self, loader: Any) -> None:
        self._batches = iter(loader) if loader is not None else None

    def is_first_stage(self) -> bool:
        return self.mpu.get_pipe_parallel_world_size() == 1

    def is_last_stage(self) -> bool:
        return True

    def _losses(self, data_iter: Any, micro_batches: int, wanted: bool = True) -> tuple[torch.Tensor, list[Any]]:
        """The loss of each micro-batch, and its output."""
        if not self._has_values:
            self._model.build_whole()
            self._has_values = True
        batches = [next(data_iter if data_iter is not None else self._batches) for _ in range(micro_batches)]
        loss_fn = self._model.loss_fn
        with torch.no_grad():
            outputs = [self.module(inputs) for inputs, _ in batches]
            if not wanted:
                return torch.zeros(0), outputs
            losses = [
                output if loss_fn is None else loss_fn(output, labels)
                for output, (_, labels) in zip(outputs, batches, strict=True)
            ]
        return torch.stack(losses), outputs


def comes_in_layers(model: Any) -> bool:
    """Whether the model is a list of layers that an engine builds, as a PipelineModule is."""
    return callable(getattr(model, "build_whole", None))


def _with_stages(settings: DsConfig, model: Any) -> DsConfig:
    """The settings with the model's own number of pipeline stages. Raises ConfigError for stages of a model that has no layers to share."""
    mine = getattr(model, "num_stages", None) if comes_in_layers(model) else 1
    if not comes_in_layers(model) and settings.mesh.pipe > 1:
        raise ConfigError(
            "the model is no pipeline",
            where="mesh.pipe",
            got=f"{settings.mesh.pipe} stages for a {type(model).__name__}",
            fix="Make it a zero_trial.PipelineModule, or remove mesh.pipe.",
        )
    return replace(settings, mesh=replace(settings.mesh, pipe=mine)) if mine and mine > 1 else settings


def _by_batches(verb: str) -> TrialError:
    """The error for the verbs of a single micro-batch, in the words of the engine."""
    return TrialError(
        "only whole batches go through a pipeline",
        where=verb,
        fix="Use engine.train_batch(iterator) or engine.eval_batch(iterator).",
    )


def recording_factory(ranks: int) -> Any:
    """An engine factory with the signature of ``zero_trial.initialize`` for a run of ``ranks`` ranks.

    The optimizer is the one given, or a stand-in with its groups and learning rate.
    """

    def initialize(
        args: Any = None,
        model: torch.nn.Module | None = None,
        optimizer: Any = None,
        model_parameters: Any = None,
        config: Any = None,
        config_params: Any = None,
        lr_scheduler: Any = None,
        **_: Any,
    ) -> tuple[Any, Any, Any, Any]:
        source: Any = next(
            (s for s in (config, config_params, getattr(args, "deepspeed_config", None)) if s is not None), {}
        )
        settings = source if isinstance(source, DsConfig) else read_ds_config(source, hints=_hints(model))
        if model is None:
            raise NotInDryRun("initialize() without a model")
        settings = _with_stages(settings, model)
        kind = RecordingPipelineEngine if comes_in_layers(model) else RecordingEngine
        engine = kind(model, settings, reconcile(settings, ranks), optimizer)
        if not isinstance(optimizer, torch.optim.Optimizer):
            groups = list(model_parameters) if model_parameters is not None else list(model.parameters())
            lr = settings.optimizer.params.get("lr", 1e-3) if settings.optimizer is not None else 1e-3
            engine.optimizer = optimizer(groups) if callable(optimizer) else _stand_in(groups, lr)
        engine.lr_scheduler = lr_scheduler(engine.optimizer) if callable(lr_scheduler) else lr_scheduler
        return engine, engine.optimizer, None, engine.lr_scheduler

    return initialize


def _stand_in(groups: list[Any], lr: float) -> torch.optim.Optimizer | None:
    return torch.optim.SGD(groups, lr=lr) if groups else None


def _hints(model: torch.nn.Module | None) -> dict[str, Any]:
    """The width of the model, where it says it as models of transformers do."""
    described = getattr(model, "config", None)
    sizes = [getattr(described, name, None) for name in ("hidden_size", "d_model", "n_embd")]
    width = next((size for size in sizes if isinstance(size, int)), None)
    return {} if width is None else {"hidden_size": width}
