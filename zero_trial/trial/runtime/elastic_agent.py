"""torch.distributed.run under the supervisor:
``python -m zero_trial.trial.runtime.elastic_agent RECORD FORKED ARGUMENTS-OF-TORCHRUN``.

It starts the ranks of one host and meets the agents of other hosts, as torch's own command does.
For the supervisor it also writes RECORD: whether it has begun to end its ranks, and which of them
failed, in order.

FORKED ranks are forked from this process, which has imported torch and the trial's half of the
package already: a start costs each rank the import of the user's module instead of some seconds.
They are forked before torch's launcher begins, while this process has one thread of Python, and
wait for the place (RANK, MASTER_ADDR, …) that the rendezvous gives them. 0 for scripts and
programs, whose first statement may decide how torch is imported.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Container, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from torch.distributed import run as torchrun
from torch.distributed.elastic import multiprocessing as elastic
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from zero_trial.errors import StorageError
from zero_trial.launch import guard
from zero_trial.trial.runs.rank_records import AgentRecord, RankExit, write_agent

NEEDED_BY_RANKS = (
    "zero_trial.trial.runtime.rank",
    "zero_trial.trial.runtime.run_folder",
    "zero_trial.engine.start",
    "numpy",
)
"""What every trial imports before its first step."""

_RANK_MODULE = "zero_trial.launch.guard"

_WAIT_SECONDS = 0.02


def main(argv: Sequence[str]) -> None:
    """Run the ranks to their end; in a forked rank, run that rank to its end and do not
    return. Raises ChildFailedError when one fails."""
    record, forked, *arguments = argv
    waiting = _fork_ranks(int(forked), _rank_arguments(arguments)) if int(forked) else []
    ended: set[int] = set()
    _let_torch_start(waiting, Path(record), ended)
    try:
        torchrun.main(list(arguments))
    except ChildFailedError as error:
        # a full disk changes neither the end of the ranks nor the error
        with suppress(StorageError):
            write_agent(Path(record), AgentRecord(closing=True, failures=failures_of(error, ended)))
        raise


def failures_of(error: ChildFailedError, ended: Container[int] = ()) -> tuple[RankExit, ...]:
    """Return how the failed ranks ended: torch's first one, then the others.

    Torch orders them by whole seconds; ``ended``, the pids of those that the agent ended, is sure.
    """
    _, first = error.get_first_failure()
    failures = (first, *(failure for failure in error.failures.values() if failure is not first))
    return tuple(RankExit(one.local_rank, one.pid, one.exitcode, one.pid in ended) for one in failures)


def _rank_arguments(arguments: Sequence[str]) -> list[str]:
    """Return what the guard of a rank gets, which is behind its name in torch's command line."""
    return list(arguments[arguments.index(_RANK_MODULE) + 1 :])


def _let_torch_start(waiting: Sequence[ForkedRank], record: Path, ended: set[int]) -> None:
    """Make torch's agent start the ranks that wait, and write down that it ends its ranks, and
    which ones (their pids go to ``ended``), before it waits for them.

    Torch has no hook for either: its agent makes the SubprocessContext itself, deep below ``main``,
    and takes no class or callback for it. So torch's class is replaced, here only, in a process
    that runs nothing else.
    """

    left = list(waiting)

    class Ranks(elastic.SubprocessContext):
        """The ranks of this host. A second start (hosts of an elastic run have changed) executes
        them again."""

        def _start(self) -> None:
            if len(left) < self.nprocs:
                super()._start()  # type: ignore[no-untyped-call]
                return
            for local_rank in range(self.nprocs):
                rank = left.pop(0)
                rank.begin(self.envs[local_rank])
                self.subprocess_handlers[local_rank] = rank  # type: ignore[assignment] # it has what torch uses

        def close(self, *args: Any, **options: Any) -> None:
            """Note that ranks are ended, if any is running.

            Torch also calls this after a success, when all ranks of this host have ended and other
            hosts may still work: nothing is written then, or the supervisor would take a rank that
            left by ``os._exit(0)`` for a killed one.
            """
            running = {one.proc.pid for one in self.subprocess_handlers.values() if one.proc.poll() is None}
            ended.update(running)
            if running:
                with suppress(StorageError):  # a full disk does not keep the ranks alive
                    write_agent(record, AgentRecord(closing=True))
            super().close(*args, **options)

    elastic.SubprocessContext = Ranks  # type: ignore[misc]


