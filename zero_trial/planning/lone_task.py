"""The environment of a trial that is built in this process, without ranks: its context and modules,
and a replacement of ``zero_trial.initialize`` that builds only rank 0's engines.

    check_initialize   an engine with real values on the CPU, for ``check``: the trial builds, loads
                       and evaluates with it
    TrialEngines       engines without values, for ``plan``: the trial's train_batch runs on the
                       plain models

A pipeline is a single engine of one stage with all layers, because the stages of a real pipeline
exchange tensors, but the other ranks are absent here.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zero_trial
from zero_trial.comm import MeshShape
from zero_trial.compat.deepspeed.deepspeed_table import install_deepspeed
from zero_trial.compat.determined_table import install_determined
from zero_trial.ds_config.keys_running import MONITORS, PipelineSection
from zero_trial.ds_config.table import DsConfig
from zero_trial.engine import Engine
from zero_trial.engine.build import build_engine
from zero_trial.engine.observe import build_writers
from zero_trial.engine.resolved_config import mesh_shape
from zero_trial.engine.start import engines_from, given_once, read_settings
from zero_trial.errors import DataError, DoesNotFit, TrialError, ZeroTrialError
from zero_trial.experiment.entrypoint import Entrypoint
from zero_trial.experiment.experiment import ExperimentConfig
from zero_trial.launch.run_experiment import CheckedRun
from zero_trial.pipeline.module import PipelineModule, pipelines_built_by
from zero_trial.pipeline.schedule import ChunkPlacement
from zero_trial.planning.blueprint import META, Blueprint, ModulesOnMeta, lone_mesh
from zero_trial.planning.memory_plan import own_process, rank_limit, rank_processes
from zero_trial.planning.pass_trace import TracedEngine
from zero_trial.planning.planner import PipelinePlanner, Planner, Subject
from zero_trial.planning.state_bytes import TrainedModel
from zero_trial.trial.context import EngineFactory, ZeroTrialContext
from zero_trial.trial.data import TRAIN_LOADER, DataPosition, open_train_data
from zero_trial.trial.runtime.local import LocalPlatform
from zero_trial.trial.runtime.protocols import Distributed
from zero_trial.trial.settings import TrainPosition
from zero_trial.trial.trial import ZeroTrial, fitted, import_trial_class, seed_everything
from zero_trial.util.failures import known_fault
from zero_trial.util.memory import machine_memory

CPU = torch.device("cpu")
MOST_VALUES = 100_000_000  # parameters that a check trains without being asked
_BYTES = 24  # per parameter, for states and activations of a small batch


class _ValuelessEngine:
    """The engine without values for a trial; the trial puts its tensors on ``device``. While a plan
    runs the trial's train_batch, calls go to the plain model (``traced``)."""

    def __init__(self, engine: Engine, device: torch.device) -> None:
        self.device = device
        self._engine = engine
        self._traced: TracedEngine | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return (self._traced or self._engine)(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._traced if hasattr(self._traced, name) else self._engine, name)

    @contextlib.contextmanager
    def running(self, traced: TracedEngine) -> Iterator[None]:
        """Forward calls to ``traced`` inside the block."""
        self._traced, self.device = traced, traced.device
        try:
            yield
        finally:
            self._traced = None


def check_initialize(ranks: int, most_values: float = MOST_VALUES) -> Callable[..., tuple[Any, Any, Any, Any]]:
    """Return the replacement of ``zero_trial.initialize`` in a check of a run of ``ranks`` ranks.

    Its engines compute on the CPU, in the precision of ds_config. Collectives move nothing, so the
    engine holds the shards of all ranks, which it treats as replicas. A model with more than
    ``most_values`` parameters, or too large for this machine, gets no values.
    """

    def engine(model: nn.Module, settings: DsConfig, options: dict[str, Any], data: dict[str, Any]) -> Any:
        device = CPU if _has_room(model, most_values) else META
        return _rank_0(model, settings, ranks, device, options, data)

    return _initializer(engine)


def _has_room(model: nn.Module, most: float) -> bool:
    """Return whether the model can be trained here; an infinite ``most`` forces it."""
    if most == math.inf:
        return True
    # a pipeline's layers may not be built yet
    sizes = [model.total_parameters] if isinstance(model, PipelineModule) else map(torch.numel, model.parameters())
    count, memory = sum(sizes), machine_memory()
    return count <= most and (memory is None or _BYTES * count <= memory)


