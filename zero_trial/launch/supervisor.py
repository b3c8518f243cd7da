"""The supervisor: starts the ranks of one host, watches them, ends all of them when one fails or a
stop is asked for, and finds the cause.

No process of a run outlives it. Three things see to that, each for the case in which the others
cannot act: the kernel kills a guarded process when its parent dies (Linux), a watching thread does
the same elsewhere, and at the end of a run every process that still carries the run's mark is
killed.
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
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Protocol

import psutil

from zero_trial.errors import ExitStatus
from zero_trial.launch.hosts import RendezvousSpec
from zero_trial.trial.runs.rank_records import ErrorRecord, RankExit, RankRecord, read_agent, read_errors, read_ranks
from zero_trial.trial.runs.run_layout import RunFolder
from zero_trial.util.failures import LESS_MEMORY
from zero_trial.util.memory import oom_kills

INFRASTRUCTURE = ExitStatus.INFRASTRUCTURE
"""The exit code of a run that ended for a reason outside of the trial: a killed rank, a lost
host."""

PREEMPTED = ExitStatus.PREEMPTED

OUT_OF_MEMORY = f"killed by the kernel's OOM killer: memory ran out. {LESS_MEMORY}"

MARK = "ZERO_TRIAL_RUN_MARK"
"""Environment variable that all processes of a run inherit; its value is unique to the run."""


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
    """One host's part of a run: how many ranks, where they meet, what they run.

    The agent is torch.distributed.run, which starts the ranks of one host and meets the agents of
    other hosts. Its output goes to ``<run>/logs/agent.log``, and what the supervisor needs of it to
    ``agent.json`` beside it (zero_trial.trial.runtime.elastic_agent).
    """

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
            *("-m", "zero_trial.trial.runtime.elastic_agent", str(self.record), str(self.ranks if self.forks else 0)),
            *("--nproc-per-node", str(self.ranks)),
            # where it makes its empty folders; by default they stay behind in /tmp
            *("--log-dir", str(self.log.parent / "agent")),
            *self.rendezvous.agent_arguments(),
            *rank,
            *self.target.guarded(),
        ]


class Watcher(Protocol):
    """Shows the run while it goes on."""

    def tick(self) -> None:
        """Show what is new; called several times a second."""

    def close(self) -> None:
        """Show the rest and leave the screen in order."""


@dataclass(frozen=True)
class SupervisorTimeouts:
    """How long the supervisor waits, in seconds."""

    tick: float = 0.1  # between two looks
    after_failure: float = 5.0  # for the other ranks to end
    after_stop: float = 60.0  # for ranks that were asked to stop to save
    after_kill: float = 5.0  # for killed processes to disappear


@dataclass(frozen=True)
class LaunchResult:
    """How a run ended: the exit code for the command, and the cause unless it is 0."""

    exit_code: int
    cause: Cause | None = None


class Supervisor:
    """One run on this host. ``stop`` asks the ranks to save and end (the first Ctrl-C); the second
    Ctrl-C kills them."""

    def __init__(
        self,
        command: AgentCommand,
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
        self._stop = stop or self._terminate_ranks
        self._asked: list[signal.Signals] = []
        self._vanished: tuple[RankRecord, ...] = ()
        self._killed: set[int] = set()  # pids that did not end when they should have
        self._deadline: float | None = None
        self._oom_kills = oom_kills()

    def run(self) -> LaunchResult:
        """Start the ranks and watch them to their end. When this returns or raises, no process of
        the run is left."""
        log = self.command.log
        log.parent.mkdir(parents=True, exist_ok=True)
        self.command.record.unlink(missing_ok=True)  # of an earlier start in this folder
        with contextlib.ExitStack() as stack:
            stack.callback(self.watcher.close)
            stack.callback(self._sweep)
            stack.enter_context(self._listening())
            output = stack.enter_context(log.open("ab"))
            earlier = log.stat().st_size  # what an earlier start in this folder has written
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
        return self._outcome(code, log, earlier)

    def _watch(self, agent: subprocess.Popen[bytes]) -> int:
        """Watch ranks and agent until the agent has ended; return its code."""
        handled = 0
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return agent.wait(self.timeouts.tick)
            self.watcher.tick()
            if len(self._asked) > handled:
                handled = len(self._asked)
                self._handle_stop(handled)
            if self._deadline is None and self._has_failed(agent):
                self._allow(self._time_to_end())
            if self._deadline is not None and time.monotonic() > self._deadline:
                self._kill_ranks(agent)

    def _handle_stop(self, times: int) -> None:
        """Let the ranks save after the first request; end them at each further one."""
        if times == 1 and self._own_ranks():
            self._stop()
            self._allow(self.timeouts.after_stop)
        else:
            self._allow(0.0)

    def _allow(self, seconds: float) -> None:
        self._deadline = time.monotonic() + seconds

    def _has_failed(self, agent: subprocess.Popen[bytes]) -> bool:
        """Return whether a rank has left an error, or is gone and the agent has begun to end the
        others. Ranks that went with the agent are not to blame."""
        if read_errors(self.run_dir):
            return True
        gone = {record.pid for record in self._open_ranks() if not is_running(record.pid)}
        if not gone or not is_running(agent.pid):
            return False
        # Read again: a rank that ends in order writes its exit code before its process is gone.
        self._vanished = tuple(record for record in self._open_ranks() if record.pid in gone)
        return bool(self._vanished) and read_agent(self.command.record).closing

    def _open_ranks(self) -> list[RankRecord]:
        return [record for record in self._own_ranks() if record.watched and record.exit_code is None]

    def _own_ranks(self) -> list[RankRecord]:
        """Return the ranks of this host; other hosts may share the folder."""
        return [record for record in read_ranks(self.run_dir) if record.host == socket.gethostname()]

    def _time_to_end(self) -> float:
        """Return how long the others may take: a preempted rank may still be saving."""
        preempted = any(error.exit_code == PREEMPTED for error in read_errors(self.run_dir))
        return self.timeouts.after_stop if preempted else self.timeouts.after_failure

    def _terminate_ranks(self) -> None:
        send_signal((record.pid for record in self._own_ranks()), signal.SIGTERM)

    def _kill_ranks(self, agent: subprocess.Popen[bytes]) -> None:
        """Kill the ranks, let the agent see it and report, then kill the agent too if it does not
        end."""
        ranks = [record.pid for record in self._open_ranks() if is_running(record.pid)]
        pids = {*ranks, *(pid for pid in marked_processes(self.mark) if pid != agent.pid)}
        self._killed |= pids
        send_signal(pids, signal.SIGKILL)
        try:
            agent.wait(self.timeouts.after_kill)
        except subprocess.TimeoutExpired:
            send_signal([agent.pid], signal.SIGKILL)

    def _sweep(self) -> None:
        """Kill every process that still carries the run's mark, until there is none."""
        end = time.monotonic() + self.timeouts.after_kill
        while (left := marked_processes(self.mark)) and time.monotonic() < end:
            send_signal(left, signal.SIGKILL)
            time.sleep(self.timeouts.tick / 10)

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        """Count Ctrl-C and SIGTERM instead of dying of them; only the main thread can."""
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

    def _outcome(self, code: int, log: Path, earlier: int) -> LaunchResult:
        """``earlier``: bytes of the log that an earlier start has written."""
        if code == 0:
            return LaunchResult(0)
        errors = read_errors(self.run_dir)
        if self._asked:
            saved = next((error for error in errors if error.exit_code == PREEMPTED), None)
            if saved is not None:
                return LaunchResult(PREEMPTED, Cause(None, saved.message, PREEMPTED))
            number = self._asked[0]
            return LaunchResult(128 + number, Cause(None, f"stopped by {number.name}", 128 + number))
        exits = [end for end in read_agent(self.command.record).failures if end.pid not in self._killed]
        cause = first_cause(errors, self._own_ranks(), exits, self._vanished)
        if cause is None:
            end = f"was {how_it_ended(code).rstrip('.')}" if code < 0 else f"ended with code {code}"
            own = log.read_bytes()[earlier:].decode("utf-8", errors="replace")
            last = " | ".join(tail(own)) or "nothing"
            said = f"torch.distributed.run {end} before a rank ended; its last lines: {last}"
            cause = Cause(None, said, INFRASTRUCTURE, killed=code == -signal.SIGKILL)
        if cause.killed and oom_kills() > self._oom_kills:
            cause = dataclasses.replace(cause, message=OUT_OF_MEMORY, exit_code=ExitStatus.DOES_NOT_FIT)
        if cause.echo and not self.command.rendezvous.single:
            cause = dataclasses.replace(cause, message=f"{cause.message} (the cause may be on another host)")
        return LaunchResult(cause.exit_code, cause)


