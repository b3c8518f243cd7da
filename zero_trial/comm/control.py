"""Control values: a few numbers, or a little JSON, that all ranks of an axis need at once.

On the host they go through a block of shared memory where the ranks have one, else through the group's
backend. Each call returns when it is done; values on a device are there for what is launched next on it.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from zero_trial.comm.health import Watchdog
from zero_trial.comm.shm.ring import CAPACITY, SharedControlBlock
from zero_trial.errors import MeshError

_COMBINE: dict[str, Callable[..., torch.Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}
_REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}

# Calls that failed. Their tensors must outlive the group: a thread of gloo still holds them, and freeing a tensor that no Python
# code holds takes the interpreter's lock, which the thread that frees the group has while it waits for gloo's (torch 2.6).
_FAILED_CALLS: list[Callable[[], Any]] = []


class ControlChannel:
    """Sums, broadcasts and gathers of control values on one axis.

    ``device``: where values must be so that the group's backend can move them. ``shared``: the block for values on the host.
    """

    def __init__(self, axis: str, group: Any, watch: Watchdog, device: torch.device) -> None:
        self.shared: SharedControlBlock | None = None
        self.device = device
        self._axis = axis
        self._group = group
        self._watch = watch
        self._size = len(watch.ranks)

    def all_reduce(self, values: torch.Tensor, label: str, op: str) -> None:
        """Replace ``values`` by their ``sum``, ``max`` or ``min`` over the ranks: in rank order in shared memory, else in the backend's order."""
        if self.fits(values):
            rows = self._exchange("all_reduce", label, values)
            total = rows[0].clone()
            for row in rows[1:]:
                _COMBINE[op](total, row, out=total)
            values.copy_(total.view(values.shape))
            return
        reduce_op = _REDUCE_OPS[op]
        self._run(
            "all_reduce", label, values, lambda: dist.all_reduce(values, reduce_op, group=self._group, async_op=True)
        )

    def broadcast(self, raw: torch.Tensor, label: str, source: int) -> None:
        """Copy ``raw`` (n,) of axis index ``source`` into every other rank's."""
        if self.fits(raw):
            raw.copy_(self._exchange("broadcast", label, raw)[source])
            return
        root = self._watch.ranks[source]
        self._run("broadcast", label, raw, lambda: dist.broadcast(raw, root, group=self._group, async_op=True))

    def gather_json(self, value: Any, label: str, index: int) -> list[Any]:
        """Return every rank's ``value``, in rank order; this rank is axis index ``index``."""
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        lengths = torch.zeros(self._size, dtype=torch.int64, device=self.device)
        lengths[index] = data.numel()
        self.all_reduce(lengths, label, "sum")
        sizes = [int(n) for n in lengths.tolist()]
        padded = torch.zeros(max(sizes), dtype=torch.uint8, device=self.device)
        padded[: data.numel()] = data.to(self.device)
        if self.fits(padded):
            rows = self._exchange("gather", label, padded)
        else:
            rows = [torch.empty_like(padded) for _ in range(self._size)]
            self._run(
                "all_gather", label, padded, lambda: dist.all_gather(rows, padded, group=self._group, async_op=True)
            )
        return [json.loads(bytes(row[:n].cpu().tolist())) for row, n in zip(rows, sizes, strict=True)]

    def fits(self, values: torch.Tensor) -> bool:
        """Say whether these values go through the shared block."""
        nbytes = values.numel() * values.element_size()
        return self.shared is not None and self._watch.on_host(values) and 0 < nbytes <= CAPACITY

    def _exchange(self, kind: str, label: str, values: torch.Tensor) -> list[torch.Tensor]:
        """Return every rank's ``values``, flat, in rank order."""
        if self.shared is None:
            raise RuntimeError("no shared block")
        name = self._enter(kind, label)
        flat = values.detach().contiguous().view(-1)
        # Not through numpy: a tensor that numpy has seen can no longer be freed.
        payload = ctypes.string_at(flat.data_ptr(), flat.numel() * flat.element_size())
        try:
            found = self.shared.exchange(name, payload, self._watch.timeout)
        except RuntimeError as error:
            self._watch.fail(name, error)
        self._watch.heartbeat.leave()
        return [
            torch.frombuffer(bytearray(found[index]), dtype=flat.dtype) if index in found else flat
            for index in range(self._size)
        ]

    def _run(self, kind: str, label: str, values: torch.Tensor, call: Callable[[], Any]) -> None:
        """Start ``call`` of the backend and wait for it."""
        name = self._enter(kind, label)
        try:
            work = call()
        except RuntimeError as error:
            self._watch.fail(name, error)
        try:
            self._watch.wait(work, name, on_host=self._watch.on_host(values))
        except MeshError:
            _FAILED_CALLS.append(call)
            raise
        self._watch.heartbeat.leave()

    def _enter(self, kind: str, label: str) -> str:
        name = f"{kind}({label}) over {self._axis}"
        self._watch.heartbeat.enter(name, self._watch.ranks)
        return name
