"""Trials written for Determined's DeepSpeedTrial, unchanged: ``import deepspeed`` and
``from determined.pytorch.deepspeed import DeepSpeedTrial`` mean zero_trial.

python -m zero_trial.as_determined model_def:MyTrial    one rank, as python -m zero_trial.run
python -m zero_trial.as_determined trainer.py ...       the same before a script
import zero_trial.as_determined                         before anything that imports either of them

The first two stand in an experiment's entrypoint, after the launcher. ``zero-trial run`` does the
same for an entrypoint with ``zero_trial.as_determined`` or ``determined.launch.deepspeed`` in it.
The rest of ``determined`` stays the original package.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from zero_trial.compat.deepspeed.deepspeed_table import install_deepspeed
from zero_trial.compat.determined_table import install_determined

install_deepspeed().refuse_if_installed()
install_determined()


def main(argv: Sequence[str]) -> int:
    """Run a script, or one rank of a trial; return the exit code."""
    if argv and argv[0].endswith(".py"):
        sys.argv = list(argv)
        sys.path.insert(0, str(Path(argv[0]).resolve().parent))
        runpy.run_path(argv[0], run_name="__main__")
        return 0
    from zero_trial.run import main as run_rank

    return run_rank(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
