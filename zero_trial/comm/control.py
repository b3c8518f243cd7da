"""A few numbers that all ranks of an axis need at once: through a block of shared memory where there is one, else by the backend."""

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
_BACKENDS_OWN = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}

# Calls that nobody waits for any more; their tensors must outlive the group. A thread of gloo still has them, and to let go of a tensor that no
# Python code holds any more takes the interpreter's lock, which belongs to whoever frees the group and waits for that thread (torch 2.6).
_LEFT_BEHIND: list[Callable[[], Any]] = []


class ControlChannel:
    """Sums, broadcasts and gathers of small things between the ranks of one axis. Values on the host are there when a call returns; those on a
    device, for what is launched next on it.

    ``device``: where values must be so that the group's backend can move them. ``shared``: a block in which CPU values travel.
    """

    def __init__(self, axis: str, group: Any, watch: Watchdog, device: torch.device) -> None:
        self.shared: SharedControlBlock | None = None
        self.device = device
        self._axis = axis
        self._group = group
        self._watch = watch
        self._size = len(watch.ranks)

    def all_reduce(self, values: torch.Tensor, label: str, op: str) -> None:
        """``sum``, ``max`` or ``min``, in rank order in shared memory, in the backend's own elsewhere."""
        if self.fits(values):
            rows = self._exchange("all_reduce", label, values)
            total = rows[0].clone()
            for row in rows[1:]:
                _COMBINE[op](total, row, out=total)
            values.copy_(total.view(values.shape))
            return
        reduce_op = _BACKENDS_OWN[op]
        self._now(
            "all_reduce", label, values, lambda: dist.all_reduce(values, reduce_op, group=self._group, async_op=True)
        )

    def broadcast(self, raw: torch.Tensor, label: str, source: int) -> None:
        """``raw`` (n,) of axis index ``source`` into everyone else's."""
        if self.fits(raw):
            raw.copy_(self._exchange("broadcast", label, raw)[source])
            return
        root = self._watch.ranks[source]
        self._now("broadcast", label, raw, lambda: dist.broadcast(raw, root, group=self._group, async_op=True))

    def gather_json(self, value: Any, label: str, index: int) -> list[Any]:
        """Every rank's ``value``, in rank order; this rank is axis index ``index``."""
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
            self._now(
                "all_gather", label, padded, lambda: dist.all_gather(rows, padded, group=self._group, async_op=True)
            )
        return [json.loads(bytes(row[:n].cpu().tolist())) for row, n in zip(rows, sizes, strict=True)]

    def fits(self, values: torch.Tensor) -> bool:
        """Whether these values go through the shared block."""
        nbytes = values.numel() * values.element_size()
        return self.shared is not None and self._watch.on_host(values) and 0 < nbytes <= CAPACITY

    def _exchange(self, kind: str, label: str, values: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's ``values``, flat, in rank order."""
        if self.shared is None:
            raise RuntimeError("no shared block")
        name = self._enter(kind, label)
        flat = values.detach().contiguous().view(-1)
        # not through numpy: a tensor that numpy has seen cannot be freed any more
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

    def _now(self, kind: str, label: str, values: torch.Tensor, call: Callable[[], Any]) -> None:
        name = self._enter(kind, label)
        try:
            work = call()
        except RuntimeError as error:
            self._watch.fail(name, error)
        try:
            self._watch.wait(work, name, on_host=self._watch.on_host(values))
        except MeshError:
            _LEFT_BEHIND.append(call)
            raise
        self._watch.heartbeat.leave()

    def _enter(self, kind: str, label: str) -> str:
        name = f"{kind}({label}) over {self._axis}"
        self._watch.heartbeat.enter(name, self._watch.ranks)
        return name
