"""What NCCL is for CUDA: a backend whose collectives of the stand-in device's tensors are work of
the device, on a stream of the group's own, and whose waits order streams.

A collective begins when the device comes to it, on a thread, so that other streams go on. The
tensors stay until the caller has waited, and no longer. Tensors of the host go over gloo, and each
wait for one is noted, as is a wait with a time limit for one of the device, which would block the
host in ProcessGroupNCCL. The two kinds are not mixed in one call.
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
from zero_trial.comm.backends import sum_in_order

Begin = Callable[[Callable[[], None]], None]  # starts a collective on a thread
# Makes a collective of gloo's out of outputs and inputs; returns its work.
Make = Callable[[list[torch.Tensor], list[torch.Tensor]], Any]

_MAX = dist.AllreduceOptions()
_MAX.reduceOp = dist.ReduceOp.MAX


def register() -> None:
    """From now on torch finds this backend for tensors of the stand-in device."""
    dist.Backend.register_backend(device.NAME, DeviceGroup, devices=["cpu", device.NAME])


class Then:
    """A work, and what is to be done after it."""

    def __init__(self, work: Any, act: Callable[[], Any]) -> None:
        self._work = work
        self._act = act

    def wait(self, *timeout: timedelta) -> bool:
        self._work.wait(*timeout)
        self._act()
        return True


class HostWork(dist.Work):
    """A collective of the host's."""

    def __init__(self, operation: str, work: Any) -> None:
        super().__init__()
        self.operation = operation
        self.work = work

    def is_completed(self) -> bool:
        return bool(self.work.is_completed())

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:  # type: ignore[override]
        device.use().scheduler.note_wait(self.operation)
        return bool(self.work.wait(timeout) if timeout else self.work.wait())


class DeviceWork(dist.Work):
    """A collective that was launched."""

    def __init__(self, operation: str, end: int, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.operation = operation
        self._end = end
        self._tensors: Sequence[torch.Tensor] = tensors

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:  # type: ignore[override]
        here = device.use()
        if timeout:
            here.scheduler.wait_event(self._end)
        here.scheduler.block(self._end, here.stream)
        self._tensors = ()
        return True


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


class DeviceGroup(dist.ProcessGroup):
    """``rank`` of ``size`` in one group, with a stream of its own."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._device = dist.ProcessGroupGloo(dist.PrefixStore("device", store), rank, size, timeout)  # type: ignore[attr-defined]
        self._host = dist.ProcessGroupGloo(dist.PrefixStore("host", store), rank, size, timeout)  # type: ignore[attr-defined]
        self._size = size
        self.timeout = timeout  # bounds what runs on the device, since no wait of the host does
        self._stream = int(device.use().library.standin_new_stream())
        self._begun: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._running = False

    # Sums in rank order, so that their bits are those of ranks that compute on the CPU.

    def _reduce_scatter_base(self, output: torch.Tensor, whole: torch.Tensor, opts: Any = None) -> Any:
        def make(outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> Any:
            parts = [torch.empty_like(inputs[0]) for _ in range(self._size)]

            def add() -> None:
                sum_in_order([part.view(self._size, -1)[self.rank()] for part in parts], outputs[0].view(-1))

            return Then(self._device.allgather([parts], inputs), add)

        return self._launch("reduce_scatter", [output], [whole], make)

    def allreduce(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> Any:
        if tensors[0].is_cpu or (opts is not None and opts.reduceOp != dist.ReduceOp.SUM):
            return self._either("all_reduce", tensors, tensors, lambda group, out, _: group.allreduce(out, opts))

        def make(outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> Any:
            parts = [torch.empty_like(inputs[0]) for _ in range(self._size)]
            return Then(self._device.allgather([parts], inputs), lambda: sum_in_order(parts, outputs[0]))

        return self._launch("all_reduce", tensors, tensors, make)

    def _allgather_base(self, output: torch.Tensor, part: torch.Tensor, opts: Any = None) -> Any:
        def start(group: Any, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> Any:
            (output,), (part,) = outputs, inputs
            parts = [torch.empty_like(part) for _ in range(self._size)]
            work = group.allgather([parts], [part.clone()])
            return Then(work, lambda: output.view(self._size, -1).copy_(torch.stack(parts).view(self._size, -1)))

        return self._either("all_gather", [output], [part], start)

    def alltoall_base(
        self, output: torch.Tensor, sent: torch.Tensor, incoming: list[int], outgoing: list[int], opts: Any = None
    ) -> Any:
        def make(outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> Any:
            # one row of the longest part per pair, since gloo's has no uneven parts here
            parts = inputs[0].split(outgoing)
            longest = torch.tensor([max(outgoing + incoming)])
            self._device.allreduce([longest], _MAX).wait()
            table = inputs[0].new_zeros(self._size, self._size, int(longest))
            for peer, part in enumerate(parts):
                table[self.rank(), peer, : part.numel()] = part
            target = outputs[0].split(incoming)

            def place() -> None:
                for peer, part in enumerate(target):
                    part.copy_(table[peer, self.rank(), : part.numel()])

            return Then(self._device.allreduce([table]), place)

        return self._launch("all_to_all", [output], [sent], make)

    # as torch calls them from 2.13 on
    reduce_scatter_single, all_gather_single = _reduce_scatter_base, _allgather_base
    all_to_all_single = alltoall_base

    def broadcast(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> Any:
        return self._either("broadcast", tensors, tensors, lambda group, out, _: group.broadcast(out, opts))

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return self._either(
            "all_gather", outputs[0], inputs, lambda group, out, given: group.allgather([out], given, opts)
        )

    def send(self, tensors: Sequence[torch.Tensor], to: int, tag: int = 0) -> Any:
        return self._either("send", [], tensors, lambda group, _, given: group.send(given, to, tag))

    def recv(self, tensors: Sequence[torch.Tensor], source: int, tag: int = 0) -> Any:
        return self._either("recv", tensors, [], lambda group, out, _: group.recv(out, source, tag))

    def _either(
        self,
        operation: str,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        start: Callable[[Any, list[torch.Tensor], list[torch.Tensor]], Any],
    ) -> Any:
        if all(values.is_cpu for values in (*outputs, *inputs)):
            return HostWork(operation, start(self._host, list(outputs), list(inputs)))
        return self._launch(operation, outputs, inputs, lambda out, given: start(self._device, out, given))

    def _launch(
        self, operation: str, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], make: Make
    ) -> Any:
        """Start a collective on the device. A tensor of both kinds is updated in place."""
        if any(values.is_cpu for values in (*outputs, *inputs)):
            raise RuntimeError(f"{operation} takes tensors on the device only")
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
