"""States that a script temporarily moves to host memory, as between generation and training:
``engine.offload_states()`` and ``engine.reload_states()``.

    optim_states             moments, and whatever else the optimizer keeps per element
    hp_params                fp32 masters
    lp_params                what is whole between steps: parameters, at stage 3 their shards
    lp_grads                 this rank's part of the reduced gradients
    contiguous_grad_buffer   full gradients

Memory moves, not tensors: the storage behind a buffer is copied and emptied, so that every view of
it stays the same object and is valid again after the reload. Memory that two kinds share
moves when both are named: fp32 parameters are their own masters, and at stages 0 and 1 the reduced
gradients can be a part of the full ones. Memory on the host stays where it is.

Cost: the bytes that leave the device occupy host memory meanwhile, and are copied twice.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from zero_trial.errors import TrialError
from zero_trial.sharding.grad_buffer import GradBuffer
from zero_trial.sharding.param_group import Lender, ParamGroup
from zero_trial.util.text import did_you_mean

log = logging.getLogger("zero_trial")

KINDS = ("optim_states", "hp_params", "lp_params", "lp_grads", "contiguous_grad_buffer")
GRADIENTS = ("lp_grads", "contiguous_grad_buffer")


def kinds_of(include: Collection[Any] | None, where: str) -> tuple[str, ...]:
    """Return the kinds that ``include`` names, as strings or members of DeepSpeed's enumeration;
    None names all. Raises TrialError for another name."""
    if include is None:
        return KINDS
    names = [include] if isinstance(include, str) else list(include)
    found = [str(getattr(name, "value", name)) for name in names]
    for name in found:
        if name not in KINDS:
            raise TrialError(
                "unknown kind of state",
                where=where,
                got=name,
                expected=f"some of {', '.join(KINDS)}",
                fix=did_you_mean(name, KINDS),
            )
    return tuple(kind for kind in KINDS if kind in found)


def on_device(storage: torch.UntypedStorage) -> bool:
    """Return whether memory is on a device other than the host."""
    return storage.device.type not in ("cpu", "meta")


@dataclass(frozen=True)
class _Moved:
    """A storage that is empty now, and its bytes in the host's memory."""

    storage: torch.UntypedStorage
    host: torch.Tensor


class MovedStates:
    """The states of one model that are now in the host's memory. ``kinds``: the requested kinds.

    Args:
        settle: completes all reads and writes of the memory of the given kinds; every rank calls it
            at the same place.
    """

    def __init__(
        self,
        groups: Sequence[ParamGroup],
        grad_buffers: Sequence[GradBuffer],
        settle: Callable[[Collection[str]], None],
    ) -> None:
        self.kinds: frozenset[str] = frozenset()
        self._settle = settle
        self._groups = groups
        self._grad_buffers = grad_buffers
        self._moved: dict[int, _Moved] = {}  # by address of the storage
        self._lenders: list[tuple[ParamGroup, Lender | None]] = []  # what groups had before
        self._said = False

    def require_here(self, where: str, kinds: Collection[str] = KINDS) -> None:
        """Raise TrialError if one of ``kinds`` has been moved to the host."""
        if not self.kinds.isdisjoint(kinds):
            raise TrialError(
                "states of this engine are still offloaded to host memory",
                where=where,
                got=f"an earlier offload_states(include={sorted(self.kinds)})",
                fix="Call engine.reload_states() first.",
            )

    def devices(self, kind: str, state: Mapping[torch.Tensor, Any]) -> set[torch.device]:
        """Return the devices of a kind's memory now; empty if it has none between steps."""
        found = {storage._cdata: storage for storage in _storages(self._tensors(kind, state))}
        return {
            torch.device("cpu") if address in self._moved else storage.device
            for address, storage in found.items()
            if address in self._moved or storage.nbytes()
        }

    @torch.no_grad()
    def move(self, kinds: Collection[str], state: Mapping[torch.Tensor, Any], *, pin: bool, wait: bool) -> None:
        """Move ``kinds`` to the host's memory, as far as they are on a device; more than one call
        adds up. Every rank must call it at the same place.

        Args:
            state: of the optimizer, by weight.
            pin: page-locked memory, between which and a device copies are faster.
            wait: copies are done when this returns; else the device's later work runs after them.
        """
        if not any(on_device(group.full.untyped_storage()) for group in self._groups):
            if not self._said:
                log.info("offload_states: this rank trains on the CPU, so nothing is moved")
            self._said = True
            return
        self._settle(kinds)
        wanted = self.kinds | set(kinds)
        found = {kind: _storages(self._tensors(kind, state)) for kind in KINDS}
        stay = {one._cdata for kind in KINDS if kind not in wanted for one in found[kind]}
        away = {one._cdata: one for kind in wanted for one in found[kind] if on_device(one) and one.nbytes()}
        self.kinds = frozenset(wanted)
        moving = [address for address in away if address not in stay]
        for address in moving:
            storage = away[address]
            host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pin)
            host.copy_(_bytes(storage), non_blocking=pin and not wait)
            storage.resize_(0)
            self._moved[address] = _Moved(storage, host)
        for group in self._groups:
            self._hold(group, moving)

    def _hold(self, group: ParamGroup, moving: Collection[int]) -> None:
        """Refuse uses of a group's moved values; whole parameters are on the host.
        ``moving``: addresses of the storages that have left in this move."""
        full, parts = group.full.untyped_storage()._cdata, (group.shard, group.master)
        if all(part.untyped_storage()._cdata not in self._moved for part in parts):
            return
        if all(group is not known for known, _ in self._lenders):
            self._lenders.append((group, group.lender))
            group.lender = self
        if full in moving:
            group.edits.went_away(self._moved[full].host.untyped_storage())

    def lent(self) -> AbstractContextManager[None]:
        self.require_here("the values of parameters, their masters or states")
        raise AssertionError  # a group is held only while some of its values are moved

    @torch.no_grad()
    def restore(self, *, wait: bool = True) -> None:
        """Move everything back to the device; do nothing if nothing was moved."""
        for moved in self._moved.values():
            moved.storage.resize_(moved.host.numel())
            _bytes(moved.storage).copy_(moved.host, non_blocking=not wait and moved.host.is_pinned())
        for group, lender in self._lenders:
            group.lender = lender
            group.edits.came_back()
        self.kinds = frozenset()
        self._moved.clear()
        self._lenders.clear()

    def _tensors(self, kind: str, state: Mapping[torch.Tensor, Any]) -> Iterator[torch.Tensor]:
        """Yield the tensors of a kind."""
        if kind == "optim_states":
            yield from tensors_inside(list(state.values()))
        elif kind == "lp_grads":
            yield from (buffer.shard for buffer in self._grad_buffers)
        elif kind == "contiguous_grad_buffer":
            yield from (buffer.full for buffer in self._grad_buffers)
        else:
            for group in self._groups:
                if kind == "lp_params":
                    yield group.shard
                elif group.trainable:
                    yield group.master


def tensors_inside(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in lists and mappings that have more than one number."""
    if torch.is_tensor(value):
        yield from (value,) if value.dim() else ()
    else:
        items = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
        for each in items:
            yield from tensors_inside(each)


def _storages(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    return [tensor.untyped_storage() for tensor in tensors]


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return a tensor over all bytes of ``storage``."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
