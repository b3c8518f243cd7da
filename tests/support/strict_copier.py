"""A copier that does each copy as late as it may, and finds out who uses memory that a copy still
needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from zero_trial.sharding.offload.copies import Copy


@dataclass(frozen=True)
class _LateCopy:
    wait: Callable[[], None]

    def order(self) -> None: ...

    def done(self) -> bool:
        return False


class StrictCopier:
    """Down: the host reads garbage until it has waited, and the device's values are spoiled then,
    so that an update which reads them there shows. Up (what comes from its own buffers): the host
    must have waited before it writes to what went up."""

    def __init__(self) -> None:
        self.begun = 0
        self.downs = 0
        self.ups = 0
        self._buffers: set[int] = set()

    def buffer(self, nbytes: int) -> torch.Tensor:
        made = torch.full((nbytes,), 255, dtype=torch.uint8)
        self._buffers.add(made.untyped_storage()._cdata)
        return made

    def begin(self) -> None:
        self.begun += 1

    def copy(self, source: torch.Tensor, into: torch.Tensor) -> Copy:
        goes_up = source.untyped_storage()._cdata in self._buffers
        return _LateCopy(self._up(source, into) if goes_up else self._down(source, into))

    def _down(self, source: torch.Tensor, into: torch.Tensor) -> Callable[[], None]:
        self.downs += 1
        into.fill_(float("nan"))

        def wait() -> None:
            if into.isnan().all():
                into.copy_(source)
                source.mul_(-3)  # padding stays zero: it counts in later norms

        return wait

    def _up(self, source: torch.Tensor, into: torch.Tensor) -> Callable[[], None]:
        self.ups += 1
        into.copy_(source)
        went = source.clone()

        def wait() -> None:
            if not torch.equal(source.view(torch.uint8), went.view(torch.uint8)):
                raise AssertionError("what goes up was written to before it was there")

        return wait
