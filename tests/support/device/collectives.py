"""What NCCL is for CUDA: a backend whose collectives of the stand-in device's tensors are work of
the device, on a stream of the group's own, and whose waits order streams.

A collective begins when the device comes to it, on a thread, so that other streams go on. The
tensors stay until the caller has waited, and no longer. Tensors of the host go over gloo.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tests.support.device import device
from tests.support.device.operators import plainly, uses
from tests.support.strict_backend import Make, StrictGroup, Then, note
from zero_trial.comm.backends import sum_in_order

Begin = Callable[[Callable[[], None]], None]  # starts a collective on a thread


def register() -> None:
    """From now on torch finds this backend for tensors of the stand-in device."""
    dist.Backend.register_backend(device.NAME, DeviceGroup, devices=["cpu", device.NAME])


class DeviceWork(dist.Work):
    """A collective that was launched."""

    def __init__(self, operation: str, end: int, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.operation = operation
        self._end = end
        self._tensors: Sequence[torch.Tensor] = tensors

    def is_completed(self) -> bool:
        return device.use().scheduler.is_done(self._end)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:  # type: ignore[override]
        here = device.use()
        if timeout:
            note(self.operation)
            here.scheduler.wait_event(self._end)
        here.scheduler.block(self._end, here.stream)
        self._tensors = ()
        return True

    def synchronize(self) -> None:
        self.wait()


class UnderWay:
    """A collective that the device has come to: on its group's thread, with copies of the tensors,
    because the device's memory is closed while the host runs."""

    def __init__(self, begin: Begin, outputs: list[torch.Tensor], inputs: list[torch.Tensor], make: Make) -> None:
        copies = {id(each): each.clone() for each in (*outputs, *inputs)}
        self._outputs = [(each, copies[id(each)]) for each in outputs]
        self._error: Exception | None = None
        self._completed = False
        given = [copies[id(each)] for each in outputs], [copies[id(each)] for each in inputs]
        begin(lambda: self._run(make, *given))

    def _run(self, make: Make, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> None:
        try:
            make(outputs, inputs).wait()
        except Exception as error:
            self._error = error
        self._completed = True
        device.use().scheduler.ended.set()

    def is_completed(self) -> bool:
        return self._completed

    def finish(self) -> None:
        if self._error is not None:
            raise self._error
        with plainly():
            for pages, copy in self._outputs:
                pages.copy_(copy)


class DeviceGroup(StrictGroup):
    """``rank`` of ``size`` in one group, with a stream of its own."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(store, rank, size, timeout)
        self._stream = int(device.use().library.standin_new_stream())
        self._begun: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def getBackendName(self) -> str:
        return device.NAME

    @staticmethod
    def on_host(values: torch.Tensor) -> bool:
        return values.is_cpu

    # Sums in rank order, so that their bits are those of ranks that compute on the CPU.

    def _reduce_scatter_base(self, output: torch.Tensor, whole: torch.Tensor, opts: Any = None) -> Any:
        def make(outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> Any:
            parts = [torch.empty_like(inputs[0]) for _ in range(self._size)]

            def add() -> None:
                sum_in_order([part.view(self._size, -1)[self.rank()] for part in parts], outputs[0].view(-1))

            return Then(self._device.allgather([parts], inputs), add)

        return self._launch("reduce_scatter", [output], [whole], make)

    reduce_scatter_single = _reduce_scatter_base

    def allreduce(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> Any:
        if self.on_host(tensors[0]) or (opts is not None and opts.reduceOp != dist.ReduceOp.SUM):
            return super().allreduce(tensors, opts)

        def make(outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> Any:
            parts = [torch.empty_like(inputs[0]) for _ in range(self._size)]
            return Then(self._device.allgather([parts], inputs), lambda: sum_in_order(parts, outputs[0]))

        return self._launch("all_reduce", tensors, tensors, make)

    def _start(self, operation: str, outputs: list[torch.Tensor], inputs: list[torch.Tensor], make: Make) -> Any:
        here = device.use()
        begin, end = (int(here.library.standin_new_event()) for _ in range(2))
        here.scheduler.record(begin, here.stream)
        here.scheduler.block(begin, self._stream)
        pages = {id(each): here.pages_of(each) for each in (*outputs, *inputs)}
        out, given = [pages[id(each)] for each in outputs], [pages[id(each)] for each in inputs]

        def run() -> UnderWay:
            with plainly():
                return UnderWay(self._begin, out, given, make)

        accesses = [*uses(inputs, writes=False), *uses(outputs, writes=True)]
        here.scheduler.launch(operation, self._stream, accesses, run, kind="collective")
        here.scheduler.record(end, self._stream)
        return DeviceWork(operation, end, [*outputs, *inputs])

    def _begin(self, collective: Callable[[], None]) -> None:
        """Make it on this group's thread, which makes one at a time, as the stream does."""
        if not self._running:
            self._running = True
            threading.Thread(target=self._make_all, name="standin-collectives", daemon=True).start()
        self._begun.put(collective)

    def _make_all(self) -> None:
        while True:
            self._begun.get()()