class ForkedRank:
    """One rank that waits for its place, as torch's SubprocessHandler: ``proc`` and ``close``.

    As ``proc`` it is the process as a Popen shows it: ``pid``, ``poll`` and ``wait``.
    """

    def __init__(self, pid: int, place: int) -> None:
        """``place``: the writing end of the pipe through which the rank gets its environment."""
        self.pid = pid
        self._place = place
        self._code: int | None = None

    @property
    def proc(self) -> ForkedRank:
        """This process."""
        return self

    def begin(self, env: dict[str, str]) -> None:
        """Let the rank run, with these variables beside those of this process."""
        with suppress(BrokenPipeError), os.fdopen(self._place, "w", encoding="utf-8") as pipe:
            json.dump(env, pipe)  # one that was killed meanwhile: ``poll`` says so

    def poll(self) -> int | None:
        """Return the exit code, -N for signal N, or None while it runs."""
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code. Raises TimeoutExpired after ``timeout`` seconds; None: never."""
        begin = time.monotonic()
        while (code := self.poll()) is None:
            if timeout is not None and time.monotonic() - begin > timeout:
                raise subprocess.TimeoutExpired(f"rank {self.pid}", timeout)
            time.sleep(_WAIT_SECONDS)
        return code

    def close(self, death_sig: signal.Signals | None = None) -> None:
        """Send a signal, SIGTERM unless given, to the rank and what it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, death_sig or signal.SIGTERM)


def _fork_ranks(number: int, arguments: Sequence[str]) -> list[ForkedRank]:
    """Fork the ranks, which wait for their places. In a rank it does not return."""
    for name in NEEDED_BY_RANKS:
        importlib.import_module(name)
    agent = os.getpid()
    ranks: list[ForkedRank] = []
    ends: list[int] = []
    gc.freeze()  # what the ranks share: Python's collector writes to all that it looks at
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # or each rank would write it once more
    for _ in range(number):
        reading, writing = os.pipe()
        ends.append(writing)
        pid = os.fork()
        if pid == 0:
            for end in ends:
                os.close(end)
            _leave(_become_rank(agent, reading, arguments))
        os.close(reading)
        ranks.append(ForkedRank(pid, writing))
    return ranks


def _become_rank(agent: int, place: int, arguments: Sequence[str]) -> int:
    """Wait for the place, then run as the guard of a rank that was started by itself; return its
    exit code."""
    guard.die_with_parent(agent)
    os.setsid()  # so that a signal reaches what the rank starts, and no other rank
    with os.fdopen(place, encoding="utf-8") as pipe:
        env = pipe.read()
    if not env:  # the agent has ended without starting its ranks
        return 0
    sys.modules["numpy"].random.seed()  # Python does the same for its own ``random`` at each fork
    return guard.main(arguments, json.loads(env))


def _leave(code: int) -> NoReturn:
    """End this rank as the interpreter does: wait for threads, call what is registered with atexit,
    close open files, those of C as well. Modules and what they hold stay as they are: to take them
    apart writes to each page that the agent and all ranks share, when memory is fullest."""
    threading._shutdown()  # type: ignore[attr-defined] # there is no other name for it
    # of the rank alone, since what is older is frozen; one of the exit functions freezes the rest
    files = [one for one in gc.get_objects() if issubclass(type(one), (io.TextIOBase, io.BufferedIOBase))]
    atexit._run_exitfuncs()
    # What writes to another file comes before it: text, then compressed bytes, then bytes.
    files.sort(key=lambda file: (not isinstance(file, io.TextIOBase), type(file).__module__ == "_io"))
    for file in files:
        with suppress(Exception):  # not for writing, a full disk, or a user's own class
            file.flush() if file in (sys.stdout, sys.stderr) else file.close()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    ctypes.CDLL(None).fflush(None)
    os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
