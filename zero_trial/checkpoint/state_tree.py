"""Plain Python state (nested dicts, lists, numbers, tensors) as JSON plus named tensors, and back,
without loss.

A value that JSON does not support is an object with one key that starts with ``$``. A dict with
such a key, or with keys that are not strings, is written as a list of pairs, so that no content of
a checkpoint can be mistaken for a marker.

    (1, 2)   {"$tuple": [1, 2]}     inf      {"$float": "inf"}     b"ab"     {"$bytes": "YWI="}
    {1: 2}   {"$items": [[1, 2]]}   {1, 2}   {"$set": [1, 2]}      tensor    {"$tensor": name}
"""

from __future__ import annotations

import base64
import math
import random
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch

from zero_trial.checkpoint.format import dtype_name, dtype_of
from zero_trial.device import is_accelerator, torch_module
from zero_trial.errors import CheckpointError


def encode_state(value: Any, prefix: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return the JSON for ``value``, and its tensors under names that start with ``prefix``:
    ``prefix/key/0``.

    Raises CheckpointError naming the position of a value that is not plain (an object, a function,
    a path ...).
    """
    tensors: dict[str, torch.Tensor] = {}
    try:
        return _encode(value, prefix, tensors), tensors
    except RecursionError as fault:
        raise CheckpointError("nested too deeply, or contains itself", where=prefix) from fault


def decode_state(document: Any, fetch: Callable[[str], torch.Tensor]) -> Any:
    """Return the value that was encoded; ``fetch`` returns tensors. Raises CheckpointError."""
    if isinstance(document, list):
        return [decode_state(item, fetch) for item in document]
    if not isinstance(document, dict):
        return document
    marker = next((key for key in document if key.startswith("$")), None)
    if marker is None:
        return {key: decode_state(item, fetch) for key, item in document.items()}
    content = document[marker]
    if len(document) != 1 or marker not in _DECODERS:
        raise CheckpointError("not written by a checkpoint", got=f"object with key {marker!r}")
    return _DECODERS[marker](content, fetch)


def _encode(value: Any, place: str, tensors: dict[str, torch.Tensor]) -> Any:
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": str(float(value))}
    if isinstance(value, torch.Tensor):
        return {"$tensor": _keep(value, place, tensors)}
    if isinstance(value, Mapping):
        return _encode_mapping(value, place, tensors)
    if isinstance(value, list):
        return _encode_items(value, place, tensors)
    if type(value) in (tuple, torch.Size):
        return {"$tuple": _encode_items(value, place, tensors)}
    if isinstance(value, (set, frozenset)):
        return {"$set": _encode_items(sorted(value, key=repr), place, tensors)}
    if isinstance(value, (bytes, bytearray)):
        return {"$bytes": base64.b64encode(bytes(value)).decode()}
    if isinstance(value, torch.dtype):
        return {"$dtype": dtype_name(value)}
    return _encode_numpy(value, place, tensors)


def _encode_items(items: Any, place: str, tensors: dict[str, torch.Tensor]) -> list[Any]:
    return [_encode(item, f"{place}/{index}", tensors) for index, item in enumerate(items)]


def _encode_mapping(value: Mapping[Any, Any], place: str, tensors: dict[str, torch.Tensor]) -> Any:
    plain = all(isinstance(key, str) and not key.startswith("$") for key in value)
    if plain and not isinstance(value, Counter):
        return {str(key): _encode(item, f"{place}/{key}", tensors) for key, item in value.items()}
    pairs = [
        [_encode(key, f"{place}/key", tensors), _encode(item, f"{place}/{key}", tensors)] for key, item in value.items()
    ]
    return {"$counter" if isinstance(value, Counter) else "$items": pairs}


def _encode_numpy(value: Any, place: str, tensors: dict[str, torch.Tensor]) -> Any:
    numpy = sys.modules.get("numpy")  # a numpy value can only exist where numpy is loaded
    if numpy is not None and isinstance(value, numpy.generic):
        return _encode(value.item(), place, tensors)
    if numpy is not None and isinstance(value, numpy.ndarray) and value.dtype.kind in "fiub":
        try:
            return {"$array": _keep(torch.from_numpy(value.copy()), place, tensors)}
        except (TypeError, CheckpointError):
            pass  # a dtype that torch or the file format does not support
    raise CheckpointError(
        "this value cannot be saved without pickle",
        where=place,
        got=f"{type(value).__module__}.{type(value).__qualname__}",
        expected="dicts, lists, tuples, sets, strings, bytes, numbers, tensors, arrays of numbers",
        fix="Save its parts as these types.",
    )


def _keep(tensor: torch.Tensor, place: str, tensors: dict[str, torch.Tensor]) -> str:
    name, again = place, 0
    while name in tensors:  # keys 1 and "1" of one dict look the same in a name
        again += 1
        name = f"{place}~{again}"
    tensors[name] = tensor.detach()
    return name


def _decode_pairs(pairs: Any, fetch: Callable[[str], torch.Tensor]) -> dict[Any, Any]:
    return {decode_state(key, fetch): decode_state(item, fetch) for key, item in pairs}


_DECODERS: dict[str, Callable[[Any, Callable[[str], torch.Tensor]], Any]] = {
    "$tuple": lambda content, fetch: tuple(decode_state(item, fetch) for item in content),
    "$set": lambda content, fetch: {decode_state(item, fetch) for item in content},
    "$items": _decode_pairs,
    "$counter": lambda content, fetch: Counter(_decode_pairs(content, fetch)),
    "$float": lambda content, fetch: float(content),
    "$bytes": lambda content, fetch: base64.b64decode(content),
    "$dtype": lambda content, fetch: dtype_of(content),
    "$tensor": lambda content, fetch: fetch(content),
    "$array": lambda name, fetch: fetch(name).numpy(),
}

# The state of this process's random generators: torch (CPU and one accelerator), numpy, random.


def capture_rng(device: torch.device | None = None) -> dict[str, Any]:
    """Return the state of each generator, in a form for ``encode_state``. ``device``: this rank's.
    numpy's global generator is included if numpy is loaded: otherwise nothing has drawn from it."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "random": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
    }
    if device is not None and is_accelerator(device):
        state[device.type] = torch_module(device).get_rng_state(device)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, words, position, has_gauss, cached = numpy.random.get_state()
        key = torch.tensor([int(word) for word in words], dtype=torch.int64)
        state["numpy"] = {"kind": str(kind), "words": key, "rest": [int(position), int(has_gauss), float(cached)]}
    return state


def restore_rng(state: Mapping[str, Any], device: torch.device | None = None) -> None:
    """Restore the states returned by ``capture_rng``, as far as this process has the generators.
    ``device``: this rank's. Raises CheckpointError for an invalid state."""
    try:
        torch.set_rng_state(state["torch"].cpu())
        python = state["random"]
        random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
        if device is not None and device.type in state:
            torch_module(device).set_rng_state(state[device.type].cpu(), device)
        if "numpy" in state:
            _restore_numpy(state["numpy"])
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as fault:
        raise CheckpointError(
            "not a state of random generators", where="rng", got=f"{type(fault).__name__}: {fault}"
        ) from fault


def _restore_numpy(state: Mapping[str, Any]) -> None:
    try:
        import numpy
    except ImportError:
        return
    position, has_gauss, cached = state["rest"]
    words = numpy.array(state["words"].tolist(), dtype=numpy.uint32)
    numpy.random.set_state((state["kind"], words, position, has_gauss, cached))
