"""Start an engine from the arguments of ``initialize()``: ds_config, ranks, console and kernels,
and the log lines before training."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import nn

from zero_trial.activation_checkpointing import CHECKPOINTING, offload_checkpoints
from zero_trial.comm import (
    AxisComm,
    Mesh,
    MeshShape,
    build_mesh,
    expects_ranks,
    init_distributed,
    is_distributed,
    sum_in_order,
    world_size,
)
from zero_trial.comm.mesh import mesh_around
from zero_trial.comm.rendezvous import DEFAULT_TIMEOUT_SECONDS
from zero_trial.device import own_device
from zero_trial.ds_config.config_report import clipping_line, filled_line
from zero_trial.ds_config.keys_running import ActivationCheckpointingSection
from zero_trial.ds_config.reader import read_ds_config
from zero_trial.ds_config.table import DsConfig
from zero_trial.engine.build import build_engine
from zero_trial.engine.compat import hints_of, require_mesh
from zero_trial.engine.engine import Engine
from zero_trial.engine.observe import describe_state
from zero_trial.engine.offload_config import offload_line, offloads
from zero_trial.engine.pipeline_build import with_stages
from zero_trial.engine.resolved_config import mesh_shape
from zero_trial.engine.start_checks import Facts, find_together
from zero_trial.errors import ConfigError, KernelUnavailable
from zero_trial.ops import Backend, backend
from zero_trial.ops.cpu import native_sum
from zero_trial.sharding.optimizer import ShardedOptimizer
from zero_trial.util.text import strip_control

log = logging.getLogger("zero_trial")

_Engines = tuple[Engine, ShardedOptimizer | None, Any, Any]


_FACTORY: ContextVar[Callable[..., _Engines] | None] = ContextVar("_FACTORY", default=None)


@contextmanager
def engines_from(factory: Callable[..., _Engines] | None) -> Iterator[None]:
    """Inside the block, :func:`initialize` calls ``factory``, however code has imported it: a dry
    run's trial may call it itself, and wrap the engine. None: it builds engines."""
    token = _FACTORY.set(factory)
    try:
        yield
    finally:
        _FACTORY.reset(token)


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
    *,
    net: nn.Module | None = None,
    dataset: Any = None,
    weights: str | Path | None = None,
    weights_prefix: str = "",
) -> tuple[Engine, ShardedOptimizer | None, Any, Any]:
    """Wrap ``model`` and return ``(engine, optimizer, training_dataloader, lr_scheduler)``, as
    DeepSpeed does.

    ``config`` (or ``config_params``, else ``args.deepspeed_config``): the ds_config as dict, path
    or base64. ``net`` and ``dataset`` are aliases of ``model`` and ``training_data``, from
    Determined's documentation. A client ``optimizer`` (object, or callable from parameter groups)
    overrides ds_config's, with a warning. A client ``lr_scheduler`` (object, or callable from the
    optimizer) together with ds_config's ``scheduler`` is an error. "auto" values are filled in from
    ``args`` (TrainingArguments, or argparse's) and ``model.config``. All ranks start from rank 0's
    weights. Collective over the world. Raises ConfigError, MeshError.

    ``weights``: a safetensors file, or a folder with one file or with several and an index, from
    which the model's initial values are loaded by name. The model's own values are ignored, so the
    model may be on the meta device. Each rank reads only its shards. ``weights_prefix`` is
    prepended either to all of the model's names in the files, or to all of the files' names in the
    model. Without ``weights``, parameters on the meta device are an error. Buffers on the meta
    device that are in no file are initialized by their module's ``reset_parameters()``, or by
    ``_init_weights(module)``.
    """
    given = dict(locals())
    if (factory := _FACTORY.get()) is not None:
        with engines_from(None):
            return factory(**given)
    training_data = given_once(training_data=training_data, dataset=dataset)
    try:
        model, settings = read_settings(args, given_once(model=model, net=net), config, config_params)
        source = first_weights(weights, weights_prefix)
        open_console(settings.log_level)
    except ConfigError as error:
        if is_distributed():
            _tell_others(error)
        # drop the traceback: the error already names file, line and key
        raise error.with_traceback(None) from None
    mesh = _join_ranks(settings, mpu, distributed_port, dist_init_required)
    require_mesh(mesh_param, mesh, settings)
    if own_device().type == "cpu" or offloads(settings):
        agree_on_kernels(mesh.world)
    engine = build_engine(
        model,
        settings,
        mesh,
        own_device(),
        optimizer,
        model_parameters,
        lr_scheduler,
        mpu,
        training_data=training_data,
        collate_fn=collate_fn,
        observed=True,
        weights=source,
    )
    if settings.compile.enabled:
        engine.compile(settings.compile.backend, settings.compile.kwargs)
    if settings.disable_python_gc:
        engine.observer.pause_collector(engine)
    _configure_checkpointing(engine.module, settings, mesh)
    if mesh.rank == 0:
        _log_start(engine, settings)
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def read_settings(args: Any, model: nn.Module | None, config: Any, config_params: Any) -> tuple[nn.Module, DsConfig]:
    """Return the model and ds_config among :func:`initialize`'s arguments. Raises ConfigError."""
    if model is None or isinstance(args, nn.Module):
        fix = "Name the arguments: initialize(model=..., config=...). The first one is args, as in DeepSpeed."
        raise ConfigError(
            "initialize() needs a model", where="initialize(model)", expected="a torch.nn.Module", fix=fix
        )
    names = ("deepspeed_config", "zero_trial_config", "deepscale_config")  # the last is DeepSpeed's first name
    by_args = next(filter(None, (getattr(args, name, None) for name in names)), None)
    given = given_once(config=config, config_params=config_params)
    source = by_args if given is None else given
    if source is None:
        ways = "config=, config_params= or args.deepspeed_config"
        raise ConfigError("there is no ds_config", where="initialize(config)", expected=ways)
    settings = source if isinstance(source, DsConfig) else read_ds_config(source, hints=hints_of(args, model))
    if given is not None and by_args is not None and by_args != given:
        # scripts read the file of their arguments, change it, and pass both
        line = "initialize(): using config=; the args.deepspeed_config that was also passed is ignored"
        settings = replace(settings, warnings=(*settings.warnings, line))
    return model, with_stages(settings, model)


