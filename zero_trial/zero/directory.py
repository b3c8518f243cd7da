"""Which unit holds a parameter: the way from a bare ``nn.Parameter`` to its shard.

GatheredParameters and the safe_get_* functions are given parameters and nothing else, as in DeepSpeed's API. The directory is weak in both
directions: it keeps neither parameters nor engines alive, and it stores nothing on the tensor.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol
from weakref import ref

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary


class Holder(Protocol):
    """Whoever keeps the shards of some parameters."""

    def open(self, params: list[nn.Parameter]) -> None:
        """Brings the full parameters to life. Collective over shard."""

    def close(self, params: list[nn.Parameter], source: int | None) -> None:
        """Takes edits over (those of rank ``source``; None: nothing was edited) and returns to the state before :meth:`open`. Collective."""


# parameter -> how to reach its holder
_HOLDERS = WeakTensorKeyDictionary()


def register(params: Iterable[nn.Parameter], holder: Holder) -> None:
    """``holder`` keeps these parameters from now on."""
    for param in params:
        _HOLDERS[param] = ref(holder)


def own(params: Iterable[nn.Parameter], holder: Holder) -> None:
    """``holder`` lives as long as these parameters do: nobody else keeps it (shards made before there is an engine)."""
    for param in params:
        _HOLDERS[param] = lambda holder=holder: holder


def forget(params: Iterable[nn.Parameter]) -> None:
    """These parameters are ordinary ones again."""
    for param in params:
        _HOLDERS.pop(param, None)


def holder_of(param: torch.Tensor) -> Holder | None:
    """The holder of ``param``; None for an ordinary parameter that no engine has sharded."""
    found = _HOLDERS.get(param)
    return found() if found is not None else None


def by_holder(params: Iterable[nn.Parameter]) -> list[tuple[Holder, list[nn.Parameter]]]:
    """Parameters grouped by holder, in the order of first sight; ordinary ones are left out."""
    groups: dict[int, tuple[Holder, list[nn.Parameter]]] = {}
    for param in params:
        holder = holder_of(param)
        if holder is not None:
            groups.setdefault(id(holder), (holder, []))[1].append(param)
    return list(groups.values())
