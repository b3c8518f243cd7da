"""A parcel: how a value that goes from one stage to the next becomes a description and bytes, and a value again.

Values are tensors of any dtype in nested tuples, lists and dicts, with None, booleans, numbers and strings between them. The description is
JSON: the same shapes and values have the same text, so that it needs to be sent once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch

from zero_trial.errors import TrialError

ALIGN = 16  # bytes; every dtype's view starts at a multiple


@dataclass
class Parcel:
    """A value with its tensors in order; ``differentiable[i]``: a gradient of tensor i is wanted back."""

    value: Any
    tensors: list[torch.Tensor] = field(default_factory=list)
    differentiable: list[bool] = field(default_factory=list)

    def wanted(self) -> list[torch.Tensor]:
        """The tensors whose gradients are wanted."""
        return [tensor for tensor, wanted in zip(self.tensors, self.differentiable, strict=True) if wanted]


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors of a value, in the order of its description: dicts as they were filled."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in tensors_in(item)]
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in tensors_in(item)]
    return []


def map_tensors(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """The same value with each tensor changed, one after the other in the order of :func:`tensors_in`."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) in (tuple, list):
        items = [map_tensors(item, change) for item in value]
        return tuple(items) if type(value) is tuple else items
    if isinstance(value, dict):
        return {key: map_tensors(item, change) for key, item in value.items()}
    return value


def parcel_of(value: Any) -> tuple[str, Parcel]:
    """The description of ``value``, and its tensors. Raises TrialError for what cannot travel."""
    parcel = Parcel(value)
    text = json.dumps(_describe(value, parcel, ""), separators=(",", ":"))
    return text, parcel


def _describe(value: Any, parcel: Parcel, path: str) -> Any:
    if isinstance(value, torch.Tensor):
        parcel.tensors.append(value)
        parcel.differentiable.append(value.requires_grad)
        return ["t", str(value.dtype).removeprefix("torch."), list(value.shape), int(value.requires_grad)]
    if value is None or isinstance(value, (bool, int, float, str)):
        return ["v", value]
    if type(value) in (tuple, list):
        kind = "u" if type(value) is tuple else "l"
        return [kind, [_describe(item, parcel, f"{path}[{index}]") for index, item in enumerate(value)]]
    if isinstance(value, dict) and all(isinstance(key, (str, int, bool)) for key in value):
        return ["d", [[key, _describe(item, parcel, f"{path}[{key!r}]")] for key, item in value.items()]]
    raise TrialError(
        "this value cannot travel between pipeline stages",
        where=f"a layer's output{path}",
        got=type(value).__name__,
        expected="tensors, None, booleans, numbers and strings in tuples, lists and dicts",
        fix="Return its parts from the last layer of the stage, and put them together in the next.",
    )


def pack(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The tensors' bytes (n,) uint8, each at a multiple of ALIGN; a view where there is one tensor only. None if there are no bytes."""
    raw = [_bytes(tensor) for tensor in tensors]
    if sum(part.numel() for part in raw) == 0:
        return None
    if len(raw) == 1:
        return raw[0]
    out: list[torch.Tensor] = []
    total = 0
    for part in raw:
        if gap := _aligned(total) - total:
            out.append(part.new_zeros(gap))
        out.append(part)
        total = _aligned(total) + part.numel()
    return torch.cat(out)


def unpack(text: str, payload: torch.Tensor | None, device: torch.device) -> Parcel:
    """The value again; its tensors share the memory of ``payload`` (n,) uint8, which starts a storage."""
    parcel = Parcel(None)
    offset = 0

    def view(dtype: torch.dtype, shape: Sequence[int], wanted: bool) -> torch.Tensor:
        nonlocal offset
        size = prod(shape) * dtype.itemsize
        offset = _aligned(offset)
        if size == 0 or payload is None:
            tensor = torch.empty(tuple(shape), dtype=dtype, device=device)
        else:
            # No view: autograd lets a layer work in place on it.
            tensor = torch.empty(0, dtype=dtype, device=device)
            tensor.set_(payload.untyped_storage(), offset // dtype.itemsize, tuple(shape))  # type: ignore[call-overload]
        offset += size
        parcel.tensors.append(tensor)
        parcel.differentiable.append(wanted)
        return tensor

    parcel.value = _rebuild(json.loads(text), view)
    return parcel


def _rebuild(node: Any, make: Callable[[torch.dtype, Sequence[int], bool], Any]) -> Any:
    kind = node[0]
    if kind == "t":
        return make(getattr(torch, node[1]), node[2], bool(node[3]))
    if kind == "v":
        return node[1]
    if kind == "d":
        return {key: _rebuild(item, make) for key, item in node[1]}
    items = [_rebuild(item, make) for item in node[1]]
    return tuple(items) if kind == "u" else items


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _aligned(offset: int) -> int:
    return -(-offset // ALIGN) * ALIGN
