"""One run of the master in this process: from taking its folder to letting go of it."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import zero_trial
from zero_trial.errors import ConfigError, ZeroTrialError
from zero_trial.master.agent.devices import SlotDevices
from zero_trial.master.agent.processes import identify
from zero_trial.master.auth import ensure_local_user
from zero_trial.master.core import Master
from zero_trial.master.directory import MasterDirectory
from zero_trial.master.http import Server

log = logging.getLogger(__name__)

_LOOK_SECONDS = 2.0
_FORMAT = "%(asctime)s.%(msecs)03dZ %(levelname)s %(message)s"


@dataclass(frozen=True)
class ServeOptions:
    """How the master is to run. ``port`` None: the one it had before, else a free one; 0: a free one."""

    home: MasterDirectory
    devices: SlotDevices
    port: int | None
    host_env: Mapping[str, str]


def serve(wish: ServeOptions, ready: Callable[[], None]) -> None:
    """Serve until SIGTERM or SIGINT, then end all running trials and return. ``ready`` is called once requests are answered.

    Raises ConfigError if another master works in the same folder.
    """
    home = wish.home
    home.prepare()
    if not home.lock(seconds=0.5):
        raise taken(home)
    me = identify(os.getpid())
    home.write_state(
        {"pid": me.pid, "start": me.start, "port": home.state().get("port"), "url": ""}
    )  # there, not ready
    _log_to(home)
    with _asked_to_end() as asked:
        cluster = Master.on(home, wish.devices, host_env=wish.host_env)
        try:
            _serve(wish, cluster, ready, asked)
        finally:
            cluster.close()
    with contextlib.suppress(FileNotFoundError):  # somebody removed the folder
        home.write_state({**home.state(), "pid": 0, "url": "", "stopped": time.time()})
    home.unlock()
    log.info("stopped")


def taken(home: MasterDirectory) -> ConfigError:
    """The error for a folder in which a master works."""
    state = home.state()
    return ConfigError(
        "a master is already running here",
        where=str(home.root),
        got=f"{state.get('url') or 'no address yet'}, pid {state.get('pid', '?')}",
        fix="Use it, end it with `zero-trial master down`, or choose another --root.",
    )


def _serve(wish: ServeOptions, cluster: Master, ready: Callable[[], None], asked: threading.Event) -> None:
    home = wish.home
    ensure_local_user(cluster.accounts, home.account)
    with _listen(cluster, wish.port, home.state().get("port")) as server:
        cluster.begin(server.url)
        more = {"port": server.port, "url": server.url, "version": zero_trial.__version__}
        home.write_state({**home.state(), **more})
        log.info(
            "zero_trial %s serves %s with %d %s slots",
            zero_trial.__version__,
            server.url,
            wish.devices.count,
            wish.devices.kind,
        )
        ready()
        while not asked.wait(_LOOK_SECONDS):
            if not home.database.exists():
                log.error("the folder %s is gone: a master without it cannot go on", home.root)
                break
        log.info("ending all runs")
        cluster.stop_runs()


def _listen(cluster: Master, port: int | None, before: int | None) -> Server:
    """On the asked port, or on the one before: trials that run know the master by it."""
    if port is not None or before is None:
        return Server(cluster, port=port or 0)
    try:
        return Server(cluster, port=before)
    except ZeroTrialError as error:
        log.warning(
            "port %d of the master before is not free any more (%s): runs of that time cannot report here",
            before,
            error,
        )
        return Server(cluster, port=0)


def _log_to(home: MasterDirectory) -> None:
    handle = os.open(home.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    handler = logging.StreamHandler(os.fdopen(handle, "a", encoding="utf-8"))
    formatter = logging.Formatter(_FORMAT, "%Y-%m-%dT%H:%M:%S")
    formatter.converter = time.gmtime
    handler.setFormatter(formatter)
    room = logging.getLogger("zero_trial.master")
    room.setLevel(logging.INFO)
    room.handlers = [handler]
    room.propagate = False


@contextlib.contextmanager
def _asked_to_end() -> Iterator[threading.Event]:
    asked = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: asked.set())
    yield asked
