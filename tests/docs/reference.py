"""The reference pages that follow from tables: ``python -m tests.docs.reference`` writes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from zero_trial.compat.deepspeed.deepspeed_table import OURS, REFUSED_MODULES, VERSION
from zero_trial.ds_config.key import Key, Origin, Support
from zero_trial.ds_config.keys_training import OPTIMIZERS, SCHEDULERS, KnownParams
from zero_trial.ds_config.table import TABLE
from zero_trial.schema.document import shown
from zero_trial.schema.types import Opaque

FOLDER = Path(__file__).parents[2] / "docs" / "reference"

_KEYS_HEAD = """# ds_config reference

Written from the keys declared in `zero_trial/ds_config/` by `python -m tests.docs.reference`; do not edit.

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

What `import deepspeed` gives under `zero-trial launch --as-deepspeed`
([guide](../guide/coming_from_deepspeed.md)): the names of DeepSpeed {VERSION} that libraries and scripts
import. Written by `python -m tests.docs.reference`; do not edit.

Any other name is an `ImportError` in `from ... import`, and an `AttributeError` as an attribute. The
message has the reason, or the nearest name.

| module | names |
|---|---|
"""


def names_page() -> str:
    """Return the page of DeepSpeed's names."""
    lines = []
    for module, names in sorted(OURS.items()):
        shown = sorted((name for name in names if not name.startswith("_") or name.endswith("__")), key=str.lower)
        lines.append(f"| `{module}` | {', '.join(f'`{name}`' for name in shown)} |")
    lines += ["", "## Refused, with all that is below them", "", "| name | what to do instead |", "|---|---|"]
    lines += [f"| `{name}` | {refused.reason} |" for name, refused in sorted(REFUSED_MODULES.items())]
    return _NAMES_HEAD + "\n".join(lines) + "\n"


if __name__ == "__main__":
    (FOLDER / "ds_config.md").write_text(keys_page(), "utf-8")
    (FOLDER / "deepspeed.md").write_text(names_page(), "utf-8")
