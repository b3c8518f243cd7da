"""Messages between two ranks of an axis: by lanes through shared memory where there are some, else by the backend."""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist

from zero_trial.mesh.watch import Watch


class Lanes(Protocol):
    """Another way for messages between two ranks than the backend's; see :mod:`zero_trial.mesh.lanes`."""

    def send(self, values: torch.Tensor, to: int, tag: int) -> Any: ...

    def receive(self, values: torch.Tensor, source: int, tag: int) -> Any: ...


class Message:
    """A tensor on its way between two ranks. It owns the buffer until :meth:`wait` returns; before that nobody may touch it."""

    def __init__(self, watch: Watch, work: Any, name: str, values: torch.Tensor, among: tuple[int, int]) -> None:
        self._watch = watch
        self._work = work
        self._name = name
        self._among = among
        self.values = values

    @property
    def done(self) -> bool:
        """It has arrived or left. Does not wait."""
        return self._work is None or bool(self._work.is_completed())

    def wait(self) -> torch.Tensor:
        """The tensor, once it has arrived or left. May be called again. Raises MeshError, naming the other rank, where that does not happen."""
        if self._work is not None:
            self._watch.wait(self._work, self._name, self._among, on_host=self._watch.on_host(self.values))
            self._work = None
        return self.values


class Messages:
    """How this rank, axis index ``index``, sends and receives on one axis."""

    def __init__(self, index: int, group: Any, watch: Watch) -> None:
        self.directions: dict[tuple[int, int], Any] = {}  # (from, to) -> a group for that way alone
        self.lanes: Lanes | None = None
        self._index = index
        self._group = group
        self._watch = watch

    def start(self, kind: str, values: torch.Tensor, peer: int, label: str, tag: int) -> Message:
        """``kind``: ``send`` to, or ``receive`` from, axis index ``peer``."""
        ranks = self._watch.ranks
        name = f"{kind}({label}) {'to' if kind == 'send' else 'from'} rank {ranks[peer]}"
        among = (ranks[self._index], ranks[peer])
        try:
            work = self._work(kind, values, peer, tag)
        except (RuntimeError, OSError) as error:
            self._watch.fail(name, error, among)
        return Message(self._watch, work, name, values, among)

    def _work(self, kind: str, values: torch.Tensor, peer: int, tag: int) -> Any:
        if self.lanes is not None and self._watch.on_host(values):
            return self.lanes.send(values, peer, tag) if kind == "send" else self.lanes.receive(values, peer, tag)
        verb = dist.isend if kind == "send" else dist.irecv
        way = (self._index, peer) if kind == "send" else (peer, self._index)
        return verb(values, self._watch.ranks[peer], group=self.directions.get(way, self._group), tag=tag)
