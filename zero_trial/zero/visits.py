"""Visits of user code to full parameters: blocks of GatheredParameters, one inside the other, that find them whole and may edit them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from zero_trial.errors import TrialError
from zero_trial.mesh import AxisComm
from zero_trial.zero.unit import Unit


class Visits:
    """To ``units``. ``wait`` returns when what was published is whole; edits are passed on over ``data``."""

    def __init__(self, units: Sequence[Unit], wait: Callable[[], object], data: AxisComm) -> None:
        self._units = units
        self._wait = wait
        self._data = data
        # For each open() without its close(), innermost last: the units that it brought to life.
        self._opened: list[list[Unit]] = []

    def open(self, params: list[nn.Parameter]) -> None:
        """See :class:`Holder`."""
        self._wait()
        visited = self._holding(params)
        opened = [unit for unit in visited if not unit.live]
        for unit in opened:
            unit.start_gather()
        for unit in opened:
            unit.finish_gather()
        for unit in visited:
            unit.pins += 1
        self._opened.append(opened)

    def close(self, params: list[nn.Parameter], source: int | None) -> None:
        """See :class:`Holder`. Raises TrialError when the optimizer has freed what was being edited."""
        opened, visited = self._opened.pop(), self._holding(params)
        for unit in visited:
            unit.pins -= 1
        for unit in visited:
            if source is not None:
                if not unit.live:
                    raise TrialError(
                        "the optimizer stepped inside a block that edits parameters",
                        where=f"GatheredParameters(modifier_rank={source})",
                        fix="Leave the block before engine.step().",
                    )
                self._data.broadcast(unit.full, f"edited {unit.name}", source)
                unit.take_edits()
            if unit in opened:
                unit.free()

    def _holding(self, params: list[nn.Parameter]) -> list[Unit]:
        wanted = {id(param) for param in params}
        return [unit for unit in self._units if any(id(param) in wanted for param in unit.params)]
