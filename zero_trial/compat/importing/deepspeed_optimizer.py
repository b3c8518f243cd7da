"""The optimizer as DeepSpeed saves it: at ZeRO stages 1 to 3, flat buffers by rank that contain the
parameters.

stages 1, 2   aaaaabbb|bccccc..               a group's parameters end to end, padded, cut into one
                                              equal partition per rank
stage 3       rank 0 aaabbc  rank 1 aa.bbc    each parameter cut by itself, ceil(numel / ranks)
                                              elements each; a rank's partitions end to end

Stage 0 numbers its parameters, and the numbers are matched with the model's names. Numbers follow
the model's order within each group, as in all common ways of building groups. With the shapes (and,
in 16 bit, the masters' values) there is usually only one match. If there are two, the import stops
and asks for the names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch

from zero_trial.checkpoint.format import Slice
from zero_trial.compat.importing.deepspeed_files import ModelStates
from zero_trial.compat.importing.imported import ImportOptions, one_number, optimizer_groups, optimizer_state
from zero_trial.compat.importing.torch_file import (
    UnknownObject,
    as_dict,
    as_integers,
    as_list,
    as_shape,
    as_tensor,
)
from zero_trial.errors import CheckpointError

State = Mapping[Any, Any]


@dataclass(frozen=True)
class FlatGroup:
    """One flat buffer of the optimizer on all ranks: masters and each kind of state, by rank.
    ``group``: the group with its hyperparameters."""

    group: int
    runs: Sequence[FlatRange]
    masters: Sequence[torch.Tensor]
    states: Mapping[str, Sequence[torch.Tensor]]
    scalars: Mapping[str, float]

    def slices(self, rank: int, with_state: bool, where: str) -> Iterator[Slice]:
        """Yield the parts of parameters in ``rank``'s buffers, without padding. Raises
        CheckpointError if a buffer is too short."""
        buffers = {"param": self.masters[rank]}
        if with_state:
            buffers |= {f"state/{kind}": of_ranks[rank] for kind, of_ranks in self.states.items()}
        flats = {kind: stored.reshape(-1) for kind, stored in buffers.items()}
        for run in (run for run in self.runs if run.rank == rank):
            for kind, flat in flats.items():
                part = flat[run.offset : run.offset + run.stop - run.start]
                if part.numel() != run.stop - run.start:
                    raise CheckpointError("a flat buffer is too short", where=where, got=f"{kind} of {run.name}")
                yield Slice(f"{kind}/{run.name}", run.shape, run.start, run.stop, part)


def stage_of(optimizer: State) -> int:
    """Return the ZeRO stage that wrote ``optimizer``; the bf16 optimizer has stage 1's layout."""
    found = optimizer.get("zero_stage", 1)
    if isinstance(found, UnknownObject):
        found = found.args[0] if found.args else None
    if found not in (1, 2, 3):
        raise CheckpointError("an unknown ZeRO stage", where="zero_stage", got=found, expected="1, 2 or 3")
    return int(found)


