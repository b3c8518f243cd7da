"""The reference pages that follow from tables: ``python -m tests.docs.reference`` writes them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path

from zero_trial.cli.main import build_parser
from zero_trial.compat.deepspeed.deepspeed_table import OURS, REFUSED_MODULES, VERSION
from zero_trial.ds_config.key import Key, Origin, Support
from zero_trial.ds_config.keys_training import OPTIMIZERS, SCHEDULERS, KnownParams
from zero_trial.ds_config.table import TABLE
from zero_trial.errors import ExitStatus
from zero_trial.schema.document import shown
from zero_trial.schema.types import Opaque

FOLDER = Path(__file__).parents[2] / "docs" / "reference"

_KEYS_HEAD = """# ds_config reference

Written from the keys declared in `zero_trial/ds_config/` by `python -m tests.docs.reference`; do not edit.

Every key that DeepSpeed 0.19.8 and older releases know is read, and has one of these answers:

| answer | meaning |
|---|---|
| supported | it does what it says |
| no effect | read and checked; its feature does not exist in this design, or is always on |
| no effect yet | read and checked; only speed, memory or monitoring would change |
| refused | setting it is an error, because training would not do what the key requests |
| mapped | an older spelling of a current key |

Any other key is an error that names the nearest known one. Defaults are those of DeepSpeed 0.19.8. `null` means that the key is not set.
`"auto"` is filled in from the trial's hyperparameters and the model; if the value is not there, it is an error that names it.
"""


def keys_page() -> str:
    """Return the page of ds_config's keys."""
    sections: dict[str, list[Key]] = {}
    for row in TABLE.values():
        top = row.path.partition(".")[0]
        name = top if "." in row.path or row.is_section else ""
        sections.setdefault(name, []).append(row)
    parts = [_KEYS_HEAD, "## Top level\n", _key_table(sections.pop(""))]
    for name, rows in sections.items():
        parts += [f"## `{name}`\n", _key_table(rows)]
        if name == "optimizer":
            parts.append(_params("optimizer", OPTIMIZERS))
        if name == "scheduler":
            parts.append(_params("scheduler", SCHEDULERS))
    return "\n".join(parts)


def _key_table(rows: list[Key]) -> str:
    lines = ["| key | value | default | answer | |", "|---|---|---|---|---|"]
    lines += [_line(row) for row in rows]
    return "\n".join(lines) + "\n"


def _line(row: Key) -> str:
    names = f"`{row.path}`" + "".join(f", `{alias}`" for alias in row.aliases)
    default = "" if row.is_section or row.required or isinstance(row.type, Opaque) else f"`{shown(row.default)}`"
    if row.was is not None:
        default += f" (was `{row.was}`)"
    says = row.meaning
    if row.support is Support.REFUSED and row.instead:
        says += f". {row.instead}"
    if row.becomes:
        says += f"; becomes `{row.becomes}`"
    if row.origin is not Origin.DEEPSPEED:
        says += f" *({row.origin.value})*"
    return f"| {names} | {row.type.describe()} | {default} | {row.support.value} | {says} |"


def _params(section: str, table: Mapping[str, KnownParams]) -> str:
    lines = []
    for named in table.values():
        lines += [f"### `{section}.type: {named.name}`\n", "| parameter | value | default |", "|---|---|---|"]
        for name, param in named.params.items():
            default = "required" if param.required else f"`{shown(param.default)}`"
            lines.append(f"| `{name}` | {param.type.describe()} | {default} |")
        lines.append("")
    return "\n".join(lines)


_NAMES_HEAD = f"""# DeepSpeed's names

This page lists the names of DeepSpeed {VERSION} that `import deepspeed` provides under `zero-trial launch
--as-deepspeed` ([guide](../guide/coming_from_deepspeed.md)): those that libraries and scripts use.
`python -m tests.docs.reference` writes this page; do not edit it.

Any other name raises an `ImportError` in `from ... import`, and an `AttributeError` as an attribute. The
message contains the reason or the nearest name.

| module | names |
|---|---|
"""


def names_page() -> str:
    """Return the page of DeepSpeed's names."""
    lines = []
    for module, names in sorted(OURS.items()):
        shown = sorted((name for name in names if not name.startswith("_") or name.endswith("__")), key=str.lower)
        lines.append(f"| `{module}` | {', '.join(f'`{name}`' for name in shown)} |")
    lines += ["", "## Refused, including their submodules", "", "| name | what to do instead |", "|---|---|"]
    lines += [f"| `{name}` | {refused.reason} |" for name, refused in sorted(REFUSED_MODULES.items())]
    return _NAMES_HEAD + "\n".join(lines) + "\n"


_CLI_HEAD = """# Command line

The commands of `zero-trial`, which is also installed as `zt`. `zero-trial VERB --help` prints the same texts; `--debug`
before the verb shows the traceback of an error. This page is generated; a test compares it with the parsers.

## Exit codes
"""


def cli_page() -> str:
    """Return the page of the command line, from its parsers."""
    lines = [_CLI_HEAD, "| code | meaning |", "|---|---|"]
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


if __name__ == "__main__":
    (FOLDER / "cli.md").write_text(cli_page(), "utf-8")
    (FOLDER / "ds_config.md").write_text(keys_page(), "utf-8")
    (FOLDER / "deepspeed.md").write_text(names_page(), "utf-8")
