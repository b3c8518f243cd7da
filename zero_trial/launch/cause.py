"""The cause: which rank ended a run, and with what words, among all that the ranks and the agent left behind. Pure.

When one rank dies, the others fail too: their connections to it break. Only the first failure is worth a person's time.
"""

from __future__ import annotations

import dataclasses
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from zero_trial.launch.agent import Death
from zero_trial.launch.records import ErrorRecord, RankRecord

INFRASTRUCTURE = 5
"""The exit code of a run that ended for a reason outside of the trial: a killed rank, a lost host."""

# How gloo, NCCL, TCPStore and our own mesh say that somebody else went away.
_SECONDARY = re.compile(
    r"connection (was )?(closed|reset|refused)|reset by peer|broken pipe|socket (timeout|closed)|connectFullMesh failed"
    r"|remote process has exited|peer (rank )?.*(gone|left|closed|exited)"
    r"|failed to recv|recvValue failed|sendBytes failed|wait timeout|timed out waiting|ncclRemoteError|ncclSystemError|NCCL communicator was aborted"
    r"|process group.*(aborted|terminated)",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Cause:
    """What ended the run: the rank (None when no rank is to blame), the words for the user, and the exit code of the command.

    ``echo`` says that the rank only heard of it: the cause itself is not known here.
    """

    rank: int | None
    message: str
    exit_code: int
    echo: bool = False

    @property
    def headline(self) -> str:
        """The words with the rank in front, unless they begin with a rank themselves: a verdict that all ranks share, told by the first to say it."""
        named = self.rank is None or self.message.startswith("rank ")
        return self.message if named else f"rank {self.rank}: {self.message}"


def is_secondary(error: ErrorRecord) -> bool:
    """Whether the error only tells that another rank has gone: it blames a connection or the mesh, not the trial."""
    return error.type == "MeshError" or bool(_SECONDARY.search(error.message))


def first_cause(
    errors: Sequence[ErrorRecord],
    ranks: Sequence[RankRecord],
    deaths: Sequence[Death],
    vanished: Sequence[RankRecord],
) -> Cause | None:
    """The cause of a failed run, or None when nothing is known.

    ``deaths`` are the failures that the agent logged, the first one in front, without those that the supervisor itself brought about; ``vanished``
    are ranks whose process was gone before anyone asked it to stop. In order: the earliest error that is no mere echo; a rank that died without
    words; the earliest echo.
    """
    primary = sorted((error for error in errors if not is_secondary(error)), key=lambda error: error.time)
    if primary:
        return _from_error(primary[0])
    silent = _silent(errors, ranks, deaths, vanished)
    if silent is not None:
        return silent
    echoes = sorted(errors, key=lambda error: error.time)
    return dataclasses.replace(_from_error(echoes[0]), echo=True) if echoes else None


def _from_error(error: ErrorRecord) -> Cause:
    # An exit code outside 1..255 cannot be passed on; 1 is then what remains of it.
    return Cause(error.rank, error.message, error.exit_code if 0 < error.exit_code < 256 else 1)


def _silent(
    errors: Sequence[ErrorRecord],
    ranks: Sequence[RankRecord],
    deaths: Sequence[Death],
    vanished: Sequence[RankRecord],
) -> Cause | None:
    """The rank that died without leaving an error: by the agent's word if it has one, else by its absence.

    The agent ends the others with SIGTERM, and on a busy machine its word about the first may be missing: whoever died of anything else is asked
    first, then whoever was gone before anyone was asked to stop, and last those that died of SIGTERM.
    """
    spoke = {error.rank for error in errors}
    by_pid = {record.pid: record.rank for record in ranks}
    silent = [(by_pid.get(death.pid, death.local_rank), death.code) for death in deaths]
    silent = [(rank, code) for rank, code in silent if rank not in spoke]
    for rank, code in silent:
        if code != -signal.SIGTERM:
            return _from_death(rank, code)
    for record in vanished:
        if record.rank in spoke:
            continue
        if (record.rank, -signal.SIGTERM) in silent:
            return _from_death(record.rank, -signal.SIGTERM)
        return Cause(record.rank, "the process ended without a word (killed?)", INFRASTRUCTURE)
    return _from_death(*silent[0]) if silent else None


def _from_death(rank: int, code: int) -> Cause:
    return Cause(rank, how_it_ended(code), code if 0 < code < 256 else INFRASTRUCTURE)


def how_it_ended(code: int) -> str:
    """A process's end in words, with the usual reason where there is one."""
    if code >= 0:
        return f"the process ended with exit code {code} and left no error"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    why = {
        "SIGKILL": " Somebody killed it, or the system ran out of memory (see dmesg).",
        "SIGSEGV": " A native library crashed.",
        "SIGBUS": " A native library crashed, or shared memory (/dev/shm) is full.",
        "SIGABRT": " A native library gave up; its last words are in the log.",
        "SIGILL": " A native library was built for another processor.",
    }.get(name, "")
    return f"killed by {name} (signal {-code}).{why}"
