"""``zero-trial completion``: print a completion script for a shell."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_PATHS = ("experiment_path", "model_dir", "run")  # parsed as text, but files or folders
_INTO = """Write the shell's script. Once, for bash: zero-trial completion bash > ~/.local/share/bash-completion/completions/zero-trial;
for zsh: zero-trial completion zsh > a folder of $fpath, as _zero-trial. Then start a new shell."""


def add_parser(subparsers: Any) -> None:
    """Add the verb."""
    parser = subparsers.add_parser("completion", help="print a shell completion script", description=_INTO)
    parser.add_argument("shell", choices=["bash", "zsh", "tcsh"], help="the shell")
    parser.set_defaults(handler=_handle)


def _handle(options: argparse.Namespace) -> int:
    """Print the script."""
    import shtab

    from zero_trial.cli.main import build_parser

    parser = build_parser()
    for action in _actions(parser):
        if action.type is Path or action.dest in _PATHS:
            vars(action)["complete"] = shtab.FILE
    print(shtab.complete(parser, options.shell))
    return 0


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield the arguments of a parser and its subcommands."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from _actions(inner)
