"""``zero-trial report RUN_FOLDER``: one run as one HTML page that needs nothing else."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from zero_trial.errors import ConfigError

NAME = "report.html"


def add_parser(subparsers: Any) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "report",
        help="write a run's report as one HTML page",
        description="Read a run's folder, finished or not, and write its curves, memory, configuration with provenance and checkpoints as "
        "one HTML page that loads nothing from anywhere.",
        allow_abbrev=False,
    )
    parser.add_argument("run", type=Path, metavar="RUN_FOLDER", help="such as runs/0001")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help=f"default: RUN_FOLDER/{NAME}")
    parser.set_defaults(handler=handle)


def handle(options: argparse.Namespace) -> int:
    """Run the verb."""
    from zero_trial.report.run_page import render_run
    from zero_trial.report.run_reader import from_run_folder

    report = from_run_folder(options.run)
    write_page(options.output or options.run / NAME, render_run(report))
    return 0


def write_page(path: Path, text: str) -> None:
    """Write the page and say where it is."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"the report cannot be written ({error.strerror})",
            where="--output",
            got=str(path),
            fix="Give another file.",
        ) from error
    print(f"report  {path}")
