"""Check which parameters an engine takes and trains, and which have had gradients; refuse what is
not as it was when the engine was built."""

from __future__ import annotations

import itertools
import logging
import operator
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakTensorKeyDictionary

from zero_trial.comm import AxisComm, Mesh, fail_together
from zero_trial.ds_config.table import DsConfig
from zero_trial.engine.accessors import EngineAccessors
from zero_trial.engine.resolved_config import ResolvedConfig
from zero_trial.errors import ConfigError, TrialError
from zero_trial.sharding.build_groups import fp32_buffers
from zero_trial.sharding.full_params import FullParams
from zero_trial.sharding.grad_buffer import GradBuffer
from zero_trial.sharding.grouping import is_model_parallel
from zero_trial.sharding.guards.freed import FreedParameter, owner_of_param, unasked
from zero_trial.sharding.layout import describe_dtypes
from zero_trial.sharding.precision import DtypePolicy

log = logging.getLogger("zero_trial")

_T = TypeVar("_T")

_SHOWN = 3  # names in a message
_REQUIRES_GRAD, _DTYPE = operator.attrgetter("requires_grad"), operator.attrgetter("dtype")
_UNUSED = operator.attrgetter("unused")
# of torch, which give each gradient to the other ranks, or keep the parameters in shards
_REDUCING = {"DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "FSDPModule"}


def require_initialized(model: nn.Module) -> None:
    """Raise ConfigError for lazy parameters and buffers, which have no shape before a first
    forward."""
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        if is_lazy(tensor):
            raise ConfigError(
                "a lazy module has not seen an input, and has no shapes",
                where=f"initialize(model): {name}",
                got=f"{type(tensor).__name__} of {type(model.get_submodule(name.rpartition('.')[0])).__name__}",
                expected="parameters with shapes",
                fix="Run one forward before initialize(), on one batch: with torch.no_grad(): model(inputs).",
            )


def require_not_wrapped(model: nn.Module) -> None:
    """Raise ConfigError where torch already gives the gradients of the model, or of a part, to the
    other ranks: they would be sent twice, and freed parameters would be found empty."""
    for name, module in model.named_modules():
        bases = type(module).__mro__
        if not any(param.requires_grad for param in module.parameters()):
            continue
        of_torch = (base.__name__ for base in bases if base.__module__.partition(".")[0] == "torch")
        if kind := next((base for base in of_torch if base in _REDUCING), None):
            raise ConfigError(
                f"the model is wrapped in torch's {kind}, and the engine does what that does",
                where=f"initialize(model){f': {name}' if name else ''}",
                got=kind,
                expected="the module itself",
                fix="Leave fully_shard() out." if kind == "FSDPModule" else f"Give model.module, or leave {kind} out.",
            )


def require_no_engine(model: nn.Module) -> None:
    """Raise ConfigError for a model whose values are in the shards of another engine (ZeRO stage
    3)."""
    for name, param in model.named_parameters():
        if isinstance(param, FreedParameter) and isinstance(owner_of_param(param), FullParams):
            raise ConfigError(
                "the model belongs to another engine, which has its values (ZeRO stage 3, offload_param)",
                where=f"initialize(model): {name}",
                got="an engine that was made of this model before, and not destroyed",
                expected="a model without an engine",
                fix="Call destroy() of that engine first, on every rank, or build the model anew.",
            )


def require_no_max_norm(model: nn.Module, trained: Iterable[nn.Parameter], ranks: int, *, freed: bool) -> None:
    """Raise ConfigError for embeddings whose forward edits their weights (``max_norm``) where ranks
    would do that each to other rows, or where the weights are ``freed`` after use."""
    ids = {id(param) for param in trained}
    for name, module in model.named_modules():
        if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or module.max_norm is None:
            continue
        if freed or (ranks > 1 and id(module.weight) in ids):
            many = f"{ranks} data-parallel ranks" if ranks > 1 else "one rank"
            raise ConfigError(
                "max_norm edits the weight in forward, in the rows of this rank's tokens: "
                + (
                    "the weight is freed after use, and edits are lost"
                    if freed
                    else "the copies of the ranks would drift apart"
                ),
                where=f"initialize(model): {f'{name}.' if name else ''}max_norm",
                got=f"{type(module).__name__}(max_norm={module.max_norm:g}) on {many}",
                expected="max_norm=None, or one rank at ZeRO stage 0 to 2 without offload_param",
                fix="Leave max_norm out and bound the norm of what forward returns, which edits nothing: "
                "torch.renorm(out.flatten(0, -2), 2, 0, max_norm).view_as(out), or F.normalize(out, dim=-1); for an "
                "EmbeddingBag do this to the rows of an Embedding, before their sum.",
            )


class ParameterCheck:
    """Refuses parameters that came to a module, or were unfrozen, after its engine was built: they
    would be neither trained nor saved; trained ones that were cast; and ties that came later: a
    checkpoint has both, and a model that is built with the tie has one.

    A forward and a step compare the tables of all modules with those of the last look, entry by
    entry, the dtypes of the trained parameters, and ``requires_grad`` of the others: about 0.2
    microseconds per parameter and module. Only a difference makes a full check. Until the next look
    it keeps alive what has been taken out of the model since.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        # parameter -> whether it was to be trained, and the dtype
        self._trained = WeakTensorKeyDictionary()
        self._names = WeakTensorKeyDictionary()  # parameter -> its first name
        for name, param in module.named_parameters():
            self._trained[param], self._names[param] = (param.requires_grad, param.dtype), name
        self._places = frozenset(self._names.values())
        self._called = False  # the engine's forward, since the last step
        self._look()

    def _look(self) -> None:
        """Remember what the model consists of."""
        tables = [(module._parameters, module._modules) for module in self._module.modules()]
        self._tables = [table.values() for pair in tables for table in pair]
        self._entries = list(itertools.chain.from_iterable(self._tables))
        params, trained = list(self._module.parameters()), self._trained
        # each is looked at for what it may not do: be cast, be unfrozen
        self._cast = [param for param in params if param in trained and trained[param][0]]
        self._frozen = [param for param in params if param not in trained or not trained[param][0]]
        with unasked():
            self._dtypes, self._thawed = list(map(_DTYPE, self._cast)), list(map(_REQUIRES_GRAD, self._frozen))

    def before_step(self) -> None:
        """Do :meth:`before_forward` where the model was called past the engine since the last
        step."""
        if not self._called:
            self.before_forward("engine.step")
        self._called = False

    def before_forward(self, where: str) -> None:
        """Do :meth:`check` if the model has other modules or parameters than at the last look, or
        trained ones were cast, or others unfrozen."""
        self._called = True
        now = list(itertools.chain.from_iterable(self._tables))
        same = len(now) == len(self._entries) and all(map(operator.is_, now, self._entries))
        if same:
            with unasked():
                same = list(map(_DTYPE, self._cast)) == self._dtypes
                if same and self._frozen:
                    same = list(map(_REQUIRES_GRAD, self._frozen)) == self._thawed
        if not same:
            self.check(where)
            self._look()

    # torch.compile of an engine does not trace this look at parameters, which are freed.
    before_forward._torchdynamo_disable = True  # type: ignore[attr-defined]

    def check(self, where: str) -> None:
        """Raise TrialError for such parameters. Reads names and flags only.

        Frozen parameters under new names may be added (a moving average, a metric's network): a
        checkpoint has them, too.
        """
        fresh, unfrozen, cast, known = [], [], [], 0
        for name, param in self._module.named_parameters():
            if param not in self._trained:
                if param.requires_grad or name in self._places:
                    fresh.append(name)
                continue
            known += 1
            if param.requires_grad and not self._trained[param][0]:
                unfrozen.append(name)
            elif self._trained[param][0] and self._trained[param][1] != param.dtype:
                cast.append(name)
        if fresh:
            raise TrialError(
                "the model has parameters that were added after its engine was built, and that are not trained",
                where=where,
                got=_listed(fresh),
                fix="Change the model before initialize(); to change it later, save a checkpoint and initialize() anew.",
            )
        if unfrozen:
            raise TrialError(
                "parameters were unfrozen after the engine was built, and are not trained",
                where=where,
                got=_listed(unfrozen),
                fix="Set requires_grad before initialize(); to unfreeze later, save a checkpoint and initialize() anew.",
            )
        if known < len(self._places) and (tied := self._tied()):
            raise TrialError(
                "parameters were tied after the engine was built: its checkpoints would not be those of a model that is tied",
                where=where,
                got=_listed(tied),
                expected="the ties that the model had in initialize()",
                fix="Tie before initialize() (b.weight = a.weight); to tie later, build the model anew, tie it, and initialize() anew.",
            )
        if cast:
            raise TrialError(
                "parameters have another dtype than their engine trains",
                where=where,
                got=_listed(cast),
                fix="Call model.half(), .to(dtype) and the like before initialize(), and set the precision in ds_config (bf16, fp16).",
            )

    def _tied(self) -> list[str]:
        """List the places of parameters at which another one is now that is still at its own, too.

        A layer that moved to another's index (some were deleted) is at one place, and no tie.
        """
        tied = []
        for name in sorted(self._places):
            param = _parameter_at(self._module, name)
            own = self._names.get(param, name) if param is not None else name
            if own != name and _parameter_at(self._module, own) is param:
                tied.append(f"{name} is {own}")
        return tied


def _parameter_at(module: nn.Module, name: str) -> nn.Parameter | None:
    """Return the parameter at a place in a model; None where the place is empty or gone."""
    *path, last = name.split(".")
    for key in path:
        child = module._modules.get(key)
        if child is None:
            return None
        module = child
    return module._parameters.get(last)


class UsedParameters:
    """The trained parameters that have got a gradient since the last step: a step in which some got
    none is an error if that is ``forbidden``, else the first is said in a line, and the first in
    which none got one in another."""

    def __init__(self, grad_buffers: Sequence[GradBuffer], *, forbidden: bool) -> None:
        self._grad_buffers = grad_buffers
        self._said = self._none_said = forbidden
        self._count = sum(len(buffer.group.params) for buffer in grad_buffers)
        watched = grad_buffers if forbidden else ()
        groups = [zip(buffer.group.layout.slots, buffer.group.params, strict=True) for buffer in watched]
        self._params = {slot.name: param for group in groups for slot, param in group}
        self._used: set[str] = set()
        # a hook holds the set alone: one that held the engine would keep it alive
        self._handles = [
            param.register_post_accumulate_grad_hook(lambda _, name=name, used=self._used: used.add(name))
            for name, param in self._params.items()
        ]

    def check(self, engine: EngineAccessors) -> None:
        """Raise TrialError for those without a gradient that are not frozen at the moment."""
        if self._params.keys() > self._used:
            names = [name for name, param in self._params.items() if name not in self._used and param.requires_grad]
            if names:
                raise reported(engine, _unused(names, engine.global_steps))

    def end_step(self, engine: EngineAccessors, passes: int) -> None:
        """Forget the gradients so far: a step has used them. Say which parameters had none on this
        rank, the first time that there are some, and the first time that all had none after
        ``passes``: without a pass nobody expects any, as a plan for the optimizer's state."""
        self._used.clear()
        if (self._said and self._none_said) or not any(map(_UNUSED, self._grad_buffers)):
            return
        if sum(len(buffer.unused) for buffer in self._grad_buffers) == self._count:
            if not passes:
                return
            if not self._none_said and engine.mesh.data.index == 0:
                log.warning(
                    "no gradient has reached any of the %d parameters on this rank in step %d: they were dropped between "
                    "backward and step (model.zero_grad()), or the loss is another model's. Where no rank has one, weight "
                    "decay and momentum go on",
                    *(self._count, engine.global_steps),
                )
            self._none_said = True
            return
        if not self._said and engine.mesh.data.index == 0:
            found = [
                (buffer.group.layout.slots[index].name, buffer.group.params[index])
                for buffer in self._grad_buffers
                for index in sorted(buffer.unused)
            ]
            frozen = [name for name, param in found if not param.requires_grad]
            log.info(
                "no gradient has reached %s%s in a step. Where no rank has one, the step takes it as 0: weight decay and momentum "
                "go on, where torch leaves the parameter alone. Freeze it before initialize() (in mid-training: save a "
                "checkpoint, freeze, initialize() anew), give it weight_decay 0, or make it an error with "
                "zero_optimization.ignore_unused_parameters: false",
                _listed([name for name, _ in found]),
                f" ({len(frozen)} frozen after initialize())" if frozen else "",
            )
        self._said = True

    def restart(self) -> None:
        """Forget the gradients so far: they were dropped."""
        self._used.clear()

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()


def reported(engine: EngineAccessors, error: TrialError) -> TrialError:
    """Send ``error`` to the other ranks: they may be in a collective that this rank will not
    enter."""
    engine.mesh.heartbeat.report_error(str(error))
    return error


def _unused(names: list[str], step: int) -> TrialError:
    return TrialError(
        "unused parameters: they got no gradient, and ds_config forbids that",
        where="engine.step",
        got=f"{_listed(names)} since step {step}",
        expected="a gradient for every trainable parameter (zero_optimization.ignore_unused_parameters is false)",
        fix="Use them in the loss, freeze them before initialize(), or remove ignore_unused_parameters.",
    )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


# --- what ranks must have in common ---------------------------------------------------------------


Facts = Mapping[str, Sequence[str]]
"""Argument of initialize() -> what of it the ranks must have in common, as text."""

_FIXES = {
    "initialize(model)": "Build the same model on every rank, with the same dtype, ties, buffers and frozen parts.",
    "initialize(config)": "Give every rank the same ds_config.",
    "initialize(optimizer)": "Give every rank the same optimizer over the same groups in one order.",
}


def find_together(mesh: Mesh, find: Callable[[], tuple[_T, Facts]]) -> _T:
    """Return the first of what ``find`` returns on this rank. Where it fails on a rank, that rank
    raises its error, and the others TrialError; where the facts of data-parallel ranks differ, all
    raise ConfigError. Collective over the world."""
    found, facts = start_together(mesh, find)
    rows = mesh.world.gather_row([mesh.data.ranks[0], _checksum(facts)], "start")
    _require_equal(mesh.world, rows, facts)
    return found


def start_together(mesh: Mesh, act: Callable[[], _T]) -> _T:
    """Return what ``act`` returns. Where it fails on a rank, that rank raises its error, and the
    others TrialError. Collective over the world."""
    return fail_together(mesh.world, act, "start", _not_started)


def _not_started(fault: str) -> TrialError:
    return TrialError(
        "another rank could not start", where="initialize()", got=fault, fix="Mend that rank; all start or none."
    )


def require_same(ranks: AxisComm, facts: Facts) -> None:
    """Raise ConfigError, on every rank of ``ranks``, where their facts differ. Collective; a number
    is compared, and facts travel only to be named."""
    _require_equal(ranks, ranks.gather_row([0, _checksum(facts)], "start"), facts)


def _checksum(facts: Facts) -> int:
    return zlib.crc32(repr(sorted((where, list(lines)) for where, lines in facts.items())).encode())


def _require_equal(ranks: AxisComm, rows: list[list[int]], facts: Facts) -> None:
    """Raise ConfigError for the first two of ``ranks`` whose rows have the same group, and other
    checksums. Collective where there are such."""
    firsts = {group: index for index, (group, _) in reversed(list(enumerate(rows)))}
    odd = next((index for index, (group, checksum) in enumerate(rows) if checksum != rows[firsts[group]][1]), None)
    if odd is None:
        return
    first = firsts[rows[odd][0]]
    listed = [[where, line] for where, lines in facts.items() for line in [*lines, "nothing more"]]
    everyone = ranks.gather_json(listed if ranks.index in (first, odd) else [], "what differs")
    one, other = next(pair for pair in zip(everyone[first], everyone[odd], strict=False) if pair[0] != pair[1])
    raise ConfigError(
        "the ranks do not train the same: each would go its own way, or wait for another",
        where=one[0],
        got=f"{one[1]} on rank {ranks.ranks[first]}, {other[1]} on rank {ranks.ranks[odd]}",
        expected="the same on every rank",
        fix=_FIXES[one[0]],
    )


def start_of(model: nn.Module, settings: DsConfig, resolved: ResolvedConfig) -> Facts:
    """List the model's tensors, and what decides about the values of a step."""
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
    """List the groups of an optimizer: their values, and what is in them."""
    names = {id(param): name for name, param in model.named_parameters()}
    facts = [getattr(optimizer, "__qualname__", type(optimizer).__name__)]
    for index, group in enumerate(groups):
        values = ", ".join(f"{key} {_plain(value)}" for key, value in sorted(group.items()) if key != "params")
        facts.append(f"group {index} ({values})")
        facts += sorted(f"group {index} with {names.get(id(param), '?')}" for param in group["params"])
    return facts


def _plain(value: Any) -> str:
    """Return a setting as text that is the same in every process."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {_plain(item)}' for key, item in sorted(value.items()))}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_plain, value))}]"
    return str(value) if value is None or isinstance(value, (bool, int, float, str)) else type(value).__name__


# --- warnings of rank 0 about a model before it trains --------------------------------------------


def log_dtypes(model: nn.Module, policy: DtypePolicy, mesh: Mesh) -> None:
    """Log a line for each way in which parameters and buffers are not what ds_config asks for."""
    if mesh.rank != 0:
        return
    trained = ((name, param.dtype) for name, param in model.named_parameters() if param.requires_grad)
    for line in describe_dtypes(trained, policy.param):
        log.warning(line)
    if policy.mixes_constants and (names := fp32_buffers(model)):
        log.info(
            "%d fp32 buffers that are not saved keep fp32 (%s%s); data_types.buffer_dtype changes that",
            len(names),
            names[0],
            " ..." if len(names) > 1 else "",
        )


def log_model_parts(model: nn.Module, mesh: Mesh, resolved: ResolvedConfig) -> None:
    """Log a warning where parts of a model clip or skip steps by themselves, or do not mark which
    parameters they share."""
    parts = mesh.model_part[1]
    if parts == 1 or mesh.rank != 0:
        return
    if mesh.model.size == 1 and (resolved.clip > 0 or resolved.policy.param == torch.float16):
        what = "clips by its own gradient norm" if resolved.clip > 0 else "skips steps and scales its loss by itself"
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
