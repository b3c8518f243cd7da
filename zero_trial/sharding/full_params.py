"""Which group holds a parameter: the way from a bare ``nn.Parameter`` to its shard.

GatheredParameters and the safe_get_* functions are given parameters and nothing else, as in DeepSpeed's API. The directory is weak in both
directions: it keeps neither parameters nor engines alive, and it stores nothing on the tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol
from weakref import ref

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from zero_trial.comm import AxisComm
from zero_trial.errors import TrialError
from zero_trial.sharding.param_group import ParamGroup
from zero_trial.sharding.plan import Lifetime
from zero_trial.sharding.unshard import ModuleHook


class ShardOwner(Protocol):
    """Whoever keeps the shards of some parameters."""

    def open(self, params: list[nn.Parameter]) -> None:
        """Brings the full parameters to life. Collective over shard."""

    def close(self, params: list[nn.Parameter], source: int | None) -> None:
        """Takes edits over (those of rank ``source``; None: nothing was edited) and returns to the state before :meth:`open`. Collective."""


# parameter -> how to reach its holder, and the optimizer that has its state
_HOLDERS = WeakTensorKeyDictionary()
_OPTIMIZERS = WeakTensorKeyDictionary()


def register_owner(params: Iterable[nn.Parameter], holder: ShardOwner) -> None:
    """``holder`` keeps these parameters from now on."""
    for param in params:
        _HOLDERS[param] = ref(holder)


def own_params(params: Iterable[nn.Parameter], holder: ShardOwner) -> None:
    """``holder`` lives as long as these parameters do: nobody else keeps it (shards made before there is an engine)."""
    for param in params:
        _HOLDERS[param] = lambda holder=holder: holder


def forget_owner(params: Iterable[nn.Parameter]) -> None:
    """These parameters are ordinary ones again."""
    for param in params:
        _HOLDERS.pop(param, None)
        _OPTIMIZERS.pop(param, None)


def register_optimizer(params: Iterable[nn.Parameter], optimizer: object) -> None:
    """``optimizer`` (a ShardedOptimizer) has the state of these parameters from now on."""
    for param in params:
        _OPTIMIZERS[param] = ref(optimizer)


def optimizer_of_param(param: torch.Tensor) -> object | None:
    """Return the optimizer with the state of ``param``; None where its engine has none."""
    found = _OPTIMIZERS.get(param)
    return found() if found is not None else None


def owner_of_param(param: torch.Tensor) -> ShardOwner | None:
    """The holder of ``param``; None for an ordinary parameter that no engine has sharded."""
    found = _HOLDERS.get(param)
    return found() if found is not None else None


def by_owner(params: Iterable[nn.Parameter]) -> list[tuple[ShardOwner, list[nn.Parameter]]]:
    """Parameters grouped by holder, in the order of first sight; ordinary ones are left out."""
    opt_groups: dict[int, tuple[ShardOwner, list[nn.Parameter]]] = {}
    for param in params:
        holder = owner_of_param(param)
        if holder is not None:
            opt_groups.setdefault(id(holder), (holder, []))[1].append(param)
    return list(opt_groups.values())


# Visits of user code to full parameters: blocks of GatheredParameters, one inside the other, that find them whole and may edit them.


class SummonedParams:
    """To ``groups``. ``wait`` returns when what was published is whole; edits are passed on over ``data``."""

    def __init__(self, groups: Sequence[ParamGroup], wait: Callable[[], object], data: AxisComm) -> None:
        self._groups = groups
        self._wait = wait
        self._data = data
        # For each open() without its close(), innermost last: the groups that it brought to life.
        self._opened: list[list[ParamGroup]] = []

    def open(self, params: list[nn.Parameter]) -> None:
        """See :class:`Holder`."""
        self._wait()
        visited = self._holding(params)
        opened = [group for group in visited if not group.live]
        for group in opened:
            group.start_gather()
        for group in opened:
            group.finish_gather()
        for group in visited:
            group.pins += 1
        self._opened.append(opened)

    def close(self, params: list[nn.Parameter], source: int | None) -> None:
        """See :class:`Holder`. Raises TrialError when the optimizer has freed what was being edited."""
        opened, visited = self._opened.pop(), self._holding(params)
        for group in visited:
            group.pins -= 1
        for group in visited:
            if source is not None:
                if not group.live:
                    raise TrialError(
                        "the optimizer stepped inside a block that edits parameters",
                        where=f"GatheredParameters(modifier_rank={source})",
                        fix="Leave the block before engine.step().",
                    )
                self._data.broadcast(group.full, f"edited {group.name}", source)
                group.take_edits()
            if group in opened:
                group.free()

    def _holding(self, params: list[nn.Parameter]) -> list[ParamGroup]:
        wanted = {id(param) for param in params}
        return [group for group in self._groups if any(id(param) in wanted for param in group.params)]


# state_dict() and load_state_dict() of a sharded module, and of any part of it: whole tensors out, whole tensors in.
#
# torch calls the hooks of every module inside the one that was asked, outermost first. Each module's own parameters are gathered when its turn
# comes and freed when another group's turn has come, so that the device holds one group at a time and never the whole model.


class StateDictHooks:
    """Collective over shard: every rank must ask the same part.

    Where parameters are freed, ``state_dict`` hands out copies in the host's memory, on every rank of the axis.
    """

    def __init__(self, module: nn.Module, groups: Sequence[ParamGroup], wait: Callable[[], object]) -> None:
        self._wait = wait
        self._scope: nn.Module | None = None  # the part that was asked
        self._loading = False
        self._opened: list[ParamGroup] = []
        self.handles: list[Any] = []
        self._copies = any(group.plan.params is not Lifetime.ALWAYS for group in groups)
        group_of = {id(param): group for group in groups for param in group.params}
        for part in module.modules():
            if inside := _groups_of(part.parameters(), group_of):
                self._install(part, inside, _groups_of(part.parameters(recurse=False), group_of))

    def _install(self, part: nn.Module, inside: list[ParamGroup], own: list[ParamGroup]) -> None:
        self.handles += [
            part.register_state_dict_pre_hook(ModuleHook(lambda module, *_: self._open(module, own, loading=False))),
            part.register_load_state_dict_pre_hook(
                ModuleHook(lambda module, *_: self._open(module, own, loading=True))
            ),
            part._register_state_dict_hook(ModuleHook(self._given)),
            part.register_load_state_dict_post_hook(ModuleHook(lambda module, _: self._taken(module, inside))),
        ]

    def remove_hooks(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    def _open(self, part: nn.Module, own: list[ParamGroup], *, loading: bool) -> None:
        """Gathers the groups of the part's own parameters, in place of those of the part before it."""
        if self._scope is None or part is self._scope or all(part is not inner for inner in self._scope.modules()):
            self._wait()
            self._loading = False  # what an earlier call left open when it failed is dropped
            self._close(())
            self._scope, self._loading = part, loading
        self._close(own)
        closed = [group for group in own if not group.live]
        for group in closed:
            group.start_gather()
        for group in closed:
            group.finish_gather()
        self._opened += closed

    def _given(self, part: nn.Module, state: dict[str, Any], prefix: str, _: object) -> None:
        """The part's own entries are views of buffers that will be freed: copies instead. Those of inner modules are copied already."""
        if self._copies:
            for name in (*part._parameters, *part._buffers):
                if torch.is_tensor(value := state.get(prefix + name)):
                    state[prefix + name] = value.to("cpu", copy=True)
        if part is self._scope:
            self._close(())
            self._scope = None

    def _taken(self, part: nn.Module, inside: list[ParamGroup]) -> None:
        if part is self._scope:
            loaded = _ids(part)
            for group in inside:
                if group.live and group not in self._opened:
                    group.take_full(loaded)
            self._close(())
            self._scope, self._loading = None, False

    def _close(self, keep: Collection[ParamGroup]) -> None:
        """Frees the groups that were gathered here, but for ``keep``; what was loaded into them goes to the shards before."""
        loaded = _ids(self._scope) if self._loading and self._scope is not None else None
        for group in [group for group in self._opened if group not in keep]:
            if loaded is not None and group.live:
                group.take_full(loaded)
            group.free()
            self._opened.remove(group)


