"""Chooses the parameters that are gathered, freed and reduced together: a model's tree cut into
blocks, and parameters into buckets.

A block is a member of the model's stack: a child of a ModuleList, or one of several alike children
of a Sequential (the outermost such stack, unless one member holds more than a quarter of the model
and has a stack of its own), or a leaf module. Everything outside the blocks (embeddings, final
norm, head, parameters that several blocks share) belongs to the root block, which lives as long as
the whole forward and backward: code may use such a weight outside its own module, as tied heads do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from zero_trial.comm import AxisComm
from zero_trial.errors import ConfigError
from zero_trial.sharding.grad_buffer import GradBuffer
from zero_trial.sharding.layout import living_dtype
from zero_trial.sharding.leaf_modules import mark_leaves, z3_leaf_module
from zero_trial.sharding.param_group import ParamGroup

ROOT = ""

# --- settings -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LeafRules:
    """ds_config's ``zero_optimization.leaf_module``: modules that are blocks by name, whatever the
    tree looks like."""

    classes: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    name_suffixes: tuple[str, ...] = ()

    def match(self, name: str, module: nn.Module) -> bool:
        """Return whether ``module`` is a leaf by these rules, or was marked as one."""
        kind = type(module).__name__
        return (
            z3_leaf_module(module)
            or any(kind == entry.rsplit(".", 1)[-1] for entry in self.classes)
            or name in self.names
            or any(name.endswith(suffix) for suffix in self.name_suffixes)
        )

    def mark(self, root: nn.Module) -> None:
        """Mark the modules that entries name as leaves.

        Raises ConfigError for a list that is a leaf outside of every other leaf, since it has no
        forward in which it could be gathered, and for an entry that names only such a list, or no
        module. A class or an ending may match nothing if another entry matches: files list the
        classes of several models.
        """
        parts = {name: part for name, part in root.named_modules(remove_duplicate=False) if _numel(part)}
        leaves = {name: part for name, part in parts.items() if self.match(name, part)}
        inside = {
            inner
            for name, part in leaves.items()
            if not isinstance(part, _LISTS)
            for inner, _ in part.named_modules(prefix=name, remove_duplicate=False)
        }
        if alone := next((name for name in leaves if z3_leaf_module(parts[name]) and name not in inside), None):
            raise ConfigError(
                "a list of modules cannot be a leaf: it has no forward in which it could be gathered",
                where="set_z3_leaf_modules",
                got=f"the {type(parts[alone]).__name__} {alone!r}",
                fix="Mark the module that holds the list.",
            )
        keys = {"classes": self.classes, "names": self.names, "name_suffixes": self.name_suffixes}
        rules = {(key, entry): LeafRules(**{key: (entry,)}) for key, entries in keys.items() for entry in entries}
        found = {at: [name for name in leaves if rule.match(name, parts[name])] for at, rule in rules.items()}
        for (key, entry), named in found.items():
            if not inside.isdisjoint(named) or (not named and key != "names" and any(found.values())):
                continue
            holder = named[0].rpartition(".")[0] if named else ""
            kind = f", which is the {type(parts[named[0]]).__name__} {named[0]!r}" if named else ""
            raise ConfigError(
                "no module with parameters is a leaf by this entry",
                where=f"zero_optimization.leaf_module.{key}",
                got=f"{entry!r}{kind}",
                expected="a module with a forward of its own",
                fix=f"Name the module that holds it, {holder!r}." if holder else "Correct the entry, or remove it.",
            )
        mark_leaves(parts[name] for name in leaves.keys() & inside)


@dataclass
class GroupingLimits:
    """Sizes in elements, from ds_config."""

    bucket: int = 500_000_000
    persistence: int = 100_000
    model_persistence: int = 9_223_372_036_854_775_807
    smallest_group: int = 0  # neighbouring blocks are put together until they have as many elements
    kept_on_host: int = 0  # of what goes to NVMe, so many elements per rank stay in memory

    def bucket_of(self, total: int) -> int:
        """Return the most elements of a bucket where all buckets together have ``total``:
        ``bucket``, or a quarter of them (never below 1 Mi), whichever is smaller."""
        return min(self.bucket, max(-(-total // 4), 1 << 20))


@dataclass(frozen=True)
class UnshardLimits:
    """Elements: how many gathered ones may live at once, how soon one must be needed again to be
    kept, how many may be prefetched."""

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
        limits: how parameters are put into groups.
        live: how much may be unsharded at once.
        leaf: which modules are gathered as a whole.
        wire_scale: multiplies gradients before their sum.
        overlap: reduce groups while others still compute.
        grads_to_none: gradients have no memory between steps.
    """

    limits: GroupingLimits = field(default_factory=GroupingLimits)
    live: UnshardLimits = field(default_factory=UnshardLimits)
    leaf: LeafRules = field(default_factory=LeafRules)
    wire_scale: float = 1.0
    overlap: bool = True
    grads_to_none: bool = False

    @property
    def in_flight(self) -> int:
        """How many groups' reductions may be under way at once."""
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
        """Whether this rank counts the group in the norm and writes it to checkpoints: of several
        copies, only the owner does."""
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
    parameter is in one."""

    def __init__(self, manual_groups: Sequence[ManualGroup] = ()) -> None:
        self.all = tuple(manual_groups)
        self.by_name = {manual_group.name: manual_group for manual_group in manual_groups}
        self._holders: dict[int, list[ManualGroup]] = {}
        for manual_group in manual_groups:
            for param in manual_group.params:
                self._holders.setdefault(param, []).append(manual_group)

    def of(self, group: ParamGroup) -> ManualGroup | None:
        """Return the manual group of ``group``, which never spans two; None without manual
        groups."""
        found = self._holders.get(id(group.params[0]), ()) if group.params else ()
        return found[0] if found else None

    def grad_buffers(self, grad_buffers: Sequence[GradBuffer]) -> dict[str, list[GradBuffer]]:
        """Sort ``grad_buffers`` by manual group; their order stays."""
        found: dict[str, list[GradBuffer]] = {name: [] for name in self.by_name}
        for grad_buffer in grad_buffers:
            if (manual_group := self.of(grad_buffer.group)) is not None:
                found[manual_group.name].append(grad_buffer)
        return found

    def owns(self, group: ParamGroup) -> bool:
        """Return whether this rank's pipeline stage counts the group's norm and saves it: true for
        all groups but copies."""
        manual_group = self.of(group)
        return manual_group is None or manual_group.owned

    def is_copy(self, name: str) -> bool:
        """Return whether a parameter or buffer is a copy of another pipeline stage's, which saves
        it."""
        return any(name.startswith(f"{manual_group.module}.") for manual_group in self.all if not manual_group.owned)

    def agree(self, param: nn.Parameter, values: torch.Tensor, label: str) -> None:
        """Overwrite ``values`` of ``param`` with its owner's. Collective over the copies."""
        for manual_group in self._holders.get(id(param), ()):
            manual_group.agree(values, label)


