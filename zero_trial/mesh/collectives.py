"""The collectives of tensors on one axis: which transport takes one, and the tag by which ranks know that they mean the same."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import torch

from zero_trial.mesh.buffers import Buffers
from zero_trial.mesh.pending import Pending
from zero_trial.mesh.shared_homes import Homes
from zero_trial.mesh.shared_memory import SharedMemory
from zero_trial.mesh.shared_transport import Mail, SharedTransport
from zero_trial.mesh.sums import Sum
from zero_trial.mesh.transport import DirectTransport, NativeTransport, Received, Transport
from zero_trial.mesh.watch import Watch


class Collectives:
    """Starts collectives of this rank, axis index ``index``, on one axis. ``add`` makes the sums of CPU tensors.

    These go by direct exchange until memory is shared.
    """

    def __init__(self, axis: str, index: int, group: Any, watch: Watch, buffers: Buffers, add: Sum) -> None:
        self.shared: SharedTransport | None = None
        self._axis = axis
        self._index = index
        self._watch = watch
        self._buffers = buffers
        self._sequence = 0
        self._add = add
        self._native = NativeTransport(group)
        self._direct = DirectTransport(group, watch.ranks, index, add)

    def share(self, memory: SharedMemory, mail: Mail, homes: Homes | None) -> None:
        """From now on CPU tensors go through ``memory``."""
        size = len(self._watch.ranks)
        self.shared = SharedTransport(self._index, size, memory, mail, self._direct, self._add, homes)
        self._buffers.homes = self.shared.homes

    def start(
        self,
        kind: str,
        full: torch.Tensor,
        part: torch.Tensor,
        label: str,
        then: Callable[[Received | None], Pending] | None = None,
        again: bool = False,
        lend: bool = True,
    ) -> Pending:
        """Starts a collective; ``then`` starts the one that follows when the first is done, and is that one (``again``)."""
        name, tag = self._enter(kind, label)
        on_host = self._watch.on_host(full)
        transport: Transport = (self.shared or self._direct) if on_host else self._native
        try:
            if kind == "all_gather":
                works, finish = transport.all_gather(full, part, tag, again, lend)
            else:
                works, finish = transport.reduce_scatter(full, part, tag)
        except (RuntimeError, OSError) as error:
            self._watch.fail(name, error)
        self._watch.board.leave()
        source = part if kind == "all_gather" else full
        if then is None:
            return Pending(self._watch, name, works, finish, source, self._buffers.settle, on_host=on_host)

        def go_on() -> Pending:
            result = finish()
            return then(result if isinstance(result, Received) else None)

        return Pending(self._watch, name, works, go_on, source, self._buffers.settle, on_host=on_host)

    def broadcast(self, shared: SharedTransport, raw: torch.Tensor, label: str, source: int) -> None:
        """``raw`` (flat) of axis index ``source`` into everyone else's, through ``shared`` memory, waited for."""
        name, tag = self._enter("broadcast", label)
        try:
            works, finish = shared.broadcast(raw, source, tag)
        except (RuntimeError, OSError) as error:
            self._watch.fail(name, error)
        Pending(self._watch, name, works, finish, raw, self._buffers.settle).wait()
        self._watch.board.leave()

    def _enter(self, kind: str, label: str) -> tuple[str, int]:
        name = f"{kind}({label}) over {self._axis}"
        self._watch.board.enter(name)
        self._sequence += 1
        return name, message_tag(self._sequence, name)


def message_tag(sequence: int, name: str) -> int:
    """Marks the messages of one collective: 20 bits of its number and 11 of its name.

    Ranks that disagree about what comes next then wait for each other in vain, and are told so, instead of summing what does not belong together.
    """
    return (sequence % (1 << 20)) << 11 | zlib.crc32(name.encode()) & 0x7FF
