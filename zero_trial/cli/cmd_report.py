"""``zero-trial report``, ``sweep report`` and ``board``: a run or a search as one HTML page, and a
live page of runs."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from zero_trial.errors import ConfigError
from zero_trial.util.text import strip_control

if TYPE_CHECKING:
    from zero_trial.master.directory import MasterDirectory
    from zero_trial.report.report_data import SweepReport


NAME = "report.html"


def add_parser(subparsers: Any) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "report",
        help="write the report of a run or an experiment as one HTML page",
        description="Read a run's folder, finished or not, and write its curves, memory, configuration with provenance and checkpoints as "
        "one HTML page that loads nothing from anywhere. Of an experiment of the embedded master, or of a folder of run folders, write "
        "what sweep report writes.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "run", metavar="RUN_FOLDER|EXPERIMENT", help="a run's folder, such as runs/0001, or an experiment's id"
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help=f"the page to write (default: RUN_FOLDER/{NAME}, or sweep-ID.html)",
    )
    _add_root(parser)
    parser.set_defaults(handler=_handle)


def _add_root(parser: argparse.ArgumentParser) -> None:
    """Add the option for the folder of the master."""
    parser.add_argument("--root", type=Path, help="the master's folder (default: the same as zero-trial master's)")


def _handle(options: argparse.Namespace) -> int:
    from zero_trial.report.run_page import render_run
    from zero_trial.report.run_reader import from_run_folder, is_run

    folder = Path(options.run)
    if not is_run(folder) and (options.run.isdigit() or _holds_runs(folder)):
        return _report_sweep(argparse.Namespace(sweep=options.run, root=options.root, output=options.output))
    report = from_run_folder(folder)
    _write_page(options.output or folder / NAME, render_run(report))
    _warn(report.left_out)
    return 0


def _warn(left_out: Iterable[str], place: str = "") -> None:
    for part in left_out:
        sys.stderr.write(strip_control(f"warn    not in the report: {place}{part}\n"))


def _holds_runs(folder: Path) -> bool:
    from zero_trial.report.run_reader import is_run

    return folder.is_dir() and any(inner.is_dir() and is_run(inner) for inner in folder.iterdir())


def _write_page(path: Path, text: str) -> None:
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


def add_sweep_parser(subparsers: Any) -> None:
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
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="the page to write (default: sweep-ID.html, or FOLDER/sweep.html)",
    )
    _add_root(report)
    report.set_defaults(handler=_report_sweep)


def _report_sweep(options: argparse.Namespace) -> int:
    from zero_trial.report.sweep_page import render_sweep

    report, output = _read_sweep(options.sweep, options.root)
    _write_page(options.output or output, render_sweep(report))
    for trial in report.trials:
        _warn(trial.left_out, f"{trial.id}/")
    return 0


def _read_sweep(sweep: str, root: Path | None) -> tuple[SweepReport, Path]:
    """Return the report and where it is written unless something else is said.

    A number is an experiment, unless a folder has it for its name.
    """
    from zero_trial.cli.cmd_master import default_root
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
    home = MasterDirectory(root or default_root(os.environ))
    if root is None:
        _require_addressed(home, os.environ)
    return from_master_store(home.database, int(sweep)), Path(f"sweep-{sweep}.html")


def _require_addressed(home: MasterDirectory, env: Mapping[str, str]) -> None:
    """Raise ConfigError where ``det`` in this shell talks to another master than the one of
    ``home``: its experiments have the same numbers."""
    addressed, own = env.get("DET_MASTER"), home.state().get("url")
    if addressed and own and _address(addressed, "DET_MASTER") != _address(own, str(home.root)):
        raise ConfigError(
            "the experiment's master is not clear: DET_MASTER is not the one of this folder",
            where=str(home.root),
            got=f"{own}, and DET_MASTER={addressed}",
            fix='Give the master\'s folder (--root), or eval "$(zero-trial master up --root FOLDER --env)".',
        )


def _address(url: str, where: str) -> tuple[str | None, int | None]:
    """Return host and port; all names of this host are one. Raises ConfigError for no address."""
    from zero_trial.launch.this_host import host_names

    try:
        parts = urlsplit(url if "//" in url else f"//{url}")
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(
            f"this is no address ({error})",
            where=where,
            got=url,
            expected="http://HOST:PORT",
            fix="Set it to the master's address, or give the master's folder (--root).",
        ) from None
    here = {"::1", *(name.lower() for name in host_names())}
    return "localhost" if host in here else host, port


def add_board_parser(subparsers: Any) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "board",
        help="serve a live page of the runs in a folder",
        description="Serve a read-only page of the runs in a folder, or of one run, on this machine until it is interrupted: curves, memory, "
        "checkpoints and logs as they come, and comparisons. The address that is printed has the token in it; without it nothing is "
        "answered. For the experiments of the embedded master, zero-trial master up prints the address of the same page.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "folder", metavar="FOLDER", type=Path, help="a folder of run folders, such as runs, or one of them"
    )
    parser.add_argument("--port", type=int, default=0, help="port to listen on (default: a free one)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(handler=_serve_board)


def _serve_board(options: argparse.Namespace) -> int:
    from zero_trial.report.board import serve_runs

    if not 0 <= options.port <= 65535:
        raise ConfigError("this is not a port", where="--port", got=options.port, expected="0 to 65535")
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())

    def ready(address: str) -> None:
        text = json.dumps({"board": address}) if options.json else f"board  {address}\nCtrl-C ends it"
        print(text, flush=True)

    serve_runs(options.folder, options.port, ready, stop)
    return 0
