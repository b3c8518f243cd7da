"""The entry of ``zero-trial``: finds the verb, runs it, turns an error into a block of text and an exit code."""

from __future__ import annotations

import argparse
import importlib
import sys
import traceback
from collections.abc import Sequence
from typing import TextIO

import zero_trial
from zero_trial.errors import ZeroTrialError

VERBS = (
    "init",
    "check",
    "plan",
    "run",
    "resume",
    "simulate",
    "schedule",
    "config",
    "launch",
    "master",
    "report",
    "sweep",
    "diff",
    "ckpt",
    "env",
)
"""Each is a module of this folder with ``add_parser(subparsers)``."""

_CODES = "exit codes: 0 ok, 1 a fault in the trial's code, 2 user error, 3 does not fit, 4 diverged, 5 infrastructure, 75 preempted (resume it)"


def build_parser() -> argparse.ArgumentParser:
    """The parser of all verbs. The verbs' modules import what they need only when they are run, so this is fast."""
    parser = argparse.ArgumentParser(prog="zero-trial", description=zero_trial.__doc__, epilog=_CODES)
    parser.add_argument("--version", action="version", version=f"zero_trial {zero_trial.__version__}")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error (before the verb)")
    subparsers = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for verb in VERBS:
        importlib.import_module(f"zero_trial.cli.{verb}").add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit code. argparse itself exits with 2 for arguments that it does not know."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        options = build_parser().parse_args(words)
        return int(options.handler(options))
    except ZeroTrialError as error:
        return report_error(error, sys.stderr, debug=words[:1] == ["--debug"])
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read our output has gone
        return 141


def report_error(error: ZeroTrialError, stream: TextIO, *, debug: bool = False) -> int:
    """Print an error as one block, without a traceback unless asked for; returns its exit code."""
    if debug:
        traceback.print_exception(error, file=stream)
    else:
        first, *rest = str(error).splitlines() or [type(error).__name__]
        stream.write("\n".join([f"error   {first}", *(f"        {line}" for line in rest)]) + "\n")
    return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
