"""Chooses the parameters that are gathered, freed and reduced together: splits a model's modules
into blocks, and parameters into buckets.

A block is a member of the model's stack: a child of a ModuleList, or one of several similar
children of a Sequential (the outermost such stack, unless one member holds more than a quarter of
the model and has its own stack, of two or more), or a leaf module. Everything outside of the blocks
(embeddings, final norm, head, parameters that several blocks share) belongs to the root block,
which lives during the whole forward and backward, because code may use such a weight outside of its
own module, as tied heads do.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn

from zero_trial.comm import AxisComm
from zero_trial.errors import ConfigError
from zero_trial.sharding.grad_buffer import GradBuffer
from zero_trial.sharding.layout import Layout
from zero_trial.sharding.leaf_modules import mark_leaves, z3_leaf_module
from zero_trial.sharding.living_dtypes import LivingDtypes
from zero_trial.sharding.param_group import ParamGroup

ROOT = ""

# --- settings -------------------------------------------------------------------------------------


_MATCHES: Mapping[str, Callable[[str, str, nn.Module], bool]] = {
    "classes": lambda entry, name, part: type(part).__name__ == entry.rpartition(".")[2],
    "names": lambda entry, name, part: name == entry,
    "name_suffixes": lambda entry, name, part: name.endswith(entry),
}


@dataclass(frozen=True)
class LeafRules:
    """ds_config's ``zero_optimization.leaf_module``: modules that are blocks by name."""

    classes: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    name_suffixes: tuple[str, ...] = ()

    def mark(self, root: nn.Module) -> None:
        """Mark the modules that entries name as leaves.

        Raises ConfigError for a list that is a leaf outside of every other leaf, since it has no
        forward before which it could be gathered, and for an entry that matches only such lists, or
        no module. A class or a suffix may match nothing if another entry matches, because files
        list the classes of several models.
        """
        parts = {name: part for name, part in root.named_modules(remove_duplicate=False) if _numel(part)}
        found = {
            (key, entry): [name for name, part in parts.items() if matches(entry, name, part)]
            for key, matches in _MATCHES.items()
            for entry in getattr(self, key)
        }
        marked = [name for name, part in parts.items() if z3_leaf_module(part)]
        leaves = {*marked, *(name for named in found.values() for name in named)}
        inside = {
            inner
            for name in leaves
            if not isinstance(parts[name], _LISTS)
            for inner, _ in parts[name].named_modules(prefix=name, remove_duplicate=False)
        }
        if alone := next((name for name in marked if name not in inside), None):
            raise ConfigError(
                "a list of modules cannot be a leaf: it has no forward before which it could be gathered",
                where="set_z3_leaf_modules",
                got=f"the {type(parts[alone]).__name__} {alone!r}",
                fix="Mark the module that holds the list.",
            )
        for (key, entry), named in found.items():
            if not inside.isdisjoint(named) or (not named and key != "names" and any(found.values())):
                continue
            holder = named[0].rpartition(".")[0] if named else ""
            kind = f", which is the {type(parts[named[0]]).__name__} {named[0]!r}" if named else ""
            raise ConfigError(
                "this entry matches no module with parameters",
                where=f"zero_optimization.leaf_module.{key}",
                got=f"{entry!r}{kind}",
                expected="a module with a forward of its own",
                fix=f"Name the module that holds it, {holder}." if holder else "Correct the entry, or remove it.",
            )
        mark_leaves(parts[name] for name in leaves & inside)


@dataclass
class GroupingLimits:
    """Sizes in elements, from ds_config."""

    bucket: int = 500_000_000
    persistence: int = 100_000
    model_persistence: int = 9_223_372_036_854_775_807
    smallest_group: int = 0  # neighboring blocks are merged until they have this many elements
    kept_on_host: int = 0  # elements per rank that stay in host memory although offload_param uses NVMe


@dataclass(frozen=True)
class UnshardLimits:
    """Limits in elements: how many gathered elements may live at once, within which distance they
    must be used again to be kept, how many may be prefetched."""

    max_live: int = 1_000_000_000
    max_reuse_distance: int = 1_000_000_000
    prefetch: int = 50_000_000

    @property
    def frees_all(self) -> bool:
        """Whether nothing is kept for another use."""
        return not self.max_live or not self.max_reuse_distance


