"""``zero-trial master``: start, inspect and stop a Determined master for this machine."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zero_trial.errors import ConfigError, MasterError
from zero_trial.util.text import strip_control

_DOWN_SECONDS = 90.0
_ROOT = "ZERO_TRIAL_MASTER_ROOT"  # of the master whose exports are in the shell


def add_parser(subparsers: Any) -> None:
    """Add the verb and its four subcommands."""
    parser = subparsers.add_parser(
        "master", help="run a Determined master on this machine, for Determined's `det` command"
    )
    words = parser.add_subparsers(dest="word", metavar="WORD", required=True)

    def add(name: str, what: str) -> Any:
        return words.add_parser(name, help=what, description=f"{what[0].upper()}{what[1:]}.")

    up = add("up", "start the master, or show where it is running")
    up.add_argument(
        "--port", type=int, help="port to listen on; 0: a free port (default: the previous port, else a free one)"
    )
    up.add_argument("--slots", type=int, help="number of slots (default: one per GPU, else one per core)")
    up.add_argument("--cpu", action="store_true", help="slots are processes on the CPU, even if there are GPUs")
    up.add_argument(
        "--on",
        metavar="ENGINE",
        help="run trials on the machines of a cluster: slurm, or ray[=ADDRESS] (default: on this machine)",
    )
    up.add_argument(
        "--cpus-per-slot", type=int, metavar="N", help="CPUs of a slot without a GPU on a cluster (default: 1)"
    )
    up.add_argument("--host", help="address of this machine at which the machines of a cluster can reach the master")
    up.add_argument("--foreground", action="store_true", help="serve in this process until it is interrupted")
    up.add_argument("--env", action="store_true", help='print shell exports only: eval "$(zero-trial master up --env)"')
    up.add_argument("--ready-fd", type=int, help=argparse.SUPPRESS)
    down = add("down", "stop the master and its trials; `up` continues from their checkpoints")
    status = add("status", "show slots, experiments and trials")
    logs = add("logs", "show the master's log")
    logs.add_argument("-f", "--follow", action="store_true", help="follow the log as it grows")
    logs.add_argument("-n", "--tail", type=int, metavar="N", help="show only the last N lines")
    for word, handler in ((up, _up), (down, _down), (status, _status), (logs, _logs)):
        word.add_argument(
            "--root",
            type=Path,
            help="the master's folder (default: that of the shell's up --env, else ~/.local/state/zero_trial/master)",
        )
        word.add_argument("--json", action="store_true", help="print one JSON object")
        word.set_defaults(handler=handler)


def default_root(env: Mapping[str, str]) -> Path:
    """Return the default of ``--root``: the folder in the shell's exports, if there is one."""
    if env.get(_ROOT):
        return Path(env[_ROOT])
    state = env.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(state) / "zero_trial" / "master"


def _home(options: argparse.Namespace) -> Any:
    from zero_trial.master.directory import MasterDirectory

    return MasterDirectory(options.root or default_root(os.environ))


# -- up


def _up(options: argparse.Namespace) -> int:
    """Start a master unless one is already running."""
    from zero_trial.master.agent.environment import find_devices

    home = _home(options)
    # raises here, so that errors are shown and not only logged
    devices = None if options.on else find_devices(options.slots, os.environ, cpu=options.cpu)
    _check_engine(options)
    if options.foreground:
        return _serve(options, home, devices)
    fresh = not home.locked()
    if fresh:
        _spawn(options, home)
    else:
        _wait_until_known(home)
    _show(options, home, fresh)
    return 0


def _serve(options: argparse.Namespace, home: Any, devices: Any) -> int:
    from zero_trial.master.agent.cluster import ClusterManager
    from zero_trial.master.http.server import LOOPBACK
    from zero_trial.master.serve import ServeOptions, require_reachable, serve
    from zero_trial.report.board import board_routes
    from zero_trial.report.master_reader import StoreSource

    host, env = options.host or LOOPBACK, dict(os.environ)

    def manager() -> Any:
        engine = _engine(home, options.on, options.cpus_per_slot or 1, gpus=not options.cpu, devices=devices)
        found = ClusterManager(home, engine, host_env=env)
        if options.on:
            require_reachable(host, found.nodes())
        return found

    def ready() -> None:
        if options.ready_fd is not None:
            os.write(options.ready_fd, b"ready\n")
            os.close(options.ready_fd)
        else:
            _show(options, home, True)

    serve(ServeOptions(home, manager, options.port, host, options.on or "", board_routes(StoreSource(home))), ready)
    return 0


