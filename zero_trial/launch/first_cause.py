"""Find the cause of a failed run in the records of its ranks: errors, exit codes, or nothing."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from zero_trial.errors import ExitStatus
from zero_trial.trial.runs.run_layout import ErrorRecord

# Messages of gloo, NCCL, TCPStore and our own communication about a lost peer.
_SECONDARY = re.compile(
    r"connection (was )?(closed|reset|refused)|reset by peer|broken pipe|socket (timeout|closed)|connectFullMesh failed"
    r"|remote process has exited|another rank ended|peer (rank )?.*(gone|left|closed|exited)"
    r"|failed to recv|recvValue failed|sendBytes failed|wait timeout|timed out waiting|ncclRemoteError|ncclSystemError|NCCL communicator was aborted"
    r"|process group.*(aborted|terminated)",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class RankExit:
    """The exit of a failed rank; a negative code is a signal. ``stopped``: by the launcher."""

    rank: int
    code: int
    stopped: bool = False


@dataclass(frozen=True)
class Cause:
    """The cause of a run's end.

    Attributes:
        rank: None if no rank caused the failure.
        message: the text for the user.
        exit_code: the exit code of the command.
        echo: the rank failed because another rank failed; the root cause is unknown on this host.
        killed: the process ended by SIGKILL.
    """

    rank: int | None
    message: str
    exit_code: int
    echo: bool = False
    killed: bool = False

    @property
    def headline(self) -> str:
        """Return the message, prefixed with the rank unless it already begins with a rank."""
        named = self.rank is None or self.message.startswith("rank ")
        return self.message if named else f"rank {self.rank}: {self.message}"


def is_secondary(error: ErrorRecord) -> bool:
    """Return whether the error only reports a lost peer."""
    return error.type == "MeshError" or bool(_SECONDARY.search(error.message))


def first_cause(errors: Sequence[ErrorRecord], exits: Sequence[RankExit]) -> Cause | None:
    """Return the cause of a failed run, or None if it is unknown.

    When a rank dies, the others also fail because their connections to it break. Preference: the
    earliest error that is not about a lost peer; a rank that died without an error and was not
    stopped by the launcher (SIGTERM last); the earliest error about a lost peer; any other exit.

    Args:
        exits: in the order of detection.
    """
    by_time = sorted(errors, key=lambda error: error.time)
    primary = next((error for error in by_time if not is_secondary(error)), None)
    if primary is not None:
        return _from_error(primary)
    reported = {error.rank for error in errors}
    silent = [end for end in exits if end.rank not in reported]
    alone = sorted((end for end in silent if not end.stopped), key=lambda end: end.code == -signal.SIGTERM)
    if alone:
        return _from_exit(alone[0])
    if by_time:
        return replace(_from_error(by_time[0]), echo=True)
    return _from_exit(silent[0]) if silent else None


def _from_error(error: ErrorRecord) -> Cause:
    # An exit code outside 1..255 cannot be passed on; use 1 instead.
    return Cause(error.rank, error.message, error.exit_code if 0 < error.exit_code < 256 else 1)


def _from_exit(end: RankExit) -> Cause:
    code = end.code if 0 < end.code < 256 else ExitStatus.INFRASTRUCTURE
    return Cause(end.rank, how_it_ended(end.code), code, killed=end.code == -signal.SIGKILL)


def how_it_ended(code: int) -> str:
    """Describe the exit of a process, with the usual reason if there is one."""
    if code >= 0:
        return f"the process ended with exit code {code} without an error message"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    why = {
        "SIGKILL": " Killed from outside, or by the kernel's OOM killer (see dmesg).",
        "SIGSEGV": " A native library crashed.",
        "SIGBUS": " A native library crashed, or shared memory (/dev/shm) is full.",
        "SIGABRT": " A native library aborted; its message is in the log.",
        "SIGILL": " A native library was built for a different processor.",
    }.get(name, "")
    return f"killed by {name} (signal {-code}).{why}"


def launcher_line(failures: Mapping[int, Any]) -> str:
    """Return the line in which torch.distributed.run reports the first failed rank and the failure.

    Does not repeat an error that a rank has printed itself, unless several ranks have errors: then
    the output does not show which was first.

    Args:
        failures: torch's ProcessFailure of each rank that failed; not empty.
    """
    exits, errors, printed = [], [], set()
    for rank, failure in sorted(failures.items(), key=lambda one: (one[1].timestamp, one[0])):
        code = failure.exitcode
        # A parent reports a child's signal n as 128 + n, or (``sys.exit(-n)``) as 256 - n.
        number = next((n for n in (-code, 256 - code, code - 128) if 0 < n < 32), 0)
        exits.append(RankExit(rank, -number or code, stopped=number == signal.SIGTERM))
        if isinstance(failure.message, dict):  # else torch's own text about the signal
            said = str(failure.message.get("message", "")).splitlines()[0]
            errors.append(ErrorRecord(rank, said.partition(":")[0], said, code, failure.timestamp))
            printed |= {rank} if failure.message.get("printed") else set()
    cause = first_cause(errors, exits) or _from_exit(exits[0])
    others = [str(rank) for rank in sorted(failures) if rank != cause.rank]
    ended = f"; ended with it: {'rank' if len(others) == 1 else 'ranks'} {', '.join(others)}" if others else ""
    code = next(end.code for end in exits if end.rank == cause.rank)
    silent = cause.rank not in {error.rank for error in errors}
    if code > 0 and (silent or (cause.rank in printed and len(errors) == 1)):
        return f"failed  rank {cause.rank} with exit code {code}{ended}"
    return f"error   rank {cause.rank}: {cause.message.rstrip('.')}{ended}"
