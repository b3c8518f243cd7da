"""``zero-trial board``: a live page of the runs in a folder."""

from __future__ import annotations

import argparse
import json
import signal
import threading
from pathlib import Path
from typing import Any

from zero_trial.errors import ConfigError


def add_parser(subparsers: Any) -> None:
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
    parser.set_defaults(handler=_handle)


def _handle(options: argparse.Namespace) -> int:
    """Run the verb."""
    from zero_trial.board.app import serve_runs

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
