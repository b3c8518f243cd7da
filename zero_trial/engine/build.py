"""Where the engine's lines go: the logger "zero_trial", with a handler of its own where the program has set up no logging.

Progress goes to the standard output, warnings to the standard error; ``log_level`` says from which level on.
"""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import nn

from zero_trial.activation_checkpointing import CHECKPOINTING
from zero_trial.comm import (
    AxisComm,
    Mesh,
    build_mesh,
    init_distributed,
    is_distributed,
    read_rank_env,
    sum_in_order,
    world_size,
)
from zero_trial.comm.mesh import mesh_around
from zero_trial.ds_config.keys_running import ActivationCheckpointingSection
from zero_trial.ds_config.reader import read_ds_config
from zero_trial.ds_config.report import filled_line
from zero_trial.ds_config.table import DsConfig
from zero_trial.engine.compat import hints_of
from zero_trial.engine.engine import Engine, ParameterCheck
from zero_trial.engine.lr_schedules import choose_schedule
from zero_trial.engine.observe import attach_observers
from zero_trial.engine.offload_config import (
    REAL_BACKENDS,
    OffloadBackends,
    OffloadPlan,
    offload_line,
    offloads,
    plan_offload,
)
from zero_trial.engine.optimizers import (
    Groups,
    check_shapes,
    groups_over,
    is_elementwise,
    parameter_groups,
    resolve_optimizer,
)
from zero_trial.engine.pipeline_build import ResolvedPipeline, build_layers, resolve_pipeline, with_stages
from zero_trial.engine.pipeline_engine import PipelineEngine
from zero_trial.engine.resolved_config import ResolvedConfig, mesh_shape, resolve_config
from zero_trial.engine.step import choose_step_outcome
from zero_trial.errors import ConfigError, KernelUnavailable
from zero_trial.ops import Backend, backend
from zero_trial.ops.cpu import native_sum
from zero_trial.ops.optimizers import FusedLamb
from zero_trial.pipeline.module import PipelineModule
from zero_trial.sharding.dtypes import describe_dtypes
from zero_trial.sharding.grouping import is_model_parallel
from zero_trial.sharding.pieces import cut_pieces, rebind
from zero_trial.zero import ShardedModel, ShardedOptimizer

LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}


class ConsoleHandler(logging.Handler):
    """One line per record. The streams are looked up when a record comes, so that a redirection made later counts.

    Where ``elsewhere`` says that lines are shown by others (a program that sets up the root logger after initialize()), it is silent.
    """

    def __init__(self, elsewhere: Callable[[], bool] = lambda: bool(logging.getLogger().handlers)) -> None:
        super().__init__()
        self._elsewhere = elsewhere

    def emit(self, record: logging.LogRecord) -> None:
        if self._elsewhere():
            return
        stream: TextIO = sys.stderr if record.levelno >= logging.WARNING else sys.stdout
        stream.write(f"{self.format(record)}\n")
        stream.flush()


def open_console(
    level: str | None, logger: logging.Logger | None = None, handler: logging.Handler | None = None
) -> None:
    """Makes lines from ``level`` (default info) on visible. A level that the program has set itself is kept unless ``level`` is given.

    Raises ConfigError for an unknown level.
    """
    log = logger if logger is not None else logging.getLogger("zero_trial")
    if level is not None and level.lower() not in LEVELS:
        raise ConfigError("no such level", where="log_level", got=repr(level), expected=f"one of {', '.join(LEVELS)}")
    if not log.hasHandlers():
        log.addHandler(handler if handler is not None else ConsoleHandler())
    if level is not None:
        log.setLevel(LEVELS[level.lower()])
    elif log.level == logging.NOTSET:
        log.setLevel(logging.INFO)


# Which arithmetic the ranks of a world use on CPU: all the same, native only where every rank has it.
#
# Kernels and plain torch round differently in the last bit, so ranks that differed would train on weights that drift apart where they are
# copies of each other, and a run would depend on which rank was placed where.


log = logging.getLogger("zero_trial")