# How gloo, NCCL, TCPStore and our own communication say that another rank has gone.
_SECONDARY = re.compile(
    r"connection (was )?(closed|reset|refused)|reset by peer|broken pipe|socket (timeout|closed)|connectFullMesh failed"
    r"|remote process has exited|peer (rank )?.*(gone|left|closed|exited)"
    r"|failed to recv|recvValue failed|sendBytes failed|wait timeout|timed out waiting|ncclRemoteError|ncclSystemError|NCCL communicator was aborted"
    r"|process group.*(aborted|terminated)",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Cause:
    """What ended the run.

    Attributes:
        rank: None when no rank is to blame.
        message: what the user reads.
        exit_code: of the command.
        echo: the rank failed because another one did; the cause itself is not known here.
        killed: the process ended by SIGKILL.
    """

    rank: int | None
    message: str
    exit_code: int
    echo: bool = False
    killed: bool = False

    @property
    def headline(self) -> str:
        """The message with the rank in front, unless it begins with a rank itself, as an error does
        that all ranks agree on."""
        named = self.rank is None or self.message.startswith("rank ")
        return self.message if named else f"rank {self.rank}: {self.message}"


def is_secondary(error: ErrorRecord) -> bool:
    """Return whether the error only says that another rank has gone: it blames a connection or the
    mesh, not the trial."""
    return error.type == "MeshError" or bool(_SECONDARY.search(error.message))


def first_cause(
    errors: Sequence[ErrorRecord],
    ranks: Sequence[RankRecord],
    exits: Sequence[RankExit],
    vanished: Sequence[RankRecord],
) -> Cause | None:
    """Return the cause of a failed run, or None when nothing is known.

    When one rank dies, the others fail too: their connections to it break. In this order: the
    earliest error that does not only say so, a rank that died without an error record, the earliest
    error that does.

    Args:
        exits: the failures that the agent saw, the first one in front, without those that the
            supervisor caused.
        vanished: ranks whose process was gone before any of them was asked to stop.
    """
    primary = sorted((error for error in errors if not is_secondary(error)), key=lambda error: error.time)
    if primary:
        return _from_error(primary[0])
    silent = _silent(errors, ranks, exits, vanished)
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
    exits: Sequence[RankExit],
    vanished: Sequence[RankRecord],
) -> Cause | None:
    """Return the rank that died without an error record: by what the agent saw if it saw one, else
    by its absence.

    The agent ends the others with SIGTERM, and on a busy machine it may miss the first one. So a
    rank that died of anything else comes first, then one that another process has sent SIGTERM,
    then one that was gone before any was asked to stop, and last, where no rank has left an error,
    one that the agent ended.
    """
    reported = {error.rank for error in errors}
    by_pid = {record.pid: record.rank for record in ranks}
    silent = [(by_pid.get(end.pid, end.local_rank), end) for end in exits]
    silent = [(rank, end) for rank, end in silent if rank not in reported]
    by_agent = {rank for rank, end in silent if end.code == -signal.SIGTERM and end.by_agent}
    outside = [(rank, end.code) for rank, end in silent if rank not in by_agent]
    for rank, code in sorted(outside, key=lambda one: one[1] == -signal.SIGTERM):
        return _from_exit(rank, code)
    for record in vanished:
        if record.rank not in reported | by_agent:
            said = "the process exited without an error report (killed?)"
            return Cause(record.rank, said, INFRASTRUCTURE, killed=True)
    return _from_exit(silent[0][0], silent[0][1].code) if silent and not errors else None


