"""A grid: a simulated schedule as text, a row per rank and a column per unit of time. Pure.

    rank 0  F0 F1 .  .  B0 -  F2 B1 -  .  B2 -
    rank 1  .  F0 B0 -  F1 B1 -  F2 B2 -  .  .

``.`` is idle, ``-`` goes on with what is left of it. With several chunks per rank an action has its chunk before it: ``2F0``.
"""

from __future__ import annotations

from zero_trial.errors import ConfigError
from zero_trial.pipeline.actions import Action
from zero_trial.pipeline.report import RankReport, Report
from zero_trial.pipeline.schedule import Schedule

IDLE, GOES_ON = ".", "-"


def grid(report: Report) -> str:
    """The picture of a report whose costs were whole numbers; others raise ConfigError."""
    columns = _whole(report.makespan)
    chunks = any(len({span.action.chunk for span in rank.spans}) > 1 for rank in report.ranks)
    rows = [_cells(rank, columns, chunks) for rank in report.ranks]
    width = max((len(cell) for row in rows for cell in row), default=1)
    head = len(f"rank {len(rows) - 1}")
    return "\n".join(
        f"{f'rank {index}':<{head}}  {' '.join(cell.ljust(width) for cell in row)}".rstrip()
        for index, row in enumerate(rows)
    )


def rows_as_text(schedule: Schedule) -> str:
    """Every action of every rank, messages and sharding as well, in the order of the row."""
    return "\n".join(f"rank {index}  {' '.join(map(str, row))}" for index, row in enumerate(schedule.rows))


def _cells(rank: RankReport, columns: int, chunks: bool) -> list[str]:
    cells = [IDLE] * columns
    for begin, end, action in rank.spans:
        first, after = _whole(begin), _whole(end)
        cells[first:after] = [_label(action, chunks), *[GOES_ON] * (after - first - 1)][: after - first]
    return cells


def _label(action: Action, chunks: bool) -> str:
    return str(action) if chunks else f"{action.kind.value}{action.micro_batch}"


def _whole(time: float) -> int:
    if time != int(time):
        raise ConfigError(
            "a grid needs times in whole numbers", where="schedule", got=time, fix="Give the costs as whole numbers."
        )
    return int(time)
