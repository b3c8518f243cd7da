"""What a trial holds of its surroundings: its engines, its place among the ranks, its experiment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from zero_trial.config.overlay import overwrite_ds_config
from zero_trial.config.source import open_source
from zero_trial.errors import ConfigError, TrialError
from zero_trial.platform.protocols import Platform
from zero_trial.trial.devices import DeviceMover
from zero_trial.trial.ds_config import Reconciled, reconcile_config, reconcile_engine, trial_ds_config, with_stages
from zero_trial.trial.experiment_view import ExperimentView
from zero_trial.trial.mpu import ModelParallelUnit, make_data_parallel_mpu, make_engine_mpu
from zero_trial.trial.periods import Position
from zero_trial.trial.profiling import Profiling
from zero_trial.trial.reducers import FunctionReducer, MetricReducer, ReducerTable

# The signature of zero_trial.initialize: (model=..., config=..., ...) -> (engine, optimizer, dataloader, lr_scheduler)
EngineFactory = Callable[..., tuple[Any, Any, Any, Any]]


class ZeroTrialContext(ExperimentView):
    """Given to the trial's ``__init__``. ``engine_factory`` makes engines; the trial half never imports one."""

    def __init__(self, platform: Platform, engine_factory: EngineFactory, device: torch.device | None = None) -> None:
        super().__init__(platform)
        self._engine_factory = engine_factory
        self.device = device if device is not None else torch.device("cpu")
        self.engines: list[Any] = []
        self.reducers = ReducerTable(platform.distributed)
        self.profiling = Profiling()
        self.auto_accumulation = True
        self.check_reproducibility = True
        self.ds_configs: list[dict[str, Any]] = []  # of the engines made by ``initialize``, as they were used
        self.parameters = 0  # of the models given to ``initialize``, counted before they are sharded
        self.weights_only = False  # the checkpoint to load is another trial's
        self.position: Position | None = None
        self._mpu: ModelParallelUnit | None = None
        self._mpu_given = False
        self._mover = DeviceMover(self.note)
        self._stop = False
        self._tensorboard = True
        self._writer: Any = None

    # Engines

    def initialize(
        self, model: Any = None, config: Mapping[str, Any] | str | Path | None = None, **options: Any
    ) -> Any:
        """A wrapped engine for ``model``, in one call: finds the ds_config, lays ``hyperparameters.ds_config`` over
        it, reconciles the batch
        sizes, builds the engine, wraps it and takes its place among the ranks from it.

        ``options`` are further arguments of ``zero_trial.initialize`` (optimizer, lr_scheduler, model_parameters
        ...). Collective.
        """
        given = with_stages(trial_ds_config(config, self.platform), model)
        filled, table = reconcile_config(given, self.platform)
        if not self.engines:
            self.note(table.line(), table=table.table)
        self.ds_configs.append(filled)
        self.parameters += count_parameters(model) if model is not None else 0
        engine, _, _, _ = self._engine_factory(model=model, config=filled, **options)
        return self.wrap_model_engine(engine)

    def wrap_model_engine(self, engine: Any) -> Any:
        """Registers an engine; the first one fixes batch size and accumulation, and the mpu unless one was given."""
        verbs = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
        if not all(callable(getattr(engine, verb, None)) for verb in verbs):
            raise TrialError(
                "this is no engine",
                where="wrap_model_engine",
                got=type(engine).__name__,
                fix="Wrap the first of the four things that zero_trial.initialize returns.",
            )
        self.engines.append(engine)
        if len(self.engines) == 1:
            self.device = getattr(engine, "device", self.device)
            if isinstance(getattr(engine, "price", None), str):  # of a pipeline: its schedule and policy
                self.note(engine.price)
            if not self._mpu_given and hasattr(getattr(engine, "mpu", None), "get_slice_parallel_rank"):
                self._mpu = mpu_of(engine)
        elif engine.train_micro_batch_size_per_gpu() != self.get_train_micro_batch_size_per_gpu():
            self.note("engines differ in micro batch size; the first engine's counts for the data loaders")
        return engine

    def wrap_mpu(self, mpu: Any) -> ModelParallelUnit:
        """Says where this rank stands among the replicas, instead of the first engine. Once.

        ``mpu``: a ModelParallelUnit, or what an engine has as ``mpu``.
        """
        if self._mpu_given:
            raise TrialError("Only one MPU can be passed to the context", where="wrap_mpu")
        self._mpu = mpu if isinstance(mpu, ModelParallelUnit) else make_engine_mpu(mpu)
        self._mpu_given = True
        return self._mpu

    def set_mpu(self, mpu: Any) -> None:
        """As ``wrap_mpu``, and after an engine is wrapped."""
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
        """Compares batch sizes with the hyperparameters and says how they agree. Takes an engine, a ds_config or its
        path.

        Raises InvalidHP in a search, ConfigError otherwise, if they do not agree.
        """
        if hasattr(engine_or_config, "train_micro_batch_size_per_gpu") and callable(
            engine_or_config.train_micro_batch_size_per_gpu
        ):
            table = reconcile_engine(engine_or_config, self.platform)
        else:
            table = reconcile_config(open_source(engine_or_config), self.platform)[1]
        self.note(table.line(), table=table.table)
        return table

    def overwrite_ds_config(
        self, base: Mapping[str, Any] | str | Path, overrides: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """A copy of ``base`` with ``overrides`` (nested or dotted) laid over it; ``hyperparameters.ds_config`` if none
        are given.
        """
        leaves = self._hparams.get("ds_config") or {} if overrides is None else overrides
        changed: dict[str, Any] = overwrite_ds_config(base, leaves)
        return changed

    def get_train_micro_batch_size_per_gpu(self) -> int:
        return int(self._first_engine().train_micro_batch_size_per_gpu())

    def get_num_micro_batches_per_slot(self) -> int:
        return int(self._first_engine().gradient_accumulation_steps())

    @property
    def use_pipeline_parallel(self) -> bool:
        return bool(getattr(self._first_engine(), "is_pipe_parallel", False))

    def get_global_batch_size(self) -> int:
        """Samples per optimizer step, over all replicas."""
        return int(self._first_engine().train_batch_size())

    def get_per_slot_batch_size(self) -> int:
        """Samples per optimizer step of one replica."""
        return self.get_train_micro_batch_size_per_gpu() * self.get_num_micro_batches_per_slot()

    @property
    def calls_per_step(self) -> int:
        """How often ``train_batch`` is called for one optimizer step."""
        return self.get_num_micro_batches_per_slot() if self.auto_accumulation and not self.use_pipeline_parallel else 1

    # Switches

    def disable_auto_grad_accumulation(self) -> None:
        """``train_batch`` is called once per optimizer step and does all micro-batches itself."""
        self.auto_accumulation = False

    def disable_dataset_reproducibility_checks(self) -> None:
        """Permits loaders that this package cannot shard and resume exactly; both are then the trial's business."""
        self.check_reproducibility = False

    def get_stop_requested(self) -> bool:
        return self._stop

    def set_stop_requested(self, stop_requested: bool) -> None:
        """Ends the run, saved, at the next boundary at which ranks talk. Any rank may ask."""
        self._stop = bool(stop_requested)

    def set_profiler(self, *args: Any, **options: Any) -> None:
        """torch.profiler.profile(*args, **options) over the run, stepped per optimizer step, traces into the
        TensorBoard folder.
        """
        self.profiling.set(self.get_tensorboard_path(), *args, **options)

    # Data and metrics

    def to_device(self, data: Any) -> Any:
        """Tensors in nested dicts, lists and tuples, on this rank's device."""
        return self._mover.move(data, self.device)

    def wrap_reducer(
        self,
        reducer: Callable[[list[Any]], Any] | MetricReducer,
        name: str | None = None,
        for_training: bool = True,
        for_validation: bool = True,
    ) -> MetricReducer:
        """Registers a metric that is collected on every rank and joined once per report.

        Without ``name`` it must give a dict.
        """
        wrapped = reducer if isinstance(reducer, MetricReducer) else FunctionReducer(reducer)
        self.reducers.add(wrapped, name, for_training, for_validation)
        return wrapped

    def reset_reducers(self, for_training: bool = True) -> None:
        self.reducers.reset(for_training)

    def reduce_metrics(self, for_training: bool) -> dict[str, Any]:
        """Collective. All wrapped reducers' metrics."""
        return self.reducers.reduce(for_training)

    # Position

    def _position(self) -> Position:
        if self.position is None:
            raise TrialError(
                "training has not started", where="ZeroTrialContext", fix="Ask inside train_batch or a callback."
            )
        return self.position

    def is_epoch_start(self) -> bool:
        return self._position().is_epoch_start

    def is_epoch_end(self) -> bool:
        return self._position().is_epoch_end

    def current_train_epoch(self) -> int:
        return self._position().epoch

    def current_train_batch(self) -> int:
        """Optimizer steps complete, from the start of the trial."""
        return self._position().step

    # TensorBoard

    def get_enable_tensorboard_logging(self) -> bool:
        return self._tensorboard

    def set_enable_tensorboard_logging(self, enable: bool) -> None:
        """Whether reported metrics also go to the writer, once ``get_tensorboard_writer`` has made one."""
        self._tensorboard = enable

    @property
    def tensorboard_writer(self) -> Any:
        """The writer, if there is one and logging is on."""
        return self._writer if self._tensorboard else None

    def get_tensorboard_writer(self) -> Any:
        """A torch SummaryWriter in the run's folder."""
        if self._writer is None:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                raise ConfigError(
                    "tensorboard is not installed",
                    where="get_tensorboard_writer",
                    fix="pip install 'zero_trial[tensorboard]'",
                ) from None
            self._writer = SummaryWriter(str(self.get_tensorboard_path()))
        return self._writer


def mpu_of(engine: Any) -> ModelParallelUnit:
    """The place that an engine gives its rank; an engine of a pipeline says itself where the first and the last layer are."""
    if not getattr(engine, "is_pipe_parallel", False) or not hasattr(engine, "is_last_stage"):
        return make_engine_mpu(engine.mpu)
    return make_engine_mpu(engine.mpu, bool(engine.is_first_stage()), bool(engine.is_last_stage()))


def count_parameters(model: Any) -> int:
    """Elements of all parameters; of a pipeline those of the whole model, of which this rank may have built only its part."""
    whole = getattr(model, "total_parameters", None)
    return whole if isinstance(whole, int) else sum(parameter.numel() for parameter in model.parameters())
