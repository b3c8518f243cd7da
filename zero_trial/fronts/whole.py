"""Where a run starts: the newest checkpoint that is whole, which all ranks agree on before the trial is built.

A checkpoint may have been damaged since it was made: a bit flipped, a file cut short or gone. Then the one before it is taken, and that is
said. All of it is read for that, each file by one rank; the engine's load checks once more what it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from zero_trial.checkpoint import CheckpointReader
from zero_trial.errors import CheckpointError
from zero_trial.fronts.local import starting_point
from zero_trial.platform.protocols import Distributed
from zero_trial.platform.seal import find_fault, manifests

Note = Callable[[str], None]


def agreed_start(
    ranks: Distributed, run_dir: Path, resume: Path | None = None, warm_start: Path | None = None, *, note: Note
) -> dict[str, Any]:
    """Collective. See :func:`starting_point`; ``note`` hears on rank 0 of each checkpoint that is passed over.

    Raises CheckpointError on every rank where there are checkpoints and none is whole: a run that starts afresh then was not meant to.
    """
    damaged: dict[str, str] = {}
    while True:
        start = ranks.broadcast(_propose(damaged, run_dir, resume, warm_start) if ranks.rank == 0 else None)
        if "fault" in start:
            raise CheckpointError(
                "no checkpoint is whole",
                where=str(run_dir),
                got=start["fault"],
                fix="Start in another folder, or move the damaged checkpoints away to start afresh.",
            )
        if start["checkpoint"] is None:
            return dict(start)
        found = ranks.allgather(fault_of(Path(start["checkpoint"]), ranks.rank, ranks.size))
        faults = [fault for fault in found if fault is not None]
        if not faults:
            return dict(start)
        damaged[start["checkpoint"]] = faults[0]
        if ranks.rank == 0:
            note(f"a damaged checkpoint is passed over: {faults[0]}")


def fault_of(folder: Path, index: int, count: int) -> str | None:
    """What is wrong with a finished checkpoint; None if nothing. Of ``count`` ranks each reads its share of the files of tensors."""
    if index == 0 and (fault := find_fault(folder)) is not None:
        return fault
    try:
        for manifest in manifests(folder):
            CheckpointReader(manifest.parent).verify(index, count)
    except CheckpointError as error:
        return str(error)
    except OSError as error:  # on this rank alone, perhaps: the others wait for its answer
        return f"rank {index} cannot read {folder} ({error.strerror or error})"
    return None


def _propose(damaged: Mapping[str, str], run_dir: Path, resume: Path | None, warm_start: Path | None) -> dict[str, Any]:
    """Rank 0: the next candidate, or a fault where all have been damaged."""
    try:
        start = starting_point(run_dir, resume, warm_start, apart_from=damaged)
    except CheckpointError:
        start = {"checkpoint": None}
    return {"fault": next(iter(damaged.values()))} if damaged and start["checkpoint"] is None else start
