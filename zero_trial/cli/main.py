"""The entry point of ``zero-trial``: run a verb, and turn errors into text and an exit code."""

from __future__ import annotations

import argparse
import difflib
import importlib
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

import zero_trial
from zero_trial.errors import ExitStatus, StorageError, ZeroTrialError
from zero_trial.util.text import strip_control

VERBS: Mapping[str, str] = {
    "init": "cmd_start:add_init_parser",
    "check": "cmd_plan:add_check_parser",
    "plan": "cmd_plan:add_plan_parser",
    "tune": "cmd_plan:add_tune_parser",
    "run": "cmd_run:add_parser",
    "resume": "cmd_run:add_resume_parser",
    "simulate": "cmd_simulate:add_parser",
    "schedule": "cmd_simulate:add_schedule_parser",
    "config": "cmd_plan:add_config_parser",
    "launch": "cmd_run:add_launch_parser",
    "master": "cmd_master:add_parser",
    "report": "cmd_report:add_parser",
    "sweep": "cmd_report:add_sweep_parser",
    "board": "cmd_report:add_board_parser",
    "diff": "cmd_report:add_diff_parser",
    "ckpt": "cmd_ckpt:add_parser",
    "env": "cmd_start:add_env_parser",
    "completion": "cmd_completion:add_parser",
}
"""Verb -> module of this folder and the function that adds its parser."""

_ABOUT = """Train PyTorch models sharded (ZeRO 0 to 3), offloaded and in pipelines, on this machine or a cluster.
To begin: zero-trial init my_trial, then check, run and report in that folder."""

_CODES = "exit codes: " + ", ".join(f"{code} {code.meaning}" for code in ExitStatus)


class _Parser(argparse.ArgumentParser):
    """Rejects abbreviated options, because a new option would change their meaning."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all verbs.

    Fast, because the verbs import their dependencies only when they run.
    """
    parser = _Parser(prog="zero-trial", description=_ABOUT, epilog=_CODES)
    parser.add_argument("--version", action="version", version=f"zero_trial {zero_trial.__version__}")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error (before the verb)")
    subparsers = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for place in VERBS.values():
        module, _, function = place.partition(":")
        getattr(importlib.import_module(f"zero_trial.cli.{module}"), function)(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; return the exit code. argparse exits with 2 for unknown arguments."""
    words = list(sys.argv[1:] if argv is None else argv)
    debug = words[:1] == ["--debug"]
    try:
        options = _parse(build_parser(), words)
        return int(options.handler(options))
    except ZeroTrialError as error:
        return report_error(error, sys.stderr, debug=debug)
    except KeyboardInterrupt:
        return ExitStatus.INTERRUPTED
    except BrokenPipeError:
        return ExitStatus.BROKEN_PIPE
    except OSError as error:
        # full disk, missing permission: not our bug, so a traceback does not help
        wrapped = StorageError(
            f"the operating system reported: {error.strerror or error}",
            where=str(error.filename) if error.filename else None,
        )
        wrapped.__cause__ = error
        return report_error(wrapped, sys.stderr, debug=debug)


def _parse(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    """Parse the words with argparse, which exits on errors; for a misspelled verb, suggest the
    nearest one."""
    if not words:
        parser.print_help(sys.stderr)
        raise SystemExit(2)
    verb = next((word for word in words if not word.startswith("-")), None)
    near = difflib.get_close_matches(verb, VERBS, 1) if verb is not None and verb not in VERBS else []
    if near:
        parser.error(f"unknown verb {verb}. Did you mean {near[0]}?")
    options, rest = parser.parse_known_args(words)
    if rest:  # argparse reads a verb's last positional arguments only before the first option
        if not isinstance(getattr(options, "settings", None), list) or any(word.startswith("-") for word in rest):
            own, name = _of_verb(parser, words), rest[0].partition("=")[0]
            near = difflib.get_close_matches(name, own._option_string_actions, 1, cutoff=0.7)
            advice = f". Did you mean {near[0]}?" if near else ""
            if not near and hasattr(options, "settings"):
                advice = f". Write a hyperparameter after the folder: hyperparameters.{name.lstrip('-')}=VALUE"
            own.error(f"unrecognized arguments: {' '.join(rest)}{advice}")
        options.settings += rest
    return options


def _of_verb(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.ArgumentParser:
    """Return the parser that reads the options of the verb in ``words``."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            verb = next((word for word in words if word in action.choices), None)
            return parser if verb is None else _of_verb(action.choices[verb], words[words.index(verb) + 1 :])
    return parser


def report_error(error: ZeroTrialError, stream: TextIO, *, debug: bool = False) -> int:
    """Print an error as one block, with a traceback only if ``debug``; return its exit code."""
    if debug:
        traceback.print_exception(error, file=stream)
    else:
        first, *rest = strip_control(str(error)).splitlines() or [type(error).__name__]
        stream.write("\n".join([f"error   {first}", *(f"        {line}" for line in rest)]) + "\n")
    return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
