"""Building blocks of plans and checks: a model and its optimizer without values, and rank 0 of a
mesh whose other ranks are absent.

Collectives of that mesh move nothing: a sum of tensors is this rank's part, and control values of
other ranks are equal to this rank's. An engine with values holds all shards itself.
"""

from __future__ import annotations

import copy
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from zero_trial.comm import AxisComm, CommCounters, Mesh, MeshShape, Pending
from zero_trial.comm.backends import Look
from zero_trial.comm.mesh import AXES
from zero_trial.comm.waits import DONE, Heartbeat
from zero_trial.errors import ZeroTrialError
from zero_trial.sharding.quantized import OpaqueParameter, PackedWeights, is_opaque, value_tables

META = torch.device("meta")


class NotCopyable(ZeroTrialError):
    """The model cannot be copied, so there is no plan for it."""


class Blueprint:
    """Copy ``model`` and ``options`` (optimizer, model_parameters, lr_scheduler) without values, so
    that the copy needs no memory.

    Copies immediately, so later changes of the model (such as sharding by an engine) do not matter.
    ``device`` is the device of the training. Tensors that are neither parameters nor buffers are
    copied with their values. Raises NotCopyable.
    """

    def __init__(
        self, model: nn.Module, options: Mapping[str, Any] | None = None, device: torch.device | str = "cpu"
    ) -> None:
        self.device = torch.device(device)
        given = {"model": model, **(options or {})}
        if isinstance(given.get("model_parameters"), Iterator):
            raise NotCopyable("model_parameters can be read only once", fix="Give a list.")
        PackedWeights(model)  # as the engine will
        self.parameters = sum(param.numel() for param in model.parameters())
        self.given = _copied(given, lambda tensor: torch.empty_like(tensor, device="meta"))

    def copy(self) -> dict[str, Any]:
        """Return another copy of model and options, on the meta device."""
        return _copied(self.given, torch.empty_like)

    def model(self, *, fake: bool, device: torch.device) -> nn.Module:
        """Return another copy of the model on ``device``: without values inside a FakeTensorMode
        (``fake``), else with small values that do not become NaN in any layer."""

        def filled(tensor: torch.Tensor) -> torch.Tensor:
            made = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            return made if fake else made.fill_(0.01 if tensor.dtype.is_floating_point else 0)

        return _copied({"model": self.given["model"]}, filled)["model"]  # type: ignore[no-any-return]


def _copied(given: Mapping[str, Any], like: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
    """Return a deep copy with ``like(tensor)`` for every tensor; shared objects stay shared."""
    model: nn.Module = given["model"]
    memo: dict[int, Any] = {id(table): table for table in value_tables(model)}
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        if id(tensor) in memo:
            continue
        made = like(tensor.detach())
        kind = OpaqueParameter if is_opaque(tensor) else nn.Parameter
        memo[id(tensor)] = kind(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
    try:
        copied = dict(copy.deepcopy(dict(given), memo))
    except (TypeError, RuntimeError, AttributeError) as error:
        raise NotCopyable(f"the model cannot be copied: {error}", where=type(model).__name__) from error
    for module in copied["model"].modules():
        if (state := getattr(module, "quant_state", None)) is not None:
            module.weight.quant_state = state  # else bitsandbytes creates a Params4bit, which fails for a fake tensor
    return copied


# torch imports its compiler to draw numbers for a tensor without values
_FILLS = frozenset({"normal_", "uniform_", "trunc_normal_", "zero_", "fill_"})


class ModulesOnMeta(TorchFunctionMode):
    """Creates tensors on the meta device inside the constructor of a module; other code, such as
    data preparation, is not affected. A module moved to a device has uninitialized values."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        like = args[0] if args else kwargs.get("tensor")  # torch.nn.init passes it by name
        if isinstance(like, torch.Tensor) and like.is_meta:
            if name in _FILLS:
                return like
            if name in ("to", "cpu"):
                given = [*args[1:], *kwargs.values(), *(["cpu"] if name == "cpu" else [])]
                dtype = next((each for each in given if isinstance(each, torch.dtype)), like.dtype)
                onto_cpu = any(str(each) == "cpu" for each in given if isinstance(each, (str, torch.device)))
                return torch.empty_like(like, dtype=dtype, device="cpu" if onto_cpu else META)
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_name == "__init__" and isinstance(frame.f_locals.get("self"), nn.Module):
                with META:
                    return func(*args, **kwargs)
            frame = frame.f_back
        return func(*args, **kwargs)


# --- a mesh without other ranks ---


class _LoneAxis(AxisComm):
    """One axis as its first rank sees it."""

    def reduce_scatter(self, full: torch.Tensor, out: torch.Tensor, label: str, look: Look | None = None) -> Pending:
        own = full.view(self.size, -1)[self.index]
        if own.data_ptr() != out.data_ptr():
            out.copy_(own)
        return DONE

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, label: str) -> Pending:
        own = full.view(self.size, -1)[self.index]
        if own.data_ptr() != shard.data_ptr():
            own.copy_(shard)
        return DONE

    def all_reduce(self, full: torch.Tensor, label: str, look: Look | None = None) -> Pending:
        return DONE

    def broadcast(self, tensor: torch.Tensor, label: str, source: int = 0) -> None:
        """Leave ``tensor`` unchanged."""

    def all_reduce_small(self, values: torch.Tensor, label: str, op: str = "sum") -> None:
        if op == "sum":
            values.mul_(self.size)

    def gather_row(self, row: list[int], label: str) -> list[list[int]]:
        return [row] * self.size

    def gather_json(self, value: Any, label: str) -> list[Any]:
        return [value] * self.size


def lone_mesh(shape: MeshShape) -> Mesh:
    """Return rank 0's mesh of ``shape``, without a process group."""
    counters, heartbeat = CommCounters(), Heartbeat(None, 0, 1)

    def axis(name: str, size: int) -> AxisComm:
        return _LoneAxis(name, tuple(range(size)), 0, None, counters, heartbeat, 0.0)

    sizes = dict(zip(AXES, shape.sizes, strict=True))
    sizes |= {"data": shape.data_parallel_size, "world": math.prod(shape.sizes)}
    return Mesh(shape, 0, {name: axis(name, size) for name, size in sizes.items()}, counters, heartbeat)
