"""Write the reference page: ``python -m zero_trial.ds_config.keys_page
docs/reference/ds_config.md``.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from zero_trial.ds_config.key import Key, Origin, Support
from zero_trial.ds_config.params import OPTIMIZERS, SCHEDULERS, KnownParams
from zero_trial.ds_config.table import TABLE
from zero_trial.schema.document import shown
from zero_trial.schema.types import Opaque

_HEAD = """# ds_config reference

Written from the keys declared in `zero_trial/ds_config/` by `python -m zero_trial.ds_config.keys_page`; do not edit.

Every key that DeepSpeed 0.19.8 and older releases know is read, and has one answer:

| answer | meaning |
|---|---|
| supported | it does what it says |
| no effect | read and checked; what it asks for does not exist in this design, or happens anyway |
| no effect yet | read and checked; only speed, memory or monitoring would change |
| refused | asking for it is an error, because training would not be what was asked for |
| mapped | another spelling of a key of today |

Any other key is an error that names the nearest known one. Defaults are those of DeepSpeed 0.19.8. `null` means that nothing was said.
`"auto"` is filled from the trial's hyperparameters and the model, or is an error that says what is missing.
"""


def reference_markdown() -> str:
    """Return the whole page."""
    sections: dict[str, list[Key]] = {}
    for row in TABLE.values():
        top = row.path.partition(".")[0]
        name = top if "." in row.path or row.is_section else ""
        sections.setdefault(name, []).append(row)
    parts = [_HEAD, "## Top level\n", _table(sections.pop(""))]
    for name, rows in sections.items():
        parts += [f"## `{name}`\n", _table(rows)]
        if name == "optimizer":
            parts.append(_params("optimizer", OPTIMIZERS))
        if name == "scheduler":
            parts.append(_params("scheduler", SCHEDULERS))
    return "\n".join(parts)


def _table(rows: list[Key]) -> str:
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


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(reference_markdown(), "utf-8")
