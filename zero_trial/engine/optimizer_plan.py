"""How an optimizer's class treats tensors, as far as it is known before training: whether it works
element by element, and whether it couples tensors.

    known elementwise (torch's Adam, SGD ... and ours)      flat pieces, split anywhere
    ``elementwise = True`` on the class, or ds_config's     flat pieces
    zero_optimization.elementwise_optimizer
    every other class                                       whole tensors, each with one owner
    ... that couples (a global norm inside step())          whole tensors, one owner for all

Coupling is detected by a probe: the same optimizer takes a few steps on tiny tensors, together and
separately, with the same gradients.
"""

from __future__ import annotations

import inspect
import logging
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from zero_trial.comm import Mesh
from zero_trial.ds_config.table import DsConfig
from zero_trial.engine.offload_config import offloads
from zero_trial.engine.optimizers import (
    Groups,
    groups_over,
    muon_groups,
    refuse_closures,
    resolve_optimizer,
    wanted_states,
)
from zero_trial.errors import ConfigError, ZeroTrialError
from zero_trial.ops.optimizers.fused import Muon, orthogonalization_flops
from zero_trial.ops.optimizers.lamb import FusedLamb
from zero_trial.ops.optimizers.shard_step import ShardOptimizer, refuse_state_hooks, steps_otherwise
from zero_trial.sharding.whole_tensors import Work, weight_for

log = logging.getLogger("zero_trial")

Make = Callable[[Groups], torch.optim.Optimizer]

# torch's classes that update each tensor independently.
_BY_TENSOR = frozenset({torch.optim.Adafactor, torch.optim.Muon})

# torch's own classes whose step treats every element independently.
ELEMENTWISE: frozenset[type[torch.optim.Optimizer]] = frozenset(
    {
        *(torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax),
        *(torch.optim.ASGD, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop),
        torch.optim.SGD,
    }
)

_STEPS = ((1.0, 3.0, 0.3), (40.0, 7.0, 90.0), (0.02, 0.1, 0.05))  # magnitudes of the probe's gradients
_SHAPES = ((), (5,), (4, 3), (3, 2, 2), (3, 2, 2, 2))  # indexed by number of dimensions
_OTHER_SHAPES = ((), (7,), (3, 5), (2, 3, 2), (2, 3, 2, 2))
_TOLERANCE = 1e-4  # relative; a norm over all tensors changes a number by more than 10 %
_ROUNDING = 5e-7  # absolute, for weights up to 4


def is_elementwise(optimizer_class: type[torch.optim.Optimizer]) -> bool:
    """Return whether this class can work on flat pieces of tensors: its ``elementwise`` attribute,
    or else whether the class, or the class that defines its step, is known to be elementwise."""
    declared = getattr(optimizer_class, "elementwise", None)
    if isinstance(declared, bool):
        return declared
    line = optimizer_class.__mro__
    known = next((each for each in line if issubclass(each, torch.optim.Optimizer) and each in ELEMENTWISE), None)
    if known is None:
        return False
    step = inspect.unwrap(known.step)  # torch wraps it in the class of the first instance
    own = [pair for each in line[: line.index(known)] for pair in vars(each).items() if callable(pair[1])]
    return all(name == "__init__" or (name == "step" and inspect.unwrap(value) is step) for name, value in own)


def needs_whole_tensors(
    optimizer_class: type[torch.optim.Optimizer], declared: bool = False, *, offloaded: bool = False
) -> bool:
    """Return whether this class must not get split tensors.

    Args:
        declared: ds_config declares that the optimizer works element by element.
        offloaded: pieces may be updated one after the other. Our LAMB sums its norms over pieces,
            and needs all of them at once.
    """
    if issubclass(optimizer_class, FusedLamb):
        return offloaded
    return not (declared or is_elementwise(optimizer_class))


class _Kind(NamedTuple):
    """A tensor of the probe: its optimizer group, shape, and a parameter with its attributes."""

    group: int
    shape: tuple[int, ...]
    like: nn.Parameter


def probe(make: Make, groups: Sequence[Mapping[str, Any]]) -> tuple[bool | None, str]:
    """Return whether the update of one tensor depends on others; or None, and the reason why this
    could not be tested.

    Steps ``make``'s optimizer on tiny tensors of the kinds in ``groups``, together and one by one.
    Restores the random generators.
    """
    kinds: list[_Kind] = []
    for index, group in enumerate(groups):
        by_dim: dict[int, list[nn.Parameter]] = {}
        for param in group["params"]:
            by_dim.setdefault(min(param.dim(), len(_SHAPES) - 1), []).append(param)
        for dim, params in sorted(by_dim.items()):
            kinds += [_Kind(index, _SHAPES[dim], params[0]), _Kind(index, _OTHER_SHAPES[dim], params[-1])]
    numbers, python = torch.get_rng_state(), random.getstate()
    try:
        together = _train(make, groups, kinds, range(len(kinds)))
        if not torch.equal(numbers, torch.get_rng_state()):
            return None, "its step draws random numbers, which must be the same on all ranks"
        alone = (_train(make, groups, kinds, [index])[0] for index in range(len(kinds)))
        return not all(map(_alike, together, alone)), ""
    except ConfigError:
        raise
    except Exception as error:  # arbitrary user code may run here
        return None, f"{type(error).__name__}: {str(error)[:80]}"
    finally:
        torch.set_rng_state(numbers)
        random.setstate(python)


