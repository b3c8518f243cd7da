"""``initialize()``: the one place that wires an engine from a model, an optimizer and a ds_config."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zero_trial.activation.checkpointing import CHECKPOINTING
from zero_trial.config import DsConfig, read_ds_config
from zero_trial.config.report import filled_line
from zero_trial.config.sections import ActivationCheckpointingSection
from zero_trial.engine.arguments import hints_of
from zero_trial.engine.console import open_console
from zero_trial.engine.engine import Engine
from zero_trial.engine.kernels import agree_on_kernels
from zero_trial.engine.late_verdict import choose_verdict
from zero_trial.engine.offload import REAL, Offload, Places, offload_line, offloads, plan_offload
from zero_trial.engine.optimizer_registry import is_elementwise, resolve_optimizer
from zero_trial.engine.pipeline_build import PipelineWiring, build_layers, wire_pipeline, with_stages
from zero_trial.engine.pipeline_engine import PipelineEngine
from zero_trial.engine.roster import Roster
from zero_trial.engine.schedules import build_scheduler
from zero_trial.engine.watch import watch
from zero_trial.engine.wiring import Wiring, mesh_shape, wire
from zero_trial.errors import ConfigError
from zero_trial.mesh import Mesh, build_mesh, init_distributed, is_distributed, read_rank_env, sum_in_order, world_size
from zero_trial.mesh.mesh import mesh_around
from zero_trial.ops.optimizers import FusedLamb
from zero_trial.ops.sum_of_parts import native_sum
from zero_trial.pipeline.module import PipelineModule
from zero_trial.zero import ShardedModel, ShardedOptimizer
from zero_trial.zero.dtypes import describe_dtypes
from zero_trial.zero.model_parallel import is_part
from zero_trial.zero.pieces import cut_pieces
from zero_trial.zero.rebind import rebind
from zero_trial.zero.store import ShardPiece

log = logging.getLogger("zero_trial")

Groups = list[dict[str, Any]]


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
    engine.verdict = choose_verdict(engine.sharded, engine.wiring, engine.device, engine.optimizer)
    if mesh.rank == 0 and (line := offload_line(engine)) is not None:
        log.info("%s", line)
    watch(engine)
    engine.roster = Roster(engine.module)
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
    places: Places = REAL,
) -> Engine:
    """The engine on a mesh that there is already; arguments as in :func:`initialize`. Collective over the mesh.

    ``places`` are those of offloaded state; a rehearsal has some without a disk.
    """
    wiring = wire(settings, mesh.data.size)
    if isinstance(model, PipelineModule):
        given = model_parameters is not None or isinstance(optimizer, torch.optim.Optimizer)
        build_layers(model, settings, mesh, has_parameters=given)
    if any(tensor.device != device for tensor in itertools.chain(model.parameters(), model.buffers())):
        model.to(device)
    groups = _parameter_groups(model, optimizer, model_parameters)
    pipeline: PipelineWiring | None = None
    if isinstance(model, PipelineModule):
        wiring, pipeline = wire_pipeline(model, settings, mesh, wiring, device)
    _say_dtypes(model, wiring.policy.param, mesh)
    _say_parts(model, mesh, wiring)
    trained = _trained(groups) if _optimizes(optimizer, settings) else []
    offload = plan_offload(settings, mesh, device, trained, wiring.policy.param, places)
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
    engine.lr_scheduler = _build_schedule(wrapped, lr_scheduler, settings)
    return engine


def _say_dtypes(model: nn.Module, asked: torch.dtype, mesh: Mesh) -> None:
    """A line where parameters are not simply what ds_config says."""
    trained = ((name, param.dtype) for name, param in model.named_parameters() if param.requires_grad)
    for line in describe_dtypes(trained, asked) if mesh.rank == 0 else ():
        log.warning(line)


def _say_parts(model: nn.Module, mesh: Mesh, wiring: Wiring) -> None:
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
    elif mesh.model.size > 1 and not any(is_part(param) for param in model.parameters()):
        log.warning(
            "%d parallel parts of the model, and no parameter has tensor_model_parallel or model_parallel = True: "
            "all are taken for copies of each other, and those of the first part alone make the gradient norm",
            parts,
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


def _parameter_groups(model: nn.Module, optimizer: Any, model_parameters: Iterable[Any] | None) -> Groups:
    """Optimizer groups over the model's trainable parameters, each parameter once."""
    if isinstance(optimizer, torch.optim.Optimizer):
        groups: Groups = [dict(group) for group in optimizer.param_groups]
    else:
        given = list(model_parameters) if model_parameters is not None else list(model.parameters())
        groups = [dict(group) for group in given] if given and isinstance(given[0], Mapping) else [{"params": given}]
    known = {id(param) for param in model.parameters()}
    strangers = 0
    for group in groups:
        params = group["params"]
        listed = (
            [params]
            if isinstance(params, torch.Tensor)
            else [entry[1] if isinstance(entry, tuple) else entry for entry in params]
        )
        trained = {id(param): param for param in listed if param.requires_grad}
        strangers += len(trained.keys() - known)
        group["params"] = list(trained.values())
    doubles = len(list(itertools.chain(*(g["params"] for g in groups)))) - len(
        {id(p) for g in groups for p in g["params"]}
    )
    if doubles:
        raise ConfigError(
            "a parameter is in two optimizer groups",
            where="model_parameters",
            got=f"{doubles} doubles",
            expected="none",
        )
    if strangers:
        where = "optimizer" if isinstance(optimizer, torch.optim.Optimizer) else "model_parameters"
        raise ConfigError(
            "these are not all parameters of the model",
            where=where,
            got=f"{strangers} trainable ones that it does not have",
            fix="Make their module a part of the model that is given to initialize(); it then trains with the model.",
        )
    return groups


