"""A trial's context: hyperparameters, experiment, engines, ranks, data and metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from zero_trial.ds_config.overlay import overwrite_ds_config, with_hyperparameters
from zero_trial.ds_config.table import DsConfig
from zero_trial.errors import ConfigError, TrialError
from zero_trial.schema.config_source import open_source
from zero_trial.trial.ds_config import (
    Reconciled,
    reconcile_config,
    reconcile_engine,
    source_line,
    trial_ds_config,
    with_stages,
)
from zero_trial.trial.metrics import FunctionReducer, MetricReducer, ReducerTable
from zero_trial.trial.runtime.protocols import Distributed, Platform
from zero_trial.trial.settings import TrainPosition
from zero_trial.util.text import did_you_mean

# The signature of zero_trial.initialize: (model=..., config=..., ...) -> (engine, optimizer,
# dataloader, lr_scheduler)
EngineFactory = Callable[..., tuple[Any, Any, Any, Any]]


# methods of Determined's PyTorchTrialContext -> what replaces them
_OF_PYTORCH_TRIAL = {
    **dict.fromkeys(
        ("wrap_model", "wrap_optimizer", "wrap_lr_scheduler"),
        "self.engine = context.initialize(model=..., optimizer=..., lr_scheduler=...)",
    ),
    "backward": "self.engine.backward(loss)",
    "step_optimizer": 'self.engine.step() for every micro-batch, and "gradient_clipping" in ds_config',
}


class HParams(dict[str, Any]):
    """A ``dict`` with attribute access: ``h.lr`` is ``h["lr"]``. Nested mappings are HParams too.

    ``dict`` methods take precedence over keys of the same name (``h["keys"]`` always works). Lists
    stay lists.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__({key: _nested(value) for key, value in values.items()})

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"no hyperparameter {name!r}; there are {sorted(self)}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


def _nested(value: Any) -> Any:
    if isinstance(value, Mapping):
        return HParams(value)
    return [_nested(item) for item in value] if isinstance(value, list) else value


@dataclass(frozen=True)
class ModelParallelUnit:
    """A rank's place among the data-parallel replicas, and its duties.

    ``should_report_metrics``: this rank's metrics count (once per replica, so that tensor- and
    pipeline-parallel peers are not counted as replicas). ``should_build_data_loader``: this rank
    reads batches.
    """

    data_parallel_rank: int
    data_parallel_world_size: int
    should_report_metrics: bool
    should_build_data_loader: bool


def make_data_parallel_mpu(dist: Distributed) -> ModelParallelUnit:
    """Return the place of a rank if every rank is a replica (possibly a sharded one)."""
    return ModelParallelUnit(dist.rank, dist.size, should_report_metrics=True, should_build_data_loader=True)


def make_engine_mpu(grid: Any, first: bool | None = None, last: bool | None = None) -> ModelParallelUnit:
    """Return a rank's place from an engine's ``mpu``.

    The first and last pipeline ranks of the first model-parallel slice read data; the last one
    reports.

    ``first`` and ``last``: whether this rank holds the first and the last layer, if the engine
    knows; a schedule may place both on one rank.
    """
    pipe, pipes = grid.get_pipe_parallel_rank(), grid.get_pipe_parallel_world_size()
    first = pipe == 0 if first is None else first
    last = pipe == pipes - 1 if last is None else last
    first_slice = grid.get_slice_parallel_rank() == 0
    return ModelParallelUnit(
        data_parallel_rank=grid.get_data_parallel_rank(),
        data_parallel_world_size=grid.get_data_parallel_world_size(),
        should_report_metrics=first_slice and last,
        should_build_data_loader=first_slice and (first or last),
    )