def _train(
    make: Make, groups: Sequence[Mapping[str, Any]], kinds: Sequence[_Kind], chosen: Sequence[int]
) -> list[dict[str, torch.Tensor]]:
    """Return for each of ``chosen``, after some steps, its change, its state, and the counters of
    its group and of the optimizer: a coupling may be visible there long before it affects the
    weights (D-adaptation)."""
    starts: dict[int, torch.Tensor] = {}
    weights: dict[int, nn.Parameter] = {}
    own: list[list[nn.Parameter]] = [[] for _ in groups]
    for index in chosen:
        group, shape, like = kinds[index]
        starts[index] = torch.randn(shape, generator=torch.Generator().manual_seed(1000 + index))
        weights[index] = weight_for(like, starts[index].clone())
        own[group].append(weights[index])
    optimizer = make([each for each in groups_over(own, groups) if each["params"]])
    if callable(switch := getattr(optimizer, "train", None)):  # schedule-free
        switch()
    for step, sizes in enumerate(_STEPS):
        for index, weight in weights.items():
            generator = torch.Generator().manual_seed(97 * step + index)
            weight.grad = torch.randn(weight.shape, generator=generator) * sizes[index % len(sizes)]
        optimizer.step()
    found = []
    for index, weight in weights.items():
        mine = next(each for each in optimizer.param_groups if any(param is weight for param in each["params"]))
        settings = {key: value for key, value in mine.items() if key != "params"}
        facts = {"moved": weight.detach() - starts[index], "state": optimizer.state[weight], "group": settings}
        found.append(_numbers({**facts, "attributes": dict(vars(optimizer), state=None, param_groups=None)}, ""))
    return found


def _numbers(value: Any, place: str) -> dict[str, torch.Tensor]:
    """Return all numbers in plain containers, as tensors keyed by their path."""
    if torch.is_tensor(value):
        return {place: value.detach().double()} if not value.is_complex() else {}
    if isinstance(value, (bool, int, float)):
        return {place: torch.tensor(float(value), dtype=torch.float64)}
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    return {at: number for key, each in items for at, number in _numbers(each, f"{place}/{key}").items()}


def _alike(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    """Return whether the numbers present in both agree, within rounding."""
    for place, value in one.items():
        if place in other and value.shape == other[place].shape and value.numel():
            size = other[place].abs().max().item()
            if not (value - other[place]).abs().max().item() <= _TOLERANCE * size + _ROUNDING * (place == "/moved"):
                return False
    return True


def again(optimizer: torch.optim.Optimizer) -> Make:
    """Return a factory of optimizers with the class and settings of ``optimizer``.

    The factory raises TypeError if its optimizer would not step like ``optimizer``: the class needs
    arguments that are not settings, an attribute differs, or the step was replaced.
    """
    known = inspect.signature(type(optimizer).__init__).parameters
    free = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in known.values())
    own = vars(optimizer)
    settings = {key: own[key] for key in known if key in own and _is_plain(own[key])}
    settings |= {key: value for key, value in getattr(optimizer, "defaults", {}).items() if free or key in known}

    def make(groups: Groups) -> torch.optim.Optimizer:
        if steps_otherwise(optimizer):
            raise TypeError("this object has hooks or a replaced step()")
        other = type(optimizer)(groups, **settings)
        for key, value in own.items():
            if _is_plain(value) and key in vars(other) and vars(other)[key] != value:
                raise TypeError(f"{key} is {value} here, and {vars(other)[key]} in a new instance")
        return other

    return make


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))


def stand_ins(groups: Sequence[Mapping[str, Any]]) -> tuple[Groups, dict[int, nn.Parameter]]:
    """Return the groups over zeros in the parameters' shapes, which take no memory, and the
    parameters by the ids of these zeros, to find out which groups a callable builds."""
    known: dict[int, nn.Parameter] = {}
    own: list[list[nn.Parameter]] = [[] for _ in groups]
    for params, group in zip(own, groups, strict=True):
        for param in group["params"]:
            dtype = torch.float64 if param.dtype == torch.float64 else torch.float32
            stand_in = weight_for(param, torch.zeros((), dtype=dtype).expand(param.shape))
            known[id(stand_in)] = param
            params.append(stand_in)
    return groups_over(own, groups), known