def agree_on_kernels(world: AxisComm) -> None:
    """Finds out what every rank has; where one has no native kernels, this process gives up its own. Collective over ``world``.

    Rank 0 says so once. Raises KernelUnavailable on every rank where one was told to use native kernels and cannot, or can and others cannot.
    """
    own, trouble = _own()
    told = {
        "native": own is not None and own.native is not None,
        "why": trouble.what if trouble is not None else own.why if own is not None else "",
        "strict": trouble is not None or (own is not None and own.strict),
    }
    everyone: list[dict[str, Any]] = world.gather_json(told, "kernels")
    if trouble is not None:
        raise trouble
    blind = next((rank for rank, row in enumerate(everyone) if not row["native"]), None)
    if blind is None or not any(row["native"] or row["strict"] for row in everyone):
        return
    why = f"rank {world.ranks[blind]} has none ({everyone[blind]['why']})"
    if any(row["strict"] for row in everyone):
        raise KernelUnavailable(
            "not every rank has native kernels, and all must compute alike",
            where="ZERO_TRIAL_OPS=native",
            got=why,
            fix="Mend that rank, or set it to auto.",
        )
    if backend().native is not None:
        backend().withdraw(why)
    if world.index == 0:
        log.warning("CPU kernels run as plain torch on all ranks, so that they compute alike: %s", why)


def _own() -> tuple[Backend | None, KernelUnavailable | None]:
    """This rank's backend, or why it has none although it must: the others are to hear of that before it ends."""
    try:
        return backend(), None
    except KernelUnavailable as trouble:
        return None, trouble


# What rank 0 says of a model before it trains, where that is not simply what ds_config says.


log = logging.getLogger("zero_trial")


def log_dtypes(model: nn.Module, asked: torch.dtype, mesh: Mesh) -> None:
    """A line for each way in which parameters are not what ds_config asks for."""
    trained = ((name, param.dtype) for name, param in model.named_parameters() if param.requires_grad)
    for line in describe_dtypes(trained, asked) if mesh.rank == 0 else ():
        log.warning(line)


def log_model_parts(model: nn.Module, mesh: Mesh, wiring: ResolvedConfig) -> None:
    """A line where parts of a model decide for themselves what concerns them all, or do not say what they have in common."""
    parts = mesh.model_part[1]
    if parts == 1 or mesh.rank != 0:
        return
    if mesh.model.size == 1 and (wiring.clip > 0 or wiring.policy.param == torch.float16):
        what = "clips by its own gradient norm" if wiring.clip > 0 else "skips steps and scales its loss by itself"
        log.warning(
            "%d parallel parts of the model and no get_model_parallel_group() of the mpu: each %s, "
            "so that weights which all parts hold can drift apart",
            parts,
            what,
        )
    elif mesh.model.size > 1 and not any(is_model_parallel(param) for param in model.parameters()):
        log.warning(
            "%d parallel parts of the model, and no parameter has tensor_model_parallel or model_parallel = True: "
            "all are taken for copies of each other, and those of the first part alone make the gradient norm",
            parts,
        )


# ``initialize()``: the one place that wires an engine from a model, an optimizer and a ds_config.