# --- blocks of a module ---------------------------------------------------------------------------


_LISTS = (nn.ModuleList, nn.ModuleDict)  # they have no forward of their own


def _numel(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())


def find_blocks(root: nn.Module, rules: LeafRules = LeafRules()) -> list[str]:
    """Return the names of the modules that are blocks, in tree order, without the root."""
    found: list[str] = []
    total = _numel(root)

    def visit(prefix: str, module: nn.Module) -> None:
        members = _stack_members(module)
        for key, child in module.named_children():
            name, numel = f"{prefix}{key}", _numel(child)
            a_list = isinstance(child, _LISTS)
            if (
                numel
                and not a_list
                and (rules.match(name, child) or (child in members and not too_large(child, numel)))
            ):
                found.append(name)
            elif numel:
                visit(f"{name}.", child)

    def too_large(member: nn.Module, numel: int) -> bool:
        return 4 * numel > total and any(isinstance(inner, _LISTS) and len(inner) for inner in member.modules())

    if isinstance(root, _LISTS) or not rules.match("", root):
        visit("", root)
    return found


def _stack_members(module: nn.Module) -> list[nn.Module]:
    children = list(module.children())
    if isinstance(module, nn.Sequential):
        kinds = Counter(type(child).__name__ for child in children if _numel(child))
        return [child for child in children if kinds[type(child).__name__] > 1]
    return children if isinstance(module, _LISTS) else []


