"""The supervisor of one allocation: starts the trial's processes, records their output, outlives
the master and leaves no process behind.

The supervisor is the last part of ``agent.node``, in its own session. Tests run it alone, with the
order as JSON on stdin.

Orphans become children of the supervisor (Linux), so that it also finds and ends processes that
moved to their own session.
"""

from __future__ import annotations

import contextlib
import errno
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

from zero_trial.master import logs
from zero_trial.master.agent import resources, storage
from zero_trial.master.logs import LogMatcher, LogPolicy
from zero_trial.util import process_tree

_LONGEST = 1 << 20  # bytes of a line; longer lines are split
_UNKNOWN = 255  # exit code of a child that another part of the process has reaped
_LONGEST_CAUSE = 500  # characters
_CAUSE = re.compile(r"(?:\[rank=\d+\] )?error   (?=\S)(.*)")
_FIRST_FAILURE = re.compile(
    r"error   (rank \d+: .*)"
)  # printed by the launcher, which sees all ranks: see sitecustomize.first_failure
_DRAIN_SECONDS = 2.0  # how long to read remaining output from the pipes after the last process has ended


@dataclass(frozen=True)
class RunOrder:
    """An order to run a command. ``grace``: seconds between SIGTERM and SIGKILL."""

    command: Sequence[str]
    cwd: str
    env: Mapping[str, str]
    log: str
    grace: float
    policies: Sequence[Mapping[str, str]] = ()


class Lines:
    """Writes one stream of a child to the trial's log with a time for each line, and records
    matches of log policies in ``folder``."""

    def __init__(self, stdtype: str, path: Path, matcher: LogMatcher, folder: Path) -> None:
        self._stdtype = stdtype
        self._path = path
        self._matcher = matcher
        self._folder = folder
        self._rest = b""
        self._lost = False  # whether a line could not be written
        self.cause = ""  # the first error line of a rank
        self.first_failure = ""  # the launcher's line about the rank that failed first

    def add(self, data: bytes) -> None:
        """Add data that was read, and write all complete lines."""
        *whole, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _LONGEST:
            whole, self._rest = [*whole, self._rest], b""
        self._write(whole)

    def close(self) -> None:
        """Write the last line if it has no newline."""
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
                matches = self._matcher.match(texts)
                if matches:  # write matches first: a full disk may lose lines, but no match of a written line
                    logs.record_matches(self._folder, matches)
                logs.append(self._path, [logs.entry(text, at, self._stdtype) for text in texts])
            except OSError as error:  # a full disk loses lines, but must not end the trial
                if not self._lost:  # report once, in the supervisor's own log if that is writable
                    self._lost = True
                    with contextlib.suppress(OSError):
                        sys.stderr.write(f"lost lines of {self._stdtype}: {error}\n")

    def _note(self, text: str) -> None:
        if not self.cause and (found := _CAUSE.match(text)):
            self.cause = found[1]
        if found := _FIRST_FAILURE.match(text):
            self.first_failure = found[1]


