"""Fresh ranks that may be killed: started from a server that has imported everything, in tenths of
a second instead of seconds.

A pool's ranks (:mod:`tests.support.pool`) live on from body to body. These run one body each, in a
world of their own, and end with it, so a body may kill its process, run out of disk or leave its
process group in pieces.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.support.pool import free_port, server, take_place

LIMIT_SECONDS = 60.0


@dataclass(frozen=True)
class Ended:
    """How a rank ended: ``code`` as of multiprocessing (-9: killed), what its body returned, or the
    words of what it raised."""

    code: int | None
    value: Any = None
    error: str = ""
    seconds: float = 0.0  # from the start to the end of the process


class FreshRanks:
    """``size`` ranks under way."""

    def __init__(
        self, size: int, body: Callable[..., Any], args: Sequence[Any], log: Path | None, limit: float
    ) -> None:
        context = server()
        port = free_port()
        self._limit = limit
        self._begin = time.monotonic()
        self._pipes: list[Connection] = []
        self.processes: list[BaseProcess] = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            words = (theirs, rank, size, port, body, tuple(args), log, limit)
            process = context.Process(target=_live, args=words, daemon=False)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        """A rank that has ended already stays as it is."""
        pid = self.processes[rank].pid
        if pid is not None and self.processes[rank].is_alive():
            os.kill(pid, number)

    def wait(self, grace: float | None = None) -> list[Ended]:
        """When all have ended. Those that have not ``limit`` seconds after the start, or ``grace``
        seconds after one of them failed, are killed: their ``code`` is None."""
        found: dict[int, Ended] = {}
        answers: dict[int, tuple[Any, str]] = {}
        end = self._begin + self._limit
        while len(found) < len(self.processes) and (left := end - time.monotonic()) > 0:
            open_pipes = [pipe for rank, pipe in enumerate(self._pipes) if rank not in answers and rank not in found]
            sentinels = [process.sentinel for rank, process in enumerate(self.processes) if rank not in found]
            wait([*open_pipes, *sentinels], left)
            for rank, process in enumerate(self.processes):
                if rank not in answers and rank not in found:
                    answers |= self._receive(rank)
                if rank not in found and not process.is_alive():
                    value, error = answers.get(rank, (None, ""))
                    found[rank] = Ended(process.exitcode, value, error, time.monotonic() - self._begin)
                    if grace is not None and process.exitcode:
                        end = min(end, time.monotonic() + grace)
        self.close()
        late = time.monotonic() - self._begin
        return [found.get(rank, Ended(None, seconds=late)) for rank in range(len(self.processes))]

    def _receive(self, rank: int) -> dict[int, tuple[Any, str]]:
        try:
            return {rank: self._pipes[rank].recv()} if self._pipes[rank].poll() else {}
        except (EOFError, ConnectionResetError):
            return {rank: (None, "")}

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()


@contextmanager
def fresh_ranks(
    size: int, body: Callable[..., Any], *args: Any, log: Path | None = None, limit: float = LIMIT_SECONDS
) -> Iterator[FreshRanks]:
    """``body(*args)`` on ``size`` fresh ranks, whose environment says where they stand; none is
    left at the end of the block.

    ``log``: a folder for what each rank prints. ``body`` is a module-level function; an int that it
        returns is the exit code as well.
    """
    started = FreshRanks(size, body, args, log, limit)
    try:
        yield started
    finally:
        started.close()


def run_fresh(
    size: int, body: Callable[..., Any], *args: Any, log: Path | None = None, limit: float = LIMIT_SECONDS
) -> list[Ended]:
    """``body(*args)`` on ``size`` fresh ranks to the end; see :func:`fresh_ranks`."""
    with fresh_ranks(size, body, *args, log=log, limit=limit) as started:
        return started.wait()


def _live(
    pipe: Connection,
    rank: int,
    size: int,
    port: int,
    body: Callable[..., Any],
    args: tuple[Any, ...],
    log: Path | None,
    limit: float,
) -> None:
    """One rank, from its first line to its exit."""
    take_place(rank, size, port)
    if log is not None:
        log.mkdir(parents=True, exist_ok=True)
        target = os.open(log / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(target, 1)
        os.dup2(target, 2)
    faulthandler.dump_traceback_later(limit, exit=True, file=sys.__stderr__ or sys.stderr)
    import torch

    torch.set_num_threads(1)
    code = 0
    try:
        value = body(*args)
        code = value if isinstance(value, int) and not isinstance(value, bool) else 0
        pipe.send((value, ""))
    except BaseException as error:
        code = getattr(error, "exit_code", 1)
        pipe.send((None, "".join(traceback.format_exception(error))))
    from zero_trial.comm import destroy_distributed

    destroy_distributed()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