def _initializer(
    make_engine: Callable[[nn.Module, DsConfig, dict[str, Any], dict[str, Any]], Any],
) -> Callable[..., tuple[Any, Any, Any, Any]]:
    """Return a function with the arguments of ``zero_trial.initialize`` that calls ``make_engine``.

    ``make_engine`` gets the model, the ds_config, the options of the engine, and the options of its
    data loader and initial weights.
    """

    def initialize(**given: Any) -> tuple[Any, Any, Any, Any]:
        get = given.get
        model = given_once(model=get("model"), net=get("net"))
        model, settings = read_settings(get("args"), model, get("config"), get("config_params"))
        training_data = given_once(training_data=get("training_data"), dataset=get("dataset"))
        options = {name: get(name) for name in ("optimizer", "model_parameters", "lr_scheduler")}
        # a generator of parameters can be read only once
        options = {
            name: list(value) if hasattr(value, "__next__") else value
            for name, value in options.items()
            if value is not None
        }
        data = {"training_data": training_data, "collate_fn": get("collate_fn")}
        if get("weights") is not None:
            data["weights"] = (get("weights"), get("weights_prefix", ""))
        with CPU:  # the model may be on another device, but the engine's own tensors are on the CPU
            engine = make_engine(model, _without_writers(settings), options, data)
        return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler

    return initialize


def _without_writers(settings: DsConfig) -> DsConfig:
    """Return the settings without writers. Raises ConfigError for a missing package."""
    build_writers(settings, rank=1)  # checks for the packages and opens nothing
    names = (*MONITORS, "flops_profiler")
    return replace(settings, **{name: replace(getattr(settings, name), enabled=False) for name in names})


def _rank_0(
    model: nn.Module,
    settings: DsConfig,
    ranks: int,
    device: torch.device,
    options: dict[str, Any],
    data: dict[str, Any],
) -> Any:
    """Build the engine of rank 0: on the CPU with the shards of all ranks, on META without values.

    For a pipeline: one engine of all layers, on the ranks that share a stage of ``settings``.
    """
    if isinstance(model, PipelineModule):
        ranks //= settings.mesh.pipe
        settings = replace(settings, mesh=replace(settings.mesh, pipe=1), pipeline=PipelineSection())
        one = ChunkPlacement.loop(1)
        with META if device == META else nullcontext():
            if model.built and model.placement == one:
                model.build(one, 0)
            else:
                model.build_whole()
    shape = mesh_shape(settings, ranks)
    if device == CPU:
        whole = MeshShape(shape.pipe, shape.data_parallel_size, 1, shape.model)
        return build_engine(model, _with_own_files(settings), lone_mesh(whole), CPU, **options, **data)
    if not all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        copied = Blueprint(model, options).given
        model = copied.pop("model")
        options = copied
    zero = replace(settings.zero_optimization, offload_optimizer=None, offload_param=None)
    settings = replace(settings, zero_optimization=zero)
    return _ValuelessEngine(build_engine(model, settings, lone_mesh(shape), META, **options, **data), CPU)


def _with_own_files(settings: DsConfig) -> DsConfig:
    """Return the settings with NVMe offload redirected to temporary files of this process."""
    zero, folder = settings.zero_optimization, (tempfile.gettempdir(),)
    for name in ("offload_optimizer", "offload_param"):
        place = getattr(zero, name)
        if place is not None and place.device == "nvme":
            zero = replace(zero, **{name: replace(place, nvme_path=folder)})
    return replace(settings, zero_optimization=zero)


def whole_pipelines(most_values: float) -> AbstractContextManager[None]:
    """Inside the block, a PipelineModule with a number of stages builds all layers immediately,
    because code for DeepSpeed passes their parameters to ``initialize``. Above ``most_values``
    parameters, layers have no values."""

    def build(module: PipelineModule, placement: ChunkPlacement) -> None:
        with META if module.total_parameters > most_values else nullcontext():
            module.build_whole()
        module.num_stages = placement.stages

    return pipelines_built_by(build)


class TrialEngines:
    """The engines of a planned trial, created by :attr:`initialize`.

    Plans several engines (a GAN) together. For a pipeline,
    :class:`zero_trial.planning.planner.PipelinePlanner` uses ``pipeline``: its module and
    ds_config.
    """

    def __init__(self, ranks: int, device: torch.device | str = "cpu") -> None:
        self.pipeline: tuple[PipelineModule, DsConfig] | None = None
        self.models: list[TrainedModel] = []
        self._engines: list[_ValuelessEngine] = []
        self._ranks = ranks
        self._device = torch.device(device)
        self.initialize = _initializer(self._make)

    def _make(
        self, model: nn.Module, settings: DsConfig, options: dict[str, Any], data: dict[str, Any]
    ) -> _ValuelessEngine:
        if isinstance(model, PipelineModule):
            self.pipeline = self.pipeline or (model, settings)
        else:
            self.models.append(TrainedModel(Blueprint(model, options, self._device), settings))
        engine: _ValuelessEngine = _rank_0(model, settings, self._ranks, META, options, data)
        if self._device.type != "cuda" or torch.cuda.is_available():
            engine.device = self._device
        self._engines.append(engine)
        return engine

    @property
    def settings(self) -> DsConfig:
        """Return the ds_config of the first engine."""
        if not self.models:
            raise TrialError(
                "the trial created no engine", where="plan", fix="Call context.initialize(model=...) in its __init__."
            )
        return self.models[0].settings

    def subject(
        self, train: Callable[[Any], Any] | None = None, batches: Sequence[Any] = (), *, whole_steps: bool = False
    ) -> Subject:
        """Return the planned models; ``train(iterator)`` is a call of the trial's ``train_batch``:
        a micro-batch, or a whole step. It reads the ``batches`` of the trial's loader in order."""

        if train is None:
            return Subject(self.models)

        def perform(engines: Sequence[TracedEngine], given: Sequence[Any]) -> None:
            with contextlib.ExitStack() as stack:
                for own, traced in zip(self._engines, engines, strict=True):
                    stack.enter_context(own.running(traced))
                train(itertools.cycle(given))

        return Subject(self.models, perform, batches, whole_steps=whole_steps)


