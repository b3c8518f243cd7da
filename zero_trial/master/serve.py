"""One run of the master in this process: lock the directory, serve, end all runs, unlock."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import zero_trial
from zero_trial.errors import ConfigError, ZeroTrialError
from zero_trial.master.agent import resources
from zero_trial.master.agent.cluster import ClusterManager, left_behind
from zero_trial.master.agent.resources import Node
from zero_trial.master.core import Master
from zero_trial.master.directory import MasterDirectory
from zero_trial.master.http import listen
from zero_trial.master.http.messages import Route
from zero_trial.master.http.server import LOOPBACK, HttpServer

log = logging.getLogger(__name__)

_LOOK_SECONDS = 2.0
_FORMAT = "%(asctime)s.%(msecs)03dZ %(levelname)s %(message)s"


@dataclass(frozen=True)
class ServeOptions:
    """Options of one run of the master. ``port``: None means the last port, else any free port; 0
    means any. ``host``: the local address to listen on. ``more``: routes that Determined lacks."""

    directory: MasterDirectory
    agent: Callable[[], ClusterManager]  # called once the directory is locked
    port: int | None
    host: str = LOOPBACK
    on: str = ""  # the cluster engine, recorded for `zero-trial master down`
    more: Sequence[Route] = ()


def serve(options: ServeOptions, ready: Callable[[], None]) -> None:
    """Serve until SIGTERM or SIGINT, then end all running trials and return. Call ``ready`` once
    the server answers requests.

    Raises ConfigError if another master is using the directory.
    """
    directory = options.directory
    directory.prepare()
    if not directory.lock(seconds=0.5):
        state = directory.state()
        raise ConfigError(
            "a master is already running here",
            where=str(directory.root),
            got=f"{state.get('url') or 'no address yet'}, pid {state.get('pid', '?')}",
            fix="Use it, stop it with `zero-trial master down`, or choose another --root.",
        )
    before = directory.state()
    last = str(before.get("on") or "")
    try:
        refuse_another_engine(last, options.on, left_behind(directory))
    except ConfigError:
        directory.unlock()
        raise
    me, host = resources.identify(os.getpid()), socket.gethostname()
    # a master exists but is not ready; until it is, jobs of the last engine may still be running
    directory.write_state(
        {"pid": me.pid, "start": me.start, "host": host, "port": before.get("port"), "url": "", "on": last}
    )
    _log_to(directory)
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    master = Master(directory, options.agent())
    try:
        _serve(options, master, ready, stopping)
    finally:
        master.close()
    with contextlib.suppress(FileNotFoundError):  # the directory was deleted
        directory.write_state({**directory.state(), "pid": 0, "url": "", "stopped": time.time()})
    directory.unlock()
    log.info("stopped")


def _serve(options: ServeOptions, master: Master, ready: Callable[[], None], stopping: threading.Event) -> None:
    directory = options.directory
    # before the first job: `down` must find the engine even if this process is killed immediately
    directory.write_state({**directory.state(), "on": options.on})
    master.accounts.ensure_local_user(directory.account)
    with _listen(master, options, directory.state().get("port")) as server:
        master.begin(server.url)
        more = {"port": server.port, "url": server.url, "version": zero_trial.__version__}
        directory.write_state({**directory.state(), **more})
        log.info(
            "zero_trial %s serves %s with %s",
            zero_trial.__version__,
            server.url,
            ", ".join(f"{pool.slots} {pool.slot_type} slots" for pool in master.machine.resource_pools()),
        )
        ready()
        while not stopping.wait(_LOOK_SECONDS):
            if not directory.database.exists():
                log.error("the directory %s was removed: the master stops", directory.root)
                break
        log.info("ending all runs")
        master.stop_runs()


def _listen(master: Master, options: ServeOptions, before: int | None) -> HttpServer:
    """Listen on the given port, or on the previous one, because running trials use that port."""
    if options.port is not None or before is None:
        return listen(master, host=options.host, port=options.port or 0, more=options.more)
    try:
        return listen(master, host=options.host, port=before, more=options.more)
    except ZeroTrialError as error:
        log.warning(
            "port %d of the last master is in use (%s): runs that it started cannot report here",
            before,
            error,
        )
        return listen(master, host=options.host, port=0, more=options.more)


def _log_to(directory: MasterDirectory) -> None:
    handle = os.open(directory.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    handler = logging.StreamHandler(os.fdopen(handle, "a", encoding="utf-8"))
    formatter = logging.Formatter(_FORMAT, "%Y-%m-%dT%H:%M:%S")
    formatter.converter = time.gmtime
    handler.setFormatter(formatter)
    logger = logging.getLogger("zero_trial.master")
    logger.setLevel(logging.INFO)
    logger.handlers = [handler]
    logger.propagate = False


def refuse_another_engine(last: str, now: str, left: Sequence[str]) -> None:
    """Raise ConfigError if a master would start with a different engine than its running
    allocations use: it would not find them, and would start their trials a second time.

    Args:
        last: ``--on`` of the last master here; "" if it ran trials on its own machine.
        now: ``--on`` of this master. Ray's address may differ: a new head has a new address.
        left: allocations whose end no master has recorded.
    """
    if not left or now.partition("=")[0] == last.partition("=")[0]:
        return
    on = f"zero-trial master up --on {last}" if last else "zero-trial master up without --on"
    raise ConfigError(
        "runs of the last master may still be running elsewhere",
        where="--on",
        got=f"{now or 'this machine'}, while {len(left)} ({left[0]}, ...) started on {last or 'this machine'}",
        fix=f"To continue them: {on}. To stop them: zero-trial master down.",
    )


def require_reachable(host: str, nodes: Sequence[Node]) -> None:
    """Raise ConfigError if the master listens on an address that other machines cannot reach."""
    if not host.startswith("127."):
        return
    mine = {"localhost", socket.gethostname(), socket.getfqdn()}
    for node in nodes:
        if node.up and node.address not in mine:
            with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
                probe.bind((node.address, 0))  # succeeds for an address of this machine
                continue
            raise ConfigError(
                "the machines of the cluster cannot reach the master",
                where="--host",
                got=f"{host}, but {node.name} has the address {node.address}",
                fix="Pass this machine's address in the cluster's network: --host ADDRESS.",
            )