def block_of(parameter_names: Sequence[str], blocks: Collection[str]) -> str:
    """Return the block of a parameter with these names (several when tied): the one block that
    contains all of them, else the root. Price: a look-up for each module around the parameter."""
    owners = {_innermost_block(name, blocks) for name in parameter_names}
    return owners.pop() if len(owners) == 1 else ROOT


def _innermost_block(name: str, blocks: Collection[str]) -> str:
    while name and name not in blocks:
        name = name.rpartition(".")[0]
    return name


# --- parameters of a module -----------------------------------------------------------------------


@dataclass(frozen=True)
class ParamFacts:
    """One parameter as grouping sees it. Parameters with different ``key`` (dtype, device,
    trainable or not) cannot share a group."""

    name: str
    numel: int
    key: tuple[object, ...]
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
    rules: LeafRules,
    *,
    dtype: torch.dtype,
    with_frozen: bool,
    device: torch.device | None = None,
) -> tuple[list[ParamFacts], dict[str, nn.Parameter], Sequence[str]]:
    """Return members for grouping, parameters by first name, and block names. ``opt_groups``:
    id(parameter) -> optimizer group. ``device``: where all of them go (None: they stay).

    A frozen parameter is left as it is, or only sharded (``with_frozen``); so is every parameter
    where nothing is trained. A trainable parameter in no optimizer group is left as it is: another
    optimizer may train it.
    """
    blocks = find_blocks(module, rules)
    among = frozenset(blocks)
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
                fix="Keep torch.view_as_real of it as the parameter, and use torch.view_as_complex in the forward.",
            )
        params[name] = param
        members.append(
            ParamFacts(
                name,
                param.numel(),
                (living_dtype(param.dtype, dtype), device if device is not None else param.device, trained),
                opt_groups[id(param)] if trained else -1,
                block_of(names, among),
            )
        )
    return members, params, blocks


def saved_buffers(module: nn.Module) -> list[str]:
    """Return the names of the buffers that a state dict holds; of a shared one its first name."""
    unsaved = {id(inner._buffers[name]) for inner in module.modules() for name in inner._non_persistent_buffers_set}
    return [name for name, buffer in module.named_buffers() if id(buffer) not in unsaved]


def by_manual_group(
    members: Sequence[ParamFacts], params: Mapping[str, nn.Parameter], manual_groups: Sequence[ManualGroup]
) -> list[ParamFacts]:
    """Return the members with their manual groups as blocks; no group spans two of them. Every
    parameter must be in one."""
    name_of = {param: manual_group.name for manual_group in manual_groups for param in manual_group.params}
    found = []
    for member in members:
        name = name_of[id(params[member.name])]
        found.append(replace(member, block=name, key=(*member.key, name)))
    return found


# Parts of tensors in a model that is parallel itself. Such a model marks them as Megatron's and
# DeepSpeed's do: an attribute ``tensor_model_parallel`` or ``model_parallel`` that is true. All
# other parameters are taken for copies of each other, and the first rank's count where something is
# summed over the model: the gradient norm.

MARKS = ("tensor_model_parallel", "model_parallel")


def is_model_parallel(param: torch.Tensor) -> bool:
    """Return whether the other ranks of the model axis hold other elements of this tensor."""
    return any(bool(getattr(param, mark, False)) for mark in MARKS)


def split_parts_from_copies(members: Sequence[ParamFacts], params: Mapping[str, nn.Parameter]) -> list[ParamFacts]:
    """Return the members with keys that keep parts and copies in different groups."""
    return [replace(member, key=(*member.key, is_model_parallel(params[member.name]))) for member in members]


