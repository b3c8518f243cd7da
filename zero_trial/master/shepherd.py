"""The entry of a supervisor (`agent.supervisor`): ``python -m zero_trial.master.shepherd FOLDER``.

The name of this module is part of the master's state on disk: a master that runs while the package is upgraded goes on to start its supervisors
by it.
"""

from __future__ import annotations

import sys
from pathlib import Path

from zero_trial.master.agent.supervisor import main

if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.stdin.read()))
