"""Small programs that play ranks, and how a test starts a supervisor around them."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path

from zero_trial.launch.hosts import rank_environment
from zero_trial.launch.supervisor import HostRanks, RankProgram, Supervisor, SupervisorTimeouts

LIMIT = 120  # seconds for a whole run with processes; only a hang reaches it

QUICK = SupervisorTimeouts(tick=0.05, after_failure=1.0, after_stop=20.0, after_kill=10.0)
"""For tests: ranks that will not end by themselves are given up soon."""


class Silent:
    """A watcher that only counts."""

    def __init__(self) -> None:
        self.ticks = 0
        self.closed = False

    def tick(self) -> None:
        self.ticks += 1

    def close(self) -> None:
        self.closed = True


def write_program(folder: Path, body: str, name: str = "program.py") -> Path:
    """A script from an indented text; ``rank`` and ``wait()`` (forever, without using the
    processor) are there for it."""
    head = """
        import os, signal, sys, threading
        rank = int(os.environ.get("RANK", "0"))
        def wait():
            threading.Event().wait()
    """
    path = folder / name
    path.write_text(textwrap.dedent(head) + textwrap.dedent(body), encoding="utf-8")
    return path


def supervisor(
    folder: Path,
    body: str,
    ranks: int = 2,
    timeouts: SupervisorTimeouts = QUICK,
    *,
    watcher: Silent | None = None,
) -> Supervisor:
    """A supervisor over ranks that run ``body``; the run's folder is ``folder/run``."""
    run_dir = folder / "run"
    run_dir.mkdir()
    program = RankProgram(str(write_program(folder, body)))
    command = HostRanks(program, ranks, str(run_dir), cwd=str(folder))
    return Supervisor(command, child_environment(), watcher or Silent(), timeouts=timeouts)


def child_environment() -> dict[str, str]:
    return rank_environment(os.environ, threads=1, interface="lo" if sys.platform == "linux" else None)


def zero_trial(*arguments: object, cwd: Path, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command line to its end."""
    words = [sys.executable, "-m", "zero_trial.cli.main", *map(str, arguments)]
    full = {**child_environment(), **(env or {})}
    return subprocess.run(words, cwd=cwd, env=full, capture_output=True, text=True, timeout=LIMIT, check=False)


def start_zero_trial(*arguments: object, cwd: Path) -> subprocess.Popen[str]:
    """Start the command line in a process group of its own."""
    words = [sys.executable, "-m", "zero_trial.cli.main", *map(str, arguments)]
    return subprocess.Popen(
        words,
        cwd=cwd,
        env=child_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