def _check_engine(options: argparse.Namespace) -> None:
    """Raise an error for incomplete combinations of options, and for missing engines."""
    if not options.on:
        for name, value in (("--cpus-per-slot", options.cpus_per_slot), ("--host", options.host)):
            if value is not None:
                raise ConfigError(
                    "only applies together with --on", where=name, got=value, fix="Add --on, or omit the option."
                )
        return
    if options.host in ("0.0.0.0", ""):
        raise ConfigError("must be a single address that trials can reach", where="--host", got=options.host)
    if options.on.partition("=")[0] not in ("slurm", "ray") or options.on.startswith("slurm="):
        raise ConfigError("no such engine", where="--on", got=options.on, expected="slurm, ray or ray=ADDRESS")
    if options.slots is not None:
        raise ConfigError(
            "the machines of a cluster determine its slots",
            where="--slots",
            fix="Omit it; see --cpus-per-slot.",
        )
    if options.cpus_per_slot is not None and options.cpus_per_slot < 1:
        raise ConfigError("must be positive", where="--cpus-per-slot", got=options.cpus_per_slot)


def _engine(home: Any, on: str | None, cpus: int, *, gpus: bool, devices: Any = None) -> Any:
    """Return the engine in ``--on``; by default this machine with ``devices``."""
    if not on:
        from zero_trial.master.agent.agent import ThisMachine
        from zero_trial.master.agent.environment import SlotDevices

        return ThisMachine(home, devices or SlotDevices(1, 1), host_env=dict(os.environ))
    name, _, address = on.partition("=")
    if name == "slurm":
        from zero_trial.master.agent.slurm import Slurm

        return Slurm(cpus=cpus, gpus=gpus, env=os.environ)
    from zero_trial.master.agent.ray import RayEngine, require_ray

    require_ray()
    return RayEngine(address, cpus=cpus, gpus=gpus, env=os.environ)


def _spawn(options: argparse.Namespace, home: Any) -> None:
    """Start the master as a process that outlives this one; return when it accepts requests."""
    home.prepare()
    reader, writer = os.pipe()
    from zero_trial.master.agent.environment import with_package

    words = [sys.executable, "-m", "zero_trial.cli.main", "master", "up", "--foreground", "--root", str(home.root)]
    words += ["--ready-fd", str(writer)]
    words += ["--cpu"] if options.cpu else []
    for name in ("port", "slots", "on", "cpus_per_slot", "host"):
        value = getattr(options, name)
        words += [f"--{name.replace('_', '-')}", str(value)] if value is not None else []
    output = home.root / "master.out"
    with output.open("wb") as out:
        child = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
            pass_fds=[writer],
            cwd=home.root,
            env=with_package(os.environ),
        )
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        said = pipe.read()
    if said != b"ready\n":
        child.wait()
        if home.locked():  # another `up` has started it first
            _wait_until_known(home)
            return
        text = output.read_text(encoding="utf-8", errors="replace").strip()
        raise MasterError(
            "the master did not start",
            where=str(home.root),
            got=text.removeprefix("error   ") or f"exit code {child.returncode}",
            fix=f"See {output} and {home.log} for the cause, then run zero-trial master up again.",
        )


def _wait_until_known(home: Any, seconds: float = 10.0) -> None:
    """Wait until a starting master responds. Raises MasterError after ``seconds``."""
    until = time.monotonic() + seconds
    while not home.state().get("url"):
        if time.monotonic() > until:
            raise MasterError(
                "a master was started here but does not answer", where=str(home.root), fix="zero-trial master down"
            )
        time.sleep(0.05)


def _show(options: argparse.Namespace, home: Any, fresh: bool) -> None:
    from zero_trial.report import board_address

    account = json.loads(home.account.read_text(encoding="utf-8"))
    # det's environment variables, and the folder for other verbs
    exports = {"DET_MASTER": home.state()["url"], "DET_USER": account["user"], "DET_USER_TOKEN": account["token"]}
    exports[_ROOT] = str(home.root.absolute())
    board = board_address(exports["DET_MASTER"], exports["DET_USER_TOKEN"])
    if options.json:
        found = {"root": str(home.root), "started": fresh, **home.state(), "board": board, "env": exports}
        print(json.dumps(found), flush=True)
        return
    lines = [f"export {name}={shlex.quote(value)}" for name, value in exports.items()]
    if not options.env:
        url = home.state()["url"]
        # options of this `up` without effect on a master that is already running
        names = ("port", "slots", "cpu", "on", "cpus_per_slot", "host")
        ignored = [f"--{name.replace('_', '-')}" for name in names if getattr(options, name) not in (None, False)]
        still = f" (was already running{'; ' + ', '.join(ignored) + ' not applied: run down first' if ignored else ''})"
        head = f"master at {url}{'' if fresh else still}"
        root = "" if options.root is None else f" --root {shlex.quote(str(options.root))}"
        lines = [
            head,
            f"board  {board}",
            "",
            "for the det command, without a password:",
            *(f"  {line}" for line in lines),
            f'or: eval "$(zero-trial master up{root} --env)"',
            f"to log in manually: det -m {url} user login {exports['DET_USER']}, password in {home.account}",
            "",
            "next: det experiment create CONFIG.yaml MODEL_DIR -f",
            f"      zero-trial master status{root}",
            f"      zero-trial master down{root}",
        ]
    print("\n".join(lines), flush=True)


