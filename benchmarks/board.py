"""The live page of a large search: the cost of the first page, and of the next one after each
trial has reported once more.

    python benchmarks/board.py                       # 100 trials x 10 000 reports
    python benchmarks/board.py --trials 20 --points 2000  # quick

Creates a master's store with one random search whose trials trained at the same time: their reports
alternate and are added one by one, as a master adds them. Renders each page as the board does,
without a network: reading, thinning, drawing. `CPU s` counts this process alone.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sqlite3
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import record
from zero_trial.master.directory import MasterDirectory
from zero_trial.master.records import Experiment, ExperimentState, MetricReport, Trial, TrialState
from zero_trial.master.store import Database, experiment_rows, metric_rows, trial_rows
from zero_trial.report.board import View, render_view
from zero_trial.report.master_reader import StoreSource

STARTED = 1_790_000_000.0
CONFIG: dict[str, Any] = {
    "name": "board",
    "searcher": {"name": "random", "metric": "validation_loss", "smaller_is_better": True},
    "hyperparameters": {"lr": {"type": "log", "base": 10, "minval": -4, "maxval": -1}},
}
PAGES = {
    "all": View(),
    "experiment, validation_loss": View("experiment", ("1",)),
    "experiment, training loss": View("experiment", ("1",), ("training", "loss")),
    "trial": View("trial", ("1",)),
    "12 trials compared": View("compare", tuple(map(str, range(1, 13)))),
}
COLUMNS: list[record.Column] = [
    ("page", lambda row: row["page"]),
    ("first, CPU s", record.number("first_cpu", 3)),
    ("first, s", record.number("first", 3)),
    ("further, CPU s", record.number("further_cpu", 3)),
    ("unchanged, CPU s", record.number("unchanged_cpu", 3)),
    ("kB", record.number("kilobytes", 0)),
]
NOTE = """Seconds to make one page: `first` with nothing read yet, `further` after a report of each trial, `unchanged` after none, which
streams do not make at all. Each first is that of a new reader of the same store."""


def add_reports(connection: sqlite3.Connection, count: int, steps: Iterable[int]) -> None:
    """Add reports of trials that train at the same time: three metrics at each step, and a
    validation at each hundredth step."""
    draw = random.Random(7)
    for step in steps:
        for trial in range(1, count + 1):
            loss = 2.0 + 6.0 * math.exp(-step / 2000 / trial) + draw.gauss(0, 0.1)
            values = {"loss": loss, "accuracy": 1 - loss / 9, "lr": 1e-3 * (1 - step / 1e6)}
            metric_rows.add(connection, MetricReport(trial, 1, "training", step, values, reported=STARTED + step))
            if step % 100 == 0:
                values = {"validation_loss": loss, "batches": step}
                report = MetricReport(trial, 1, "validation", step, values, reported=STARTED + step)
                metric_rows.add(connection, report, loss)


def make_store(directory: MasterDirectory, count: int, points: int) -> None:
    """Create one experiment with ``count`` trials of ``points`` reports each."""
    directory.prepare()
    database = Database(directory.database)
    with database.transaction() as connection:
        text = json.dumps(CONFIG)
        number = experiment_rows.add(
            connection, Experiment(0, ExperimentState.ACTIVE, CONFIG, text, "me", "job", STARTED, name="board"), b""
        )
        for at in range(count):
            trial_rows.add(
                connection,
                Trial(
                    0, number, f"r{at}", f"1.{at}", TrialState.ACTIVE, {"lr": 10 ** (-1 - 3 * at / count)}, at, STARTED
                ),
            )
        add_reports(connection, count, range(1, points + 1))
    database.close()


def make(source: StoreSource, view: View) -> tuple[float, float, float]:
    """Render a page once, and return CPU seconds, seconds and kilobytes."""
    cpu, began = time.process_time(), time.perf_counter()
    size = sum(len(str(section.markup())) for section in render_view(source, view))
    return time.process_time() - cpu, time.perf_counter() - began, size / 1000


def main() -> None:
    """Measure each page and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--points", type=int, default=10_000)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        directory = MasterDirectory(Path(folder))
        make_store(directory, options.trials, options.points)
        database, step = Database(directory.database), options.points
        for name, view in PAGES.items():
            source = StoreSource(directory)
            first_cpu, first, size = make(source, view)
            step += 1
            with database.transaction() as connection:
                add_reports(connection, options.trials, [step])
            further_cpu, _, _ = make(source, view)
            unchanged_cpu, _, _ = make(source, view)
            rows.append(
                {
                    "page": name,
                    "first_cpu": first_cpu,
                    "first": first,
                    "further_cpu": further_cpu,
                    "unchanged_cpu": unchanged_cpu,
                    "kilobytes": size,
                }
            )
        database.close()
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    settings = {"trials": options.trials, "points": options.points, "load of the machine": f"({load})"}
    record.save("board", settings, rows, COLUMNS, NOTE)


if __name__ == "__main__":
    main()
