"""A collective under way, as a value that owns its buffers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

import torch

from zero_trial.errors import MeshError
from zero_trial.mesh.mappings import MappingRefused
from zero_trial.mesh.transport import Finish, Received, Works
from zero_trial.mesh.watch import Watch

# Sees this rank's part of a sum and what peers put in, by axis index, before it is passed on.
Look = Callable[[torch.Tensor, Mapping[int, torch.Tensor]], None]


class Pending:
    """A collective under way. It owns the buffers until :meth:`wait` returns; before that neither input nor output may be touched.

    On CPU peers may read the input where it lies (:meth:`AxisComm.buffer`). So there are two ends:

        arrive   the result is there; peers may still be reading the input
        wait     and they have read it: it may be overwritten

    ``wait`` thus needs the other ranks to come as far as ``arrive`` for the same collective. That is no deadlock as long as ranks wait for
    what they have started in the same order, or where they :meth:`arrive` at all of it before they settle any (:func:`wait_all`). Who cannot
    promise that arrives, and calls :meth:`AxisComm.settle` when it is about to overwrite the input, at a point that all ranks pass after the
    collective's arrival.
    """

    def __init__(
        self,
        watch: Watch | None,
        label: str,
        works: Works,
        finish: Finish | None,
        source: torch.Tensor | None = None,
        settle: Callable[[torch.Tensor], None] | None = None,
        *,
        on_host: bool = True,
    ) -> None:
        """``works``, waited for by ``watch``, and then ``finish()``, make the result; ``settle(source)`` waits for those who read the input.

        ``watch`` is None where there are no works to wait for. ``on_host``: as :meth:`Watch.wait` has it.
        """
        self._watch = watch
        self._on_host = on_host
        self._label = label
        self._works = works
        self._finish = finish
        self._source = source
        self._settle = settle
        self._next: Pending | None = None
        self.received = Received({})  # what peers contributed to a sum on CPU, if it was asked for

    def turn(self, *, keep: bool = False) -> None:
        """Finishes the part under way and starts what follows it (the gather half of an all-reduce), without waiting for that.

        A MeshError is no end: who asks again waits again, or is told so again.
        """
        finish = self._finish
        if finish is None:
            return
        if self._watch is not None:
            for work in self._works:
                self._watch.wait(work, self._label, on_host=self._on_host)
        self._works, self._finish = [], self._refuse  # what breaks off here may have made half of the result
        result = finish() if self._watch is None else self._finished(self._watch, finish)
        self._finish = None
        if isinstance(result, Pending):
            self._next = result
        elif isinstance(result, Received):
            self.received = result
            if not keep:
                result.release()

    def arrive(self, *, keep: bool = False) -> None:
        """Returns when the result is there; the input may not be overwritten yet. ``keep``: ``received`` stays readable until it is released."""
        self.turn(keep=keep)
        if self._next is not None:
            self._next.arrive()
            self._next = None

    def wait(self) -> None:
        """Returns when the result is there and input and output are the caller's again. May be called again."""
        self.arrive()
        source, self._source = self._source, None
        if source is not None and self._settle is not None:
            self._settle(source)

    def _refuse(self) -> NoReturn:
        raise MeshError("this collective has failed before", where=self._label, fix="Look for its first error, above.")

    def _finished(self, watch: Watch, finish: Finish) -> object:
        try:
            return finish()
        except MappingRefused as error:
            watch.fail(self._label, error)
        except OSError as error:  # memory of a peer that is gone
            watch.fail(self._label, RuntimeError(f"closed: {error}"))


# A collective of one rank: the result is there.
DONE = Pending(None, "", [], None)


def wait_all(pendings: Sequence[Pending]) -> None:
    """Waits for several collectives: starts the second halves of all, arrives at all, and then settles them."""
    for pending in pendings:
        pending.turn()
    for pending in pendings:
        pending.arrive()
    for pending in pendings:
        pending.wait()