def _trained(groups: Groups) -> list[torch.Tensor]:
    return [param for group in groups for param in group["params"]]


def _build_optimizer(
    engine: Engine, optimizer: Any, groups: Groups, settings: DsConfig, offload: Offload
) -> ShardedOptimizer | None:
    if not _optimizes(optimizer, settings):
        return None
    landings = engine.sharded.landings
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
        base = build(_groups_over(pieces, groups))
        if (
            spec is None and not is_elementwise(type(base)) and not isinstance(base, FusedLamb)
        ):  # a callable does not say before what it gives
            pieces = cut_pieces(landings, whole_tensors=True)
            base = build(_groups_over(pieces, groups))
    store = offload.store(base, pieces, is_elementwise(type(base)))
    wrapped = ShardedOptimizer(base, pieces, scale=lambda: engine.loss_scaler.scale, store=store)
    comm = engine.mesh.shard
    wrapped.bind_tensors(
        [landing.unit for landing in landings], lambda sums: comm.all_reduce_small(sums, "tensor norms")
    )
    return wrapped


def _groups_over(pieces: Sequence[ShardPiece], groups: Groups) -> Groups:
    """The same groups with the same settings, over pieces of masters instead of parameters."""
    return [
        {key: value for key, value in group.items() if key != "params"}
        | {"params": [p.weight for p in pieces if p.group == index]}
        for index, group in enumerate(groups)
    ]


def _build_schedule(optimizer: ShardedOptimizer | None, client: Any, settings: DsConfig) -> Any:
    if client is not None:
        if not hasattr(client, "step"):
            return client if optimizer is None else client(optimizer.base)
        _require_own(client, optimizer)
        return client
    if settings.scheduler is None or optimizer is None:
        return None
    return build_scheduler(settings.scheduler.type, settings.scheduler.params, optimizer.base)


def _require_own(schedule: Any, optimizer: ShardedOptimizer | None) -> None:
    """A schedule of torch's is bound to an optimizer; if that is another one, every learning rate would stay as it is, without a word."""
    theirs = getattr(schedule, "optimizer", None)
    if optimizer is None or not isinstance(theirs, torch.optim.Optimizer) or theirs is optimizer.base:
        return
    kind = type(schedule).__name__
    raise ConfigError(
        "the schedule belongs to another optimizer than the engine's, and would change nothing",
        where="initialize(lr_scheduler)",
        got=f"{kind} of {type(theirs).__name__}",
        fix=f"Give a function of the optimizer: lr_scheduler=lambda optimizer: {kind}(optimizer, ...); or pass that optimizer as well.",
    )
