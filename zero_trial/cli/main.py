"""The entry of ``zero-trial``: finds the verb, runs it, turns an error into a block of text and an exit code."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import zero_trial


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit code (0 ok, 2 user, 3 does not fit, 4 diverged, 5 infrastructure, 75 preempted)."""
    parser = argparse.ArgumentParser(prog="zero-trial", description=zero_trial.__doc__)
    parser.add_argument("--version", action="version", version=f"zero_trial {zero_trial.__version__}")
    parser.parse_args(sys.argv[1:] if argv is None else argv)
    parser.print_help()
    return 0