def given_once(**names: Any) -> Any:
    """Return the only argument among ``names`` that is not None, or None. Raises ConfigError if
    several are given, because they are aliases."""
    given = [name for name, value in names.items() if value is not None]
    if len(given) > 1:
        raise ConfigError("two names for one argument", where="initialize()", got=" and ".join(given), fix="Pass one.")
    return names[given[0]] if given else None


def first_weights(weights: Any, prefix: Any) -> tuple[Path, str] | None:
    """Return source and prefix of first values; None without a file. Raises ConfigError."""
    if not isinstance(prefix, str) or (weights is None and prefix):
        raise ConfigError(
            "weights_prefix= without weights=" if weights is None else "weights_prefix is not a string",
            where="initialize(weights_prefix)",
            got=repr(prefix),
            fix="Pass weights= with it, or omit it." if weights is None else None,
        )
    if weights is None:
        return None
    if not isinstance(weights, str | os.PathLike) or not str(weights):
        raise ConfigError(
            "weights is not a path",
            where="initialize(weights)",
            got=repr(weights),
            expected='a file or a folder, "." for the working directory',
        )
    return Path(weights), prefix


def _configure_checkpointing(module: nn.Module, settings: DsConfig, mesh: Mesh) -> None:
    """Configure ``zero_trial.checkpointing`` by this engine's section, if it has one."""
    section = settings.activation_checkpointing
    offload_checkpoints(module, everywhere=section.cpu_checkpointing)
    if section == ActivationCheckpointingSection():
        return
    CHECKPOINTING.configure_from(section, mesh.model)
    if section.partition_activations and mesh.model.size == 1 and mesh.rank == 0:
        log.info(
            "activation_checkpointing.partition_activations has no effect: there are no model-parallel ranks (mesh.model is 1)"
        )


def _log_start(engine: Engine, settings: DsConfig) -> None:
    """Log unusual ds_config values, and the values that were filled in."""
    for warning in settings.warnings:
        log.warning("%s", warning)
    lines = [filled_line(settings), clipping_line(settings), offload_line(engine)]
    if settings.dump_state:
        lines.append(describe_state(settings, engine.resolved, engine.mesh, engine.sharded.groups))
    for line in filter(None, lines):
        log.info("%s", line)


