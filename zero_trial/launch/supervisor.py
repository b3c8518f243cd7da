"""The supervisor: starts the ranks of one host, watches them, and ends every one of them when one fails or when it is told to stop."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Protocol

from zero_trial.launch.agent import AgentCommand, deaths, tail
from zero_trial.launch.cause import INFRASTRUCTURE, Cause, first_cause
from zero_trial.launch.processes import MARK, is_running, marked, send
from zero_trial.launch.records import RankRecord, read_errors, read_ranks
from zero_trial.launch.run_folder import LOGS

PREEMPTED = 75


class Watcher(Protocol):
    """Who shows the run while it goes on."""

    def tick(self) -> None:
        """Look for news; called several times a second."""

    def close(self) -> None:
        """Show what is still to be shown and leave the screen in order."""


@dataclass(frozen=True)
class Patience:
    """How long, in seconds, the supervisor waits: between looks, for ranks to end after one failed, for a save after a stop was asked for, and for
    processes to disappear after they were killed."""

    tick: float = 0.1
    after_failure: float = 5.0
    after_stop: float = 60.0
    after_kill: float = 5.0


@dataclass(frozen=True)
class Outcome:
    """How a run ended: the exit code for the command, and the cause unless it is 0."""

    exit_code: int
    cause: Cause | None = None


class Supervisor:
    """One run on this host. ``stop`` asks the ranks to end by themselves (the first Ctrl-C); the second Ctrl-C kills them."""

    def __init__(
        self,
        command: AgentCommand,
        env: Mapping[str, str],
        watcher: Watcher,
        *,
        stop: Callable[[], None] | None = None,
        patience: Patience | None = None,
    ) -> None:
        self.command = command
        self.run_dir = Path(command.run_dir)
        self.env = env
        self.watcher = watcher
        self.patience = patience or Patience()
        self.mark = uuid.uuid4().hex
        self._agent_log = self.run_dir / LOGS / command.log_name
        self._stop = stop or self._terminate_ranks
        self._asked: list[signal.Signals] = []
        self._vanished: tuple[RankRecord, ...] = ()
        self._killed: set[int] = set()  # pids that did not end when they should have
        self._deadline: float | None = None

    def run(self) -> Outcome:
        """Start, watch, clean up. When this returns (or raises), no process of the run is left."""
        log = self._agent_log
        log.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            stack.callback(self.watcher.close)
            stack.callback(self._sweep)
            stack.enter_context(self._listening())
            output = stack.enter_context(log.open("ab"))
            agent = subprocess.Popen(
                self.command.argv(os.getpid()),
                env={**self.env, MARK: self.mark},
                cwd=self.run_dir,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            code = self._watch(agent)
        return self._outcome(code, log)

    def _watch(self, agent: subprocess.Popen[bytes]) -> int:
        """Look at ranks and agent until the agent has ended; returns its code."""
        handled = 0
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return agent.wait(self.patience.tick)
            self.watcher.tick()
            if len(self._asked) > handled:
                handled = len(self._asked)
                self._obey(handled)
            if self._deadline is None and self._has_failed():
                self._give(self._time_to_end())
            if self._deadline is not None and time.monotonic() > self._deadline:
                self._kill_ranks(agent)

    def _obey(self, times: int) -> None:
        """The first request lets the ranks save; each further one ends them now."""
        if times == 1 and self._own_ranks():
            self._stop()
            self._give(self.patience.after_stop)
        else:
            self._give(0.0)

    def _give(self, seconds: float) -> None:
        self._deadline = time.monotonic() + seconds

    def _has_failed(self) -> bool:
        """Whether a rank has left an error, or is gone and the agent has begun to end the others."""
        if read_errors(self.run_dir):
            return True
        gone = {record.pid for record in self._open_ranks() if not is_running(record.pid)}
        if not gone:
            return False
        # Read again: a rank that ends in order writes so before its process is gone.
        self._vanished = tuple(record for record in self._open_ranks() if record.pid in gone)
        return bool(self._vanished) and b"closing signal" in self._agent_log.read_bytes()

    def _open_ranks(self) -> list[RankRecord]:
        return [record for record in self._own_ranks() if record.watched and record.exit_code is None]

    def _own_ranks(self) -> list[RankRecord]:
        """The ranks of this host; other hosts may share the folder."""
        return [record for record in read_ranks(self.run_dir) if record.host == socket.gethostname()]

    def _time_to_end(self) -> float:
        """How long the others may take: a preempted rank may still be saving."""
        preempted = any(error.exit_code == PREEMPTED for error in read_errors(self.run_dir))
        return self.patience.after_stop if preempted else self.patience.after_failure

    def _terminate_ranks(self) -> None:
        send((record.pid for record in self._own_ranks()), signal.SIGTERM)

    def _kill_ranks(self, agent: subprocess.Popen[bytes]) -> None:
        """Kill the ranks, let the agent see it and report, then kill the agent too if it does not end."""
        ranks = [record.pid for record in self._open_ranks() if is_running(record.pid)]
        pids = {*ranks, *(pid for pid in marked(self.mark) if pid != agent.pid)}
        self._killed |= pids
        send(pids, signal.SIGKILL)
        try:
            agent.wait(self.patience.after_kill)
        except subprocess.TimeoutExpired:
            send([agent.pid], signal.SIGKILL)

    def _sweep(self) -> None:
        """Kill whatever still carries the run's mark, until nothing does."""
        end = time.monotonic() + self.patience.after_kill
        while (left := marked(self.mark)) and time.monotonic() < end:
            send(left, signal.SIGKILL)
            time.sleep(self.patience.tick / 10)

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        """Count Ctrl-C and SIGTERM instead of dying of them; only the main thread may."""
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

    def _outcome(self, code: int, log: Path) -> Outcome:
        if code == 0:
            return Outcome(0)
        errors = read_errors(self.run_dir)
        if self._asked:
            saved = next((error for error in errors if error.exit_code == PREEMPTED), None)
            if saved is not None:
                return Outcome(PREEMPTED, Cause(None, saved.message, PREEMPTED))
            number = self._asked[0]
            return Outcome(128 + number, Cause(None, f"stopped by {number.name}", 128 + number))
        text = log.read_text(encoding="utf-8", errors="replace")
        seen = [death for death in deaths(text) if death.pid not in self._killed]
        cause = first_cause(errors, self._own_ranks(), seen, self._vanished)
        if cause is None:
            words = " | ".join(tail(text)) or "nothing"
            cause = Cause(
                None,
                f"torch.distributed.run ended with code {code} before a rank did; its last words: {words}",
                INFRASTRUCTURE,
            )
        if cause.echo and not self.command.rendezvous.single:
            cause = dataclasses.replace(cause, message=f"{cause.message} (the cause may stand on another host)")
        return Outcome(cause.exit_code, cause)
