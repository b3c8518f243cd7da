"""A model, with what else was given to ``initialize``, from which engines for rehearsals are built, as often as needed."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from zero_trial.errors import ZeroTrialError


class NoTwin(ZeroTrialError):
    """The model cannot be copied, so nothing can be rehearsed with it."""


class Blueprint:
    """A copy of ``model`` and of ``options`` (optimizer, model_parameters, lr_scheduler) without values: it costs no memory.

    The copy is made at once: what happens to the model later (an engine that shards it) does not matter. ``device`` is where the training will
    be. Tensors that are neither parameters nor buffers are copied as they are. Raises NoTwin.
    """

    def __init__(
        self, model: nn.Module, options: Mapping[str, Any] | None = None, device: torch.device | str = "cpu"
    ) -> None:
        place = torch.device(device)
        # With its number, as tensors say it of themselves.
        self.device = torch.device(f"{place.type}:0") if place.type != "cpu" and str(place) == place.type else place
        given = {"model": model, **(options or {})}
        parameters = given.get("model_parameters")
        if isinstance(parameters, Iterator):
            raise NoTwin("model_parameters can be read only once", fix="Give a list.")
        self.parameters = sum(param.numel() for param in model.parameters())
        self._given = _twin(given, lambda tensor: torch.empty_like(tensor, device="meta"))

    @cached_property
    def mode(self) -> FakeTensorMode:
        """Made when first needed: torch loads some 800 modules for it, which takes a second."""
        return FakeTensorMode(allow_non_fake_inputs=True)

    def options(self, *, imagined: bool) -> dict[str, Any]:
        """A new copy. ``imagined``: without values, to be used inside :meth:`without_values`; else real tensors, on the CPU, of zeros and ones."""
        if imagined:
            with self.mode:
                return _twin(
                    self._given, lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
                )
        return _twin(self._given, lambda tensor: _filled(tensor.shape, tensor.dtype))

    @contextmanager
    def without_values(self, *, imagined: bool) -> Iterator[None]:
        """Inside, operations compute shapes, dtypes and lifetimes of tensors, and no values."""
        if not imagined:
            yield
            return
        with self.mode:
            yield

    @contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        """Inside, copies and batches are on another device than that of the training."""
        before, self.device = self.device, device
        try:
            yield
        finally:
            self.device = before

    def batch(self, value: Any, *, imagined: bool) -> Any:
        """A batch for a rehearsal: the same nested form; its tensors without values where ``imagined``."""
        if not imagined:
            return value
        memo: dict[int, Any] = {}
        return torch.utils._pytree.tree_map(
            lambda leaf: self._fake(leaf, memo) if isinstance(leaf, torch.Tensor) else leaf, value
        )

    def _fake(self, tensor: torch.Tensor, memo: dict[int, Any]) -> Any:
        if id(tensor) not in memo:
            with self.mode:
                made = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
            memo[id(tensor)] = made.requires_grad_(tensor.requires_grad)
        return memo[id(tensor)]


def _twin(given: Mapping[str, Any], like: Any) -> dict[str, Any]:
    """A deep copy in which ``like(tensor)`` stands for every parameter and buffer; what was shared stays shared."""
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
        raise NoTwin(f"the model cannot be copied: {error}", where=type(model).__name__) from error


def _filled(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Small numbers that no layer turns into nan."""
    return torch.full(shape, 0.01, dtype=dtype) if dtype.is_floating_point else torch.zeros(shape, dtype=dtype)
