"""The supervisor: starts and watches the ranks of one host, ends all of them if one fails or a stop
is requested, and finds the cause.

No process outlives its run. Three mechanisms ensure this, each for cases that the others do not
cover: the kernel kills a guarded process when its parent dies (Linux), a watcher thread does the
same on other systems, and at the end of a run every remaining process with the run's mark is
killed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Protocol

from zero_trial.errors import ExitStatus
from zero_trial.launch.first_cause import Cause, RankExit, first_cause
from zero_trial.launch.hosts import RendezvousSpec
from zero_trial.launch.meeting import Meeting, meet
from zero_trial.trial.runs.run_layout import RunFolder, read_errors
from zero_trial.util.failures import LESS_MEMORY
from zero_trial.util.memory import oom_kills
from zero_trial.util.process_tree import marked, send, sweep

PREEMPTED = ExitStatus.PREEMPTED

OUT_OF_MEMORY = f"killed by the kernel's OOM killer: memory ran out. {LESS_MEMORY}"

MARK = "ZERO_TRIAL_RUN_MARK"
"""Environment variable that all processes of a run inherit; its value is unique to the run."""


@dataclass(frozen=True)
class RankProgram:
    """The code of each rank: a module, a script or (``program``) any executable."""

    name: str
    arguments: tuple[str, ...] = ()
    kind: str = "script"  # "module", "script" or "program"
    local_rank: bool = False  # append --local_rank=N, as DeepSpeed's launcher does

    def guarded(self) -> list[str]:
        """Return the arguments that follow the guard's own options."""
        flag = {"module": ["-m"], "script": [], "program": ["--exec"]}[self.kind]
        return [*flag, self.name, *self.arguments]


@dataclass(frozen=True)
class HostRanks:
    """One host's part of a run: the number of ranks, their rendezvous, and their program."""

    target: RankProgram
    ranks: int
    run_dir: str
    rendezvous: RendezvousSpec = field(default_factory=RendezvousSpec)
    cwd: str | None = None

    def argv(self, parent: int) -> list[str]:
        """Return the command of each rank: the guard, then the target."""
        return [
            *(sys.executable, "-m", "zero_trial.launch.guard", "--parent", str(parent), "--run-dir", self.run_dir),
            *(["--cwd", self.cwd] if self.cwd else []),
            *(["--inject-local-rank"] if self.target.local_rank else []),
            *self.target.guarded(),
        ]


class Watcher(Protocol):
    """Shows the progress of a run."""

    def tick(self) -> None:
        """Show new output; called several times a second."""

    def close(self) -> None:
        """Show the remaining output and restore the screen."""


@dataclass(frozen=True)
class SupervisorTimeouts:
    """Timeouts of the supervisor in seconds."""

    tick: float = 0.1  # between two polls
    after_failure: float = 5.0  # for the other ranks to end
    after_stop: float = 60.0  # for ranks to save after a stop request
    after_kill: float = 5.0  # for killed processes to disappear
    after_end: float = 300.0  # for ranks of other hosts after this host's ranks are done


@dataclass(frozen=True)
class LaunchResult:
    """The outcome of a run: the command's exit code, and the cause unless the code is 0."""

    exit_code: int
    cause: Cause | None = None


