"""``python -m zero_trial.ops``: print what runs the ops on this machine as JSON, or why
``ZERO_TRIAL_OPS`` is not possible."""

from __future__ import annotations

import json
import sys

from zero_trial.errors import ZeroTrialError
from zero_trial.ops.dispatch import report


def main() -> int:
    """Print the report."""
    try:
        sys.stdout.write(json.dumps(report(), indent=1) + "\n")
    except ZeroTrialError as error:  # ZERO_TRIAL_OPS
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