def _ids(module: nn.Module) -> set[int]:
    return {id(param) for param in module.parameters()}


def _groups_of(params: Iterable[nn.Parameter], group_of: Mapping[int, ParamGroup]) -> list[ParamGroup]:
    """The groups that hold any of ``params``, in the order of first sight."""
    found = [group for param in params if (group := group_of.get(id(param))) is not None]
    return list(dict.fromkeys(found))


# Reading and editing full parameters that are sharded: ``with GatheredParameters(model.parameters()): ...``.


class GatheredParameters:
    """Inside the block the parameters hold their full values on every rank of the shard axis. Collective: every rank must enter.

    ``modifier_rank=None``: read only; edits are dropped where parameters are sharded. ``modifier_rank=r``: what data-parallel rank ``r``
    wrote becomes everyone's value at every ZeRO stage, fp32 master weights included (those of elements that were not edited keep their bits).
    Ordinary parameters pass through untouched. ``fwd_module`` is
    accepted for compatibility: uses outside a module's own forward need no registration here.
    """

    def __init__(
        self,
        params: torch.Tensor | nn.Module | Iterable[nn.Parameter],
        modifier_rank: int | None = None,
        fwd_module: Any = None,
        enabled: bool = True,
    ) -> None:
        if isinstance(params, nn.Module):
            chosen: list[Any] = list(params.parameters())
        else:
            chosen = [params] if isinstance(params, torch.Tensor) else list(params)
        self._groups = by_owner(chosen) if enabled else []
        self._modifier = modifier_rank

    def __enter__(self) -> None:
        for holder, params in self._groups:
            holder.open(params)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for holder, params in self._groups:
            holder.close(params, self._modifier if kind is None else None)