# --- groups ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GroupSpec:
    """A group to build: its members in layout order (sorted by optimizer group, so that each is one
    run), and whether it always lives."""

    name: str
    members: tuple[ParamFacts, ...]
    always: bool
    block: str = ROOT


def into_buckets(members: Sequence[ParamFacts], limits: GroupingLimits) -> list[GroupSpec]:
    """Fill buckets of parameters that always live, from the last parameter backwards: backward
    finishes those first.

    A bucket closes at :meth:`GroupingLimits.bucket_of` elements, so that reductions overlap with
    what is left of backward and no buffer is larger than the model needs.
    """
    goal = limits.bucket_of(sum(member.numel for member in members))
    out: list[GroupSpec] = []
    open_: dict[tuple[object, ...], list[ParamFacts]] = {}
    filled = Counter[tuple[object, ...]]()  # elements of each open bucket

    def close(key: tuple[object, ...]) -> None:
        chosen = open_.pop(key)
        del filled[key]
        chosen.reverse()  # back into the model's order
        out.append(GroupSpec(f"bucket{len(out)}", tuple(sorted(chosen, key=lambda m: m.opt_group)), True))

    for member in reversed(members):
        if member.key in open_ and filled[member.key] + member.numel > goal:
            close(member.key)
        open_.setdefault(member.key, []).append(member)
        filled[member.key] += member.numel
    for key in list(open_):
        close(key)
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
    """Make groups of parameters that live while their block computes: one per block and key; small
    ones always live, in buckets.

    A parameter below ``limits.persistence`` elements stays live, as long as all such together stay
    below ``limits.model_persistence``. Order: as backward reaches them, last block first, the
    root's and the persistent buckets at the end.
    """
    small, kept = persistent_members(members, limits)
    grouped: dict[tuple[str, tuple[object, ...]], list[ParamFacts]] = {}
    for member in kept:
        grouped.setdefault((member.block, member.key), []).append(member)
    groups = [
        GroupSpec(block or "root", tuple(sorted(chosen, key=lambda m: m.opt_group)), False, block)
        for (block, _), chosen in reversed(grouped.items())
    ]
    groups.sort(key=lambda group: group.block == ROOT)
    return groups + [GroupSpec(f"small.{group.name}", group.members, True) for group in into_buckets(small, limits)]


def merge_small(blocks: Sequence[str], members: Sequence[ParamFacts], smallest: int) -> dict[str, tuple[str, ...]]:
    """Merge neighbouring blocks of one stack until each group has ``smallest`` elements: group name
    -> its blocks, in order.

    A group is gathered when its first block is used and freed after its last: fewer and larger
    messages, for at most ``smallest`` more elements that live. ``members``: the parameters that
    will be freed.
    """
    sizes = Counter[str]()
    for member in members:
        sizes[member.block] += member.numel
    merged: dict[str, tuple[str, ...]] = {}
    run: list[str] = []
    held = 0  # elements of the run

    def close() -> None:
        if run:
            merged[run[0] if len(run) == 1 else f"{run[0]}..{run[-1]}"] = tuple(run)
            run.clear()

    for block in blocks:
        if not sizes[block]:
            continue
        if run and (_stack_of(run[-1]) != _stack_of(block) or held >= smallest):
            close()
            held = 0
        run.append(block)
        held += sizes[block]
    close()
    return merged


def _stack_of(block: str) -> str:
    return block.rpartition(".")[0]


def runs_of_groups(offsets: Sequence[tuple[int, int]], numel: int) -> Mapping[int, tuple[int, int]]:
    """Return [start, stop) of each optimizer group in a flat buffer. ``offsets``: (offset,
    optimizer group) of each slot in order.

    Padding goes with the group before it, so that every run starts and ends at an aligned element.
    """
    starts: dict[int, int] = {}
    for offset, opt_group in offsets:
        starts.setdefault(opt_group, offset)
    ordered = sorted(starts.items(), key=lambda item: item[1])
    stops = [start for _, start in ordered[1:]] + [numel]
    return {opt_group: (start, stop) for (opt_group, start), stop in zip(ordered, stops, strict=True)}
