"""The optimizer of ZeRO stage 0, which numbers its parameters: match the numbers with the model's
names.

The numbers follow the model's own order inside each group, as every usual way of making groups
leaves it. With the shapes (and, in 16 bit, the values of the masters) there is then mostly one way
to match them. Where there are two, the import stops and asks for the names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch

from zero_trial.checkpoint.format import Slice
from zero_trial.compat.importing.deepspeed_files import ModelStates
from zero_trial.compat.importing.facts import one_number, optimizer_groups, optimizer_state
from zero_trial.compat.importing.imported import ImportOptions
from zero_trial.compat.importing.torch_file import as_list, as_tensor
from zero_trial.errors import CheckpointError

State = Mapping[Any, Any]


class NumberedOptimizer:
    """The state of an optimizer that knows its parameters by number.

    Args:
        optimizer: torch's state dict, or DeepSpeed's with 16-bit parameters, which adds masters and
            may flatten each group into one.
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
        """Collect what is one number per group. Raises CheckpointError where the tensors of a group
        do not agree."""
        found: dict[str, dict[str, float]] = {}
        for index, group in enumerate(self.groups):
            own: dict[str, float] = {}
            for number in group.get("params", ()):
                for kind, value in self._state.get(number, {}).items():
                    if str(kind) not in self.kinds:
                        for key, one in one_number(str(kind), value).items():
                            if own.setdefault(key, one) != one:
                                raise CheckpointError(
                                    f"tensors of one optimizer group have a {key} of their own",
                                    where=self._where,
                                    got=f"{own[key]} and {one} in group {index}",
                                    fix="Import with --no-optimizer.",
                                )
            own = one_number("step", group.get("step")) | own
            if own:
                found[str(index)] = own
        return found

    def slices(self) -> list[Slice]:
        """Return masters, where there are any, and moments."""
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
        """Check that each group has its masters. Raises CheckpointError."""
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
        """List the kinds of state with one value per element: those that are more than one number
        for some tensor."""
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
        """Return after which place ``name`` would be done if it began at ``place``; -1 if another
        tensor is there."""
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
        """Return the shape of the tensor at a place; None where it has no state: a parameter that
        had no gradient so far."""
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
        """Check the names that the user gave. Raises CheckpointError where one cannot be what is
        there."""
        found: list[list[tuple[str, int]]] = []
        for group, end in enumerate(self._ends()):
            row, place = [], 0
            for name in names[group] if group < len(names) else ():
                after = self._fits(name, group, place) if name in self._model.tensors and place < end else -1
                if after < 0:
                    got = f"group {group}, place {place}: {name}"
                    raise CheckpointError("a given name cannot be that tensor's", where="--names", got=got)
                row.append((name, place))
                place = after
            if place != end:
                got = f"{len(row)} names for group {group}"
                raise CheckpointError(
                    "too few names are given", where="--names", got=got, expected=f"up to place {end}"
                )
            found.append(row)
        return found


# The matching, as counting of ways.


Fits = Callable[[str, int, int], int]
"""``(name, group, place)`` -> the next place if that parameter can be there, else -1."""

MOST_STATES = 200_000


def deal(names: Sequence[str], ends: Sequence[int], fits: Fits, where: str) -> list[list[tuple[str, int]]]:
    """Assign to each group its parameters with their places, from place 0 to ``ends[group]``;
    parameters that are left over were not trained.

    Raises CheckpointError where there is no way, or more than one.
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
            raise _unclear(where, "too many ways to tell them apart")
    count = reached.get(tuple(ends), 0)
    if count != 1:
        raise _unclear(where, "more than one way to match them" if count else "no way to match them")
    return _trace(names, ways, tuple(ends))


def _trace(
    names: Sequence[str], ways: list[dict[tuple[int, ...], list[tuple[tuple[int, ...], int]]]], end: tuple[int, ...]
) -> list[list[tuple[str, int]]]:
    """Trace the one way backwards: a state on it has one origin on it, since there is one way in
    all."""
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
        "the optimizer knows its parameters by number only, and their shapes do not tell which is which",
        where=where,
        got=got,
        fix="Give --names FILE, a JSON list of the parameters' names in each group, in the order of param_groups; or --no-optimizer.",
    )