# --- the task around the trial ---


@dataclass(frozen=True)
class DryRunRequest:
    """What to run: one point of an experiment on ``slots`` ranks.

    ``dry_run``: train and evaluate even if that is expensive.
    """

    experiment: ExperimentConfig
    entrypoint: Entrypoint
    hyperparameters: Mapping[str, Any]
    model_dir: Path
    slots: int
    seed: int = 0
    dry_run: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "model_dir", self.model_dir.resolve())  # the trial runs in it

    @classmethod
    def of(cls, checked: CheckedRun) -> DryRunRequest:
        """Return the request for the run of a single trial."""
        experiment = checked.experiment
        values = experiment.hyperparameters
        return cls(experiment, checked.entrypoint, values, checked.model_dir, checked.ranks, checked.seed)


class LoneTask:
    """The task around a trial that is built in this process: rank 0 without other ranks.

    Attributes:
        ranks: replaces the exchange between ranks; every rank has rank 0's values.
        events: the events that the trial has emitted.
    """

    def __init__(self, request: DryRunRequest, storage: Path) -> None:
        self._request = request
        self.ranks = Distributed(0, request.slots, 0, lambda value: [value] * request.slots)
        self.events: list[Mapping[str, Any]] = []
        self.platform = LocalPlatform(
            storage,
            show=self.events.append,
            hparams=request.hyperparameters,
            experiment=request.experiment.plain(),
            model_dir=request.model_dir,
            seed=request.seed,
            distributed=self.ranks,
        )
        self._contexts: list[ZeroTrialContext] = []

    def import_class(self) -> type[ZeroTrial]:
        """Import the trial's class, which runs the user's module."""
        name = self._request.entrypoint
        if name.as_determined:
            install_deepspeed().refuse_if_installed()
            install_determined()
        return import_trial_class(name.module, name.name, self._request.model_dir)

    def seeded_context(self) -> ZeroTrialContext:
        """Seed all random generators as a run does; return the context to build the trial with."""
        seed_everything(self._request.seed)
        self._contexts.append(ZeroTrialContext(self.platform, zero_trial.initialize, torch.device("cpu")))
        return self._contexts[-1]

    def close(self) -> None:
        """Close files that contexts have opened in the folder, which is removed next."""
        for context in self._contexts:
            context.tensorboard.close()


@contextlib.contextmanager
def lone_task(request: DryRunRequest, initialize: EngineFactory, most_values: float = 0.0) -> Iterator[LoneTask]:
    """Yield the task for building a trial. Inside the block, ``initialize`` creates engines, and
    pipelines of at most ``most_values`` parameters have values.

    The trial's output goes to stderr. Afterwards its modules are unloaded and its files are
    deleted.
    """
    with (
        tempfile.TemporaryDirectory(prefix="zero-trial-dry-run-") as folder,
        contextlib.redirect_stdout(sys.stderr),
        _model_folder(request.model_dir),
        engines_from(initialize),
        whole_pipelines(most_values),
    ):
        task = LoneTask(request, Path(folder))
        try:
            yield task
        finally:
            task.close()


class TrialCodeError(TrialError):
    """The trial's own code raised an exception."""

    exit_code = 1


def trial_code_error(error: BaseException, model_dir: Path, doing: str) -> ZeroTrialError:
    """Return the error for an exception of the user's code, with the last line of that code."""
    if (known := known_fault(error)) is not None:
        return known
    root = model_dir.resolve()
    own = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<") and Path(frame.filename).resolve().is_relative_to(root)
    ]
    where = f"{Path(own[-1].filename).resolve().relative_to(root)}:{own[-1].lineno}" if own else None
    if not own and isinstance(error, RuntimeError):
        return TrialError(str(error))  # our own error about the trial's behavior: Determined raises the same
    line = f" in: {own[-1].line}" if own and own[-1].line else ""
    text = str(error).strip()
    return TrialCodeError(f"{doing} raised {type(error).__name__}{f': {text}' if text else ''}{line}", where=where)