log = logging.getLogger("zero_trial")


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[..., torch.optim.Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Any = None,
    config: Mapping[str, Any] | DsConfig | str | Path | None = None,
    mesh_param: tuple[int, ...] | None = None,
    config_params: Mapping[str, Any] | str | Path | None = None,
) -> tuple[Engine, ShardedOptimizer | None, Any, Any]:
    """Wraps ``model`` and returns ``(engine, optimizer, training_dataloader, lr_scheduler)``, as DeepSpeed does.

    ``config`` (or ``config_params``, or ``args.deepspeed_config``): ds_config as dict, path or base64. A client ``optimizer``
    (object, or callable from parameter groups) wins over ds_config's; so does a client ``lr_scheduler`` (object, or callable
    from the optimizer). "auto" takes what ``args`` (TrainingArguments, or argparse's) and ``model.config`` say.
    All ranks start from rank 0's weights. Collective over the world. Raises ConfigError, MeshError.
    """
    if model is None:
        raise ConfigError(
            "initialize() needs a model", where="initialize(model)", got=None, expected="a torch.nn.Module"
        )
    source = _config_source(args, config, config_params)
    settings = source if isinstance(source, DsConfig) else read_ds_config(source, hints=_hints(model) | hints_of(args))
    settings = with_stages(settings, model)
    open_console(settings.log_level)
    mesh = _join(settings, mpu, distributed_port, dist_init_required)
    if _device().type == "cpu" or offloads(settings):
        agree_on_kernels(mesh.world)
    engine = build_engine(model, settings, mesh, _device(), optimizer, model_parameters, lr_scheduler, mpu)
    if mesh.rank == 0 and (filled := filled_line(settings)):
        log.info("%s", filled)
    engine.verdict = choose_step_outcome(engine.sharded, engine.wiring, engine.device, engine.optimizer)
    if mesh.rank == 0 and (line := offload_line(engine)) is not None:
        log.info("%s", line)
    attach_observers(engine)
    engine.roster = ParameterCheck(engine.module)
    _configure_checkpointing(settings, mesh)
    if training_data is not None:
        engine.training_dataloader = engine.deepspeed_io(
            training_data, **({"collate_fn": collate_fn} if collate_fn is not None else {})
        )
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def _configure_checkpointing(settings: DsConfig, mesh: Mesh) -> None:
    """``zero_trial.checkpointing`` follows the section of the engine that was initialized last, where one was written."""
    section = settings.activation_checkpointing
    if section == ActivationCheckpointingSection():
        return
    CHECKPOINTING.configure_from(section, mesh.model)
    if section.partition_activations and mesh.model.size == 1 and mesh.rank == 0:
        log.info(
            "activation_checkpointing.partition_activations has no effect: there are no model-parallel ranks (mesh.model is 1)"
        )


