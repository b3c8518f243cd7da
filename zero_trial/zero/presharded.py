"""Parameters that were cut into shards while the model was built, before any engine exists."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

from zero_trial.mesh import AxisComm
from zero_trial.zero import directory
from zero_trial.zero.absent import absent
from zero_trial.zero.layout import ALIGN, round_up


class PreSharded:
    """One parameter's shard on this rank: ``ceil(numel / N)`` elements, padded to ALIGN; the parameter itself keeps only its shape.

    Cutting is collective over ``comm``: rank 0's values are everyone's.
    """

    def __init__(self, param: nn.Parameter, comm: AxisComm) -> None:
        self._param = param
        self._comm = comm
        self._numel = param.numel()
        padded = round_up(max(self._numel, 1), ALIGN * comm.size)
        self._padded = padded
        self._shard = torch.zeros(padded // comm.size, dtype=param.dtype, device=param.device)
        self.live = True
        self.cut()

    def cut(self) -> None:
        """Keeps this rank's part of the parameter's present value and frees the rest. Collective, if the value is there."""
        if not self.live:
            return
        values = self._param.detach().contiguous().view(-1)
        self._comm.broadcast(values, "first values")
        low = self._comm.index * self._shard.numel()
        own = values[low : low + self._shard.numel()]
        self._shard[: own.numel()].copy_(own)
        self._leave()

    def gather(self) -> torch.Tensor:
        """The full value as a new tensor. Collective."""
        full = torch.empty(self._padded, dtype=self._shard.dtype, device=self._shard.device)
        self._comm.all_gather(full, self._shard, "built parameter").wait()
        return full[: self._numel].view(self._param.shape)

    def lift(self) -> None:
        """Lets the parameter hold its full value until the next :meth:`cut`. Collective."""
        if not self.live:
            self._param.data = self.gather()
            self.live = True

    def _leave(self) -> None:
        self._param.data = absent(self._param.shape, self._shard.dtype, self._shard.device)
        self.live = False

    # the Holder protocol, so that GatheredParameters works before there is an engine

    def open(self, params: list[nn.Parameter]) -> None:
        with torch._C.DisableTorchFunction(), torch.no_grad():
            self.cut()  # what was written until now stays, whatever becomes of the edits that follow
            self.lift()

    def close(self, params: list[nn.Parameter], source: int | None) -> None:
        with torch._C.DisableTorchFunction(), torch.no_grad():
            if source is None:
                self._leave()
                return
            values = self._param.data.contiguous()
            self._comm.broadcast(values, "edited parameter", source)
            self._param.data = values
            self.cut()


def read_first_values(param: nn.Parameter) -> torch.Tensor:
    """The full first value of a parameter, gathered if it was cut while the model was built. Collective in that case."""
    holder = directory.holder_of(param)
    if isinstance(holder, PreSharded):
        return param.detach() if holder.live else holder.gather()
    return param.detach()


Keep = Callable[[PreSharded], None]


def presharded(params: Iterable[nn.Parameter]) -> list[PreSharded]:
    """The holders of those parameters that are cut."""
    return [holder for param in params if isinstance(holder := directory.holder_of(param), PreSharded)]