@contextlib.contextmanager
def raised_by_trial(model_dir: Path, doing: str) -> Iterator[None]:
    """Convert exceptions of the trial's code in the block into the error of that code."""
    try:
        yield
    except ZeroTrialError:
        raise
    except (Exception, SystemExit) as error:
        raise trial_code_error(error, model_dir, doing) from error


@contextlib.contextmanager
def _model_folder(folder: Path) -> Iterator[None]:
    """Change to the model folder, as ranks do, so that the trial finds its files.

    Afterwards, unload modules imported from it: the next trial may have modules of the same names.
    """
    path, before, working = list(sys.path), set(sys.modules), os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(working)
        sys.path[:] = path
        for name in set(sys.modules) - before:
            file = getattr(sys.modules[name], "__file__", None)
            if file and Path(file).resolve().is_relative_to(folder):
                del sys.modules[name]


# --- the plan of an experiment's trial ---


@dataclass(frozen=True)
class PlannedMachine:
    """The machine to plan for.

    ``limit``: bytes per rank, None if unknown. ``elsewhere``: this machine has neither the GPUs nor
    enough memory for the model. ``sharers``: number of ranks whose processes share the limit with
    their tensors; 0 if the limit is for tensors only.
    """

    device: str
    limit: int | None
    one_host: bool
    elsewhere: bool = False
    sharers: int = 0


@contextlib.contextmanager
def trial_planner(
    request: DryRunRequest, machine: PlannedMachine, stage: int | None = None
) -> Iterator[Planner | PipelinePlanner]:
    """Yield the planner of an experiment's trial, which is built here as rank 0, without values if
    the machine is elsewhere. Raises what the trial raises."""
    ranks, device = request.slots, machine.device
    engines = TrialEngines(ranks, device)
    with lone_task(request, engines.initialize) as task:
        with raised_by_trial(request.model_dir, "building the trial"):
            kind = task.import_class()
            # measured before the model is built: with the trial's imports, without tensors
            processes = rank_processes(own_process(), machine.sharers) if machine.sharers else 0
            context = task.seeded_context()
            with ModulesOnMeta() if machine.elsewhere else nullcontext():
                trial = kind(context)
            data = open_train_data(trial, context, DataPosition())
        feed = data.feed
        with raised_by_trial(request.model_dir, f"reading a batch of {TRAIN_LOADER}"):
            first = None if feed is None else next(feed)
        context.position = TrainPosition(0, data.epoch_length)
        if engines.pipeline is not None:
            model, settings = engines.pipeline
            settings, batch = _at_stage(settings, stage), _pair(first) if feed is not None else (None, None)
            more: dict[str, Any] = {"one_host": machine.one_host, "processes": processes}
            yield PipelinePlanner(model, settings, ranks, batch, device=device, **more)
            return
        settings, train = _at_stage(engines.settings, stage), fitted(trial.train_batch)
        subject = engines.subject()
        if feed is not None:
            whole = not context.auto_accumulation
            subject = engines.subject(lambda batches: train(batches, 0, 0), [first], whole_steps=whole)
        yield Planner(subject, settings, ranks, one_host=machine.one_host, processes=processes)


def this_machine(ranks_here: int, *, one_host: bool = True) -> PlannedMachine:
    """Return this machine, with ``ranks_here`` ranks."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    limit = rank_limit(torch.device(device), ranks_here)
    return PlannedMachine(device, limit, one_host, sharers=0 if device == "cuda" else ranks_here)


def too_large(request: DryRunRequest, parameters: int) -> DoesNotFit | None:
    """Return the error of ``zero-trial plan`` for a trial that does not fit on this machine.

    Does not plan a trial whose states cannot fill half of a rank's memory, because planning takes
    longer than a check.
    """
    machine = this_machine(request.slots)
    if machine.limit is None or _STATE_BYTES * parameters < machine.limit // 2:
        return None
    with contextlib.suppress(ZeroTrialError), trial_planner(request, machine) as planner:
        return None if planner.plan().fits(machine.limit) else planner.does_not_fit(machine.limit)
    return None


_STATE_BYTES = 16  # per parameter: fp32 with Adam, not sharded


def _at_stage(settings: DsConfig, stage: int | None) -> DsConfig:
    if stage is None:
        return settings
    return replace(settings, zero_optimization=replace(settings.zero_optimization, stage=stage))


def _pair(batch: Any) -> tuple[Any, Any]:
    """Return a micro-batch of a pipeline: inputs and labels."""
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], batch[1]
    raise DataError(
        "a pipeline's micro-batch is a pair", where="plan", got=type(batch).__name__, expected="(inputs, labels)"
    )
