"""An engine that trains nothing: it answers for rank 0 of the run that is checked, over the plain model on the CPU."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch

from zero_trial.config.reader import read_ds_config
from zero_trial.config.reconcile import AxisSizes, Reconciliation, reconcile
from zero_trial.config.sections import DsConfig


class NotRehearsed(AttributeError):
    """The trial asks for something that only the real engine has."""


class Grid:
    """The ``mpu`` of rank 0."""

    def __init__(self, axes: AxisSizes) -> None:
        self._axes = axes

    def get_data_parallel_rank(self) -> int:
        return 0

    def get_data_parallel_world_size(self) -> int:
        return self._axes.data_parallel

    def get_pipe_parallel_rank(self) -> int:
        return 0

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
        self.mpu = Grid(batch.axes)
        self.optimizer, self.lr_scheduler = optimizer, None
        self.global_steps = self.global_samples = self.micro_steps = self.skipped_steps = 0
        self._batch = batch.batch

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        return self.module(*inputs, **named)

    def __getattr__(self, name: str) -> Any:
        raise NotRehearsed(f"engine.{name}")

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

    def get_lr(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def get_global_grad_norm(self) -> float | None:
        return None


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
            raise NotRehearsed("initialize() without a model")
        engine = RecordingEngine(model, settings, reconcile(settings, ranks), optimizer)
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
