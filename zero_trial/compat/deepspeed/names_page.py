"""Write the reference page: ``python -m zero_trial.compat.deepspeed.names_page
docs/reference/deepspeed.md``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from zero_trial.compat.deepspeed.deepspeed_refused import REFUSED_MODULES, REFUSED_NAMES
from zero_trial.compat.deepspeed.deepspeed_table import OURS, VERSION

_HEAD = f"""# DeepSpeed's names

What `import deepspeed` gives under `zero-trial launch --as-deepspeed`
([guide](../guide/coming_from_deepspeed.md)): every public name of DeepSpeed {VERSION} is answered with
a name of zero_trial or of torch, or refused with a reason. Written from `zero_trial/compat/deepspeed/` by
`python -m zero_trial.compat.deepspeed.names_page`; do not edit.

A refused name is an `ImportError` in `from ... import`, and an `AttributeError` as an attribute. A
name that is in neither list answers with the nearest one.
"""


def reference_markdown() -> str:
    """Return the whole page."""
    lines = [_HEAD, "## Modules that are there", ""]
    for module in sorted({*OURS, *REFUSED_NAMES}):
        lines += _module(module)
    lines += ["## Modules that are refused", "", "With all of their submodules.", ""]
    lines += ["| module | why, and what to do instead |", "|---|---|"]
    lines += [f"| `{module}` | {_cell(refused.reason)} |" for module, refused in sorted(REFUSED_MODULES.items())]
    return "\n".join(lines) + "\n"


def _module(module: str) -> Iterator[str]:
    yield from (f"### {module}", "")
    names = {
        name: target.replace(":", ".")
        for name, target in OURS.get(module, {}).items()
        if not name.startswith("_") or name.endswith("__")
    }
    if names:
        yield from ("| name | is |", "|---|---|")
        yield from (f"| `{name}` | `{names[name]}` |" for name in sorted(names, key=_order))
        yield ""
    refused = REFUSED_NAMES.get(module, {})
    if refused:
        yield from ("| refused | why, and what to do instead |", "|---|---|")
        for reason, listed in refused.items():
            shown = ", ".join(f"`{name}`" for name in sorted(listed.split(), key=_order))
            yield f"| {shown} | {_cell(reason)} |"
        yield ""


def _order(name: str) -> tuple[str, str]:
    return name.lower(), name


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(reference_markdown(), encoding="utf-8")