@dataclass(frozen=True)
class ShardingSettings:
    """The settings of ds_config for sharding.

    Args:
        limits: how parameters are grouped.
        live: how many elements may be unsharded at once.
        leaf: which modules are gathered as a whole.
        wire_scale: factor for gradients before their sum.
        overlap: whether groups are reduced while others still compute.
        grads_to_none: whether gradients have no memory between steps.
    """

    limits: GroupingLimits = field(default_factory=GroupingLimits)
    live: UnshardLimits = field(default_factory=UnshardLimits)
    leaf: LeafRules = field(default_factory=LeafRules)
    wire_scale: float = 1.0
    overlap: bool = True
    grads_to_none: bool = False

    @property
    def in_flight(self) -> int:
        """How many groups' reductions may be in flight at once."""
        return 2 if self.overlap else 0


@dataclass(frozen=True)
class ManualGroup:
    """Parameters (by id) that a schedule gathers, frees and reduces together, such as those of one
    chunk of a pipeline.

    ``copies`` are the ranks that hold the same parameters for other layers (tied weights), or None.
    Copies have the same shapes in the same order on all their ranks, and so the same layout: each
    rank exchanges the shard that it owns.
    """

    name: str
    params: frozenset[int]
    copies: AxisComm | None = None
    owner: int = 0  # the index among the copies of the one whose first values count
    module: str = ""  # with copies: the dotted name of the module that holds all of it

    @property
    def owned(self) -> bool:
        """Whether this rank counts and saves the group: of several copies, only the owner does."""
        return self.copies is None or self.copies.index == self.owner

    def agree(self, values: torch.Tensor, label: str) -> None:
        """Overwrite ``values`` with the owner's. Collective over the copies."""
        if self.copies is not None:
            self.copies.broadcast(values, label, self.owner)

    @property
    def holders(self) -> int:
        return self.copies.size if self.copies is not None else 1


class ManualGroups:
    """The manual groups of a model: none where its own hooks gather and reduce; otherwise every
    parameter is in one, and the block of a group is the name of its manual group."""

    def __init__(self, manual_groups: Sequence[ManualGroup] = ()) -> None:
        self.all = tuple(manual_groups)
        self.by_name = {manual_group.name: manual_group for manual_group in manual_groups}

    def of(self, param: nn.Parameter) -> ManualGroup | None:
        """Return the manual group of a parameter; None without manual groups."""
        return next((manual_group for manual_group in self.all if id(param) in manual_group.params), None)

    def grad_buffers(self, grad_buffers: Sequence[GradBuffer]) -> dict[str, list[GradBuffer]]:
        """Sort ``grad_buffers`` by manual group; their order stays."""
        return {name: [each for each in grad_buffers if each.group.block == name] for name in self.by_name}

    def owns(self, group: ParamGroup) -> bool:
        """Return whether this pipeline stage counts and saves the group: not if it is a copy."""
        return group.block not in self.by_name or self.by_name[group.block].owned

    def is_copy(self, name: str) -> bool:
        """Return whether a parameter or buffer is a copy that another pipeline stage saves."""
        return any(name.startswith(f"{manual_group.module}.") for manual_group in self.all if not manual_group.owned)


# --- blocks of a module ---------------------------------------------------------------------------


_LISTS = (nn.ModuleList, nn.ModuleDict)  # they have no forward of their own


def _numel(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())


def find_blocks(root: nn.Module) -> list[str]:
    """Return the names of the modules that are blocks, in tree order, without the root."""
    found: list[str] = []
    total = _numel(root)

    def visit(prefix: str, module: nn.Module) -> None:
        members = _stack_members(module)
        for key, child in module.named_children():
            name, numel = f"{prefix}{key}", _numel(child)
            member = z3_leaf_module(child) or (child in members and not too_large(child, numel))
            if numel and member and not isinstance(child, _LISTS):
                found.append(name)
            elif numel:
                visit(f"{name}.", child)

    def too_large(member: nn.Module, numel: int) -> bool:
        return 4 * numel > total and any(isinstance(inner, _LISTS) and len(inner) > 1 for inner in member.modules())

    if isinstance(root, _LISTS) or not z3_leaf_module(root):
        visit("", root)
    return found


def _stack_members(module: nn.Module) -> list[nn.Module]:
    children = list(module.children())
    if isinstance(module, nn.Sequential):
        kinds = Counter(type(child).__name__ for child in children if _numel(child))
        return [child for child in children if kinds[type(child).__name__] > 1]
    return children if isinstance(module, _LISTS) else []


