"""``python -m zero_trial.ops [--json]``: print what each op runs as on this machine, or why
``ZERO_TRIAL_OPS`` is not possible."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from zero_trial.errors import ZeroTrialError
from zero_trial.ops.dispatch import as_dict, as_text, report


def main(arguments: Sequence[str]) -> int:
    """Print the report."""
    parser = argparse.ArgumentParser(prog="python -m zero_trial.ops", description="what each op runs as here, and why")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args(arguments)
    try:
        lines = report()
    except ZeroTrialError as error:  # ZERO_TRIAL_OPS
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    sys.stdout.write((json.dumps(as_dict(lines)) if given.json else as_text(lines)) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