class ZeroTrialContext:
    """Hyperparameters, data, engines and ranks of a trial; passed to the trial's ``__init__``.
    ``engine_factory`` creates engines."""

    def __init__(self, platform: Platform, engine_factory: EngineFactory, device: torch.device | None = None) -> None:
        self.platform = platform
        self._hparams = HParams(platform.hparams)
        self._engine_factory = engine_factory
        self._device = device if device is not None else torch.device("cpu")
        self.engines: list[Any] = []
        self.reducers = ReducerTable(platform.distributed)
        self.profile: torch.profiler.profile | None = None
        self.auto_accumulation = True
        self.check_reproducibility = True
        # of the engines made by ``initialize``, with the values in use
        self.ds_configs: list[DsConfig] = []
        # of the models passed to ``initialize``, counted before they are sharded
        self.parameters = 0
        # the checkpoint to load is another trial's: only its weights are used
        self.weights_only = False
        self.tensorboard = TensorBoardLog(platform)
        self.position: TrainPosition | None = None  # where the run is; None before training
        self._mpu: ModelParallelUnit | None = None
        self._mpu_given = False
        self._stop = False

    if not TYPE_CHECKING:  # otherwise every attribute would have a type

        def __getattr__(self, name: str) -> Any:
            if name in _OF_PYTORCH_TRIAL:
                raise AttributeError(
                    f"ZeroTrialContext has no {name!r} (PyTorchTrialContext has it). Use {_OF_PYTORCH_TRIAL[name]}"
                )
            return object.__getattribute__(self, name)  # raises; for a property, re-raises its error

    # The experiment

    @property
    def distributed(self) -> Distributed:
        """The ranks of this trial: rank, size, local_rank, and collectives for small JSON-able
        values."""
        return self.platform.distributed

    def get_hparams(self) -> HParams:
        """Return all hyperparameters: a dict that also allows ``h.name``."""
        return self._hparams

    def get_hparam(self, name: str) -> Any:
        if name not in self._hparams:
            where, known = f"hyperparameters.{name}", f"one of {sorted(self._hparams)}"
            fix = did_you_mean(name, self._hparams)
            raise ConfigError("no such hyperparameter", where=where, expected=known, fix=fix)
        return self._hparams[name]

    def get_experiment_config(self) -> dict[str, Any]:
        return dict(self.platform.experiment)

    def get_data_config(self) -> dict[str, Any]:
        return dict(self.platform.experiment.get("data") or {})

    def get_experiment_id(self) -> str:
        return self.platform.experiment_id

    def get_trial_id(self) -> str:
        return self.platform.trial_id

    def get_trial_seed(self) -> int:
        return self.platform.seed

    def get_initial_batch(self) -> int:
        """Return the completed steps of the checkpoint to start from; 0 in a new trial."""
        return self.platform.steps_completed

    def get_tensorboard_path(self) -> Path:
        """Return the folder of this trial's TensorBoard files."""
        return self.tensorboard.path()

    def note(self, text: str, **more: Any) -> None:
        """Print a line for the user, and record it as an event with ``more``; on rank 0 only."""
        if self.distributed.rank == 0:
            self.platform.emit({"kind": "note", "message": text, **more})

    # Engines

    @property
    def device(self) -> torch.device:
        """Return the device of the first engine, or of the rank if there is no engine yet."""
        return getattr(self.engines[0], "device", self._device) if self.engines else self._device

    def initialize(
        self, model: Any = None, config: Mapping[str, Any] | str | Path | None = None, **options: Any
    ) -> Any:
        """Build and return a wrapped engine for ``model``, in one call. Collective.

        Finds the ds_config, merges ``hyperparameters.ds_config`` over it, reconciles the batch
        sizes, builds and wraps the engine, and sets this rank's data-parallel replica from it.

        Args:
            config: a ds_config, its path, or None for the experiment's ds_config.
            options: further arguments of ``zero_trial.initialize`` (optimizer, lr_scheduler,
                model_parameters, weights ...).
        """
        given = with_stages(trial_ds_config(config, self.platform), model)
        filled, table = reconcile_config(given, self.platform)
        data = self.platform.experiment.get("data") if config is None else None
        self.note(source_line(given, filled, data))
        if not self.engines:
            self.note(table.line(), table=table.table)
        self.ds_configs.append(filled)
        # in a pipeline: the whole model's trainable ones, of which this rank may have built a part
        whole = getattr(model, "total_parameters", None)
        if model is not None:
            self.parameters += whole if isinstance(whole, int) else sum(each.numel() for each in model.parameters())
        # a plan makes the other three only for who takes them
        return self.wrap_model_engine(self._engine_factory(model=model, config=filled, **options)[0])

    def wrap_model_engine(self, model: Any) -> Any:
        """Register and return an engine; the first engine sets batch size, accumulation and the
        mpu."""
        engine = model  # an engine wraps a model; the argument has Determined's name
        verbs = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
        if not all(callable(getattr(engine, verb, None)) for verb in verbs):
            raise TrialError(
                "this is not an engine",
                where="wrap_model_engine",
                got=type(engine).__name__,
                fix="Wrap the first of the four values that zero_trial.initialize returns.",
            )
        self.engines.append(engine)
        if len(self.engines) == 1:
            # a pipeline: log its schedule and policy
            if isinstance(getattr(engine, "price", None), str):
                self.note(engine.price)
            if not self._mpu_given and hasattr(getattr(engine, "mpu", None), "get_slice_parallel_rank"):
                # a pipeline's engine knows the ranks of the first and the last layer
                knows = getattr(engine, "is_pipe_parallel", False) and hasattr(engine, "is_last_stage")
                ends = (bool(engine.is_first_stage()), bool(engine.is_last_stage())) if knows else ()
                self._mpu = make_engine_mpu(engine.mpu, *ends)
        elif engine.train_micro_batch_size_per_gpu() != self.get_train_micro_batch_size_per_gpu():
            self.note("engines differ in micro batch size; the data loaders use the first engine's")
        return engine

    def wrap_mpu(self, mpu: Any) -> ModelParallelUnit:
        """Set this rank's data-parallel replica, instead of the first engine's. Allowed once.

        ``mpu``: a ModelParallelUnit, or an engine's ``mpu``.
        """
        if self._mpu_given:
            raise TrialError("Only one MPU can be passed to the context", where="wrap_mpu")
        self._mpu = mpu if isinstance(mpu, ModelParallelUnit) else make_engine_mpu(mpu)
        self._mpu_given = True
        return self._mpu

    def set_mpu(self, mpu: Any) -> None:
        """Set this rank's replica like ``wrap_mpu``, after an engine was wrapped."""
        self._first_engine()
        self.wrap_mpu(mpu)

    @property
    def mpu(self) -> ModelParallelUnit:
        return self._mpu if self._mpu is not None else make_data_parallel_mpu(self.distributed)

    def _first_engine(self) -> Any:
        if not self.engines:
            raise TrialError(
                "Must have at least one model engine",
                where="ZeroTrialContext",
                fix="Call context.initialize(model=...) or context.wrap_model_engine(engine) in the trial's __init__.",
            )
        return self.engines[0]

    def reconcile_ds_config(self, engine_or_config: Any) -> Reconciled:
        """Check the batch sizes against the hyperparameters, and log how they agree.

        Accepts an engine, an engine's ``_config``, a ds_config or its path. If the sizes do not
        agree, raises InvalidHP in a search, otherwise ConfigError.
        """
        if not isinstance(engine_or_config, Mapping) and hasattr(engine_or_config, "train_micro_batch_size_per_gpu"):
            table = reconcile_engine(engine_or_config, self.platform)
        else:
            table = reconcile_config(open_source(engine_or_config), self.platform)[1]
        self.note(table.line(), table=table.table)
        return table

    def overwrite_ds_config(
        self, base: Mapping[str, Any] | str | Path, overrides: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return a copy of ``base`` overwritten by ``overrides`` (nested or dotted keys). Without
        overrides, use ``hyperparameters.overwrite_deepspeed_args`` and
        ``hyperparameters.ds_config``."""
        if overrides is not None:
            return overwrite_ds_config(base, overrides)
        changed: dict[str, Any] = with_hyperparameters(open_source(base), self._hparams).value
        return changed

    def get_train_micro_batch_size_per_gpu(self) -> int:
        return int(self._first_engine().train_micro_batch_size_per_gpu())

    def get_num_micro_batches_per_slot(self) -> int:
        return int(self._first_engine().gradient_accumulation_steps())

    # Names from before Determined 0.38, used in its examples, one of them with the underscore.
    train_micro_batch_size_per_gpu = property(get_train_micro_batch_size_per_gpu)
    _train_micro_batch_size_per_gpu = train_micro_batch_size_per_gpu
    num_micro_batches_per_slot = property(get_num_micro_batches_per_slot)

    @property
    def models(self) -> list[Any]:
        """The wrapped engines, under Determined's name."""
        return self.engines

    @property
    def use_pipeline_parallel(self) -> bool:
        return bool(getattr(self._first_engine(), "is_pipe_parallel", False))

    def get_global_batch_size(self) -> int:
        """Return the samples per optimizer step over all replicas."""
        return int(self._first_engine().train_batch_size())

    @property
    def known_batch_size(self) -> int | None:
        """Return the samples per optimizer step, or None before an engine is wrapped."""
        return self.get_global_batch_size() if self.engines else None

    def get_per_slot_batch_size(self) -> int:
        """Return the samples per optimizer step of one replica."""
        return self.get_train_micro_batch_size_per_gpu() * self.get_num_micro_batches_per_slot()

    # Switches

    def disable_auto_grad_accumulation(self) -> None:
        """Call ``train_batch`` once per optimizer step; ``train_batch`` then runs all micro-batches
        itself."""
        self.auto_accumulation = False

    def disable_dataset_reproducibility_checks(self) -> None:
        """Allow loaders that zero_trial cannot shard or resume exactly: the trial must do both."""
        self.check_reproducibility = False

    def get_stop_requested(self) -> bool:
        return self._stop

    def set_stop_requested(self, stop_requested: bool) -> None:
        """Stop and save the run the next time the ranks communicate. Any rank may call it."""
        self._stop = bool(stop_requested)

    def set_profiler(self, *args: Any, **options: Any) -> None:
        """Profile the run with torch.profiler.profile(*args, **options), stepped once per optimizer
        step; traces are written to the TensorBoard folder."""
        folder = str(self.get_tensorboard_path())
        options.setdefault("on_trace_ready", torch.profiler.tensorboard_trace_handler(folder))
        self.profile = torch.profiler.profile(*args, **options)

    # Data and metrics

    def to_device(self, data: Any) -> Any:
        """Move tensors in nested dicts, lists and tuples to this rank's device."""
        return move_to(data, self.device)

    def wrap_reducer(
        self,
        reducer: Callable[[list[Any]], Any] | MetricReducer,
        name: str | None = None,
        for_training: bool = True,
        for_validation: bool = True,
    ) -> MetricReducer:
        """Register a metric that is collected on every rank and reduced once per report.

        Without ``name``, the reducer must return a dict.
        """
        wrapped = reducer if isinstance(reducer, MetricReducer) else FunctionReducer(reducer)
        self.reducers.add(wrapped, name, for_training, for_validation)
        return wrapped

    def reset_reducers(self, for_training: bool = True) -> None:
        self.reducers.reset(for_training)

    def reduce_metrics(self, for_training: bool) -> dict[str, Any]:
        """Return the metrics of all wrapped reducers. Collective."""
        return self.reducers.reduce(for_training)

    # Position

    def _started(self) -> TrainPosition:
        if self.position is None:
            raise TrialError(
                "training has not started", where="ZeroTrialContext", fix="Use it inside train_batch or a callback."
            )
        return self.position

    def is_epoch_start(self) -> bool:
        """Return whether the next step is the first of its epoch."""
        return self._started().is_epoch_start

    def is_epoch_end(self) -> bool:
        """Return whether the next step is the last of its epoch."""
        return self._started().is_epoch_end

    def current_train_epoch(self) -> int:
        """Return the index of the epoch that the next step belongs to, from 0."""
        return self._started().epoch

    def current_train_batch(self) -> int:
        """Return the number of completed optimizer steps since the start of the trial."""
        return self._started().step

    # TensorBoard

    def get_enable_tensorboard_logging(self) -> bool:
        """Return whether reported metrics are also written by the TensorBoard writer."""
        return self.tensorboard.enabled

    def set_enable_tensorboard_logging(self, enable_tensorboard_logging: bool) -> None:
        """Set whether reported metrics are also written by the TensorBoard writer, once it
        exists."""
        self.tensorboard.enabled = enable_tensorboard_logging

    def get_tensorboard_writer(self) -> Any:
        """Return a torch SummaryWriter in the run's folder."""
        return self.tensorboard.writer()


def move_to(data: Any, device: torch.device) -> Any:
    """Return ``data`` with tensors in nested containers on ``device``."""
    if hasattr(data, "to"):
        return data.to(device)
    if isinstance(data, Mapping):
        return {key: move_to(value, device) for key, value in data.items()}
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(move_to(value, device) for value in data))
    if isinstance(data, (list, tuple)):
        return type(data)(move_to(value, device) for value in data)
    if type(data).__module__ == "numpy" and getattr(data, "ndim", None):
        return torch.as_tensor(data, device=device)
    return data


