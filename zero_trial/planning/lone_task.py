"""What a trial gets that is built in this process, without ranks: its context and modules, and
instead of ``zero_trial.initialize`` one that builds engines of rank 0 alone.

    check_initialize   an engine with real values on the CPU, for ``check``: the trial builds, loads
                       and evaluates with it
    TrialSubject       a proxy, for ``plan``: the trial's train_batch runs on the plain model

A pipeline is one engine of one stage that holds all layers, because the stages of a real one
exchange tensors and the other ranks of a lone mesh send none. Its layers have no values where only
its sizes are asked for.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

import zero_trial
from zero_trial.comm import MeshShape
from zero_trial.compat.deepspeed.deepspeed_table import install_deepspeed
from zero_trial.compat.determined_table import install_determined
from zero_trial.ds_config.keys_running import PipelineSection
from zero_trial.ds_config.table import DsConfig
from zero_trial.engine import Engine
from zero_trial.engine.build import build_engine
from zero_trial.engine.compat import EngineMpu
from zero_trial.engine.monitors import build_writers
from zero_trial.engine.resolved_config import mesh_shape
from zero_trial.engine.start import engines_from, given_once, read_settings
from zero_trial.errors import TrialError, ZeroTrialError
from zero_trial.experiment.entrypoint import Entrypoint
from zero_trial.experiment.experiment import ExperimentConfig
from zero_trial.launch.run_experiment import CheckedRun
from zero_trial.pipeline.module import PipelineModule, pipelines_built_by
from zero_trial.pipeline.schedule import ChunkPlacement
from zero_trial.planning.blueprint import META, Blueprint
from zero_trial.planning.lone_mesh import lone_mesh
from zero_trial.planning.memory_plan import Figures
from zero_trial.planning.pass_trace import TracedEngine
from zero_trial.planning.state_bytes import PlannedStates, TrainedModel
from zero_trial.planning.subject import Passes, first_rows, plan_figures, rows_of, variant, with_state_at
from zero_trial.trial.context import EngineFactory, ZeroTrialContext
from zero_trial.trial.runtime.local import LocalPlatform
from zero_trial.trial.runtime.protocols import JsonDistributed
from zero_trial.trial.trial import ZeroTrial, import_trial_class, seed_everything
from zero_trial.util.failures import known_fault
from zero_trial.util.memory import machine_memory

CPU = torch.device("cpu")
MOST_VALUES = 100_000_000  # parameters that are trained unasked
_BYTES = 24  # per parameter, of the states and the activations of a little work


class _ProxyEngine:
    """The engine that a trial gets: while a plan runs its train_batch, calls go to the plain model;
    everything else goes to an engine without values, which is built when it is first needed.

    Args:
        device: where the trial should put its tensors.
        build: builds the engine.
        known: attributes of the engine that need no engine, such as those that a context asks for.
    """

    def __init__(
        self, device: torch.device, build: Callable[[], Engine], known: Mapping[str, Any] | None = None
    ) -> None:
        self.device = device
        self._build = build
        self._known = known or {}
        self._built: Engine | None = None
        self._traced: TracedEngine | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return (self._traced or self._engine)(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if self._traced is not None and hasattr(TracedEngine, name):
            return getattr(self._traced, name)
        return self._known[name] if name in self._known else getattr(self._engine, name)

    @property
    def module(self) -> Any:
        return self._traced.module if self._traced is not None else self._engine.module

    @property
    def _engine(self) -> Engine:
        if self._built is None:
            with _disable_current_modes(), CPU:  # also while a plan runs without values
                self._built = self._build()
        return self._built

    @contextlib.contextmanager
    def running(self, traced: TracedEngine) -> Iterator[None]:
        """Pass calls to ``traced`` inside."""
        self._traced, self.device = traced, traced.device
        try:
            yield
        finally:
            self._traced = None


def _returned(engine: Any) -> tuple[Any, Any, Any, Any]:
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


class _Returned(tuple[Any, ...]):
    """What ``initialize`` returns for a proxy: only a caller that takes more than the engine needs
    the engine to be built."""

    def __new__(cls, engine: _ProxyEngine) -> _Returned:
        return super().__new__(cls, (engine, None, None, None))

    def __getitem__(self, place: Any) -> Any:
        return super().__getitem__(0) if place == 0 else tuple(self)[place]

    def __iter__(self) -> Iterator[Any]:
        return iter(_returned(self[0]))


def check_initialize(ranks: int, most_values: float = MOST_VALUES) -> Callable[..., tuple[Any, Any, Any, Any]]:
    """Return a function with the signature of ``zero_trial.initialize`` for a run of ``ranks``
    ranks.

    Its engines compute on the CPU, in the precision of ds_config. Collectives move nothing, so the
    engine of a model that has room here (:func:`has_room`) has the shards of all ranks: they are
    replicas to it. In another model the parameters of other ranks become zeros. A pipeline of more
    than ``most_values`` parameters gets no values at all.
    """

    def engine(model: nn.Module, settings: DsConfig, options: dict[str, Any], data: dict[str, Any]) -> Any:
        given = options | data
        if not isinstance(model, PipelineModule):
            return _rank_0(model, settings, ranks, CPU, given, whole=has_room(model.parameters()))
        if model.total_parameters <= most_values:
            return _whole_pipeline(model, settings, ranks, CPU, given, whole=_fits(model.total_parameters))
        return _proxy_of_pipeline(model, settings, ranks, given)

    return _initializer(engine)


def has_room(params: Iterable[nn.Parameter]) -> bool:
    """Return whether the parameters are few enough to be trained here unasked."""
    return _fits(sum(param.numel() for param in params))


def _fits(parameters: int) -> bool:
    memory = machine_memory()
    return parameters <= MOST_VALUES and (memory is None or _BYTES * parameters <= memory)


def _initializer(
    make_engine: Callable[[nn.Module, DsConfig, dict[str, Any], dict[str, Any]], Any],
) -> Callable[..., tuple[Any, Any, Any, Any]]:
    """Return a function with the signature of ``zero_trial.initialize`` that calls ``make_engine``.

    ``make_engine`` gets the model, the ds_config, what the engine is made from, and what its data
    loader is made from.
    """

    def initialize(
        args: Any = None,
        model: nn.Module | None = None,
        optimizer: Any = None,
        model_parameters: Any = None,
        training_data: Any = None,
        lr_scheduler: Any = None,
        distributed_port: int = 0,
        mpu: Any = None,
        dist_init_required: bool | None = None,
        collate_fn: Any = None,
        config: Any = None,
        mesh_param: Any = None,
        config_params: Any = None,
        *,
        net: nn.Module | None = None,
        dataset: Any = None,
        weights: Any = None,
        weights_prefix: str = "",
    ) -> tuple[Any, Any, Any, Any]:
        model, settings = read_settings(args, given_once(model=model, net=net), config, config_params)
        settings = _without_writers(settings)
        training_data = given_once(training_data=training_data, dataset=dataset)
        options = {"optimizer": optimizer, "model_parameters": model_parameters, "lr_scheduler": lr_scheduler}
        data = {"training_data": training_data, "collate_fn": collate_fn}
        data |= {"weights": (weights, weights_prefix)} if weights is not None else {}
        with CPU:  # a model may be built on another device, and the engine's own tensors are here
            engine = make_engine(model, settings, options, data)
        return _Returned(engine) if isinstance(engine, _ProxyEngine) else _returned(engine)

    return initialize


def _without_writers(settings: DsConfig) -> DsConfig:
    """Return the settings without what writes files or reports elsewhere. Raises ConfigError for a
    package that the run would miss."""
    build_writers(settings, rank=1)  # looks for the packages and opens nothing
    names = ("tensorboard", "csv_monitor", "wandb", "comet", "flops_profiler")
    return replace(settings, **{name: replace(getattr(settings, name), enabled=False) for name in names})


def _rank_0(
    model: nn.Module,
    settings: DsConfig,
    ranks: int,
    device: torch.device,
    options: dict[str, Any],
    *,
    whole: bool = False,
) -> Engine:
    """Build the engine of rank 0; ``whole``: its shards are those of all ranks."""
    shape = mesh_shape(settings, ranks)
    if whole:
        shape = MeshShape(shape.pipe, shape.data_parallel_size, 1, shape.model)
    return build_engine(model, _with_own_files(settings, keep=whole), lone_mesh(shape), device, **options)


def _with_own_files(settings: DsConfig, *, keep: bool) -> DsConfig:
    """Return the settings with what is offloaded to NVMe in files of this process's own, which go
    with it; ``keep=False``: in memory."""
    zero, folder = settings.zero_optimization, (tempfile.gettempdir(),)
    state, params = zero.offload_optimizer, zero.offload_param
    if state is not None and state.device == "nvme":
        zero = replace(zero, offload_optimizer=replace(state, nvme_path=folder) if keep else None)
    if params is not None and params.device == "nvme":
        zero = replace(zero, offload_param=replace(params, nvme_path=folder) if keep else None)
    return replace(settings, zero_optimization=zero)


def _whole_pipeline(
    model: PipelineModule,
    settings: DsConfig,
    ranks: int,
    device: torch.device,
    options: dict[str, Any],
    *,
    whole: bool = False,
) -> Engine:
    """Build the engine of all layers on the ranks that share one stage of ``settings``."""
    one_stage = replace(settings, mesh=replace(settings.mesh, pipe=1), pipeline=PipelineSection())
    one = ChunkPlacement.loop(1)
    if model.built and model.placement == one:
        model.build(one, 0)
    else:
        with device if device == META else nullcontext():
            model.build_whole()
    if device == META and not all(param.is_meta for param in model.parameters()):  # layers given as modules
        made_from = {name: options[name] for name in options.keys() & {"optimizer", "model_parameters", "lr_scheduler"}}
        copied = Blueprint(model, made_from, META).copy()
        model, options = copied.pop("model"), options | copied
    return _rank_0(model, one_stage, ranks // settings.mesh.pipe, device, options, whole=whole)


def _proxy_of_pipeline(model: PipelineModule, settings: DsConfig, ranks: int, options: dict[str, Any]) -> _ProxyEngine:
    engine = _whole_pipeline(model, settings, ranks, META, options)
    return _ProxyEngine(CPU, lambda: engine)


def whole_pipelines(most_values: float) -> AbstractContextManager[None]:
    """Inside, a PipelineModule that names its stages builds all layers at once, as it builds its
    own on a rank: code for DeepSpeed gives their parameters to ``initialize``. One of more than
    ``most_values`` parameters builds them without values."""

    def build(module: PipelineModule, placement: ChunkPlacement) -> None:
        with META if module.total_parameters > most_values else nullcontext():
            module.build_whole()
        module.num_stages = placement.stages

    return pipelines_built_by(build)


@dataclass(frozen=True)
class _Part:
    model: TrainedModel
    proxy: _ProxyEngine


class TrialSubject:
    """A trial built with :meth:`factory` instead of ``zero_trial.initialize``; see
    :class:`zero_trial.planning.subject.Subject`.

    Give it the trial's micro-batch with :meth:`perform` before a plan. Several engines (a GAN) are
    planned together. A pipeline is planned by :class:`zero_trial.planning.PipelinePlanner`, from
    ``pipeline``: its module and ds_config.
    """

    def __init__(self, ranks: int, device: torch.device | str = "cpu") -> None:
        self.ranks = ranks
        self.pipeline: tuple[PipelineModule, DsConfig] | None = None
        self.device = torch.device(device)
        self._parts: list[_Part] = []
        self._passes: Passes | None = None
        self._batches: list[Any] = []

    @property
    def factory(self) -> Callable[..., tuple[Any, Any, Any, Any]]:
        """Return a function with the signature of ``zero_trial.initialize`` whose engines are
        planned, each behind a :class:`_ProxyEngine`.
        """
        return _initializer(self._engine)

    def _engine(
        self, model: nn.Module, settings: DsConfig, options: dict[str, Any], data: dict[str, Any]
    ) -> _ProxyEngine:
        given = {name: _listed(value) for name, value in options.items() if value is not None}
        data = {name: value for name, value in data.items() if name != "weights"}  # sizes are all that is asked
        if isinstance(model, PipelineModule):
            self.pipeline = self.pipeline or (model, settings)
            return _proxy_of_pipeline(model, settings, self.ranks, given | data)
        trained = TrainedModel(Blueprint(model, given, self.device), settings)
        states = PlannedStates(trained, settings, self.ranks, self.device)  # refuses what an engine would
        here = self.device.type != "cuda" or torch.cuda.is_available()

        def build() -> Engine:
            copied = trained.blueprint.copy()
            return _rank_0(copied.pop("model"), _with_own_files(settings, keep=False), self.ranks, META, copied | data)

        batch = states.resolved.batch
        known = {
            "mpu": EngineMpu(states.mesh),
            "price": None,
            "is_pipe_parallel": False,
            "train_batch_size": lambda: batch.train_batch_size,
            "train_micro_batch_size_per_gpu": lambda: batch.micro_batch_size,
            "gradient_accumulation_steps": lambda: batch.accumulation,
        }
        proxy = _ProxyEngine(self.device if here else CPU, build, known)
        self._parts.append(_Part(trained, proxy))
        return proxy

    def perform(
        self, train: Callable[[Any], Any], batches: Sequence[Any], *, calls_per_step: int | None = None
    ) -> None:
        """Set what a plan runs: ``train(iterator)`` is one call of the trial's ``train_batch``.

        Args:
            batches: real ones of the trial's loader, handed out in turn.
            calls_per_step: 1 for a trial that does all micro-batches of a step itself; None: once
                per micro-batch.
        """
        self._batches = list(batches)

        def perform(engines: Sequence[TracedEngine], given: Sequence[Any]) -> None:
            with contextlib.ExitStack() as stack:
                for part, engine in zip(self._parts, engines, strict=True):
                    stack.enter_context(part.proxy.running(engine))
                train(_repeated(given))

        self._passes = Passes(perform, whole_steps=calls_per_step == 1)

    @property
    def settings(self) -> DsConfig:
        """Return the ds_config of the first engine."""
        if not self._parts:
            raise TrialError(
                "the trial made no engine", where="plan", fix="Call context.initialize(model=...) in its __init__."
            )
        return self._parts[0].model.settings

    @property
    def parameters(self) -> int:
        return sum(part.model.blueprint.parameters for part in self._parts)

    @property
    def samples(self) -> int | None:
        return rows_of(self._batches)

    def figures(self, settings: DsConfig, ranks: int, micro_batch: int, one_host: bool = True) -> tuple[Figures, str]:
        stage, accumulation = settings.zero_optimization.stage, settings.gradient_accumulation_steps or 1
        place = settings.zero_optimization.offload_optimizer
        engines = [part.model for part in self._parts]
        own = [
            variant(
                with_state_at(each.settings, place), stage=stage, micro_batch=micro_batch, accumulation=accumulation
            )
            for each in engines
        ]
        given = [first_rows(batch, rows, micro_batch) if (rows := rows_of(batch)) else batch for batch in self._batches]
        return plan_figures(engines, own, ranks, self._passes, given, micro_batch, one_host=one_host)


def _repeated(batches: Sequence[Any]) -> Any:
    """Yield the batches in turn, without an end."""
    while True:
        yield from batches


def _listed(value: Any) -> Any:
    """Return a generator of parameters as a list, so that it can be read more than once."""
    return list(value) if hasattr(value, "__next__") else value


# --- the task around the trial ---


@dataclass(frozen=True)
class DryRunRequest:
    """What to run: one point of an experiment on ``slots`` ranks.

    ``dry_run``: train and evaluate also where that is much work.
    """

    experiment: ExperimentConfig
    entrypoint: Entrypoint
    hyperparameters: Mapping[str, Any]
    model_dir: Path
    slots: int
    seed: int = 0
    dry_run: bool = False

    @classmethod
    def of(cls, checked: CheckedRun) -> DryRunRequest:
        """Return the request for the run of a single trial."""
        experiment = checked.experiment
        values = experiment.hyperparameters
        return cls(experiment, checked.entrypoint, values, checked.model_dir, checked.ranks, checked.seed)


class LoneTask:
    """What surrounds a trial that is built in this process: rank 0 of ranks that are not there.

    Attributes:
        ranks: what the ranks would tell each other; each says what rank 0 says.
        events: what the trial has emitted.
    """

    def __init__(self, request: DryRunRequest, storage: Path) -> None:
        self._request = request
        self.ranks = JsonDistributed(0, request.slots, 0, lambda value: [value] * request.slots)
        self.events: list[Mapping[str, Any]] = []
        self.platform = LocalPlatform(
            storage,
            show=self.events.append,
            hparams=request.hyperparameters,
            experiment=request.experiment.plain(),
            model_dir=request.model_dir.resolve(),
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
        return import_trial_class(name.module, name.name, self._request.model_dir.resolve())

    def seeded_context(self) -> ZeroTrialContext:
        """Seed all random generators as a run does and return the context to build the trial
        with.
        """
        seed_everything(self._request.seed)
        self._contexts.append(ZeroTrialContext(self.platform, zero_trial.initialize, torch.device("cpu")))
        return self._contexts[-1]

    def close(self) -> None:
        """Close what contexts have opened in the folder, which is removed next."""
        for context in self._contexts:
            context.tensorboard.close()


@contextlib.contextmanager
def lone_task(request: DryRunRequest, initialize: EngineFactory, most_values: float = 0.0) -> Iterator[LoneTask]:
    """Yield what a trial is built with; inside, its engines come from ``initialize``, and pipelines
    of at most ``most_values`` parameters have values.

    What the trial prints goes to stderr. Afterwards its modules are forgotten and its files are
    gone.
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
    """Return the error for what the user's code raised, with the last line of that code in the
    traceback.
    """
    if (known := known_fault(error)) is not None:
        return known
    root = model_dir.resolve()
    own = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename).resolve().is_relative_to(root)
    ]
    where = f"{Path(own[-1].filename).resolve().relative_to(root)}:{own[-1].lineno}" if own else None
    if not own and isinstance(error, RuntimeError):
        return TrialError(str(error))  # ours, about what the trial did: Determined raises the same
    line = f" in: {own[-1].line}" if own and own[-1].line else ""
    text = str(error).strip()
    return TrialCodeError(f"{doing} raised {type(error).__name__}{f': {text}' if text else ''}{line}", where=where)


@contextlib.contextmanager
def raised_by_trial(model_dir: Path, doing: str) -> Iterator[None]:
    """Raise what the trial's code raises in the block as the error of that code."""
    try:
        yield
    except ZeroTrialError:
        raise
    except (Exception, SystemExit) as error:
        raise trial_code_error(error, model_dir, doing) from error


@contextlib.contextmanager
def _model_folder(folder: Path) -> Iterator[None]:
    """Forget afterwards what was imported from the model's folder: the next one may have modules of
    the same names.
    """
    path, before, root = list(sys.path), set(sys.modules), folder.resolve()
    try:
        yield
    finally:
        sys.path[:] = path
        for name in set(sys.modules) - before:
            file = getattr(sys.modules[name], "__file__", None)
            if file and Path(file).resolve().is_relative_to(root):
                del sys.modules[name]
