"""Control values on one axis: a few numbers, or a little JSON, that all ranks need at once."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from zero_trial.comm.shared_memory import CONTROL_CAPACITY, SharedControlBlock
from zero_trial.comm.waits import CallOrder, Watchdog
from zero_trial.errors import MeshError

_COMBINE: dict[str, Callable[..., torch.Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}
_REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}

# Calls that failed. Their tensors must outlive the group: a thread of gloo still holds them, and
# freeing a tensor that no Python code holds takes the interpreter's lock, which the thread that
# frees the group has while it waits for gloo's (torch 2.6).
_FAILED_CALLS: list[Callable[[], Any]] = []


class ControlChannel:
    """Sums, broadcasts and gathers of control values on one axis.

    On the host they go through a block of memory that the ranks share, where they have one, else
    through the group's backend. Each call returns when it is done; values on a device are there for
    what is launched next on it. ``device``: where values must be so that the backend can move them.
    ``order`` notes each call.
    """

    def __init__(
        self, axis: str, group: Any, watch: Watchdog, device: torch.device, order: CallOrder | None = None
    ) -> None:
        self.device = device
        self._order = order if order is not None else CallOrder()
        self._axis = axis
        self._group = group
        self._watch = watch
        self._size = len(watch.ranks)
        self._shared: SharedControlBlock | None = None
        self.shared_bytes = 0  # how many bytes on the host go through the shared block

    @staticmethod
    def on_host(values: torch.Tensor) -> bool:
        """Say whether a collective of ``values`` is done when its wait returns, so that reading
        them costs nothing.

        On a device it is only ordered before what is launched there next.
        """
        return values.is_cpu

    def share(self, block: SharedControlBlock | None) -> None:
        """Exchange values on the host through ``block`` from now on.

        All ranks must call it alike.
        """
        self._shared = block
        self.shared_bytes = CONTROL_CAPACITY if block is not None else 0

    def all_reduce(self, values: torch.Tensor, label: str, op: str) -> None:
        """Replace ``values`` by their ``sum``, ``max`` or ``min`` over the ranks: in rank order in
        shared memory, else in the backend's order.
        """
        rows = self._exchange("all_reduce", label, values)
        if rows is None:
            reduce_op = _REDUCE_OPS[op]
            self._run(
                "all_reduce",
                label,
                values,
                lambda: dist.all_reduce(values, reduce_op, group=self._group, async_op=True),
            )
            return
        total = rows[0].clone()
        for row in rows[1:]:
            _COMBINE[op](total, row, out=total)
        values.copy_(total.view(values.shape))

    def broadcast(self, raw: torch.Tensor, label: str, source: int) -> None:
        """Copy ``raw`` (n,) of axis index ``source`` into every other rank's."""
        rows = self._exchange("broadcast", label, raw)
        if rows is not None:
            raw.copy_(rows[source])
            return
        root = self._watch.ranks[source]
        self._run("broadcast", label, raw, lambda: dist.broadcast(raw, root, group=self._group, async_op=True))

    def gather_row(self, row: list[int], label: str, index: int) -> list[list[int]]:
        """Return every rank's ``row`` of integers, in rank order, by one all-reduce; this rank is
        axis index ``index``."""
        table = torch.zeros(self._size, len(row), dtype=torch.int64, device=self.device)
        table[index] = torch.tensor(row, device=self.device)
        self.all_reduce(table, label, "sum")
        rows: list[list[int]] = table.tolist()
        return rows

    def gather_json(self, value: Any, label: str, index: int) -> list[Any]:
        """Return every rank's ``value``, in rank order; this rank is axis index ``index``."""
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = [size for (size,) in self.gather_row([data.numel()], label, index)]
        padded = torch.zeros(max(sizes), dtype=torch.uint8, device=self.device)
        padded[: data.numel()] = data.to(self.device)
        rows = self._exchange("gather", label, padded)
        if rows is None:
            rows = [torch.empty_like(padded) for _ in range(self._size)]
            self._run(
                "all_gather", label, padded, lambda: dist.all_gather(rows, padded, group=self._group, async_op=True)
            )
        return [json.loads(bytes(row[:n].cpu().tolist())) for row, n in zip(rows, sizes, strict=True)]

    def _exchange(self, kind: str, label: str, values: torch.Tensor) -> list[torch.Tensor] | None:
        """Return every rank's ``values``, flat, in rank order; None where they do not go through
        the shared block. Every call comes here first.
        """
        name = f"{kind}({label}) over {self._axis}"
        self._order.note(name)
        if self._shared is None or not values.is_cpu or not 0 < values.nbytes <= self.shared_bytes:
            return None
        self._watch.heartbeat.enter(name, self._watch.ranks, self._order.call)
        flat = values.detach().contiguous().view(-1)
        # Not through numpy: a tensor that numpy has seen can no longer be freed.
        payload = ctypes.string_at(flat.data_ptr(), flat.nbytes)
        try:
            found = self._shared.exchange(name, payload, self._watch.timeout)
        except RuntimeError as error:
            self._watch.fail(name, error)
        self._watch.heartbeat.leave()
        rows = [flat] * self._size
        for index, other in found.items():
            rows[index] = torch.frombuffer(bytearray(other), dtype=flat.dtype)
        return rows

    def _run(self, kind: str, label: str, values: torch.Tensor, call: Callable[[], Any]) -> None:
        """Start ``call`` of the backend and wait for it."""
        name = f"{kind}({label}) over {self._axis}"
        place = self._order.call if kind != "broadcast" else None  # its source does not wait for the others
        self._watch.heartbeat.enter(name, self._watch.ranks, place)
        try:
            work = call()
        except RuntimeError as error:
            self._watch.fail(name, error)
        try:
            self._watch.wait([work], name, on_host=self.on_host(values), call=place)
        except MeshError:
            _FAILED_CALLS.append(call)
            raise
        self._watch.heartbeat.leave()
