"""``import zero_trial.as_deepspeed``: from here on ``import deepspeed`` means zero_trial.

ZERO_TRIAL_AS_DEEPSPEED=1 does the same for any process that imports zero_trial, which those under
``zero-trial launch`` and ``run`` do before the user's code. Where the real deepspeed is installed
this raises ConfigError, unless ZERO_TRIAL_AS_DEEPSPEED=replace asks for the stand-in by name.

``python -m zero_trial.as_deepspeed SCRIPT ...`` or ``... -m MODULE ...`` runs a program like that,
for launchers of other projects, and so the Pythons that this program starts.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from zero_trial.compat.deepspeed.deepspeed_table import install_deepspeed, pass_on_stand_in

install_deepspeed().refuse_if_installed()


def _run(command: list[str]) -> None:
    """Run a script, or a module after ``-m``, as this process's main program."""
    module = command[:1] == ["-m"]
    sys.argv = command[1:] if module else command
    if not sys.argv:
        sys.exit("usage: python -m zero_trial.as_deepspeed SCRIPT ... (or -m MODULE ...)")
    pass_on_stand_in()
    if module:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    _run(sys.argv[1:])
