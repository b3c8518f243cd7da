"""Which arithmetic the ranks of a world use on CPU: all the same, native only where every rank has it.

Kernels and plain torch round differently in the last bit, so ranks that differed would train on weights that drift apart where they are
copies of each other, and a run would depend on which rank was placed where.
"""

from __future__ import annotations

import logging
from typing import Any

from zero_trial.errors import KernelUnavailable
from zero_trial.mesh import AxisComm
from zero_trial.ops import Backend, backend

log = logging.getLogger("zero_trial")


def agree_on_kernels(world: AxisComm) -> None:
    """Finds out what every rank has; where one has no native kernels, this process gives up its own. Collective over ``world``.

    Rank 0 says so once. Raises KernelUnavailable on every rank where one was told to use native kernels and cannot, or can and others cannot.
    """
    own, trouble = _own()
    told = {
        "native": own is not None and own.native is not None,
        "why": trouble.what if trouble is not None else own.why if own is not None else "",
        "strict": trouble is not None or (own is not None and own.strict),
    }
    everyone: list[dict[str, Any]] = world.gather_json(told, "kernels")
    if trouble is not None:
        raise trouble
    blind = next((rank for rank, row in enumerate(everyone) if not row["native"]), None)
    if blind is None or not any(row["native"] or row["strict"] for row in everyone):
        return
    why = f"rank {world.ranks[blind]} has none ({everyone[blind]['why']})"
    if any(row["strict"] for row in everyone):
        raise KernelUnavailable(
            "not every rank has native kernels, and all must compute alike",
            where="ZERO_TRIAL_OPS=native",
            got=why,
            fix="Mend that rank, or set it to auto.",
        )
    if backend().native is not None:
        backend().withdraw(why)
    if world.index == 0:
        log.warning("CPU kernels run as plain torch on all ranks, so that they compute alike: %s", why)


def _own() -> tuple[Backend | None, KernelUnavailable | None]:
    """This rank's backend, or why it has none although it must: the others are to hear of that before it ends."""
    try:
        return backend(), None
    except KernelUnavailable as trouble:
        return None, trouble
