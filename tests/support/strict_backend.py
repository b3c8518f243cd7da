"""A stand-in for NCCL on a machine without GPUs: a backend of torch.distributed that is as strict
about who waits for what.

Tensors of floating-point numbers count as being on the device, all others as being on the host:
parameters, gradients, norms and losses are the former, what ranks tell each other in between (JSON,
lengths, counts) is the latter.

    device   one thread per group makes the collectives, in the order of their launches; a wait
             without a time limit stands for ordering streams, a wait with one blocks the host, as
             ProcessGroupNCCL has it, and is noted in ``host_waits``
    host     gloo; every wait blocks the host and is noted

The two kinds may not be mixed in one call, and the tensor collectives of the hot path take device
tensors only.
"""

from __future__ import annotations

import queue
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zero_trial
from zero_trial.comm.control import ControlChannel

NAME = "strict"
PACKAGE = f"{Path(zero_trial.__file__).parent}/"

Call = Callable[[], Any]  # starts a collective of gloo's; returns its work

host_waits: list[str] = []  # of this process, by operation and caller
launched: list[str] = []  # the device's operations, in the order of their launches


def on_host(values: torch.Tensor) -> bool:
    return not values.is_floating_point()


def register() -> None:
    """From now on ``init_process_group("strict")`` makes such groups."""
    dist.Backend.register_backend(NAME, StrictGroup, devices=["cpu"])


@contextmanager
def pretended_device() -> Iterator[None]:
    """Inside, the mesh treats floating-point tensors as a device's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ControlChannel, "on_host", staticmethod(on_host))
        yield


def note(operation: str) -> None:
    callers = [frame for frame in traceback.extract_stack() if frame.filename.startswith(PACKAGE)]
    host_waits.append(f"{operation}: " + " < ".join(f"{frame.name}" for frame in reversed(callers[-5:])))


class StrictWork(dist.Work):
    """A collective that was launched on the device."""

    def __init__(self, operation: str) -> None:
        super().__init__()
        self.operation = operation
        self.done = threading.Event()
        self.error: Exception | None = None

    def is_completed(self) -> bool:
        return self.done.is_set()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:  # type: ignore[override]
        if timeout:
            note(self.operation)
        # there are no streams here: what the caller computes next is computed at once
        self.done.wait()
        if self.error is not None:
            raise self.error
        return True

    def synchronize(self) -> None:
        note(self.operation)
        self.done.wait()


class HostWork(dist.Work):
    """A collective of the host's."""

    def __init__(self, operation: str, work: Any) -> None:
        super().__init__()
        self.operation = operation
        self.work = work

    def is_completed(self) -> bool:
        return bool(self.work.is_completed())

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:  # type: ignore[override]
        note(self.operation)
        return bool(self.work.wait(timeout) if timeout else self.work.wait())


_MAX = dist.AllreduceOptions()
_MAX.reduceOp = dist.ReduceOp.MAX


# Makes a collective of gloo's out of outputs and inputs; returns its work.
Make = Callable[[list[torch.Tensor], list[torch.Tensor]], Any]


class StrictGroup(dist.ProcessGroup):
    """``rank`` of ``size`` in one group."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._device = dist.ProcessGroupGloo(dist.PrefixStore("device", store), rank, size, timeout)  # type: ignore[attr-defined]
        self._host = dist.ProcessGroupGloo(dist.PrefixStore("host", store), rank, size, timeout)  # type: ignore[attr-defined]
        self._size = size
        self.timeout = timeout  # bounds what runs on the device, since no wait of the host does
        self._launches: queue.SimpleQueue[tuple[StrictWork, Call]] = queue.SimpleQueue()
        self._running = False

    def getBackendName(self) -> str:
        return NAME

    @staticmethod
    def on_host(values: torch.Tensor) -> bool:
        return on_host(values)

    def _reduce_scatter_base(self, output: torch.Tensor, whole: torch.Tensor, opts: Any = None) -> Any:
        def make(outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> Any:
            (output,), (whole,) = outputs, inputs
            sums = whole.clone()  # gloo has no reduce-scatter in every release
            return Then(
                self._device.allreduce([sums]),
                lambda: output.copy_(sums.view(self._size, -1)[self.rank()].view_as(output)),
            )

        return self._launch("reduce_scatter", [output], [whole], make)

    def _allgather_base(self, output: torch.Tensor, part: torch.Tensor, opts: Any = None) -> Any:
        def make(outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> Any:
            (output,), (part,) = outputs, inputs
            parts = [torch.empty_like(part) for _ in range(self._size)]
            work = self._device.allgather([parts], [part.clone()])
            return Then(work, lambda: output.view(self._size, -1).copy_(torch.stack(parts).view(self._size, -1)))

        return self._launch("all_gather", [output], [part], make)

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

    def allreduce(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> Any:
        return self._either("all_reduce", tensors, tensors, lambda group, out, _: group.allreduce(out, opts))

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

    def barrier(self, opts: Any = None) -> Any:
        return HostWork("barrier", self._host.barrier())

    def _either(
        self,
        operation: str,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        start: Callable[[Any, list[torch.Tensor], list[torch.Tensor]], Any],
    ) -> Any:
        if all(self.on_host(values) for values in (*outputs, *inputs)):
            return HostWork(operation, start(self._host, list(outputs), list(inputs)))
        return self._launch(operation, outputs, inputs, lambda out, given: start(self._device, out, given))

    def _launch(
        self, operation: str, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], make: Make
    ) -> Any:
        """Start a collective on the device. A tensor of both kinds is updated in place."""
        tensors = [*outputs, *inputs]
        if any(self.on_host(values) for values in tensors):
            kinds = ", ".join(
                f"{values.dtype} on the {'host' if self.on_host(values) else 'device'}" for values in tensors
            )
            raise RuntimeError(f"{operation} takes tensors on the device only, got {kinds}")
        launched.append(operation)
        return self._start(operation, list(outputs), list(inputs), make)

    def _start(self, operation: str, outputs: list[torch.Tensor], inputs: list[torch.Tensor], make: Make) -> Any:
        if not self._running:
            self._running = True
            threading.Thread(target=self._run, name="strict-device", daemon=True).start()
        work = StrictWork(operation)
        self._launches.put((work, lambda: make(outputs, inputs)))
        return work

    def _run(self) -> None:
        while True:
            work, call = self._launches.get()
            try:
                call().wait()
            except Exception as error:
                work.error = error
            work.done.set()


class Then:
    """A work, and what is to be done after it."""

    def __init__(self, work: Any, act: Callable[[], Any]) -> None:
        self._work = work
        self._act = act

    def wait(self) -> None:
        self._work.wait()
        self._act()