# -- down


def _down(options: argparse.Namespace) -> int:
    """Stop the master and all processes of its trials, including those of a killed master."""
    from zero_trial.master.agent.cluster import cancel_all, left_behind
    from zero_trial.master.agent.resources import Identity

    home = _home(options)
    _require_here(home)
    running = home.locked()
    if running:
        state = home.state()
        identity = Identity(state.get("pid", 0), state.get("start", ""))
        identity.send(signal.SIGTERM)
        until = time.monotonic() + _DOWN_SECONDS
        while identity.alive and time.monotonic() < until:
            time.sleep(0.05)
        identity.send(signal.SIGKILL)
    on = home.state().get("on")
    # left by a killed master
    left, still = cancel_all(home, _engine(home, on, 1, gpus=True)) if left_behind(home) else ([], [])
    if options.json:
        print(json.dumps({"root": str(home.root), "was_running": running, "ended_allocations": left}))
    else:
        print("master ended" if running else f"no master was running in {home.root}")
        for name in left:
            print(f"ended allocation {name}")
    if still:
        raise MasterError(
            "jobs could not be stopped",
            where=on or "this machine",
            got=", ".join(still),
            fix="Check them on the cluster, and run zero-trial master down again.",
        )
    return 0


def _require_here(home: Any) -> None:
    """Raise an error if the folder's master runs on another machine: its processes are not visible
    from here, and its database must not be opened."""
    host = home.state().get("host") or socket.gethostname()
    if host != socket.gethostname() and home.locked():
        raise ConfigError(
            "the master of this folder runs on another machine",
            where=str(home.root),
            got=socket.gethostname(),
            expected=host,
        )


# -- status


def _status(options: argparse.Namespace) -> int:
    """Print the master's state from its store, also if the master is down."""
    home = _home(options)
    if not home.database.exists():
        raise ConfigError("no master has been started in this folder", where=str(home.root), fix="zero-trial master up")
    _require_here(home)
    facts = _facts(home)
    print(json.dumps(facts) if options.json else "\n".join(_text(facts)))
    return 0


def _facts(home: Any) -> dict[str, Any]:
    from zero_trial.master.store import experiment_rows
    from zero_trial.master.store import trial_rows as trials
    from zero_trial.master.store.database import reading

    running = home.locked()
    with reading(home.database) as connection:
        known = list(experiment_rows.all_(connection))
        allocations = trials.allocations(connection)
        live = {item.id: trials.of_experiment(connection, item.id, derived=True) for item in known}
    return {
        "running": running,
        "url": home.state().get("url"),
        "root": str(home.root),
        "slots_used": sum(len(one.slots) for one in allocations),
        "queued": sum(one.state.value == "QUEUED" for one in allocations),
        "experiments": [
            {
                "id": item.id,
                "name": item.name,
                "state": item.shown_state,
                "progress": item.progress,
                "trials": Counter(trial.shown_state for trial in live[item.id]),
                "pruned": item.pruned_trials,
                "best": item.best_metric,
            }
            for item in known
            if not item.archived
        ],
    }


def _text(facts: Mapping[str, Any]) -> list[str]:
    head = f"master at {facts['url']}" if facts["running"] else "the master is down"
    lines = [
        f"{head}, root {facts['root']}",
        f"slots in use {facts['slots_used']}, waiting for slots {facts['queued']}",
    ]
    for item in facts["experiments"]:
        counts = ", ".join(f"{count} {state}" for state, count in sorted(item["trials"].items())) or "no trials"
        progress = "" if item["progress"] is None else f" {item['progress']:.0%}"
        best = "" if item["best"] is None else f"  best {item['best']:.6g}"
        pruned = f"  ({item['pruned']} pruned before launch)" if item["pruned"] else ""
        lines.append(
            f"  {item['id']:>4}  {item['state']}{progress}  {strip_control(item['name'])}  {counts}{pruned}{best}"
        )
    return lines


# -- logs


def _logs(options: argparse.Namespace) -> int:
    """Print the master's log."""
    home = _home(options)
    if not home.log.exists():
        raise ConfigError("no master has been started in this folder", where=str(home.root), fix="zero-trial master up")
    with home.log.open(encoding="utf-8", errors="replace") as file:
        lines = file.read().splitlines()
        shown = lines if options.tail is None else lines[-options.tail :] if options.tail else []
        print(json.dumps({"lines": shown}) if options.json else strip_control("\n".join(shown)), flush=True)
        while options.follow:
            fresh = file.read()
            if fresh:
                print(strip_control(fresh), end="", flush=True)
            else:
                time.sleep(0.2)
    return 0
