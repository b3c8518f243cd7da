"""The supervisor of one allocation: it starts the trial's processes, records their output, outlives the master and leaves no process behind.

It runs in a session of its own, as ``python -m zero_trial.master.shepherd FOLDER`` with its order as JSON on stdin (see there about the name).
Orphans become its own children (Linux), so that it also finds and ends processes that moved into a session of their own.

The end of this file says in one line which rank failed first: it runs in the launcher, by way of ``relocation/sitecustomize.py``, in place of the
traceback and the table of torch.distributed.run. The supervisor takes that line as the trial's cause; without it, the first cause that a
rank printed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero_trial.master import logs
from zero_trial.master.agent import lease, processes, storage

_LONGEST = 1 << 20  # bytes of a line; a longer one is cut into several
_UNKNOWN = 255
_LONGEST_CAUSE = 500  # characters
_CAUSE = re.compile(r"(?:\[rank=\d+\] )?error   (?=\S)(.*)")
_VERDICT = re.compile(r"error   (rank \d+: .*)")  # of the launcher, which has seen all ranks: see verdict
_DRAIN_SECONDS = 2.0  # after the last process, for what is still in the pipes


@dataclass(frozen=True)
class RunOrder:
    """What to run, where, with which environment, and how long it has to end after SIGTERM."""

    command: tuple[str, ...]
    cwd: str
    env: Mapping[str, str]
    log: str
    grace: float

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> RunOrder:
        """From its JSON form."""
        return cls(tuple(content["command"]), content["cwd"], content["env"], content["log"], content["grace"])


class Lines:
    """One stream of a child, cut into lines that carry the time at which they came."""

    def __init__(self, stdtype: str, path: Path) -> None:
        self._stdtype = stdtype
        self._path = path
        self._rest = b""
        self._lost = False  # a line could not be written
        self.cause = ""  # the first line with which a rank says why it fails, unless the launcher knows better
        self.verdict = ""

    def take(self, data: bytes) -> None:
        """Write all lines that are whole now."""
        *whole, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _LONGEST:
            whole, self._rest = [*whole, self._rest], b""
        self._write(whole)

    def close(self) -> None:
        """Write what did not end in a newline."""
        if self._rest:
            self._write([self._rest])
            self._rest = b""

    def _write(self, whole: list[bytes]) -> None:
        if whole:
            at = time.time()
            texts = [line.decode("utf-8", errors="replace").rstrip("\r") for line in whole]
            for text in texts:
                self._note(text)
            try:
                logs.append(self._path, [logs.entry(text, at, self._stdtype) for text in texts])
            except OSError as error:  # a full disk: lines are lost, the trial is not
                self._lament(error)

    def _note(self, text: str) -> None:
        if not self.cause and (found := _CAUSE.match(text)):
            self.cause = found[1]
        if found := _VERDICT.match(text):
            self.verdict = found[1]

    def _lament(self, error: OSError) -> None:
        """Into the shepherd's own log, once, if that can be written."""
        if not self._lost:
            self._lost = True
            with contextlib.suppress(OSError):
                sys.stderr.write(f"lines of {self._stdtype} are lost: {error}\n")


