"""The agent: torch.distributed.run, the process that starts the ranks of one host and meets the agents of other hosts.

This module builds its command line and reads its log; both are pure. The agent's own words go to ``<run>/logs/agent.log``.
"""

from __future__ import annotations

import re
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from zero_trial.launch.hosts import RendezvousSpec

# "failed (exitcode: -9) local_rank: 1 (pid: 5768) of binary: python": logged once, for the rank that failed first.
_FIRST = re.compile(r"failed \(exitcode: (?P<code>-?\d+)\) local_rank: (?P<local>\d+) \(pid: (?P<pid>\d+)\)")
# "rank      : 1 (local_rank: 1)" and under it "exitcode  : -9 (pid: 5768)": one such pair per failed rank in the final report.
_REPORTED = re.compile(r"\(local_rank: (?P<local>\d+)\)\s+exitcode\s+: (?P<code>-?\d+) \(pid: (?P<pid>\d+)\)")


@dataclass(frozen=True)
class RankProgram:
    """What each rank runs: a module, a script or (``program``) any executable, with its arguments."""

    name: str
    arguments: tuple[str, ...] = ()
    kind: str = "script"  # "module", "script" or "program"
    local_rank: bool = False  # append --local_rank=N, as DeepSpeed's launcher does

    def guarded(self) -> list[str]:
        """The arguments after the guard's own options."""
        flag = {"module": ["-m"], "script": [], "program": ["--exec"]}[self.kind]
        return [*flag, self.name, *self.arguments]


@dataclass(frozen=True)
class RankExit:
    """How a rank ended, as the agent saw it; a negative code is a signal."""

    local_rank: int
    pid: int
    code: int


@dataclass(frozen=True)
class AgentCommand:
    """One host's part of a run: how many ranks, where they meet, what they run."""

    target: RankProgram
    ranks: int
    run_dir: str
    rendezvous: RendezvousSpec = field(default_factory=RendezvousSpec)
    cwd: str | None = None

    @property
    def log_name(self) -> str:
        """The agent's log in ``<run>/logs``: hosts that share the folder have one each."""
        return (
            "agent.log" if self.rendezvous.single else f"agent-{socket.gethostname()}-{self.rendezvous.node_rank}.log"
        )

    def argv(self, parent: int) -> list[str]:
        """The whole command: guard, torch.distributed.run, and for each rank again the guard and the target."""
        rank = ["-m", "zero_trial.launch.guard", "--run-dir", self.run_dir]
        rank += ["--cwd", self.cwd] if self.cwd else []
        rank += ["--inject-local-rank"] if self.target.local_rank else []
        return [
            *(sys.executable, "-m", "zero_trial.launch.guard", "--parent", str(parent)),
            *("-m", "torch.distributed.run", "--nproc-per-node", str(self.ranks)),
            # where it makes its empty folders; by default they stay behind in /tmp
            *("--log-dir", str(Path(self.run_dir) / "logs" / "agent")),
            *self.rendezvous.agent_arguments(),
            *rank,
            *self.target.guarded(),
        ]


def failed_ranks(log: str) -> list[RankExit]:
    """The failures that the agent's log tells of, each once, the one that it saw first in front."""
    matches = [*_FIRST.finditer(log), *_REPORTED.finditer(log)]
    found = [RankExit(local_rank=int(m["local"]), pid=int(m["pid"]), code=int(m["code"])) for m in matches]
    return list(dict.fromkeys(found))


def tail(text: str, lines: int = 5) -> Sequence[str]:
    """The last lines of a log that say something."""
    return [line for line in text.splitlines() if line.strip()][-lines:]
