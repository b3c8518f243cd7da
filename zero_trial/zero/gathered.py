"""Reading and editing full parameters that are sharded: ``with GatheredParameters(model.parameters()): ...``."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Any

import torch
from torch import nn

from zero_trial.zero.directory import by_holder


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
        self._groups = by_holder(chosen) if enabled else []
        self._modifier = modifier_rank

    def __enter__(self) -> None:
        for holder, params in self._groups:
            holder.open(params)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for holder, params in self._groups:
            holder.close(params, self._modifier if kind is None else None)