def regrouped(optimizer: torch.optim.Optimizer, groups: Groups, known: Mapping[int, nn.Parameter]) -> Groups | None:
    """Map the groups that a callable built from stand-ins back to the parameters; None if it used
    the given groups.

    The callable has seen shapes, which flat pieces do not have. Raises ConfigError if it uses other
    tensors, such as the model's own parameters, because nothing would train.
    """
    strangers = sum(id(param) not in known for group in optimizer.param_groups for param in group["params"])
    if strangers:
        raise ConfigError(
            "this callable builds an optimizer over tensors other than those passed to it",
            where="initialize(optimizer)",
            got=f"{strangers} of {type(optimizer).__name__} that are not in the groups",
            expected="an optimizer over the groups passed to the callable",
            fix="Use the argument: initialize(optimizer=lambda groups: ...). Choose parameters with model_parameters.",
        )
    made = [[known[id(each)] for each in group["params"] if id(each) in known] for group in optimizer.param_groups]
    same = len(made) == len(groups) and all(
        [id(param) for param in own] == [id(param) for param in group["params"]]
        for own, group in zip(made, groups, strict=True)
    )
    return None if same else groups_over(made, optimizer.param_groups)


# --- the plan -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OptimizerPlan:
    """What an optimizer is built over.

    Args:
        groups: of parameters, with their settings.
        whole: the groups whose tensors are not split.
        make: builds the optimizer, unless it is ``client``.
        one_owner: one rank updates all tensors, because the optimizer's step couples them.
        at_once: the optimizer is stepped once per step, with all tensors, because its class may
            count its steps or couple tensors.
        work: the cost of updating a whole tensor of a given shape.
    """

    groups: Groups
    whole: frozenset[int]
    make: Make
    client: torch.optim.Optimizer | None = None
    by_callable: bool = False
    one_owner: bool = False
    at_once: bool = False
    work: Work = math.prod

    @property
    def params(self) -> list[list[nn.Parameter]]:
        """The parameters of each group."""
        return [group["params"] for group in self.groups]


def plan_optimizer(
    optimizer: torch.optim.Optimizer | Make | None, groups: Groups, model: nn.Module, settings: DsConfig, mesh: Mesh
) -> OptimizerPlan:
    """Decide whether the optimizer gets flat pieces or whole tensors. Local and the same on every
    rank; rank 0 logs unusual decisions.

    Args:
        optimizer: the client's, or a factory from parameter groups; None for ds_config's.

    Raises ConfigError for an optimizer that cannot be stepped here.
    """
    states = wanted_states(settings, optimizer)
    if optimizer is None:
        return _by_name(groups, model, settings, mesh, states)
    make: Make = again(optimizer) if isinstance(optimizer, torch.optim.Optimizer) else optimizer
    given, client = groups, optimizer if isinstance(optimizer, torch.optim.Optimizer) else None
    base = client
    if base is None:
        shapes, known = stand_ins(groups)
        base = make(shapes)
        if (made := regrouped(base, groups, known)) is not None:
            groups, client = made, base
    name = type(base).__name__
    if settings.optimizer is not None and mesh.rank == 0:
        log.warning(
            "initialize(optimizer=...): using %s, as DeepSpeed does, instead of %s from ds_config: remove one of the two",
            *(name, settings.optimizer.type),
        )
    refuse_closures(base)
    refuse_state_hooks(base)
    declared, offloaded = settings.zero_optimization.elementwise_optimizer, offloads(settings)
    own = isinstance(base, ShardOptimizer)
    hooked = steps_otherwise(base)
    if own and hooked:
        raise ConfigError(
            "this optimizer has hooks or a replaced step(), and its single pass over the gradients calls neither",
            where="optimizer",
            got=name,
            fix="Use torch's class (torch.optim.AdamW), which runs hooks, or remove them.",
        )
    if isinstance(base, Muon):
        whole = frozenset(index for index, group in enumerate(base.param_groups) if group["use_muon"])
    else:
        whole = frozenset(
            range(len(groups))
            if needs_whole_tensors(type(base), declared, offloaded=offloaded) or (hooked and not declared)
            else ()
        )
    one_owner = bool(whole) and not own and type(base) not in _BY_TENSOR and _one_owner(make, given, name, mesh)
    if whole and not own and not one_owner and mesh.shard.size > 1 and mesh.rank == 0:
        log.info(
            "%s is not known to work element by element, so one rank updates each whole tensor. If it does work element by element, "
            "zero_optimization.elementwise_optimizer true (or elementwise = True on the class) splits tensors evenly",
            name,
        )
    return OptimizerPlan(
        groups,
        whole,
        make,
        client,
        by_callable=client is None,
        one_owner=one_owner,
        at_once=not own and (hooked or type(base) not in ELEMENTWISE | _BY_TENSOR),
        work=_work_of(type(base)),
    )