def block_of(parameter_names: Sequence[str], blocks: Collection[str]) -> str:
    """Return the block of a parameter with these names (several if tied): the block that contains
    all of them, else the root. Cost: a look-up for each module around the parameter."""
    owners = set()
    for name in parameter_names:
        while name and name not in blocks:
            name = name.rpartition(".")[0]
        owners.add(name)
    return owners.pop() if len(owners) == 1 else ROOT


# --- parameters of a module -----------------------------------------------------------------------


class Kind(NamedTuple):
    """Properties that the parameters of a group share."""

    dtype: torch.dtype
    device: torch.device
    trained: bool
    part: bool = False  # see is_model_parallel
    manual_group: str = ""


@dataclass(frozen=True)
class ParamFacts:
    """One parameter as grouping sees it."""

    name: str
    numel: int
    kind: Kind
    opt_group: int  # optimizer group; -1 when frozen
    block: str = ROOT


def parameter_names(module: nn.Module) -> dict[str, tuple[nn.Parameter, tuple[str, ...]]]:
    """Return every parameter by its first name, with all its names (more than one when tied)."""
    names: dict[int, list[str]] = {}
    params: dict[int, nn.Parameter] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
        params[id(param)] = param
    return {known[0]: (params[key], tuple(known)) for key, known in names.items()}


def collect_params(
    module: nn.Module,
    opt_groups: Mapping[int, int],
    manual_groups: ManualGroups,
    blocks: Collection[str],
    *,
    living: LivingDtypes,
    with_frozen: bool,
    with_parts: bool = False,
    device: torch.device | None = None,
) -> tuple[list[ParamFacts], dict[str, nn.Parameter]]:
    """Return members for grouping, and parameters by first name. ``opt_groups``: id(parameter) ->
    optimizer group. ``with_parts``: the model is parallel itself. ``device``: the target device of
    all parameters (None: they are not moved).

    A frozen parameter is unchanged, or only sharded (``with_frozen``), and so is every parameter if
    nothing is trained. A trainable parameter in no optimizer group is unchanged, because another
    optimizer may train it.
    """
    members, params = [], {}
    for name, (param, names) in parameter_names(module).items():
        trained = param.requires_grad and id(param) in opt_groups
        if not trained and (not with_frozen or (param.requires_grad and opt_groups)):
            continue
        if trained and param.is_complex():
            raise ConfigError(
                "a complex parameter cannot be trained",
                where=name,
                got=param.dtype,
                fix="Use torch.view_as_real of it as the parameter, and call torch.view_as_complex in the forward.",
            )
        params[name] = param
        place = device if device is not None else param.device
        manual_group = manual_groups.of(param)
        manual = manual_group.name if manual_group is not None else ""
        part = with_parts and is_model_parallel(param)
        kind = Kind(living.of(param), place, trained, part, manual)
        opt_group = opt_groups[id(param)] if trained else -1
        members.append(ParamFacts(name, param.numel(), kind, opt_group, manual or block_of(names, blocks)))
    return members, params


def saved_buffers(module: nn.Module) -> list[str]:
    """Return the names of the buffers that a state dict holds; for a shared one, its first name."""
    unsaved = {id(inner._buffers[name]) for inner in module.modules() for name in inner._non_persistent_buffers_set}
    return [name for name, buffer in module.named_buffers() if id(buffer) not in unsaved]


# Parts of tensors in a model that is parallel itself. Such a model marks them as Megatron's and
# DeepSpeed's models do: with an attribute ``tensor_model_parallel`` or ``model_parallel`` that is
# true. All other parameters are treated as copies of each other, and only those of the first rank
# count in a sum over the model, such as the gradient norm.

MARKS = ("tensor_model_parallel", "model_parallel")


def is_model_parallel(param: torch.Tensor) -> bool:
    """Return whether the other ranks of the model axis hold other elements of this tensor."""
    return any(bool(getattr(param, mark, False)) for mark in MARKS)


