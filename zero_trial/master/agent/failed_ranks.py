"""The verdict: what torch.distributed.run knows of failed ranks, in one line where it prints a traceback of its own and a table.

A line that begins with ``error   `` is the trial's cause, whatever ranks have said before; where one has said so itself, and no other
has spoken, it need not be said again.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# How a rank says that somebody else went away.
_ECHO = re.compile(
    r"another rank ended|connection (was )?(closed|reset|refused)|broken pipe|peer|socket|timed? ?out|process group",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class FailedRank:
    """One rank's end: the exit code that its launcher saw, and what it left as its last words, if anything."""

    rank: int
    code: int
    words: str = ""
    printed: bool = False
    time: int = 0

    @property
    def signal(self) -> int:
        """The signal that ended it, 0 for none. A parent passes it on as 128 + n, or (``sys.exit(-n)``) as 256 - n."""
        for number in (-self.code, 256 - self.code, self.code - 128):
            if 0 < number < 32:
                return number
        return 0


def of_failure(rank: int, failure: Any) -> FailedRank:
    """From torch's ProcessFailure."""
    message = failure.message
    if not isinstance(message, Mapping):  # torch's own words, about the signal or its documentation
        return FailedRank(rank, failure.exitcode, time=failure.timestamp)
    words = str(message.get("message", ""))
    return FailedRank(rank, failure.exitcode, words, bool(message.get("printed")), failure.timestamp)


def first_of(failed: Sequence[FailedRank]) -> FailedRank:
    """The rank that ended the others: it has words about itself, or died of something that a launcher does not send."""
    return min(failed, key=lambda one: (_blame(one), one.time, one.rank))


def _blame(one: FailedRank) -> int:
    if one.words:
        return 2 if _ECHO.search(one.words) else 0
    return 3 if one.signal == signal.SIGTERM else 1


def verdict(failed: Sequence[FailedRank]) -> str:
    """Which rank failed first, and how. ``failed`` is not empty."""
    first = first_of(failed)
    others = [one.rank for one in failed if one is not first]
    ended = (
        f"; ended with it: {'rank' if len(others) == 1 else 'ranks'} {', '.join(map(str, others))}" if others else ""
    )
    spoke = [one for one in failed if one.words]
    if first.words and (not first.printed or len(spoke) > 1):  # of several it is not clear who began
        return f"error   rank {first.rank}: {first.words.splitlines()[0]}{ended}"
    if not first.words and first.signal:
        return f"error   rank {first.rank}: {_killed(first.signal)}{ended}"
    return f"failed  rank {first.rank} with exit code {first.code}{ended}"


def _killed(number: int) -> str:
    name = signal.Signals(number).name
    why = {
        "SIGKILL": ", by somebody or because memory ran out",
        "SIGSEGV": ": a native library crashed",
        "SIGBUS": ": a native library crashed, or /dev/shm is full",
        "SIGABRT": ": a native library gave up",
    }
    return f"killed by {name}{why.get(name, '')}"
