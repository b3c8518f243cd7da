"""Write the reference page: ``python -m zero_trial.compat.deepspeed.names_page
docs/reference/deepspeed.md``."""

from __future__ import annotations

import sys
from pathlib import Path

from zero_trial.compat.deepspeed.deepspeed_refused import REFUSED_MODULES
from zero_trial.compat.deepspeed.deepspeed_table import OURS, VERSION

_HEAD = f"""# DeepSpeed's names

What `import deepspeed` gives under `zero-trial launch --as-deepspeed`
([guide](../guide/coming_from_deepspeed.md)): the names of DeepSpeed {VERSION} that libraries and scripts
import. Written from `zero_trial/compat/deepspeed/` by `python -m zero_trial.compat.deepspeed.names_page`; do
not edit.

Any other name is an `ImportError` in `from ... import`, and an `AttributeError` as an attribute. The
message has the reason, or the nearest name.

| module | names |
|---|---|
"""


def reference_markdown() -> str:
    """Return the whole page."""
    lines = []
    for module, names in sorted(OURS.items()):
        shown = sorted((name for name in names if not name.startswith("_") or name.endswith("__")), key=str.lower)
        lines.append(f"| `{module}` | {', '.join(f'`{name}`' for name in shown)} |")
    lines += ["", "## Refused, with all that is below them", "", "| name | what to do instead |", "|---|---|"]
    lines += [f"| `{name}` | {refused.reason} |" for name, refused in sorted(REFUSED_MODULES.items())]
    return _HEAD + "\n".join(lines) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(reference_markdown(), encoding="utf-8")