class AllocationSupervisor:
    """Runs one order: an event loop over signals and the pipes of the child processes."""

    def __init__(self, order: RunOrder, folder: Path) -> None:
        self._order = order
        self._folder = folder
        self._matcher = LogMatcher(LogPolicy(**policy) for policy in order.policies)
        self._selector = selectors.DefaultSelector()
        # keep a reference: deleting the Popen object would lose the exit status
        self._process: subprocess.Popen[bytes] | None = None
        self._child: int | None = None
        self._status: int | None = None  # exit code of the main child
        self._kill_at: float | None = None
        self._stopping = False  # whether a signal to end the run has arrived
        self._streams: list[Lines] = []
        self._open = 0
        self._listen()

    def _listen(self) -> None:
        """Write signals to a pipe, so that none is lost between a check and a wait."""
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._stop)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._wakeup = reader
        self._selector.register(reader, selectors.EVENT_READ, None)

    def _stop(self, *_: object) -> None:
        self._stopping = True

    def run(self) -> resources.Exit:
        """Run the order until it ends; return its exit record. No process is left afterwards."""
        if not self._stopping:
            self._start()
        return self._finish()

    def _finish(self) -> resources.Exit:
        while self._child is not None and self._status is None:
            left = 1.0 if self._kill_at is None else self._kill_at - time.monotonic()
            self._poll(max(0.01, min(1.0, left)))
            if self._stopping and self._kill_at is None:
                self._kill_at = time.monotonic() + self._order.grace
                self._signal(signal.SIGTERM)
            elif self._kill_at is not None and time.monotonic() >= self._kill_at:
                self._signal(signal.SIGKILL)
        while self._signal(signal.SIGKILL):  # kill processes that outlive the main child, like the end of a container
            time.sleep(0.01)
            self._reap()
        until = time.monotonic() + _DRAIN_SECONDS
        while self._open and time.monotonic() < until:
            self._poll(0.05)
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, Lines):
                key.data.close()
        status = 128 + signal.SIGTERM if self._status is None else self._status
        why = ""
        if status != 0 and not self._stopping:
            # the error printed by the rank that failed first, else the first error printed
            causes = [stream.first_failure for stream in self._streams] + [stream.cause for stream in self._streams]
            why = next((cause for cause in causes if cause), "")[:_LONGEST_CAUSE].rstrip(".")
        return resources.Exit(status, time.time(), killed=self._stopping, why=why)

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
        except (OSError, ValueError) as error:  # ValueError: a variable contains a NUL
            logs.append(
                log, [logs.entry(f"cannot start {self._order.command[0]}: {error}", time.time(), "stderr", l="ERROR")]
            )
            self._status = 127
            return
        self._process, self._child = child, child.pid
        for name, stream in (("stdout", child.stdout), ("stderr", child.stderr)):
            if stream is not None:
                self._streams.append(Lines(name, log, self._matcher, self._folder))
                self._selector.register(stream, selectors.EVENT_READ, self._streams[-1])
                self._open += 1

    def _poll(self, seconds: float) -> None:
        """Wait at most ``seconds`` for signals or output, and handle them."""
        for key, _ in self._selector.select(seconds):
            if key.data is None:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wakeup, 4096)
            else:
                self._read(key)
        self._reap()

    def _read(self, key: selectors.SelectorKey) -> None:
        data = os.read(key.fd, 1 << 16)
        if data:
            key.data.add(data)
            return
        key.data.close()
        self._selector.unregister(key.fileobj)
        self._open -= 1

    def _reap(self) -> None:
        """Reap children that have ended, including adopted ones."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                if self._child is not None and self._status is None:
                    self._status = _UNKNOWN  # no child is left, and its exit status was lost
                return
            if pid == 0:
                return
            if pid == self._child:
                code = os.waitstatus_to_exitcode(status)
                self._status = code if code >= 0 else 128 - code

    def _signal(self, number: signal.Signals) -> bool:
        """Signal all remaining processes; return False if there are none."""
        left = process_tree.descendants(os.getpid())
        process_tree.send(left, number)
        return bool(left)


def main(folder: Path, text: str) -> int:
    """Acquire the allocation's lease, run the RunOrder in ``text`` (JSON), and record its exit."""
    order = RunOrder(**json.loads(text))
    process_tree.adopt_orphans()
    supervisor = AllocationSupervisor(order, folder)
    if not resources.acquire_lease(folder, resources.identify(os.getpid())):
        return 0
    ended = supervisor.run()
    # remove it before the exit is recorded: readers of the record expect nothing left behind
    storage.remove_scratch(folder)
    while True:
        try:
            resources.record_exit(folder, ended)
        except OSError as error:  # without this record, the master would treat the run as crashed
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            time.sleep(1.0)
        else:
            return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.stdin.read()))
