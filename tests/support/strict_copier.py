"""A copier that does each copy as late as it may, and finds out who uses memory that a copy still
needs."""

from __future__ import annotations

import torch

from zero_trial.sharding.offload.host import Wait


class StrictCopier:
    """Down: the host reads garbage until it has waited, and the device's values are spoiled then,
    so that an update which reads them there shows. Up: the host must have waited before it writes
    to what went up."""

    def __init__(self) -> None:
        self.begun = 0
        self.downs = 0
        self.ups = 0

    def buffer(self, nbytes: int) -> torch.Tensor:
        return torch.full((nbytes,), 255, dtype=torch.uint8)

    def begin(self) -> None:
        self.begun += 1

    def down(self, source: torch.Tensor, into: torch.Tensor) -> Wait:
        self.downs += 1
        into.fill_(float("nan"))

        def wait() -> None:
            if into.isnan().all():
                into.copy_(source)
                source.mul_(-3)  # padding stays zero: it counts in later norms

        return wait

    def up(self, source: torch.Tensor, into: torch.Tensor) -> Wait:
        self.ups += 1
        into.copy_(source)
        went = source.clone()

        def wait() -> None:
            if not torch.equal(source.view(torch.uint8), went.view(torch.uint8)):
                raise AssertionError("what goes up was written to before it was there")

        return wait