class TensorBoardLog:
    """A trial's TensorBoard files: the trial's writer also writes the reported metrics there."""

    def __init__(self, platform: Platform) -> None:
        self.enabled = True
        self._platform = platform
        self._writer: Any = None

    def path(self) -> Path:
        """Create and return the folder. Raises ConfigError if the platform stores no such files."""
        path = self._platform.tensorboard_path
        if path is None:
            raise ConfigError("this platform writes no TensorBoard files", where="get_tensorboard_path")
        path.mkdir(parents=True, exist_ok=True)
        return path

    def writer(self) -> Any:
        """Return a torch SummaryWriter, created by the first call."""
        if self._writer is None:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                raise ConfigError(
                    "tensorboard is not installed",
                    where="get_tensorboard_writer",
                    fix="pip install 'zero_trial[tensorboard]'",
                ) from None
            self._writer = SummaryWriter(str(self.path()))
        return self._writer

    def close(self) -> None:
        """Close the writer, if there is one."""
        if self._writer is not None:
            self._writer.close()

    def add(self, group: str, step: int, metrics: Mapping[str, Any]) -> None:
        """Write the scalars among ``metrics``, if there is a writer and logging is enabled."""
        if self._writer is None or not self.enabled:
            return
        for name, value in metrics.items():
            if isinstance(value, (int, float)):
                self._writer.add_scalar(f"{group}/{name}", value, step)
        self._writer.flush()