class Supervisor:
    """One run on this host. The first Ctrl-C calls ``stop``; the second kills the ranks."""

    def __init__(
        self,
        command: HostRanks,
        env: Mapping[str, str],
        watcher: Watcher,
        *,
        stop: Callable[[], None] | None = None,
        timeouts: SupervisorTimeouts | None = None,
    ) -> None:
        self.command = command
        self.run_dir = Path(command.run_dir)
        self.env = env
        self.watcher = watcher
        self.timeouts = timeouts or SupervisorTimeouts()
        self.mark = uuid.uuid4().hex
        self._stop = stop or self._terminate
        self._asked: list[signal.Signals] = []  # requests to end the run (Ctrl-C, SIGTERM)
        self._handled = 0  # number of handled requests
        self._begun = False  # whether ranks have been started
        self._running: dict[int, subprocess.Popen[bytes]] = {}  # by rank
        self._stopped: set[int] = set()  # ranks that we terminated or killed because another rank failed
        self._exits: list[RankExit] = []  # of failed ranks, in order of detection
        self._deadline: float | None = None  # remaining ranks are killed after this time
        self._oom_kills = oom_kills()

    def run(self) -> LaunchResult:
        """Start the ranks and watch them until they end. When this returns or raises, no process of
        the run is left. Raises MeshError if the rendezvous fails."""
        with contextlib.ExitStack() as stack:
            stack.callback(self.watcher.close)
            stack.callback(sweep, MARK, self.mark, self.timeouts.after_kill)
            stack.enter_context(self._listening())
            meeting = self._meet(None)
            while meeting is not None:
                self._start(meeting)
                meeting = self._meet(meeting) if self._watch(meeting) else None
        return self._outcome()

    def _meet(self, earlier: Meeting | None) -> Meeting | None:
        """Wait for the other hosts; return None if a stop is requested meanwhile."""
        found: Future[Meeting] = Future()

        def join() -> None:
            try:
                found.set_result(meet(self.command.rendezvous, self.command.ranks, earlier))
            except BaseException as error:
                found.set_exception(error)

        # torch waits for minutes without handling signals; a daemon thread does not block exit
        threading.Thread(target=join, name="zero_trial-meeting", daemon=True).start()
        while not self._asked:
            if wait([found], self.timeouts.tick).done:
                return found.result()
            self.watcher.tick()
        return None

    def _start(self, meeting: Meeting) -> None:
        self._begun, self._deadline = True, None
        folder = RunFolder(self.run_dir)
        folder.logs.mkdir(parents=True, exist_ok=True)
        for local_rank in range(self.command.ranks):
            rank = meeting.first + local_rank
            with folder.log(rank).open("ab") as log:
                self._running[rank] = subprocess.Popen(
                    self.command.argv(os.getpid()),
                    env={**self.env, MARK: self.mark, **meeting.place(local_rank)},
                    cwd=self.run_dir,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )

    def _watch(self, meeting: Meeting) -> bool:
        """Watch the ranks until they end; return whether the hosts of an elastic run change."""
        changed = False
        while self._running or not self._may_leave(meeting):
            time.sleep(self.timeouts.tick)
            self._reap(changed)
            self.watcher.tick()
            if len(self._asked) > self._handled:
                # the first request lets the ranks save; every further request ends them
                self._handled = len(self._asked)
                save = self._handled == 1 and bool(self._running)
                if save:
                    self._stop()
                self._allow(self.timeouts.after_stop if save else 0.0)
            elif self._deadline is None and (self._exits or read_errors(self.run_dir)):
                # a preempted rank may still be saving
                preempted = any(error.exit_code == PREEMPTED for error in read_errors(self.run_dir))
                self._allow(self.timeouts.after_stop if preempted else self.timeouts.after_failure)
            elif self._running and self._deadline is None and meeting.has_changed():
                changed = True
                self._terminate()
                self._allow(self.timeouts.after_failure)
            elif not self._running and self._deadline is None:
                self._allow(self.timeouts.after_end)
            if self._deadline is not None and time.monotonic() > self._deadline:
                self._stopped |= self._running.keys()
                send(marked(MARK, self.mark), signal.SIGKILL)
        return changed and not (self._exits or self._asked)

    def _may_leave(self, meeting: Meeting) -> bool:
        """Record that this host's ranks are done. Return True if it need not wait for ranks of
        other hosts, which may use its store."""
        late = self._deadline is not None and time.monotonic() > self._deadline
        return meeting.is_over() or late or bool(self._exits or self._asked)

    def _reap(self, changed: bool) -> None:
        """Record ranks that have ended. The first failure ends the other ranks, which would
        otherwise wait for the missing peer; after a preemption they get time to save."""
        for rank, process in list(self._running.items()):
            code = process.poll()
            if code is None:
                continue
            del self._running[rank]
            if code and not changed:
                self._exits.append(RankExit(rank, code, rank in self._stopped))
        if self._exits and not self._stopped and not self._asked and self._exits[0].code != PREEMPTED:
            self._stopped |= self._running.keys()
            self._terminate()

    def _allow(self, seconds: float) -> None:
        self._deadline = time.monotonic() + seconds

    def _terminate(self) -> None:
        send([process.pid for process in self._running.values()], signal.SIGTERM)

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        """Count Ctrl-C and SIGTERM instead of exiting (only possible in the main thread)."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def note(number: int, frame: FrameType | None) -> None:
            self._asked.append(signal.Signals(number))

        watched = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if sys.platform != "win32" else (signal.SIGINT,)
        before = {number: signal.signal(number, note) for number in watched}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _outcome(self) -> LaunchResult:
        errors = read_errors(self.run_dir)
        if self._asked and (self._exits or not self._begun):
            saved = next((error for error in errors if error.exit_code == PREEMPTED), None)
            if saved is not None:
                return LaunchResult(PREEMPTED, Cause(None, saved.message, PREEMPTED))
            number = self._asked[0]
            return LaunchResult(128 + number, Cause(None, f"stopped by {number.name}", 128 + number))
        cause = first_cause(errors, self._exits) if self._exits else None
        if cause is None:
            return LaunchResult(0)
        if cause.killed and oom_kills() > self._oom_kills:
            cause = dataclasses.replace(cause, message=OUT_OF_MEMORY, exit_code=ExitStatus.DOES_NOT_FIT)
        if cause.echo and not self.command.rendezvous.single:
            cause = dataclasses.replace(cause, message=f"{cause.message} (the cause may be on another host)")
        return LaunchResult(cause.exit_code, cause)
