"""``zero-trial sweep report``: all trials of a search, and its decisions, as one HTML page that needs nothing else."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero_trial.cli.report import write_page
from zero_trial.errors import ConfigError

if TYPE_CHECKING:
    from zero_trial.report.data import SweepReport


def add_parser(subparsers: Any) -> None:
    """Add the verb and its word."""
    parser = subparsers.add_parser("sweep", help="write a search's report as one HTML page")
    words = parser.add_subparsers(dest="word", metavar="WORD", required=True)
    report = words.add_parser(
        "report",
        help="write a search's report",
        description="Read an experiment of the embedded master, or a folder of run folders, and write its learning curves, the search's "
        "decisions, the swept values and the best configuration as one HTML page that loads nothing from anywhere.",
        allow_abbrev=False,
    )
    report.add_argument("sweep", metavar="EXPERIMENT|FOLDER", help="an experiment's id, or a folder of run folders")
    report.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="default: sweep-ID.html, or FOLDER/sweep.html"
    )
    report.add_argument(
        "--root", type=Path, help="the master's folder, if it is not the default one of zero-trial master up"
    )
    report.set_defaults(handler=handle)


def handle(options: argparse.Namespace) -> int:
    """Run the verb."""
    from zero_trial.report.sweep_page import render_sweep

    report, output = read(options.sweep, options.root)
    write_page(options.output or output, render_sweep(report))
    return 0


def read(sweep: str, root: Path | None) -> tuple[SweepReport, Path]:
    """The report and where it is written unless something else is said. A number is an experiment, unless a folder has it for its name."""
    from zero_trial.cli.master import default_root
    from zero_trial.master.directory import MasterDirectory
    from zero_trial.report.master_reader import from_master_store
    from zero_trial.report.run_reader import from_runs

    folder = Path(sweep)
    if folder.is_dir():
        return from_runs(folder), folder / "sweep.html"
    if not sweep.isdigit():
        raise ConfigError(
            "there is no such folder",
            where="EXPERIMENT|FOLDER",
            got=sweep,
            expected="an experiment's id, or a folder of run folders",
        )
    database = MasterDirectory(root or default_root(os.environ)).database
    return from_master_store(database, int(sweep)), Path(f"sweep-{sweep}.html")