def flat_groups(model: State, optimizers: Sequence[State], options: ImportOptions, where: str) -> list[FlatGroup]:
    """Read all buffers of all ranks, and match them with the shapes in the model's file. Raises
    CheckpointError if they do not match."""
    stage, ranks = stage_of(optimizers[0]), len(optimizers)
    counts = optimizers[0].get("partition_count", ranks)
    most = max(as_integers(counts, f"{where}, partition_count")) if isinstance(counts, list) and counts else counts
    if most != ranks:
        raise CheckpointError(
            "some ranks' files are missing, or groups of ranks have copies",
            where=where,
            got=f"{ranks} files",
            expected=f"partition_count {counts}",
        )
    key, inner = (
        ("fp32_flat_groups", "optimizer_state_dict")
        if stage == 3
        else ("single_partition_of_fp32_groups", "base_optimizer_state")
    )
    buffers = [as_list(optimizer.get(key), f"{where}, {key}") for optimizer in optimizers]
    shapes = shapes_of(model, options, where)
    if {len(row) for row in buffers} != {len(shapes)}:
        got = f"{len(buffers[0])} flat buffers for {len(shapes)} lists of shapes"
        raise CheckpointError("the optimizer's buffers do not match the model's shapes", where=where, got=got)
    home = group_of_buffer(optimizer_groups(optimizers[0].get(inner), f"{where}, {inner}"), len(shapes))
    gaps = _gaps(optimizers[0], len(shapes), where) if stage != 3 else None
    found = []
    for index, named in enumerate(shapes):
        masters = [as_tensor(row[index], f"{where}, {key}[{index}]") for row in buffers]
        place = f"{where}, {key}[{index}]"
        if stage == 3:
            runs = each_parameter_runs(named, masters[0].numel(), ranks, place)
        else:
            runs = whole_group_runs(named, masters[0].numel(), ranks, gaps[index] if gaps is not None else None, place)
        states, scalars = _state(optimizers, inner, index, where)
        found.append(FlatGroup(home[index], runs, masters, states, scalars))
    return found


def shapes_of(model: State, options: ImportOptions, where: str) -> list[dict[str, tuple[int, ...]]]:
    """Return the trained parameters by flat buffer, in buffer order."""
    place = f"{where}, param_shapes"
    return [
        {options.own(str(name)): as_shape(shape, f"{place}, {name}") for name, shape in as_dict(part, place).items()}
        for part in as_list(model.get("param_shapes"), place)
    ]


def param_groups(optimizer: State, where: str) -> list[dict[Any, Any]]:
    """Return the hyperparameters, by group."""
    key = "optimizer_state_dict" if stage_of(optimizer) == 3 else "base_optimizer_state"
    return optimizer_groups(optimizer.get(key), f"{where}, {key}")


def _gaps(optimizer: State, count: int, where: str) -> list[list[int]] | None:
    """Return the padding elements after each parameter at stages 1 and 2, by flat buffer."""
    found, place = optimizer.get("param_alignment_paddings"), f"{where}, param_alignment_paddings"
    if not isinstance(found, list) or not found:
        return None
    listed = [as_integers(row, place) for row in found]
    if len(listed) != count:
        raise CheckpointError("a different number of flat buffers", where=place, got=len(listed), expected=count)
    return listed


def _state(
    optimizers: Sequence[State], inner: str, index: int, where: str
) -> tuple[dict[str, list[torch.Tensor]], dict[str, float]]:
    """Return the state of one buffer: tensors by kind and rank, and scalars by kind."""
    rows = [optimizer_state(each.get(inner), f"{where}, {inner}").get(index, {}) for each in optimizers]
    if any(row.keys() != rows[0].keys() for row in rows):
        raise CheckpointError(
            "ranks have different kinds of optimizer state", where=where, got=[sorted(row) for row in rows]
        )
    states: dict[str, list[torch.Tensor]] = {}
    scalars: dict[str, float] = {}
    for kind, first in rows[0].items():
        if isinstance(first, torch.Tensor) and first.shape:
            states[str(kind)] = [as_tensor(row[kind], f"{where}, {kind}") for row in rows]
        else:
            scalars |= one_number(str(kind), first)
    for group in optimizer_groups(optimizers[0].get(inner), f"{where}, {inner}"):
        if index in group["params"]:  # older optimizers store the step here; newer ones store 0
            scalars = one_number("step", group.get("step")) | scalars
    return states, scalars


def group_of_buffer(groups: Sequence[State], count: int) -> list[int]:
    """Return the group of each buffer; stage 3 may split a group, see the groups' ``params``."""
    home = {place: index for index, group in enumerate(groups) for place in group["params"]}
    return [home.get(index, index) for index in range(count)]


# The layout: pure arithmetic over shapes.


Shapes = Mapping[str, tuple[int, ...]]


class FlatRange(NamedTuple):
    """Elements [start, stop) of ``name`` are in ``rank``'s flat buffer from ``offset`` on."""

    name: str
    shape: tuple[int, ...]
    rank: int
    start: int
    stop: int
    offset: int


