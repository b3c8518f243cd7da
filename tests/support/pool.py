"""A pool of gloo ranks that lives as long as the test run, and the server that ranks of tests are
forked from: a process that imports torch costs seconds, a fork of one that has it milliseconds."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import logging
import multiprocessing
import os
import random
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from typing import Any
from unittest import mock

import psutil

TIMEOUT_SECONDS = 120.0
COLLECTIVE_TIMEOUT_SECONDS = 30.0


PRELOADED = ["pytest", "torch._dynamo", "zero_trial.run", "zero_trial.trial", "tests.support.pipelines"]
ENVIRONMENT = dict(os.environ)  # as it was before the first test


class RankFailed(AssertionError):
    """A rank raised, hung or died; the message holds every rank's traceback."""


class Nursery:
    """A process that imports modules whose libraries take seconds, once for all ranks that are
    forked from it. The server that all others come from does without them."""

    def __init__(self) -> None:
        self._pipe: Connection | None = None

    def bear(self, modules: Sequence[str], *place: Any) -> int:
        """Fork a process that has ``modules`` and serves as ``_serve(*place)``; return its id."""
        if self._pipe is None:
            self._pipe, theirs = server().Pipe()
            server().Process(target=_bear, args=(theirs,), daemon=True).start()
            theirs.close()
        self._pipe.send((modules, place))
        answer = self._pipe.recv()
        if not isinstance(answer, int):
            raise RankFailed(f"{', '.join(modules)} cannot be imported\n{answer}")
        return answer

    def close(self) -> None:
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None


def _bear(pipe: Connection) -> None:
    """Import what is asked for, fork and answer, until the session ends."""
    os.environ["OMP_NUM_THREADS"] = "1"
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no one waits for the ranks
    while True:
        try:
            modules, place = pipe.recv()
        except EOFError:
            return
        try:
            for name in modules:
                importlib.import_module(name)
        except BaseException:
            pipe.send(traceback.format_exc())
            continue
        child = os.fork()
        if not child:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            pipe.close()
            try:
                _serve(*place)
            finally:
                os._exit(0)
        place[0].close()
        pipe.send(child)


class RankPool:
    """``size`` processes in one world. After a failure the world is thrown away: its ranks may wait
    for each other forever.

    ``world``: the ranks compute on the CPU, "gloo", or on the stand-in device, "standin"
    (:mod:`tests.support.device`).
    ``nursery``: forks the ranks, with ``modules``; None: the server that has torch does.
    """

    def __init__(
        self, size: int, *, world: str = "gloo", nursery: Nursery | None = None, modules: Sequence[str] = ()
    ) -> None:
        self.size = size
        context = server()
        port = free_port()
        self._pipes: list[Connection] = []
        self._processes: list[psutil.Process] = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            place = (theirs, rank, size, port, world)
            if nursery is None:
                process = context.Process(target=_serve, args=place, daemon=True)
                process.start()
                number = process.pid
            else:
                number = nursery.bear(modules, *place)
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(psutil.Process(number))

    def run(self, body: Callable[..., Any], *args: Any, timeout: float = TIMEOUT_SECONDS, **kwargs: Any) -> list[Any]:
        """``body(*args, **kwargs)`` on every rank; the results in rank order. ``body`` is a
        module-level function."""
        for pipe in self._pipes:
            pipe.send((body, args, kwargs, timeout))
        answers, faults = [], []
        for rank, pipe in enumerate(self._pipes):
            try:
                done = pipe.poll(timeout + 10) and pipe.recv()
            except (EOFError, ConnectionResetError):
                done = (False, "the process died")
            ok, value = done or (False, "no answer in time")
            answers.append(value)
            if not ok:
                faults.append(f"--- rank {rank} of {self.size}\n{value}")
        if faults:
            self.close()
            raise RankFailed("\n".join(faults))
        return answers

    @property
    def alive(self) -> bool:
        return bool(self._processes) and all(map(_lives, self._processes))

    def close(self) -> None:
        for process in self._processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(self._processes, timeout=10)
        self._processes = []


def _lives(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


class Pools:
    """One pool per world size, made when first asked for; with ``nursery``, its ranks have
    ``modules``; in ``world``, as RankPool has it."""

    def __init__(self, nursery: Nursery | None = None, modules: Sequence[str] = (), *, world: str = "gloo") -> None:
        self._pools: dict[int, RankPool] = {}
        self._of: dict[str, Any] = {"nursery": nursery, "modules": modules, "world": world}

    def __call__(self, size: int) -> RankPool:
        pool = self._pools.get(size)
        if pool is None or not pool.alive:
            pool = self._pools[size] = RankPool(size, **self._of)
        return pool

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


def server() -> ForkServerContext:
    """Return the context whose processes are forked from one that has imported everything; it is
    started with the first use, in the environment of the test run.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with mock.patch.dict(os.environ, {**ENVIRONMENT, "OMP_NUM_THREADS": "1"}, clear=True):
        forkserver.ensure_running()
    return context


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def take_place(rank: int, size: int, port: int) -> None:
    """This process is ``rank`` of ``size`` on this host, by torch.distributed's variables."""
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
    )


def _serve(pipe: Connection, rank: int, size: int, port: int, world: str) -> None:
    take_place(rank, size, port)
    import torch

    from zero_trial.comm import init_distributed

    torch.set_num_threads(1)
    if world == "standin":
        from tests.support.device import collectives, device

        device.use().go_on_when_idle()
        collectives.register()
    init_distributed(timeout=COLLECTIVE_TIMEOUT_SECONDS)
    gc.freeze()  # bodies that collect do not look at torch
    while True:
        try:
            body, args, kwargs, timeout = pipe.recv()
        except EOFError:
            return
        except Exception:  # the module of the body cannot be imported here
            pipe.send((False, traceback.format_exc()))
            continue
        faulthandler.dump_traceback_later(timeout, exit=True, file=sys.stderr)
        try:
            _fresh_logger()
            # As in a fresh process: no outcome depends on the bodies that ran here before.
            seed_generators()
            answer = (True, body(*args, **kwargs))
        except BaseException:
            answer = (False, traceback.format_exc())
        faulthandler.cancel_dump_traceback_later()
        pipe.send(answer)


def _fresh_logger() -> None:
    """What an earlier body has done to the package's logger does not reach the next one."""
    logging.disable(logging.NOTSET)
    logger = logging.getLogger("zero_trial")
    logger.handlers.clear()
    logger.disabled, logger.propagate = False, True
    logger.setLevel(logging.NOTSET)


def logged_lines(level: int = logging.NOTSET) -> list[str]:
    """What the package logs on this rank until the end of the body."""
    lines: list[str] = []
    handler = logging.Handler(level)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zero_trial").addHandler(handler)
    return lines


def seed_generators() -> None:
    """Seed Python's, numpy's and torch's generators.

    torch.manual_seed would also queue a call for the CUDA context that may come, with a formatted
    traceback: milliseconds per test.
    """
    import numpy
    import torch

    random.seed(0)
    numpy.random.seed(0)
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(0)