class AllocationSupervisor:
    """One event loop over the children's pipes and our signals."""

    def __init__(self, order: RunOrder) -> None:
        self._order = order
        self._selector = selectors.DefaultSelector()
        self._process: subprocess.Popen[bytes] | None = None  # kept: its end would take the exit status with it
        self._child: int | None = None
        self._status: int | None = None  # of the main child, as an exit code
        self._kill_at: float | None = None
        self._asked = False
        self._streams: list[Lines] = []
        self._open = 0
        self._listen()

    def _listen(self) -> None:
        """Signals become bytes in a pipe, so that none is lost between a look and a wait."""
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._ask)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._wakeup = reader
        self._selector.register(reader, selectors.EVENT_READ, None)

    def _ask(self, *_: object) -> None:
        self._asked = True

    def run(self) -> lease.Exit:
        """Run the order to its end; returns how it ended, with nothing left of it."""
        if not self._asked:
            self._start()
        return self._see_off()

    def _see_off(self) -> lease.Exit:
        while self._child is not None and self._status is None:
            self._turn(self._wait_seconds())
            self._end_if_asked()
        self._end_rest()
        until = time.monotonic() + _DRAIN_SECONDS
        while self._open and time.monotonic() < until:
            self._turn(0.05)
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, Lines):
                key.data.close()
        status = 128 + signal.SIGTERM if self._status is None else self._status
        failed = status != 0 and not self._asked
        return lease.Exit(status, time.time(), killed=self._asked, why=self._cause() if failed else "")

    def _cause(self) -> str:
        """What a rank said of its failure; empty if none said anything."""
        causes = [stream.verdict for stream in self._streams] + [stream.cause for stream in self._streams]
        said = next((cause for cause in causes if cause), "")
        return said[:_LONGEST_CAUSE].rstrip(".")

    def _start(self) -> None:
        log = Path(self._order.log)
        try:
            child = subprocess.Popen(
                self._order.command,
                cwd=self._order.cwd,
                env=dict(self._order.env),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:  # ValueError: a variable with a NUL in it
            logs.append(
                log, [logs.entry(f"cannot start {self._order.command[0]}: {error}", time.time(), "stderr", l="ERROR")]
            )
            self._status = 127
            return
        self._process, self._child = child, child.pid
        for name, stream in (("stdout", child.stdout), ("stderr", child.stderr)):
            if stream is not None:
                self._streams.append(Lines(name, log))
                self._selector.register(stream, selectors.EVENT_READ, self._streams[-1])
                self._open += 1

    def _wait_seconds(self) -> float:
        return 1.0 if self._kill_at is None else max(0.01, min(1.0, self._kill_at - time.monotonic()))

    def _turn(self, seconds: float) -> None:
        """Wait for a signal or output, and take it."""
        for key, _ in self._selector.select(seconds):
            if key.data is None:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wakeup, 4096)
            else:
                self._take(key)
        self._reap()

    def _take(self, key: selectors.SelectorKey) -> None:
        data = os.read(key.fd, 1 << 16)
        if data:
            key.data.take(data)
            return
        key.data.close()
        self._selector.unregister(key.fileobj)
        self._open -= 1

    def _reap(self) -> None:
        """Collect children that have ended, adopted ones too."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                if self._child is not None and self._status is None:
                    self._status = _UNKNOWN  # there is no child any more, and nobody told us how ours ended
                return
            if pid == 0:
                return
            if pid == self._child:
                code = os.waitstatus_to_exitcode(status)
                self._status = code if code >= 0 else 128 - code

    def _end_if_asked(self) -> None:
        if not self._asked:
            return
        if self._kill_at is None:
            self._kill_at = time.monotonic() + self._order.grace
            self._signal(signal.SIGTERM)
        elif time.monotonic() >= self._kill_at:
            self._signal(signal.SIGKILL)

    def _end_rest(self) -> None:
        """The main child is gone: whatever is left of it is ended as a container's end would."""
        while self._signal(signal.SIGKILL):
            time.sleep(0.01)
            self._reap()

    def _signal(self, number: signal.Signals) -> bool:
        """Signal all that is left; False if there is nothing."""
        left = processes.descendants(os.getpid())
        processes.send(left, number)
        if self._child is not None and not Path("/proc/self/stat").exists():
            # No /proc: the main child's group is all that we can know.
            try:
                os.killpg(self._child, number)
            except (ProcessLookupError, PermissionError):
                return False
            return self._status is None
        return bool(left)


def main(folder: Path, text: str) -> int:
    """Take the lease of the allocation, run it, record how it ended. Do nothing if the lease is taken."""
    order = RunOrder.of(json.loads(text))
    processes.adopt_orphans()
    supervisor = AllocationSupervisor(order)
    if not lease.acquire(folder, processes.identify(os.getpid())):
        return 0
    ended = supervisor.run()
    storage.remove_scratch(folder)  # before the exit is recorded: readers of the record find nothing left
    lease.record_exit(folder, ended)
    return 0


# -- the launcher's line about failed ranks

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