def _from_exit(rank: int, code: int) -> Cause:
    exit_code = code if 0 < code < 256 else INFRASTRUCTURE
    return Cause(rank, how_it_ended(code), exit_code, killed=code == -signal.SIGKILL)


def how_it_ended(code: int) -> str:
    """Describe a process's end, with the usual reason where there is one."""
    if code >= 0:
        return f"the process ended with exit code {code} and left no error"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    why = {
        "SIGKILL": " Killed from outside, or by the kernel's OOM killer (see dmesg).",
        "SIGSEGV": " A native library crashed.",
        "SIGBUS": " A native library crashed, or shared memory (/dev/shm) is full.",
        "SIGABRT": " A native library gave up; its message is in the log.",
        "SIGILL": " A native library was built for another processor.",
    }.get(name, "")
    return f"killed by {name} (signal {-code}).{why}"


def tail(text: str, lines: int = 5) -> Sequence[str]:
    """Return the last lines of a log that are not empty."""
    return [line for line in text.splitlines() if line.strip()][-lines:]


def is_running(pid: int) -> bool:
    """Return whether the process exists and is not a zombie."""
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True


def marked_processes(mark: str) -> list[int]:
    """Return the pids of this user's running processes whose environment carries ``mark``; never
    this process."""
    found = []
    for process in psutil.process_iter():
        # it is another user's, or it ends meanwhile
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(MARK) == mark and process.pid != os.getpid() and is_running(process.pid):
                found.append(process.pid)
    return found


def send_signal(pids: Iterable[int], number: signal.Signals) -> None:
    """Send a signal to each process that leads a group as a group, to the others alone; those that
    are gone are passed over."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getpgid(pid) == pid:
                os.killpg(pid, number)
            else:
                os.kill(pid, number)
