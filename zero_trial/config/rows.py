"""Rows of name, value and source, and how they are printed as a table."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from zero_trial.config.canonical import shown


@dataclass(frozen=True)
class Row:
    """One value: its name, what it is, where it came from, and a remark if there is something to say."""

    name: str
    value: Any
    source: str
    remark: str = ""


def render_rows(rows: Iterable[Row]) -> str:
    """The rows in aligned columns, one line each."""
    cells = [(row.name, shown(row.value), row.source, row.remark) for row in rows]
    widths = [max((len(cell[column]) for cell in cells), default=0) for column in range(3)]
    lines = []
    for name, value, source, remark in cells:
        line = f"{name:<{widths[0]}}  {value:<{widths[1]}}  {source:<{widths[2]}}  {remark}"
        lines.append(line.rstrip())
    return "\n".join(lines)