def build_engine(
    model: nn.Module,
    settings: DsConfig,
    mesh: Mesh,
    device: torch.device,
    optimizer: torch.optim.Optimizer | Callable[..., torch.optim.Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    lr_scheduler: Any = None,
    mpu: Any = None,
    places: OffloadBackends = REAL_BACKENDS,
) -> Engine:
    """The engine on a mesh that there is already; arguments as in :func:`initialize`. Collective over the mesh.

    ``places`` are those of offloaded state; a rehearsal has some without a disk.
    """
    wiring = resolve_config(settings, mesh.data.size)
    if isinstance(model, PipelineModule):
        given = model_parameters is not None or isinstance(optimizer, torch.optim.Optimizer)
        build_layers(model, settings, mesh, has_parameters=given)
    _require_values(model)
    if any(tensor.device != device for tensor in itertools.chain(model.parameters(), model.buffers())):
        model.to(device)
    groups = parameter_groups(model, optimizer, model_parameters)
    if optimizer is None and settings.optimizer is not None:
        trained = {id(param) for group in groups for param in group["params"]}
        tensors = {name: param for name, param in model.named_parameters() if id(param) in trained}
        check_shapes(settings.optimizer.type, tensors, mesh.shard.size if wiring.plan.shard_optimizer else 1)
    pipeline: ResolvedPipeline | None = None
    if isinstance(model, PipelineModule):
        wiring, pipeline = resolve_pipeline(model, settings, mesh, wiring, device)
    log_dtypes(model, wiring.policy.param, mesh)
    log_model_parts(model, mesh, wiring)
    trained = list(itertools.chain(*(group["params"] for group in groups))) if _optimizes(optimizer, settings) else []
    everything = list(model.parameters())
    offload = plan_offload(settings, mesh, device, trained, wiring.policy.param, places, everything)
    sharded = ShardedModel(
        model,
        [group["params"] for group in groups] if _optimizes(optimizer, settings) else [],
        wiring.plan,
        mesh,
        wiring.policy,
        wiring.sharding,
        pipeline.domains if pipeline is not None else (),
        offload.house,
    )
    parts = (model, sharded, None, None, wiring, settings, mesh, device)
    place: dict[str, Any] = {"local_rank": read_rank_env().local_rank, "client_mpu": mpu}
    engine = Engine(*parts, **place) if pipeline is None else PipelineEngine(*parts, **place, wired=pipeline)
    wrapped = _build_optimizer(engine, optimizer, groups, settings, offload)
    engine.optimizer = sharded.optimizer = wrapped
    engine.lr_scheduler = choose_schedule(wrapped.base if wrapped is not None else None, lr_scheduler, settings)
    return engine


def _require_values(model: nn.Module) -> None:
    """Raises ConfigError for a model that was built on the meta device: training has to start from some values."""
    tensors = itertools.chain(model.named_parameters(), model.named_buffers())
    if (name := next((name for name, tensor in tensors if tensor.is_meta), None)) is not None:
        raise ConfigError(
            "the model is on the meta device and has no values",
            where=f"initialize(model): {name}",
            got="device meta",
            expected="initialized parameters and buffers",
            fix="Build it inside zero_trial.zero.Init(), which shards each layer as it is built, or call model.to_empty() and initialize it.",
        )


def _config_source(args: Any, config: Any, config_params: Any) -> Any:
    by_args = getattr(args, "deepspeed_config", None) or getattr(args, "zero_trial_config", None)
    given = [value for value in (config, config_params, by_args) if value is not None]
    if len(given) != 1:
        raise ConfigError(
            "ds_config must be given exactly once",
            where="initialize(config)",
            got=f"{len(given)} of config, config_params, args.deepspeed_config",
            expected="one",
        )
    return given[0]


def _hints(model: nn.Module) -> dict[str, Any]:
    """What "auto" values can be derived from: the width that Hugging Face style models declare."""
    described = getattr(model, "config", None)
    sizes = [getattr(described, name, None) for name in ("hidden_size", "d_model", "n_embd")]
    width = next((size for size in sizes if isinstance(size, int)), None)
    return {"hidden_size": width} if width is not None else {}


def _join(settings: DsConfig, mpu: Any, port: int, required: bool | None) -> Mesh:
    timeout = settings.comm_timeout_seconds
    if read_rank_env().launched or required or is_distributed():
        init_distributed(distributed_port=port, timeout=timeout, dist_init_required=required)
    add = native_sum(sum_in_order)
    if mpu is not None:
        model_size = mpu.get_model_parallel_world_size() if hasattr(mpu, "get_model_parallel_world_size") else 1
        own_group = model_size > 1 and hasattr(mpu, "get_model_parallel_group")
        model_group = mpu.get_model_parallel_group() if own_group else None
        return mesh_around(
            mpu.get_data_parallel_group(), model_size=model_size, model_group=model_group, timeout=timeout, add=add
        )
    shape = mesh_shape(settings, world_size())
    return build_mesh(shape, timeout=timeout, shared_memory=settings.comm_transport == "auto", add=add)


def _device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _optimizes(optimizer: Any, settings: DsConfig) -> bool:
    return optimizer is not None or settings.optimizer is not None


def _build_optimizer(
    engine: Engine, optimizer: Any, groups: Groups, settings: DsConfig, offload: OffloadPlan
) -> ShardedOptimizer | None:
    if not _optimizes(optimizer, settings):
        return None
    landings = engine.sharded.grad_buffers
    if isinstance(optimizer, torch.optim.Optimizer):
        base = optimizer
        pieces = cut_pieces(
            landings,
            whole_tensors=not is_elementwise(type(base)) and not isinstance(base, FusedLamb),
            most=offload.most,
            make=offload.piece,
        )
        rebind(base, pieces)
    else:
        spec = None if optimizer is not None else resolve_optimizer(settings.optimizer.type, settings.optimizer.params)  # type: ignore[union-attr]
        pieces = cut_pieces(
            landings,
            whole_tensors=spec is not None and not spec.elementwise and not spec.binds_tensors,
            most=offload.most,
            make=offload.piece,
        )
        build = spec.build if spec is not None else optimizer
        base = build(groups_over(pieces, groups))
        if (
            spec is None and not is_elementwise(type(base)) and not isinstance(base, FusedLamb)
        ):  # a callable does not say before what it gives
            pieces = cut_pieces(landings, whole_tensors=True)
            base = build(groups_over(pieces, groups))
    store = offload.store(base, pieces, is_elementwise(type(base)))
    wrapped = ShardedOptimizer(base, pieces, scale=lambda: engine.loss_scaler.scale, store=store)
    comm = engine.mesh.shard
    wrapped.bind_tensors(
        [landing.group for landing in landings], lambda sums: comm.all_reduce_small(sums, "tensor norms")
    )
    return wrapped