# --- groups ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GroupSpec:
    """A group to build: its members in layout order (sorted by optimizer group, so that each is one
    run), and whether it always lives."""

    name: str
    members: tuple[ParamFacts, ...]
    always: bool
    block: str = ROOT

    @property
    def kind(self) -> Kind:
        return self.members[0].kind

    def runs(self, layout: Layout) -> Mapping[int, tuple[int, int]]:
        """Return [start, stop) of each optimizer group in the flat buffer; none if it is frozen.

        Padding goes with the group before it, so that every run starts and ends at an aligned
        element.
        """
        starts: dict[int, int] = {}
        for slot, member in zip(layout.slots, self.members, strict=True):
            starts.setdefault(member.opt_group, slot.offset)
        ends = [*starts.values(), layout.numel]
        return dict(zip(starts, itertools.pairwise(ends), strict=True)) if self.kind.trained else {}


def into_buckets(members: Sequence[ParamFacts], limits: GroupingLimits) -> list[GroupSpec]:
    """Fill buckets of parameters that always live, starting with the last parameter, because
    backward finishes these first.

    A bucket closes at ``limits.bucket`` elements, or a quarter of all (never below 1 Mi), whichever
    is smaller, so that reductions overlap with the rest of backward and no buffer is larger than
    the model needs.
    """
    goal = min(limits.bucket, max(-(-sum(member.numel for member in members) // 4), 1 << 20))
    out: list[GroupSpec] = []
    open_: dict[Kind, list[ParamFacts]] = {}

    def close(kind: Kind) -> None:
        chosen = open_.pop(kind)[::-1]  # back into the model's order
        in_order = tuple(sorted(chosen, key=lambda m: m.opt_group))
        out.append(GroupSpec(f"bucket{len(out)}", in_order, True, kind.manual_group))

    filled = Counter[Kind]()  # elements of each open bucket
    for member in reversed(members):
        if member.kind in open_ and filled[member.kind] + member.numel > goal:
            close(member.kind)
            filled[member.kind] = 0
        open_.setdefault(member.kind, []).append(member)
        filled[member.kind] += member.numel
    for kind in list(open_):
        close(kind)
    return out


def persistent_members(
    members: Sequence[ParamFacts], limits: GroupingLimits
) -> tuple[list[ParamFacts], list[ParamFacts]]:
    """Return the parameters that are too small to be worth freeing, and the rest."""
    small, rest, spent = [], [], 0
    for member in members:
        if member.numel < limits.persistence and spent + member.numel <= limits.model_persistence:
            small.append(member)
            spent += member.numel
        else:
            rest.append(member)
    return small, rest


def into_blocks(members: Sequence[ParamFacts], limits: GroupingLimits) -> list[GroupSpec]:
    """Make groups of parameters that live while their block computes: one per block and kind; small
    ones always live, in buckets.

    Parameters below ``limits.persistence`` elements always live, as long as their sum stays below
    ``limits.model_persistence``. Order: as backward reaches them, last block first, with the root's
    groups and the persistent buckets at the end.
    """
    small, kept = persistent_members(members, limits)
    grouped: dict[tuple[str, Kind], list[ParamFacts]] = {}
    for member in kept:
        grouped.setdefault((member.block, member.kind), []).append(member)
    groups = [
        GroupSpec(block or "root", tuple(sorted(chosen, key=lambda m: m.opt_group)), False, block)
        for (block, _), chosen in reversed(grouped.items())
    ]
    groups.sort(key=lambda group: group.block == ROOT)
    return groups + [
        GroupSpec(f"small.{group.name}", group.members, True, group.block) for group in into_buckets(small, limits)
    ]


def merge_small(blocks: Sequence[str], members: Sequence[ParamFacts], smallest: int) -> dict[str, tuple[str, ...]]:
    """Merge neighboring blocks of one stack until each group has ``smallest`` elements: group name
    -> its blocks, in order.

    A group is gathered when its first block is used and freed after its last: messages are fewer
    and larger, and at most ``smallest`` more elements live. ``members``: the parameters that will
    be freed.
    """
    sizes = Counter[str]()
    for member in members:
        sizes[member.block] += member.numel
    runs: list[list[str]] = []
    held = 0  # elements of the last run
    for block in blocks:
        if not sizes[block]:
            continue
        if not runs or runs[-1][-1].rpartition(".")[0] != block.rpartition(".")[0] or held >= smallest:
            runs.append([])
            held = 0
        runs[-1].append(block)
        held += sizes[block]
    return {run[0] if len(run) == 1 else f"{run[0]}..{run[-1]}": tuple(run) for run in runs}
