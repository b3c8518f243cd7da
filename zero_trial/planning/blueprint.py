"""A model without values: whole, or with few of the layers that are alike; and what a model of many
layers costs by the cost of a few.

Bytes, traffic and operations grow by the same amount with each further layer, so a stack of n alike
layers is measured at three, four and six of them. Where six are not what three and four say, or a
limit such as ``max_live_parameters`` is between few layers and all, it is measured at more; and at
all n where that does not help, or where the model does not run without the others.
"""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from zero_trial.engine.offload_config import LeftOut
from zero_trial.errors import ZeroTrialError

META = torch.device("meta")


class NotCopyable(ZeroTrialError):
    """The model cannot be copied, so there is no dry run with it."""


class Blueprint:
    """Copy ``model`` and ``options`` (optimizer, model_parameters, lr_scheduler) without values, so
    that the copy needs no memory.

    The copy is made at once: what happens to the model later (an engine that shards it) does not
    matter. ``device`` is where the training will be. Tensors that are neither parameters nor
    buffers are copied as they are. Raises NotCopyable.
    """

    def __init__(
        self, model: nn.Module, options: Mapping[str, Any] | None = None, device: torch.device | str = "cpu"
    ) -> None:
        place = torch.device(device)
        # With its number, as in ``tensor.device``.
        self.device = torch.device(f"{place.type}:0") if place.type != "cpu" and str(place) == place.type else place
        given = {"model": model, **(options or {})}
        parameters = given.get("model_parameters")
        if isinstance(parameters, Iterator):
            raise NotCopyable("model_parameters can be read only once", fix="Give a list.")
        self.parameters = sum(param.numel() for param in model.parameters())
        self._given = _copied(given, lambda tensor: torch.empty_like(tensor, device="meta"))
        self.left_out = LeftOut()  # by with_layers
        self._cut: dict[tuple[int, ...], Blueprint] = {}  # with_layers
        self._shorts: dict[tuple[int, int], tuple[list[Stack], dict[str, Any]]] = {}

    @cached_property
    def stacks(self) -> list[Stack]:
        """Return the model's long runs of alike layers."""
        return stacks_of(self._given["model"], _groups_of(self._given))

    @property
    def elements(self) -> tuple[int, int]:
        """Return the elements of the parameters, each counted once, and of the trained ones."""
        everything, chosen = self._params()
        return sum(each.numel() for each in everything), sum(each.numel() for each in chosen)

    def _params(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Return the parameters, each once, and those that are trained."""
        groups, named = _groups_of(self._given), self._given.keys() & {"model_parameters", "optimizer"}
        params = list(self._given["model"].parameters())
        return params, [
            each for each in params if each.requires_grad and (not named or not groups or id(each) in groups)
        ]

    @property
    def few_layers(self) -> Blueprint | None:
        """Return a blueprint with few layers of each stack; None where there is no stack."""
        return self.with_layers([FEW] * len(self.stacks)) if self.stacks else None

    @property
    def has_inner_lists(self) -> bool:
        """Return whether the alike layers hold lists of modules themselves."""
        layers = (self._given["model"].get_submodule(stack.path)[stack.first] for stack in self.stacks)
        return any(isinstance(inner, (nn.ModuleList, nn.ModuleDict)) for layer in layers for inner in layer.modules())

    def with_layers(self, counts: Sequence[int], below: int = 0) -> Blueprint:
        """Return a blueprint with so many layers of each stack, and of the others with their
        parameters of fewer than ``below`` elements and nothing else."""
        key = (*counts, below)
        if key not in self._cut:
            most, short = self._short(-(-max(counts) // (2 * FEW)) * 2 * FEW, below)
            made = self._cut[key] = copy.copy(self)
            made._given = _copied(short, torch.empty_like)
            for stack, count in zip(most, counts, strict=True):
                keep(made._given, stack, count, below)
            trained, everything = map(_without_forms, reversed(self._params()), reversed(made._params()))
            made.left_out = LeftOut(trained, everything)
        self._cut[key].device = self.device
        return self._cut[key]

    def _short(self, most: int, below: int) -> tuple[list[Stack], dict[str, Any]]:
        """Return the stacks cut to ``most`` layers, and a copy of what is given that has those, and
        of the others the parameters of fewer than ``below`` elements."""
        if (most, below) not in self._shorts:
            given = _copied(self._given, torch.empty_like)
            cut = [replace(stack, count=min(most, stack.count)) for stack in self.stacks]
            for stack, left in zip(self.stacks, cut, strict=True):
                keep(given, stack, left.count, below)
            self._shorts[most, below] = cut, given
        return self._shorts[most, below]

    @cached_property
    def mode(self) -> FakeTensorMode:
        """Return the mode, made when first needed: torch loads some 800 modules for it, which takes
        a second.
        """
        return FakeTensorMode(allow_non_fake_inputs=True)

    def options(self, *, fake: bool) -> dict[str, Any]:
        """Return a new copy.

        ``fake``: without values, for use inside :meth:`without_values`; else real tensors on the
        CPU.
        """
        if self.device.type == "meta":
            return _copied(self._given, torch.empty_like)
        if fake:
            with self.mode:
                return _copied(
                    self._given, lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
                )
        return _copied(self._given, lambda tensor: _filled(tensor.shape, tensor.dtype))

    @contextmanager
    def without_values(self, *, fake: bool) -> Iterator[None]:
        """Compute shapes, dtypes and lifetimes of tensors inside, and no values, where ``fake``."""
        with self.mode if fake and self.device.type != "meta" else nullcontext():
            yield

    @contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        """Make copies and batches on another device inside than that of the training."""
        before, self.device = self.device, device
        try:
            yield
        finally:
            self.device = before

    def batch(self, value: Any, *, fake: bool) -> Any:
        """Return a batch of the same nested form; its tensors have no values where ``fake``."""
        if not fake and self.device.type != "meta":
            return value
        memo: dict[int, Any] = {}
        return torch.utils._pytree.tree_map(
            lambda leaf: self._fake(leaf, memo) if isinstance(leaf, torch.Tensor) else leaf, value
        )

    def _fake(self, tensor: torch.Tensor, memo: dict[int, Any]) -> Any:
        if id(tensor) not in memo:
            with self.without_values(fake=True):
                made = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
            memo[id(tensor)] = made.requires_grad_(tensor.requires_grad)
        return memo[id(tensor)]


def _copied(given: Mapping[str, Any], like: Any) -> dict[str, Any]:
    """Return a deep copy with ``like(tensor)`` in place of every parameter and buffer; what was
    shared stays shared.
    """
    model: nn.Module = given["model"]
    memo: dict[int, Any] = {}
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        if id(tensor) in memo:
            continue
        made = like(tensor.detach())
        memo[id(tensor)] = nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
    try:
        return dict(copy.deepcopy(dict(given), memo))
    except (TypeError, RuntimeError, AttributeError) as error:
        raise NotCopyable(f"the model cannot be copied: {error}", where=type(model).__name__) from error


def _without_forms(params: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors with the sizes and dtypes of ``params`` that ``others`` have not, flat and
    without values."""
    ours, theirs = (Counter((each.numel(), each.dtype) for each in given) for given in (params, others))
    return [torch.empty(numel, dtype=dtype, device="meta") for numel, dtype in (ours - theirs).elements()]


def _filled(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Return small numbers that no layer turns into nan."""
    return torch.full(shape, 0.01, dtype=dtype) if dtype.is_floating_point else torch.zeros(shape, dtype=dtype)


# --- layers that are alike ---

# Below, running all layers takes hardly longer and needs no check.
WORTH_LAYERS = 48
# Three, as the prefetch of a layer's parameters reaches into the next one.
FEW = 3


@dataclass(frozen=True)
class Stack:
    """``count`` alike children of the container ``path``, from child ``first`` on."""

    path: str
    first: int
    count: int


def stacks_of(model: nn.Module, groups: _Groups | None = None) -> list[Stack]:
    """Return the long runs of alike layers in the model's lists and sequences, outermost ones
    only.

    Layers are alike if they share the same things with the rest of the model, too, and their
    parameters are in the same ``groups`` of an optimizer.
    """
    found: list[Stack] = []
    held = Counter(id(part) for module in model.modules() for part in _parts(module))
    for path, module in model.named_modules():
        inside = any(path.startswith(f"{stack.path}.") for stack in found)
        if inside or not isinstance(module, (nn.ModuleList, nn.Sequential)) or len(module) < WORTH_LAYERS:
            continue
        children = list(module)
        ties = [_ties(child, held, groups or {}) for child in children]
        first = 0
        for index in range(1, len(children) + 1):
            alike = index < len(children) and ties[first] == ties[index]
            if alike and _alike(children[first], first, children[index], index):
                continue
            if index - first >= WORTH_LAYERS:
                found.append(Stack(path, first, index - first))
            first = index
    return found


_Groups = Mapping[int, tuple[tuple[Any, ...], ...]]
"""The places of each parameter, by its id, among what the optimizer is made from."""


def _groups_of(given: Mapping[str, Any]) -> dict[int, tuple[tuple[Any, ...], ...]]:
    found: dict[int, tuple[tuple[Any, ...], ...]] = {}

    def walk(value: Any, place: tuple[Any, ...]) -> None:
        if isinstance(value, torch.Tensor):
            found[id(value)] = (*found.get(id(value), ()), place)
        elif isinstance(value, torch.optim.Optimizer):
            walk(value.param_groups, place)
        elif isinstance(value, (Mapping, list, tuple)):
            for key, each in value.items() if isinstance(value, Mapping) else enumerate(value):
                walk(each, place if isinstance(each, torch.Tensor) else (*place, key))

    for name, value in given.items():
        if name != "model":
            walk(value, (name,))
    return found


def _parts(module: nn.Module) -> list[Any]:
    """Return the modules, parameters and buffers that a module holds itself."""
    held = (*module._modules.values(), *module._parameters.values(), *module._buffers.values())
    return [part for part in held if part is not None]


def _ties(layer: nn.Module, held: Mapping[int, int], groups: _Groups) -> list[Any]:
    """Return what of a layer is the same thing, in the layer or elsewhere in the model, and the
    groups of its parameters.

    Args:
        held: how many modules hold each part of the model, by its id.
    """
    parts = [layer, *(part for module in layer.modules() for part in _parts(module))]
    inside, first = Counter(map(id, parts)), {id(part): place for place, part in reversed(list(enumerate(parts)))}
    return [
        (("elsewhere", id(part)) if held[id(part)] > inside[id(part)] else first[id(part)], groups.get(id(part)))
        for part in parts
    ]


def _alike(one: nn.Module, place: int, other: nn.Module, other_place: int) -> bool:
    """Return whether two layers differ in nothing but the number of their place."""
    if type(one) is not type(other) or one._modules.keys() != other._modules.keys():
        return False
    for tensors in ("_parameters", "_buffers"):
        ours, theirs = ({name: _form(value) for name, value in vars(each)[tensors].items()} for each in (one, other))
        if ours != theirs:
            return False
    for name in vars(one).keys() | vars(other).keys():
        a, b = vars(one).get(name), vars(other).get(name)
        if isinstance(a, _PLAIN) and isinstance(b, _PLAIN) and a != b and (a, b) != (place, other_place):
            return False
    inside = ((one._modules[name], other._modules[name]) for name in one._modules)
    return all(a is b or (a is not None and b is not None and _alike(a, place, b, other_place)) for a, b in inside)


_PLAIN = (bool, int, float, str, tuple, type(None))


def _form(tensor: torch.Tensor | None) -> tuple[Any, ...] | None:
    return None if tensor is None else (tensor.shape, tensor.dtype, tensor.requires_grad)


def keep(given: dict[str, Any], stack: Stack, count: int, below: int = 0) -> None:
    """Leave ``count`` layers of a stack in ``given["model"]``; the parameters of the others leave
    the optimizer and the lists beside it, too. Those of fewer than ``below`` elements stay, in one
    module instead of the layers, which can hold parameters and no more."""
    if count == stack.count:
        return
    model: nn.Module = given["model"]
    container = model.get_submodule(stack.path)
    named = list(container._modules.items())
    gone = named[stack.first + count : stack.first + stack.count]
    before, after = named[: stack.first + count], named[stack.first + stack.count :]
    elsewhere = {id(param) for _, layer in (*before, *after) if layer is not None for param in layer.parameters()}
    small = nn.Module()
    for place, layer in gone:
        for name, param in layer.named_parameters() if layer is not None else ():
            if param.numel() < below and id(param) not in elsewhere:
                unique = f"{place}.{name}.{len(small._parameters)}"
                small.register_parameter(unique.replace(".", "_"), param)
    stays = [*before, *([(gone[0][0], small)] if small._parameters else ()), *after]
    renumbered = all(name.isdigit() for name, _ in named)
    container._modules = {str(index) if renumbered else name: layer for index, (name, layer) in enumerate(stays)}
    left = {id(param) for param in model.parameters()}
    removed = {id(param) for _, layer in gone if layer is not None for param in layer.parameters()} - left
    for name, value in given.items():
        if name != "model":
            given[name] = _without(value, removed)


def _without(value: Any, removed: set[int]) -> Any:
    """Return nested lists and dicts without the tensors of these ids; an optimizer loses them from
    its groups."""
    if isinstance(value, torch.optim.Optimizer):
        for group in value.param_groups:
            group["params"][:] = [param for param in group["params"] if id(param) not in removed]
        return value
    if isinstance(value, Mapping):
        return type(value)((key, _without(each, removed)) for key, each in value.items())  # type: ignore[call-arg]
    if isinstance(value, (list, tuple)):
        kept = [_without(each, removed) for each in value if id(each) not in removed]
        return kept if isinstance(value, list) else tuple(kept)
    return value


# A sum may differ from the even growth by one part in so many, or by so little: small parameters
# are put together, and where one such bucket ends another begins.
_SLACK, _NOTHING = 500, 1 << 20


def within_slack(off: int, of: int) -> bool:
    """Return whether a sum ``of`` so much may be ``off`` by so much."""
    return off <= max(of // _SLACK, _NOTHING)


Measure = Callable[[Sequence[int]], Mapping[str, int]]
"""Measures the model with so many layers of each stack: sums by name."""


def extrapolate(
    stacks: Sequence[Stack], measure: Measure, few: int = FEW
) -> tuple[dict[str, int], frozenset[str]] | None:
    """Return what ``measure`` would give with all layers, from runs with ``few``, with one more and
    with three more, and the names of those sums that grow evenly to the last digit. Return None
    where some do not grow evenly at all: where what three more are off would be too much for all
    layers."""
    base = measure([few] * len(stacks))
    slopes = [measure([few + (index == place) for place in range(len(stacks))]) for index in range(len(stacks))]
    checked = measure([few + FEW] * len(stacks))
    if any(found.keys() != base.keys() for found in (*slopes, checked)):
        return None

    def at(counts: Sequence[int]) -> dict[str, int]:
        steps = [(slope, count - few) for slope, count in zip(slopes, counts, strict=True)]
        return {
            name: value + sum((slope[name] - value) * more for slope, more in steps) for name, value in base.items()
        }

    predicted, found = at([few + FEW] * len(stacks)), at([stack.count for stack in stacks])
    off = {name: abs(value - checked[name]) for name, value in predicted.items()}
    further = max(stack.count for stack in stacks) - few
    if not all(within_slack(wrong * further // FEW, found[name]) for name, wrong in off.items()):
        return None
    return found, frozenset(name for name, wrong in off.items() if not wrong)