def whole_group_runs(
    shapes: Shapes, partition: int, ranks: int, gaps: Sequence[int] | None, where: str
) -> list[FlatRange]:
    """Return the ranges of stages 1 and 2: ``partition`` elements on each of ``ranks``; ``gaps``:
    padding elements after each parameter.

    Raises CheckpointError if these parameters do not fill the buffer up to the padding that makes
    all partitions equal.
    """
    gaps = list(gaps) if gaps is not None else [0] * len(shapes)
    used = sum(prod(shape) for shape in shapes.values()) + sum(gaps)
    if len(gaps) != len(shapes) or not 0 <= partition * ranks - used < max(2 * ranks, 1):
        raise _other_layout(where, partition * ranks, used)
    found: list[FlatRange] = []
    at = 0
    for (name, shape), gap in zip(shapes.items(), gaps, strict=True):
        found += _cut(name, tuple(shape), at, partition)
        at += prod(shape) + gap
    return found


def each_parameter_runs(shapes: Shapes, partition: int, ranks: int, where: str) -> list[FlatRange]:
    """Return the ranges of stage 3: a rank's buffer has ``partition`` elements. Raises
    CheckpointError if these parameters do not fill the buffer."""
    found: list[FlatRange] = []
    at = 0
    for name, shape in shapes.items():
        numel = prod(shape)
        share = -(-numel // ranks)
        for rank in range(ranks):
            start, stop = min(rank * share, numel), min((rank + 1) * share, numel)
            if start < stop:
                found.append(FlatRange(name, tuple(shape), rank, start, stop, at))
        at += share
    if not 0 <= partition - at < 2:
        raise _other_layout(where, partition, at)
    return found


def _cut(name: str, shape: tuple[int, ...], at: int, partition: int) -> Iterator[FlatRange]:
    numel, start = prod(shape), 0
    while start < numel:
        rank, offset = divmod(at + start, partition)
        stop = min(numel, start + partition - offset)
        yield FlatRange(name, shape, rank, start, stop, offset)
        start = stop


def _other_layout(where: str, held: int, named: int) -> CheckpointError:
    return CheckpointError(
        "the flat buffers do not fit the parameters' shapes",
        where=where,
        got=f"buffers of {held} elements",
        expected=f"{named}, what the named parameters have, and padding",
        fix="Save again with DeepSpeed 0.10 or later and without expert parallelism, or import only the weights.",
    )


# --- stage 0: numbers -----------------------------------------------------------------------------


class NumberedOptimizer:
    """The state of an optimizer that numbers its parameters.

    Args:
        optimizer: torch's state dict, or DeepSpeed's for 16-bit parameters, which adds masters and
            may flatten each group into one tensor.
    """

    def __init__(self, optimizer: State, model: ModelStates, options: ImportOptions) -> None:
        self._where = f"{model.where}, optimizer"
        inner = optimizer.get("optimizer_state_dict", optimizer)
        if not isinstance(inner, dict) or not isinstance(inner.get("param_groups"), list):
            raise CheckpointError("not the state of an optimizer", where=self._where)
        self.groups = optimizer_groups(inner, self._where)
        self._state = optimizer_state(inner, self._where)
        self._model = model
        flat, rows = optimizer.get("fp32_groups_flat"), optimizer.get("fp32_groups")
        self._flat = self._tensors(flat, "fp32_groups_flat") if flat is not None else None
        self._masters = (
            [self._tensors(row, "fp32_groups") for row in as_list(rows, f"{self._where}, fp32_groups")]
            if rows is not None
            else None
        )
        self._check_counts()
        self.kinds = self._kinds()
        self.names = (
            self._given(options.names)
            if options.names is not None
            else deal(model.parameters, self._ends(), self._fits, self._where)
        )

    def scalars(self) -> dict[str, dict[str, float]]:
        """Return each group's scalars. Raises CheckpointError if they differ within a group."""
        found: dict[str, dict[str, float]] = {}
        for index, group in enumerate(self.groups):
            own: dict[str, float] = {}
            for number in group.get("params", ()):
                for kind, value in self._state.get(number, {}).items():
                    if str(kind) not in self.kinds:
                        for key, one in one_number(str(kind), value).items():
                            if own.setdefault(key, one) != one:
                                raise CheckpointError(
                                    f"tensors of one optimizer group have different values of {key}",
                                    where=self._where,
                                    got=f"{own[key]} and {one} in group {index}",
                                    fix="Import with --no-optimizer.",
                                )
            own = one_number("step", group.get("step")) | own
            if own:
                found[str(index)] = own
        return found

    def slices(self) -> list[Slice]:
        """Return masters, if there are any, and moments."""
        found = []
        for index, row in enumerate(self.names):
            for name, place in row:
                shape = tuple(self._model.tensors[name].shape)
                for kind, tensor in self._tensors_at(index, place, prod(shape)).items():
                    own_shape = shape if tensor.numel() == prod(shape) else tuple(tensor.shape)
                    found.append(Slice.whole(f"{kind}/{name}", tensor.reshape(own_shape)))
        return found

    def _tensors(self, rows: Any, key: str) -> list[torch.Tensor]:
        place = f"{self._where}, {key}"
        return [as_tensor(value, place) for value in as_list(rows, place)]

    def _check_counts(self) -> None:
        """Raise CheckpointError unless each group has its masters."""
        counts = [len(group["params"]) for group in self.groups]
        if self._flat is not None and (len(self._flat) != len(counts) or 0 in counts):
            got, expected = f"{len(self._flat)} flat buffers", f"one for each of {len(counts)} groups of parameters"
        elif self._masters is not None and [len(row) for row in self._masters] != counts:
            got, expected = f"masters of {[len(row) for row in self._masters]} parameters", f"{counts}"
        else:
            return
        raise CheckpointError("the masters do not match the groups", where=self._where, got=got, expected=expected)

    def has_masters(self) -> bool:
        return self._flat is not None or self._masters is not None

    def _kinds(self) -> list[str]:
        """List the kinds of state with one value per element."""
        found = {
            str(kind)
            for state in self._state.values()
            for kind, value in state.items()
            if isinstance(value, torch.Tensor) and value.shape
        }
        return sorted(found)

    def _tensors_at(self, group: int, place: int, numel: int) -> dict[str, torch.Tensor]:
        if self._flat is not None:
            number = self.groups[group]["params"][0]
            sources: dict[str, Any] = {"param": self._flat[group]}
        else:
            number = self.groups[group]["params"][place]
            sources = {"param": self._masters[group][place]} if self._masters is not None else {}
        sources |= {f"state/{kind}": value for kind, value in self._state.get(number, {}).items()}
        kept = {"param", *(f"state/{kind}" for kind in self.kinds)}
        tensors = {
            kind: value.detach() for kind, value in sources.items() if isinstance(value, torch.Tensor) and kind in kept
        }
        if self._flat is not None:
            return {kind: tensor.reshape(-1)[place : place + numel] for kind, tensor in tensors.items()}
        return tensors

    def _ends(self) -> list[int]:
        if self._flat is not None:
            return [flat.numel() for flat in self._flat]
        return [len(group["params"]) for group in self.groups]

    def _fits(self, name: str, group: int, place: int) -> int:
        """Return the end of ``name`` if it begins at ``place``; -1 if it does not fit there."""
        weight = self._model.tensors[name]
        if self._flat is not None:
            end = place + weight.numel()
            return end if end <= self._flat[group].numel() and self._same(weight, self._flat[group], place) else -1
        shape = self._shape_at(group, place)
        if shape is not None and shape != weight.shape:
            return -1
        if self._masters is not None and not self._same(weight, self._masters[group][place], 0):
            return -1
        return place + 1

    def _shape_at(self, group: int, place: int) -> tuple[int, ...] | None:
        """Return the shape of the tensor at a position; None if it has no state yet."""
        if self._masters is not None:
            return self._masters[group][place].shape
        state = self._state.get(self.groups[group]["params"][place], {})
        shapes = {
            value.shape for kind, value in state.items() if isinstance(value, torch.Tensor) and str(kind) in self.kinds
        }
        return next(iter(shapes)) if len(shapes) == 1 else None

    def _same(self, weight: torch.Tensor, master: torch.Tensor, start: int) -> bool:
        """Compare a 16-bit parameter with its master, rounded."""
        values = weight.reshape(-1)
        part = master.reshape(-1)[start : start + weight.numel()]
        return torch.equal(part[:64].to(values.dtype), values[:64]) and torch.equal(part.to(values.dtype), values)

    def _given(self, names: Sequence[Sequence[str]]) -> list[list[tuple[str, int]]]:
        """Return the places of the user's names. Raises CheckpointError if a name is impossible."""
        found: list[list[tuple[str, int]]] = []
        for group, end in enumerate(self._ends()):
            row, place = [], 0
            for name in names[group] if group < len(names) else ():
                after = self._fits(name, group, place) if name in self._model.tensors and place < end else -1
                if after < 0:
                    got = f"group {group}, place {place}: {name}"
                    raise CheckpointError("a given name does not fit that tensor", where="--names", got=got)
                row.append((name, place))
                place = after
            if place != end:
                got = f"{len(row)} names for group {group}"
                raise CheckpointError("too few names", where="--names", got=got, expected=f"names up to place {end}")
            found.append(row)
        return found


# The matching, by counting the possible assignments.


Fits = Callable[[str, int, int], int]
"""``(name, group, place)`` -> the next place if the parameter fits there, else -1."""

MOST_STATES = 200_000


def deal(names: Sequence[str], ends: Sequence[int], fits: Fits, where: str) -> list[list[tuple[str, int]]]:
    """Assign parameters with their places (0 to ``ends[group]``) to each group; unassigned
    parameters were not trained.

    Raises CheckpointError if there is no assignment, or more than one.
    """
    start = (0,) * len(ends)
    ways: list[dict[tuple[int, ...], list[tuple[tuple[int, ...], int]]]] = []
    reached = {start: 1}
    for name in names:
        step: dict[tuple[int, ...], list[tuple[tuple[int, ...], int]]] = {}
        for state in reached:
            step.setdefault(state, []).append((state, -1))
            for group, place in enumerate(state):
                after = fits(name, group, place) if place < ends[group] else -1
                if place < after <= ends[group]:
                    target = (*state[:group], after, *state[group + 1 :])
                    step.setdefault(target, []).append((state, group))
        ways.append(step)
        reached = {state: min(2, sum(reached[origin] for origin, _ in origins)) for state, origins in step.items()}
        if len(reached) > MOST_STATES:
            raise _unclear(where, "too many possible matches")
    count = reached.get(tuple(ends), 0)
    if count != 1:
        raise _unclear(where, "several possible matches" if count else "no possible match")
    return _trace(names, ways, tuple(ends))


def _trace(
    names: Sequence[str], ways: list[dict[tuple[int, ...], list[tuple[tuple[int, ...], int]]]], end: tuple[int, ...]
) -> list[list[tuple[str, int]]]:
    """Trace backwards: each state has one origin, because the assignment is unique."""
    found: list[list[tuple[str, int]]] = [[] for _ in end]
    state = end
    for name, step in zip(reversed(names), reversed(ways), strict=True):
        ((origin, group),) = step[state]
        if group >= 0:
            found[group].append((name, origin[group]))
        state = origin
    return [list(reversed(group)) for group in found]


def _unclear(where: str, got: str) -> CheckpointError:
    return CheckpointError(
        "the optimizer identifies its parameters only by number, and their shapes are ambiguous",
        where=where,
        got=got,
        fix="Pass --names FILE, a JSON list of the parameters' names in each group, in the order of param_groups; or --no-optimizer.",
    )
