"""Checks of the arguments of :func:`initialize`: the model, and agreement between all ranks."""

from __future__ import annotations

import itertools
import json
import logging
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from zero_trial.comm import AxisComm, Mesh, fail_together
from zero_trial.ds_config.table import DsConfig
from zero_trial.engine.accessors import EngineAccessors
from zero_trial.engine.resolved_config import ResolvedConfig
from zero_trial.errors import ConfigError, TrialError
from zero_trial.sharding.build_groups import fp32_buffers
from zero_trial.sharding.full_params import FullParams
from zero_trial.sharding.grouping import is_model_parallel
from zero_trial.sharding.guards.freed import FreedParameter, owner_of_param
from zero_trial.sharding.init import PreSharded
from zero_trial.sharding.layout import describe_dtypes
from zero_trial.sharding.living_dtypes import LivingDtypes

log = logging.getLogger("zero_trial")

_T = TypeVar("_T")

# torch's wrappers that send each gradient to the other ranks, or shard the parameters
_REDUCING = {"DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "FSDPModule"}


def require_initialized(model: nn.Module) -> None:
    """Raise ConfigError for lazy parameters and buffers, which have no shape yet."""
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        if is_lazy(tensor):
            raise ConfigError(
                "a lazy module has not seen an input yet, so its shapes are unknown",
                where=f"initialize(model): {name}",
                got=f"{type(tensor).__name__} of {type(model.get_submodule(name.rpartition('.')[0])).__name__}",
                expected="parameters with shapes",
                fix="Run one forward pass before initialize(), on one batch: with torch.no_grad(): model(inputs).",
            )


def require_not_wrapped(model: nn.Module) -> None:
    """Raise ConfigError if torch already reduces the gradients of the model, or of a part of it:
    they would be sent twice, and the wrapper would access freed parameters."""
    for name, module in model.named_modules():
        bases = type(module).__mro__
        if not any(param.requires_grad for param in module.parameters()):
            continue
        of_torch = (base.__name__ for base in bases if base.__module__.partition(".")[0] == "torch")
        if kind := next((base for base in of_torch if base in _REDUCING), None):
            raise ConfigError(
                f"the model is wrapped in torch's {kind}, which duplicates what the engine does",
                where=f"initialize(model){f': {name}' if name else ''}",
                got=kind,
                expected="the module itself",
                fix="Remove fully_shard()." if kind == "FSDPModule" else f"Pass model.module, or remove {kind}.",
            )


def require_no_engine(model: nn.Module) -> None:
    """Raise ConfigError for a model whose values are in another engine's shards (ZeRO stage 3)."""
    for name, param in model.named_parameters():
        if isinstance(param, FreedParameter) and isinstance(owner_of_param(param), FullParams):
            raise ConfigError(
                "the model belongs to another engine, which holds its values (ZeRO stage 3, offload_param)",
                where=f"initialize(model): {name}",
                got="an earlier engine of this model that was not destroyed",
                expected="a model without an engine",
                fix="Call destroy() of that engine first, on every rank, or build the model again.",
            )


def require_no_max_norm(model: nn.Module, trained: Iterable[nn.Parameter], ranks: int, *, freed: bool) -> None:
    """Raise ConfigError for embeddings whose forward edits their weights (``max_norm``) if ranks
    would edit different rows, or if the weights are ``freed`` after use."""
    ids = {id(param) for param in trained}
    for name, module in model.named_modules():
        if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or module.max_norm is None:
            continue
        if freed or (ranks > 1 and id(module.weight) in ids):
            many = f"{ranks} data-parallel ranks" if ranks > 1 else "one rank"
            raise ConfigError(
                "max_norm edits the weight in forward, only in the rows of this rank's tokens: "
                + ("the weight is freed after use, and edits are lost" if freed else "the ranks' copies would diverge"),
                where=f"initialize(model): {f'{name}.' if name else ''}max_norm",
                got=f"{type(module).__name__}(max_norm={module.max_norm:g}) on {many}",
                expected="max_norm=None, or one rank at ZeRO stage 0 to 2 without offload_param",
                fix="Remove max_norm and bound the norm of the forward's output instead, which edits no weight: torch.renorm(out.flatten(0, -2), "
                "2, 0, max_norm).view_as(out), or F.normalize(out, dim=-1); for an EmbeddingBag do this to the rows of an Embedding, before "
                "they are summed.",
            )


def require_unrounded(model: nn.Module, living: LivingDtypes) -> None:
    """Raise ConfigError if zero.Init has rounded a parameter that must stay fp32."""
    for name, param in model.named_parameters():
        owner = owner_of_param(param)
        if isinstance(owner, PreSharded) and owner.rounded and living.keeps(param):
            raise ConfigError(
                "zero.Init has rounded the first values of a parameter that stays fp32",
                where=f"initialize(model): {name}",
                got=str(param.dtype),
                expected="fp32, as data_types.keep_in_fp32_modules or the model's own lists ask for",
                fix="Pass this ds_config to zero.Init(config=...) and build the whole model inside it, or pass weights=.",
            )


def reported(engine: EngineAccessors, error: TrialError) -> TrialError:
    """Send ``error`` to the other ranks, which may be waiting in a collective for this rank."""
    engine.mesh.heartbeat.report_error(str(error))
    return error


# --- what ranks must have in common ---------------------------------------------------------------


Facts = Mapping[str, Sequence[str]]
"""Argument of initialize() -> the properties that must match between ranks, as text."""

_FIXES = {
    "initialize(model)": "Build the same model on every rank, with the same dtype, ties, buffers and frozen parts.",
    "initialize(config)": "Give every rank the same ds_config.",
    "initialize(optimizer)": "Give every rank the same optimizer over the same groups in one order.",
}


def find_together(mesh: Mesh, find: Callable[[], tuple[_T, Facts]]) -> _T:
    """Return the first result of ``find`` on this rank. If it fails on a rank, that rank raises its
    error, and the others TrialError; if the facts of data-parallel ranks differ, all raise
    ConfigError. Collective over the world."""
    found, facts = start_together(mesh, find)
    rows = mesh.world.gather_row([mesh.data.ranks[0], checksum(facts)], "start")
    _require_equal(mesh.world, rows, facts)
    return found


def start_together(mesh: Mesh, act: Callable[[], _T]) -> _T:
    """Return the result of ``act``. If it fails on a rank, that rank raises its error, and the
    others TrialError. Collective over the world."""
    return fail_together(mesh.world, act, "start", _not_started)


def _not_started(fault: str) -> TrialError:
    return TrialError(
        "another rank could not start",
        where="initialize()",
        got=fault,
        fix="Fix that rank; the ranks start together or not at all.",
    )


def require_same(ranks: AxisComm, facts: Facts) -> None:
    """Raise ConfigError, on every rank of ``ranks``, if their facts differ. Collective. Ranks
    compare checksums, and exchange facts only for the error."""
    _require_equal(ranks, ranks.gather_row([0, checksum(facts)], "start"), facts)


def checksum(value: Any) -> int:
    """Return a number that ranks compare instead of the value."""
    return zlib.crc32(_plain(value).encode())


def _require_equal(ranks: AxisComm, rows: list[list[int]], facts: Facts) -> None:
    """Raise ConfigError for the first two of ``ranks`` whose rows have the same group but different
    checksums. Collective if there are such ranks."""
    firsts = {group: index for index, (group, _) in reversed(list(enumerate(rows)))}
    odd = next((index for index, (group, checksum) in enumerate(rows) if checksum != rows[firsts[group]][1]), None)
    if odd is None:
        return
    first = firsts[rows[odd][0]]
    listed = [[where, line] for where, lines in facts.items() for line in [*lines, "nothing more"]]
    everyone = ranks.gather_json(listed if ranks.index in (first, odd) else [], "what differs")
    one, other = next(pair for pair in zip(everyone[first], everyone[odd], strict=False) if pair[0] != pair[1])
    raise ConfigError(
        "the ranks have different settings, and would compute different results or wait for each other",
        where=one[0],
        got=f"{one[1]} on rank {ranks.ranks[first]}, {other[1]} on rank {ranks.ranks[odd]}",
        expected="the same on every rank",
        fix=_FIXES[one[0]],
    )


def start_of(model: nn.Module, settings: DsConfig, resolved: ResolvedConfig) -> Facts:
    """List the model's tensors, and the settings that affect the values of a step."""
    optimizer, scheduler = settings.optimizer, settings.scheduler
    decide = [
        f"zero_optimization.stage {settings.zero_optimization.stage}",
        f"gradient_accumulation_steps {resolved.batch.accumulation}",
        f"gradient_clipping {resolved.clip:g}",
        f"optimizer {_plain([optimizer.type, dict(optimizer.params)]) if optimizer is not None else None}",
        f"scheduler {_plain([scheduler.type, dict(scheduler.params)]) if scheduler is not None else None}",
        f"precision {resolved.policy}",
        f"zero_optimization {resolved.plan} {resolved.sharding.limits}",
    ]
    return {"initialize(model)": tensors_of(model.named_parameters()), "initialize(config)": decide}


def tensors_of(named: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    """List tensors with their shapes, dtypes and whether they are trained."""
    return [
        f"{name} {tuple(tensor.shape)} {tensor.dtype}{'' if tensor.requires_grad else ' without gradients'}"
        for name, tensor in named
    ]


def groups_of(model: nn.Module, groups: Sequence[Mapping[str, Any]], optimizer: Any) -> list[str]:
    """List the groups of an optimizer: their settings and their parameters."""
    names = {id(param): name for name, param in model.named_parameters()}
    facts = [getattr(optimizer, "__qualname__", type(optimizer).__name__)]
    for index, group in enumerate(groups):
        values = ", ".join(f"{key} {_plain(value)}" for key, value in sorted(group.items()) if key != "params")
        facts.append(f"group {index} ({values})")
        facts += sorted(f"group {index} with {names.get(id(param), '?')}" for param in group["params"])
    return facts


def _plain(value: Any) -> str:
    """Convert a setting to text that is the same in every process."""
    return json.dumps(value, sort_keys=True, default=lambda other: type(other).__name__)


# --- warnings of rank 0 about a model before it trains --------------------------------------------


def log_dtypes(model: nn.Module, living: LivingDtypes, mesh: Mesh) -> None:
    """Log a line for each way in which parameters and buffers differ from ds_config's dtypes."""
    if mesh.rank != 0:
        return
    params = dict(model.named_parameters())
    kept = [name for name, param in params.items() if living.keeps(param)]
    trained = ((name, param.dtype) for name, param in params.items() if param.requires_grad and name not in set(kept))
    for line in describe_dtypes(trained, living.policy.param):
        log.warning(line)
    if kept:
        log.info(
            "%d parameters stay in fp32 (%s%s) because of data_types.keep_in_fp32_modules or the model's own lists",
            *(len(kept), kept[0], " ..." if len(kept) > 1 else ""),
        )
    if living.policy.mixes_constants and (names := fp32_buffers(model)):
        log.info(
            "%d fp32 buffers that are not saved stay in fp32 (%s%s); data_types.buffer_dtype changes that",
            len(names),
            names[0],
            " ..." if len(names) > 1 else "",
        )


def log_untrained(model: nn.Module, trained: Iterable[nn.Parameter], mesh: Mesh) -> None:
    """Log a warning if the optimizer lacks trainable parameters, e.g. of a layer added later."""
    ids = {id(param) for param in trained}
    left = [name for name, param in model.named_parameters() if param.requires_grad and id(param) not in ids]
    if left and mesh.rank == 0:
        log.warning(
            "trainable parameters that are in no group of the optimizer will not be trained: %s. Give them to the optimizer "
            "or as model_parameters, or freeze them (requires_grad_(False))",
            f"{len(left)} ({left[0]} ...)" if len(left) > 1 else left[0],
        )


def log_model_parts(model: nn.Module, mesh: Mesh, resolved: ResolvedConfig) -> None:
    """Log a warning if parallel parts of a model clip or skip independently, or none is marked."""
    parts = mesh.model_part[1]
    if parts == 1 or mesh.rank != 0:
        return
    if mesh.model.size == 1 and (resolved.clip > 0 or resolved.policy.param == torch.float16):
        what = (
            "clips by its own gradient norm" if resolved.clip > 0 else "skips steps and scales its loss independently"
        )
        log.warning(
            "%d parallel parts of the model, but the mpu has no get_model_parallel_group(): each %s, so weights that all parts share can diverge",
            parts,
            what,
        )
    elif mesh.model.size > 1 and not any(is_model_parallel(param) for param in model.parameters()):
        log.warning(
            "%d parallel parts of the model, but no parameter has tensor_model_parallel or model_parallel = True: all parameters are treated as "
            "copies of each other, and only the first part counts in the gradient norm",
            parts,
        )
