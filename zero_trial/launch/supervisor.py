"""The processes of one run: tied to their parent, found by a mark in their environment, ended together.

No process of a run outlives it. Three things see to that, each for the case in which the others cannot act: the kernel kills a tied process when its
parent dies (Linux), a watching thread does the same elsewhere, and at the end of a run whatever still carries its mark is killed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Protocol

from zero_trial.errors import ExitStatus
from zero_trial.launch.agent import AgentCommand, RankExit, failed_ranks, tail
from zero_trial.runs.layout import RunFolder
from zero_trial.runs.records import ErrorRecord, RankRecord, read_errors, read_ranks

MARK = "ZERO_TRIAL_RUN_MARK"
"""Environment variable that all processes of a run inherit; its value is unique to the run."""


def is_running(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        # Either no /proc on this system (the signal above is the answer) or gone in this instant.
        return not Path("/proc/self/stat").exists()
    except OSError:
        return False
    # The state follows the command name, which is in brackets and may itself hold brackets and blanks.
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


def marked_processes(mark: str) -> list[int]:
    """Pids of this user's processes whose environment carries ``mark``; empty where there is no /proc. Never this process."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if wanted in (entry / "environ").read_bytes().split(b"\0") and int(entry.name) != os.getpid():
                found.append(int(entry.name))
    return [pid for pid in found if is_running(pid)]


def send_signal(pids: Iterable[int], number: signal.Signals) -> None:
    """Send a signal to each process that leads a group as a group, to the others alone; those that are gone are passed over."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getpgid(pid) == pid:
                os.killpg(pid, number)
            else:
                os.kill(pid, number)


# The cause: which rank ended a run, and with what words, among all that the ranks and the agent left behind. Pure.
#
# When one rank dies, the others fail too: their connections to it break. Only the first failure is worth a person's time.


INFRASTRUCTURE = ExitStatus.INFRASTRUCTURE
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
    deaths: Sequence[RankExit],
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
    deaths: Sequence[RankExit],
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


# The supervisor: starts the ranks of one host, watches them, and ends every one of them when one fails or when it is told to stop.


PREEMPTED = ExitStatus.PREEMPTED


class Watcher(Protocol):
    """Who shows the run while it goes on."""

    def tick(self) -> None:
        """Look for news; called several times a second."""

    def close(self) -> None:
        """Show what is still to be shown and leave the screen in order."""


@dataclass(frozen=True)
class SupervisorTimeouts:
    """How long, in seconds, the supervisor waits: between looks, for ranks to end after one failed, for a save after a stop was asked for, and for
    processes to disappear after they were killed."""

    tick: float = 0.1
    after_failure: float = 5.0
    after_stop: float = 60.0
    after_kill: float = 5.0


@dataclass(frozen=True)
class LaunchResult:
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
        patience: SupervisorTimeouts | None = None,
    ) -> None:
        self.command = command
        self.run_dir = Path(command.run_dir)
        self.env = env
        self.watcher = watcher
        self.patience = patience or SupervisorTimeouts()
        self.mark = uuid.uuid4().hex
        self._agent_log = RunFolder(self.run_dir).logs / command.log_name
        self._stop = stop or self._terminate_ranks
        self._asked: list[signal.Signals] = []
        self._vanished: tuple[RankRecord, ...] = ()
        self._killed: set[int] = set()  # pids that did not end when they should have
        self._deadline: float | None = None

    def run(self) -> LaunchResult:
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
        send_signal((record.pid for record in self._own_ranks()), signal.SIGTERM)

    def _kill_ranks(self, agent: subprocess.Popen[bytes]) -> None:
        """Kill the ranks, let the agent see it and report, then kill the agent too if it does not end."""
        ranks = [record.pid for record in self._open_ranks() if is_running(record.pid)]
        pids = {*ranks, *(pid for pid in marked_processes(self.mark) if pid != agent.pid)}
        self._killed |= pids
        send_signal(pids, signal.SIGKILL)
        try:
            agent.wait(self.patience.after_kill)
        except subprocess.TimeoutExpired:
            send_signal([agent.pid], signal.SIGKILL)

    def _sweep(self) -> None:
        """Kill whatever still carries the run's mark, until nothing does."""
        end = time.monotonic() + self.patience.after_kill
        while (left := marked_processes(self.mark)) and time.monotonic() < end:
            send_signal(left, signal.SIGKILL)
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

    def _outcome(self, code: int, log: Path) -> LaunchResult:
        if code == 0:
            return LaunchResult(0)
        errors = read_errors(self.run_dir)
        if self._asked:
            saved = next((error for error in errors if error.exit_code == PREEMPTED), None)
            if saved is not None:
                return LaunchResult(PREEMPTED, Cause(None, saved.message, PREEMPTED))
            number = self._asked[0]
            return LaunchResult(128 + number, Cause(None, f"stopped by {number.name}", 128 + number))
        text = log.read_text(encoding="utf-8", errors="replace")
        seen = [death for death in failed_ranks(text) if death.pid not in self._killed]
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
        return LaunchResult(cause.exit_code, cause)
