"""The command line of the agent: torch.distributed.run, which starts the ranks of one host and
meets the agents of other hosts.

Its output goes to ``<run>/logs/agent.log``, and what the supervisor needs of it to ``agent.json``
beside it (zero_trial.runtime.agent).
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from zero_trial.launch.hosts import RendezvousSpec
from zero_trial.runs.layout import RunFolder


@dataclass(frozen=True)
class RankProgram:
    """What each rank runs: a module, a script or (``program``) any executable, with its
    arguments."""

    name: str
    arguments: tuple[str, ...] = ()
    kind: str = "script"  # "module", "script" or "program"
    local_rank: bool = False  # append --local_rank=N, as DeepSpeed's launcher does
    forked: bool = False  # from the agent, which has imported torch; not for what users start themselves

    def guarded(self) -> list[str]:
        """Return the arguments after the guard's own options."""
        flag = {"module": ["-m"], "script": [], "program": ["--exec"]}[self.kind]
        return [*flag, self.name, *self.arguments]


@dataclass(frozen=True)
class AgentCommand:
    """One host's part of a run: how many ranks, where they meet, what they run."""

    target: RankProgram
    ranks: int
    run_dir: str
    rendezvous: RendezvousSpec = field(default_factory=RendezvousSpec)
    cwd: str | None = None

    @property
    def log(self) -> Path:
        """The agent's log; hosts that share the run's folder have one each."""
        own = "" if self.rendezvous.single else f"-{socket.gethostname()}-{self.rendezvous.node_rank}"
        return RunFolder(Path(self.run_dir)).logs / f"agent{own}.log"

    @property
    def record(self) -> Path:
        """The agent's record for the supervisor."""
        return self.log.with_suffix(".json")

    @property
    def forks(self) -> bool:
        """Whether the ranks are forked from the agent: on Linux, where that is safe with torch."""
        return self.target.forked and sys.platform == "linux"

    def argv(self, parent: int) -> list[str]:
        """Return the whole command: guard, torch.distributed.run, and for each rank again the guard
        and the target."""
        rank = ["-m", "zero_trial.launch.guard", "--run-dir", self.run_dir]
        rank += ["--cwd", self.cwd] if self.cwd else []
        rank += ["--inject-local-rank"] if self.target.local_rank else []
        return [
            *(sys.executable, "-m", "zero_trial.launch.guard", "--parent", str(parent)),
            *("-m", "zero_trial.runtime.agent", str(self.record), str(self.ranks if self.forks else 0)),
            *("--nproc-per-node", str(self.ranks)),
            # where it makes its empty folders; by default they stay behind in /tmp
            *("--log-dir", str(self.log.parent / "agent")),
            *self.rendezvous.agent_arguments(),
            *rank,
            *self.target.guarded(),
        ]


def tail(text: str, lines: int = 5) -> Sequence[str]:
    """Return the last lines of a log that are not empty."""
    return [line for line in text.splitlines() if line.strip()][-lines:]
