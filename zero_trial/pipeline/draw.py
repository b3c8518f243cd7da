"""A simulated schedule drawn as text, a row per rank and a column per unit of time.

    rank 0  F0 F1 .  .  B0 -  F2 B1 -  .  B2 -
    rank 1  .  F0 B0 -  F1 B1 -  F2 B2 -  .  .

``.`` is idle, ``-`` is the rest of an action that takes longer than one unit. With several chunks
per rank an action has its chunk before it: ``2F0``.
"""

from __future__ import annotations

from zero_trial.errors import ConfigError
from zero_trial.pipeline.schedule import Schedule
from zero_trial.pipeline.simulator import RankReport, SimulationReport


def grid(report: SimulationReport) -> str:
    """Return the picture of a report whose costs were whole numbers; others raise ConfigError."""
    chunks = any(len({span.action.chunk for span in rank.spans}) > 1 for rank in report.ranks)
    rows = [_cells(rank, int(report.makespan), chunks) for rank in report.ranks]
    width = max((len(cell) for row in rows for cell in row), default=1)
    head = len(f"rank {len(rows) - 1}")
    return "\n".join(
        f"{f'rank {index}':<{head}}  {' '.join(cell.ljust(width) for cell in row)}".rstrip()
        for index, row in enumerate(rows)
    )


def rows_as_text(schedule: Schedule) -> str:
    """Return every action of every rank, messages and sharding as well, in the order of the row."""
    return "\n".join(f"rank {index}  {' '.join(map(str, row))}" for index, row in enumerate(schedule.rows))


def _cells(rank: RankReport, columns: int, chunks: bool) -> list[str]:
    cells = ["."] * columns
    for begin, end, action in rank.spans:
        if begin != int(begin) or end != int(end):
            raise ConfigError("a grid needs times in whole numbers", where="schedule", got=(begin, end))
        label = str(action) if chunks else f"{action.kind.value}{action.micro_batch}"
        cells[int(begin) : int(end)] = [label, *["-"] * int(end - begin - 1)]
    return cells
