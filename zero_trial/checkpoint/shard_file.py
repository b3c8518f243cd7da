"""The bytes of one rank's safetensors file, made piece by piece, so that no second copy of a shard ever exists.

The format (safetensors 0.4 and later): 8 bytes little-endian length of the header, the header as JSON padded with
spaces to 8 bytes, then the tensors' bytes end to end in the header's order.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterator, Sequence

import torch

from zero_trial.checkpoint.dtypes import safetensors_name
from zero_trial.checkpoint.slice import Slice

CHUNK_BYTES = 1 << 24  # how much of a tensor on another device is brought to the host at a time


def piece_key(part: Slice) -> str:
    """The safetensors name of a slice, unique within a file: ``param/wte.weight[0:4096]``."""
    return f"{part.name}[{part.start}:{part.stop}]"


def shard_chunks(slices: Sequence[Slice]) -> Iterator[bytes | memoryview]:
    """The file's bytes in order. ``slices``: not empty ones, names of their keys all different."""
    yield _header(slices)
    for part in slices:
        yield from _tensor_chunks(part.flat)


def _header(slices: Sequence[Slice]) -> bytes:
    entries: dict[str, object] = {}
    end = 0
    for part in slices:
        start, end = end, end + part.tensor.numel() * part.tensor.element_size()
        shape = [part.tensor.numel()]
        entries[piece_key(part)] = {"dtype": safetensors_name(part.dtype), "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _tensor_chunks(flat: torch.Tensor) -> Iterator[memoryview]:
    per_chunk = flat.numel() if flat.device.type == "cpu" else max(1, CHUNK_BYTES // flat.element_size())
    for start in range(0, flat.numel(), per_chunk):
        host = flat[start : start + per_chunk].cpu()
        # a view of the tensor's own memory, which ``host`` keeps alive until the consumer has taken the chunk
        size = host.numel() * host.element_size()
        yield memoryview((ctypes.c_char * size).from_address(host.data_ptr())).cast("B")