def _by_name(groups: Groups, model: nn.Module, settings: DsConfig, mesh: Mesh, states: str | None) -> OptimizerPlan:
    section = settings.optimizer
    if section is None:
        raise ConfigError("there is no optimizer", where="optimizer", fix='Add "optimizer" to ds_config or pass one.')
    spec = resolve_optimizer(section.type, section.params, states)
    if spec.states != "fp32":
        _require_fp32_masters(spec.states, model, groups)
    if spec.optimizer_class is Muon:
        groups = muon_groups(model, groups, section.params)
        whole = frozenset(index for index, group in enumerate(groups) if group["use_muon"])
        if mesh.rank == 0:
            count, chosen = sum(len(group["params"]) for group in groups), sum(len(groups[i]["params"]) for i in whole)
            log.info("Muon trains %d of %d tensors, AdamW trains the others (param.use_muon decides)", chosen, count)
    else:
        whole = frozenset(
            range(len(groups)) if needs_whole_tensors(spec.optimizer_class, offloaded=offloads(settings)) else ()
        )
    by_tensor = spec.optimizer_class in {Muon, FusedLamb, *_BY_TENSOR}
    work = _work_of(spec.optimizer_class)
    return OptimizerPlan(groups, whole, spec.build, at_once=bool(whole) and not by_tensor, work=work)


def _require_fp32_masters(states: str, model: nn.Module, groups: Groups) -> None:
    """Raise ConfigError for a float64 parameter: states in bf16 are rounded from fp32."""
    trained = {id(param) for group in groups for param in group["params"]}
    double = (name for name, p in model.named_parameters() if id(p) in trained and p.dtype == torch.float64)
    if (name := next(double, None)) is not None:
        raise ConfigError(
            "optimizer states in bf16 require fp32 masters",
            where="data_types.optimizer_states",
            got=f"{states}, and {name} in float64",
            fix="Remove the key, or train the parameter in fp32.",
        )


def _one_owner(make: Make, groups: Groups, name: str, mesh: Mesh) -> bool:
    """Return whether one rank must update all tensors. Raises ConfigError if no rank can."""
    couples, why = probe(make, groups)
    parts = mesh.pipe.size > 1 or mesh.model_part[1] > 1
    if couples and parts:
        raise ConfigError(
            "the update of one tensor depends on the others, but no rank has all tensors of the model",
            where="optimizer",
            got=f"{name} with mesh.pipe {mesh.pipe.size}, {mesh.model_part[1]} parts of the model",
            fix="Use mesh.pipe 1 and mesh.model 1, an optimizer that updates each tensor independently, or gradient_clipping instead of a norm "
            "inside step().",
        )
    if couples is False:
        return False
    if mesh.rank == 0 and (parts or mesh.shard.size > 1):
        found = "couples tensors (the update of one depends on others)"
        if couples is None:
            found = f"could not be tested before training ({why}); the update of one tensor may depend on others"
        so = f"rank {mesh.shard.ranks[0]} updates all tensors, and holds all of the optimizer state"
        if parts:
            so = "training would be wrong, because no rank has all tensors (mesh.pipe, mesh.model)"
        log.warning("%s %s: %s", name, found, so)
    return not parts


def _work_of(optimizer_class: type) -> Work:
    """Return the cost of updating a tensor: Muon's operations, otherwise one per element."""
    return orthogonalization_flops if any("Muon" in each.__name__ for each in optimizer_class.__mro__) else math.prod


def made_by_client(plan: OptimizerPlan, weights: list[list[nn.Parameter]]) -> torch.optim.Optimizer:
    """Build the client's optimizer over the tensors that this rank owns. Raises ConfigError if its
    code fails with them, for example because a kind of tensor is missing.

    A rank without tensors builds it over stand-ins of the model's shapes and steps nothing, because
    a class that wraps other optimizers may not accept an empty list.
    """
    count = sum(map(len, weights))
    try:
        if count:
            return plan.make(groups_over(weights, plan.groups))
        base = plan.make(stand_ins(plan.groups)[0])
    except ZeroTrialError:
        raise
    except Exception as error:
        raise unbuildable(f"{type(error).__name__}: {error} (with {count} tensors)") from error
    for group in base.param_groups:
        group["params"] = []
    base.state.clear()
    return base


def unbuildable(fault: str) -> ConfigError:
    """Return the error for a callable that failed on some rank."""
    return ConfigError(
        "this callable fails with the tensors of one rank: each rank passes only the tensors that it owns",
        where="initialize(optimizer)",
        got=fault,
        fix='Use zero_optimization.stage 0, or make the callable accept any tensors; for Muon with AdamW, "optimizer": {"type": "Muon"}.',
    )