def _tell_others(error: ConfigError) -> None:
    """Report to the other ranks of the process group that this rank has no valid ds_config.
    Collective over the world, with :func:`_compare_starts` on the ranks that have one."""

    def fail() -> Facts:
        raise error

    with suppress(ConfigError):
        _compare_starts(fail)


def _compare_starts(find: Callable[[], Facts], timeout: float = DEFAULT_TIMEOUT_SECONDS) -> None:
    """Raise on every rank, before the ranks build a mesh from ds_config, if ``find`` fails on one
    rank or their facts differ: otherwise a single failing rank would leave the others waiting.
    Collective over the world."""
    if world_size() > 1:
        everyone = build_mesh(MeshShape(shard=world_size()), timeout=timeout, shared_memory=False)
        find_together(everyone, lambda: (None, find()))


def _mesh_facts(settings: DsConfig) -> Facts:
    stage, shape = settings.zero_optimization.stage, mesh_shape(settings, world_size())
    return {"initialize(config)": [f"zero_optimization.stage {stage}", f"mesh {shape}"]}


def _join_ranks(settings: DsConfig, mpu: Any, port: int, required: bool | None) -> Mesh:
    timeout = settings.comm_timeout_seconds
    if expects_ranks() or required:
        init_distributed(distributed_port=port, timeout=timeout, dist_init_required=required)
    _compare_starts(lambda: _mesh_facts(settings) if mpu is None else {}, timeout)
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


# --- console --------------------------------------------------------------------------------------

# The logger "zero_trial" gets its own handler if the program has not configured logging. Progress
# goes to stdout, warnings go to stderr; ``log_level`` is the minimum level of shown lines.
LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}


class ConsoleHandler(logging.Handler):
    """Prints one line per record. The streams are looked up for each record, so that a later
    redirection works.

    Prints nothing while ``elsewhere`` returns True, i.e. once the program has its own handlers on
    the root logger.
    """

    def __init__(self, elsewhere: Callable[[], bool] = lambda: bool(logging.getLogger().handlers)) -> None:
        super().__init__()
        self._elsewhere = elsewhere

    def emit(self, record: logging.LogRecord) -> None:
        if self._elsewhere():
            return
        stream: TextIO = sys.stderr if record.levelno >= logging.WARNING else sys.stdout
        stream.write(strip_control(self.format(record)) + "\n")
        stream.flush()


def open_console(
    level: str | None, logger: logging.Logger | None = None, handler: logging.Handler | None = None
) -> None:
    """Show log lines of at least ``level`` (default info). A level that the program has set itself
    is kept unless ``level`` is given.

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


# --- CPU kernels: the same on all ranks -----------------------------------------------------------
#
# Kernels and plain torch round differently in the last bit, so copies of a weight would diverge
# between such ranks, and a run would depend on the placement of ranks.


def agree_on_kernels(world: AxisComm) -> None:
    """Use native kernels only if every rank has them; otherwise disable them in this process.
    Collective over ``world``.

    Rank 0 logs this. Raises KernelUnavailable on every rank if ZERO_TRIAL_OPS=native is set but
    not every rank has native kernels.
    """
    own: Backend[Any] | None = None
    trouble: KernelUnavailable | None = None
    try:
        own = backend()
    except KernelUnavailable as error:  # raised once the other ranks know
        trouble = error
    own_answer = {
        "native": own is not None and own.native is not None,
        "why": trouble.what if trouble is not None else own.why if own is not None else "",
        "strict": trouble is not None or (own is not None and own.strict),
    }
    everyone: list[dict[str, Any]] = world.gather_json(own_answer, "kernels")
    if trouble is not None:
        raise trouble
    blind = next((rank for rank, row in enumerate(everyone) if not row["native"]), None)
    if blind is None or not any(row["native"] or row["strict"] for row in everyone):
        return
    why = f"rank {world.ranks[blind]} has none ({everyone[blind]['why']})"
    if any(row["strict"] for row in everyone):
        raise KernelUnavailable(
            "not every rank has native kernels, but all must compute identically",
            where="ZERO_TRIAL_OPS=native",
            got=why,
            fix="Fix that rank, or set the key to auto.",
        )
    if backend().native is not None:
        backend().withdraw(why)
    if world.index == 0:
        log.warning("all ranks use plain torch instead of CPU kernels, so that they compute identically: %s", why)
