"""What is written from the parsers: the reference page (``python -m zero_trial.cli.cli_page
docs/reference/cli.md``), and for ``zero-trial completion`` the words that a shell offers.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zero_trial.errors import ExitStatus

_HEAD = """# Command line

The commands of `zero-trial`, which is also installed as `zt`. `zero-trial VERB --help` prints the same texts; `--debug`
before the verb shows the traceback of an error. This page is generated; a test compares it with the parsers.

## Exit codes
"""


def render() -> str:
    """Return the whole page."""
    from zero_trial.cli.main import build_parser  # which reads this module for the verb's parser

    lines = [_HEAD, "| code | meaning |", "|---|---|"]
    lines += [f"| {code} | {_cell(code.meaning)} |" for code in ExitStatus]
    lines += ["| 128 + n | stopped by signal n |", ""]
    for path, parser in _parsers(build_parser()):
        lines += _section(path, parser)
    return "\n".join(lines).rstrip() + "\n"


def _parsers(
    parser: argparse.ArgumentParser, path: str = "zero-trial"
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield every parser that takes no further verb, with what is typed to reach it."""
    children = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not children:
        yield path, parser
    for action in children:
        for name, child in action.choices.items():
            yield from _parsers(child, f"{path} {name}")


def _section(path: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    actions = [action for action in parser._actions if action.help is not argparse.SUPPRESS and action.dest != "help"]
    positional = [action for action in actions if not action.option_strings]
    usage = " ".join(
        [
            path,
            *(_positional(action) for action in positional),
            *(["[OPTIONS]"] if len(positional) < len(actions) else []),
        ]
    )
    yield from (f"## {path}", "", f"    {usage}", "")
    if parser.description:
        yield from (_prose(parser.description), "")
    if actions:
        yield from ("| argument | meaning |", "|---|---|")
        yield from (f"| `{_cell(_name(action))}` | {_help(action)} |" for action in actions)
        yield ""


def _positional(action: argparse.Action) -> str:
    name = _metavar(action)
    if action.nargs == argparse.REMAINDER:
        return f"[{name} ...]"
    return f"[{name}]" if action.nargs == "?" else name


def _name(action: argparse.Action) -> str:
    if not action.option_strings or action.nargs == 0:
        return ", ".join(action.option_strings) or _metavar(action)
    return f"{', '.join(action.option_strings)} {_metavar(action)}"


def _metavar(action: argparse.Action) -> str:
    if action.metavar is None and action.choices is not None:
        return "{" + ",".join(map(str, action.choices)) + "}"
    given = action.metavar or (action.dest.upper() if action.option_strings else action.dest)
    return given if isinstance(given, str) else " ".join(given)


def _help(action: argparse.Action) -> str:
    return _cell((action.help or "") % {**vars(action), "prog": "zero-trial"})


def _cell(text: str) -> str:
    return _prose(text).replace("|", "\\|")


def _prose(text: str) -> str:
    return " ".join(text.split())


_PATHS = ("experiment_path", "model_dir", "run")  # read as text, and yet files or folders
_INTO = """Write the shell's script. Once, for bash: zero-trial completion bash > ~/.local/share/bash-completion/completions/zero-trial;
for zsh: zero-trial completion zsh > a folder of $fpath, as _zero-trial. Then start a new shell."""


def add_parser(subparsers: Any) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "completion", help="print a script with which a shell completes words", description=_INTO
    )
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
    """Yield the arguments of a parser and of its words."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from _actions(inner)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(render(), encoding="utf-8")
