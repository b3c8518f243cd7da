"""``zero-trial launch``: run a plain script on several ranks, supervised like a trial."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from zero_trial.compat.deepspeed.deepspeed_table import refuse_real_deepspeed, started_with_stand_in
from zero_trial.errors import ConfigError
from zero_trial.launch.guard import ERROR_HEADER
from zero_trial.launch.hosts import (
    HostPlacement,
    HostPlan,
    PlacementRequest,
    count_devices,
    host_environment,
    host_names,
    parse_exports,
    place,
    ssh_command,
)
from zero_trial.launch.screen import LogWatcher, NoWatcher
from zero_trial.launch.supervisor import HostRanks, LaunchResult, RankProgram, Supervisor, Watcher
from zero_trial.trial.runs.run_layout import RunFolder, given_run_folder, new_run_folder

_DEFAULT_HOSTFILE = Path("/job/hostfile")
"""Where DeepSpeed's launcher looks when no hostfile is named."""

_ENVIRONMENT_FILE = ".deepspeed_env"


@dataclass(frozen=True)
class ScriptRequest:
    """What to run and where. ``kind`` is "script", "module" or "program"; ``local_rank`` is None if
    the script's source decides; ``as_deepspeed`` is "" or a value of ZERO_TRIAL_AS_DEEPSPEED, which
    makes ``import deepspeed`` import zero_trial in the ranks."""

    target: str
    arguments: tuple[str, ...] = ()
    kind: str = "script"
    local_rank: bool | None = None
    as_deepspeed: str = ""
    run_dir: Path | None = None
    placement: PlacementRequest = field(default_factory=PlacementRequest)


def launch_script(request: ScriptRequest, output: TextIO) -> tuple[LaunchResult, Path]:
    """Run the script to its end; return outcome and the run's folder. Raises ConfigError."""
    if request.kind == "script" and not Path(request.target).is_file():
        expected = "a Python file, and no python before it"
        raise ConfigError("there is no such script", where="launch", got=request.target, expected=expected)
    if request.as_deepspeed:
        refuse_real_deepspeed(request.as_deepspeed)
    devices = count_devices(os.environ)
    placement = place(request.placement, os.environ, devices, host_names(), default_slots=devices.gpus or 1)
    own = placement.own
    remote = own is None or own.node_rank > 0 or not own.rendezvous.single
    folder = _run_folder(request.run_dir, remote)
    remotes = _start_others(placement, request, folder)
    try:
        if own is None:
            return _wait_for(remotes), folder
        script = request.kind == "script"
        name = str(Path(request.target).resolve()) if script else request.target
        inject = request.local_rank
        if inject is None:
            inject = script and wants_local_rank(Path(name), as_deepspeed=bool(request.as_deepspeed))
        program = RankProgram(name, request.arguments, request.kind, local_rank=inject)
        command = HostRanks(program, own.ranks, str(folder), own.rendezvous, cwd=os.getcwd())
        env = host_environment(own, devices)
        if request.as_deepspeed:
            env = started_with_stand_in(env, request.as_deepspeed)
        watcher: Watcher = NoWatcher()
        if own.rendezvous.leads:
            watcher = LogWatcher(
                RunFolder(folder).log(0), output, stop_at=ERROR_HEADER, events=RunFolder(folder).events
            )
        return Supervisor(command, env, watcher).run(), folder
    finally:
        for process in remotes:
            process.terminate()
        for process in remotes:
            process.wait()


def read_hostfile(given: str | None) -> tuple[str | None, str]:
    """Return text and name of the given or DeepSpeed's default hostfile, or (None, "")."""
    path = Path(given) if given else _DEFAULT_HOSTFILE
    if path.is_file():
        return path.read_text(encoding="utf-8"), str(path)
    if given:
        raise ConfigError("there is no such file", where="--hostfile", got=given)
    return None, ""


def wants_local_rank(script: Path, *, as_deepspeed: bool = False) -> bool:
    """Return whether a script's text contains the option ``--local_rank`` or ``--local-rank``.

    ``as_deepspeed``: any ``local_rank`` counts, because libraries generate options from parameters
    and fields, and DeepSpeed's launcher passes the option to every script.
    """
    text = script.read_text(encoding="utf-8", errors="replace")
    return re.search(r"\blocal_rank\b" if as_deepspeed else r"--local[_-]rank\b", text) is not None


def _run_folder(given: Path | None, shared: bool) -> Path:
    """Return the absolute path of the folder for logs and records; hosts of a run may share it."""
    if given is None:
        return new_run_folder(Path("runs")).resolve()
    if shared:
        given.mkdir(parents=True, exist_ok=True)
        return given.resolve()
    return given_run_folder(given).resolve()


def _start_others(placement: HostPlacement, request: ScriptRequest, folder: Path) -> list[subprocess.Popen[bytes]]:
    """Start the other hosts' parts over ssh, with output to ``<run>/logs/host-<k>.log``."""
    exports = _exports(os.environ, (Path.cwd(), Path.home())) if placement.others else {}
    started = []
    RunFolder(folder).logs.mkdir(parents=True, exist_ok=True)
    for plan in placement.others:
        command = ssh_command(plan, remote_command(plan, request, folder), os.getcwd(), exports)
        with (RunFolder(folder).logs / f"host-{plan.node_rank}.log").open("ab") as log:
            started.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log))
    return started


def remote_command(plan: HostPlan, request: ScriptRequest, folder: Path) -> list[str]:
    """Return the ``zero-trial launch`` command that another host runs for its part."""
    where = plan.rendezvous
    command = [sys.executable, "-m", "zero_trial.cli.main", "launch"]
    command += ["--slots", str(plan.ranks), "--run-dir", str(folder)]
    if not where.single:
        command += ["--nnodes", where.hosts, "--node_rank", str(where.node_rank)]
        command += ["--master_addr", where.master_addr, "--master_port", str(where.master_port)]
    command += {"module": ["--module"], "program": ["--no_python"], "script": []}[request.kind]
    command += {True: ["--local_rank"], False: ["--no_local_rank"], None: []}[request.local_rank]
    command += {"": [], "1": ["--as-deepspeed"], "replace": ["--replace-deepspeed"]}[request.as_deepspeed]
    target = str(Path(request.target).resolve()) if request.kind == "script" else request.target
    devices = [f"CUDA_VISIBLE_DEVICES={','.join(map(str, plan.visible))}"] if plan.visible else []
    return [*(["env", *devices] if devices else []), *command, target, *request.arguments]


def _exports(env: Mapping[str, str], folders: Iterable[Path]) -> dict[str, str]:
    """Return the environment for other hosts: PYTHONPATH, and the first environment file."""
    exports = {"PYTHONPATH": env["PYTHONPATH"]} if env.get("PYTHONPATH") else {}
    for folder in folders:
        path = folder / _ENVIRONMENT_FILE
        if path.is_file():
            return {**exports, **parse_exports(path.read_text(encoding="utf-8"), str(path))}
    return exports


def _wait_for(processes: Sequence[subprocess.Popen[bytes]]) -> LaunchResult:
    """Return the outcome of a run without ranks on this host: that of its first failing part."""
    codes = [process.wait() for process in processes]
    bad = next((code for code in codes if code), 0)
    return LaunchResult(bad if 0 <= bad < 256 else 5)
