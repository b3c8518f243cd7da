"""``zero-trial run``: run one trial of an experiment on this host's ranks. Everything is checked
before the start; a failed run is restarted if that may help."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from zero_trial.ds_config.batch import Reconciliation, reconcile
from zero_trial.ds_config.config_report import report_json, resolved_ds_config
from zero_trial.ds_config.reader import read_ds_config
from zero_trial.ds_config.table import DsConfig
from zero_trial.errors import ConfigError, ExitStatus
from zero_trial.experiment.entrypoint import (
    AS_DETERMINED,
    Entrypoint,
    check_entrypoint,
    parse_entrypoint,
)
from zero_trial.experiment.experiment import LOCK_SECTION, ExperimentConfig, KeyPath, read_experiment
from zero_trial.launch.hosts import (
    HostDevices,
    HostPlan,
    PlacementRequest,
    count_devices,
    host_environment,
    host_names,
    place,
)
from zero_trial.launch.screen import EventWatcher, NoWatcher, Screen
from zero_trial.launch.supervisor import HostRanks, LaunchResult, RankProgram, Supervisor, Watcher
from zero_trial.trial.runs.provenance import locked_model_dir, write_lock
from zero_trial.trial.runs.run_checkpoints import checkpoint_step, latest_checkpoint
from zero_trial.trial.runs.run_layout import RunFolder, given_run_folder, lock_run, new_run_folder, resumed_run_folder

_DEFAULT_SEED = 0


@dataclass(frozen=True)
class RunRequest:
    """The options of the command line; None means not set."""

    experiment_path: Path | None = None
    model_dir: Path | None = None
    seed: int | None = None
    run_dir: Path | None = None
    resume: Path | None = None
    changes: Mapping[KeyPath, Any] = field(default_factory=dict)
    placement: PlacementRequest = field(default_factory=PlacementRequest)


@dataclass(frozen=True)
class CheckedRun:
    """A checked experiment. ``ds_config`` and ``batch`` are None if the trial has its own."""

    experiment_path: Path
    experiment: ExperimentConfig
    entrypoint: Entrypoint
    model_dir: Path
    own: HostPlan
    devices: HostDevices
    seed: int
    ds_config: DsConfig | None
    batch: Reconciliation | None

    @property
    def ranks(self) -> int:
        """Return the number of ranks on all hosts; every host has as many as this one."""
        hosts = self.own.rendezvous.hosts
        return self.own.ranks * (int(hosts) if hosts.isdigit() else 1)


def check_run(request: RunRequest, env: Mapping[str, str]) -> CheckedRun:
    """Read and check everything that does not require running the trial. Raises ConfigError."""
    experiment_path = _experiment_path(request)
    experiment = read_experiment(experiment_path, changes=request.changes)
    model_dir = model_folder(experiment, request.model_dir)
    if experiment.searcher.searches:
        raise ConfigError(
            f"the searcher {experiment.searcher.name} runs several trials, but zero-trial run runs only one",
            where=experiment.document.where("searcher.name"),
            fix="Write searcher: {name: single, ...} and constant hyperparameters.",
        )
    where = experiment.document.where("entrypoint")
    entrypoint = parse_entrypoint(experiment.entrypoint, where)
    check_entrypoint(entrypoint, model_dir, where)
    devices = count_devices(env)
    placement = place(request.placement, env, devices, host_names(), default_slots=experiment.slots_per_trial)
    if placement.own is None:
        raise ConfigError("zero-trial run starts the ranks of this host only", fix="Run the same command on each host.")
    seed = next(seed for seed in (request.seed, experiment.experiment_seed, _DEFAULT_SEED) if seed is not None)
    checked = CheckedRun(experiment_path, experiment, entrypoint, model_dir, placement.own, devices, seed, None, None)
    if not experiment.names_ds_config():  # the trial provides its own
        return checked
    values, hints = experiment.hyperparameters, experiment.hints
    config = read_ds_config(experiment.ds_config(model_dir), hints=hints, hyperparameters=values)
    return replace(checked, ds_config=config, batch=reconcile(config, checked.ranks, values))


def _experiment_path(request: RunRequest) -> Path:
    if request.experiment_path is not None:
        return request.experiment_path
    if request.resume is not None and RunFolder(request.resume).config_lock.is_file():
        return RunFolder(request.resume).config_lock
    raise ConfigError(
        "no experiment was given",
        where="command line",
        fix="Pass the experiment and the folder of its model: const.yaml model_def_folder.",
    )


def model_folder(experiment: ExperimentConfig, given: Path | None) -> Path:
    """Return the folder of the trial's module: ``given``, else the folder in a run's lock, else the
    current folder.

    Raises ConfigError if the folder does not exist or, for a lock, no longer contains the module.
    """
    locked = locked_model_dir(experiment)
    if given is not None or locked is None:
        folder = given or Path()
        if not folder.is_dir():
            expected = "a folder with the trial's module"
            raise ConfigError("the folder does not exist", where="MODEL_DIR", got=str(folder), expected=expected)
        return folder
    entrypoint = parse_entrypoint(experiment.entrypoint)
    if entrypoint.file(locked) is not None:
        return locked
    key = f"data.{LOCK_SECTION}.model_dir"
    raise ConfigError(
        f"the model of this run ({entrypoint}) is no longer in its folder",
        where=experiment.document.where(key),
        got=str(locked),
        fix="Write its new path there, or pass it: zero-trial run CONST.yaml MODEL_DIR --resume RUN.",
    )


def run_experiment(checked: CheckedRun, request: RunRequest, screen: Screen) -> tuple[LaunchResult, Path]:
    """Run a checked experiment under the run lock; return the outcome and the run's folder."""
    leads = checked.own.rendezvous.leads
    with contextlib.ExitStack() as stack:
        if leads and request.resume is not None:
            stack.enter_context(lock_run(request.resume))
        folder, events_before = _folder(checked, request)
        if leads and request.resume is None:
            stack.enter_context(lock_run(folder))
        return _run_in(folder, checked, screen, events_before), folder


def _run_in(folder: Path, checked: CheckedRun, screen: Screen, events_before: bool) -> LaunchResult:
    """Run in the folder; on a single host, restart after a crash if that may help."""
    leads = checked.own.rendezvous.leads
    lock = begin_run(folder, checked) if leads else RunFolder(folder).config_lock
    most = checked.experiment.max_restarts if checked.own.rendezvous.single else 0
    restarts = 0
    if events_before and latest_checkpoint(RunFolder(folder).checkpoints) is None:
        screen.say("note    this run has saved no checkpoint: it starts over at its first step")
    while True:
        before = newest_step(folder)
        events = RunFolder(folder).events
        watcher = EventWatcher(events, screen, skip_existing=events_before) if leads else NoWatcher()
        outcome = supervisor_of(folder, lock, checked, watcher).run()
        step = newest_step(folder)
        if restarts >= most or not restart_may_help(outcome, before, step):
            return outcome
        restarts += 1
        screen.say(restart_line(outcome, restarts, most, step))
        resumed_run_folder(folder)
        events_before = True


def begin_run(folder: Path, checked: CheckedRun) -> Path:
    """Write the lock of a run and the report of its values into its folder; return the lock
    path."""
    config = checked.ds_config
    lock = write_lock(
        folder,
        checked.experiment,
        resolved_ds_config(config) if config else None,
        model_dir=checked.model_dir,
        slots=checked.ranks,
        seed=checked.seed,
    )
    write_report(folder, checked)
    return lock


def supervisor_of(folder: Path, lock: Path, checked: CheckedRun, watcher: Watcher) -> Supervisor:
    """Return the supervisor that starts this host's ranks of a run in ``folder``."""
    arguments = ["--run-dir", str(folder), "--experiment", str(lock), "--model-dir", str(checked.model_dir.resolve())]
    arguments += ["--seed", str(checked.seed)]
    arguments += ["--repeat", repeat_command(folder)]
    program = AS_DETERMINED if checked.entrypoint.as_determined else "zero_trial.run"
    target = RankProgram(program, (str(checked.entrypoint), *arguments), "module")
    rendezvous = checked.own.rendezvous
    command = HostRanks(target, checked.own.ranks, str(folder), rendezvous, cwd=str(checked.model_dir.resolve()))
    env = host_environment(checked.own, checked.devices)
    return Supervisor(command, env, watcher, stop=RunFolder(folder).preempt.touch)


def write_report(folder: Path, checked: CheckedRun) -> None:
    """Write the source of every value; a resumed run keeps the report from its start."""
    path = RunFolder(folder).resolved_config
    if checked.ds_config is not None and not path.exists():
        rows = checked.batch.rows if checked.batch is not None else ()
        path.write_text(report_json(checked.ds_config, rows) + "\n", encoding="utf-8")


def _folder(checked: CheckedRun, request: RunRequest) -> tuple[Path, bool]:
    """Return the run's folder, and whether it contains events of an earlier part of the run."""
    if request.resume is not None:
        return resumed_run_folder(request.resume).resolve(), True
    if request.run_dir is None:
        if not checked.own.rendezvous.single:
            raise ConfigError("several hosts need a common run folder", where="--run-dir", fix="Pass --run-dir DIR.")
        return new_run_folder(Path("runs")).resolve(), False
    if checked.own.rendezvous.leads:
        return given_run_folder(request.run_dir).resolve(), False
    request.run_dir.mkdir(parents=True, exist_ok=True)
    return request.run_dir.resolve(), False


def repeat_command(folder: Path) -> str:
    """Return the command that repeats the run in ``folder``, relative to the current directory."""
    return shlex.join(["zero-trial", "run", os.path.relpath(RunFolder(folder).config_lock)])


def newest_step(folder: Path) -> int | None:
    """Return the step of the newest finished checkpoint in a run's folder."""
    checkpoints = RunFolder(folder).checkpoints
    steps = (checkpoint_step(path) for path in checkpoints.iterdir()) if checkpoints.is_dir() else ()
    return max((step for step in steps if step is not None), default=None)


def restart_may_help(outcome: LaunchResult, before: int | None, now: int | None) -> bool:
    """Return whether to start a failed run again.

    The user is watching, so restart only if the cause may be transient (a killed process, a lost
    connection, an error outside this package) and the run has saved a new checkpoint: without one
    it would fail again at the same step after the same time.

    ``before`` and ``now``: the step of the newest checkpoint before the run and after it.
    """
    if outcome.exit_code not in (ExitStatus.INFRASTRUCTURE, ExitStatus.TRIAL_FAULT):
        return False  # it succeeded, was stopped, or would fail in the same way
    return now is not None and (before is None or now > before)


def restart_line(outcome: LaunchResult, number: int, most: int, step: int | None) -> str:
    """Return ``restart 1 of 3, from step 40: rank 1: killed by SIGKILL``."""
    cause = outcome.cause.headline.splitlines()[0] if outcome.cause is not None else f"exit code {outcome.exit_code}"
    return f"restart {number} of {most}, from step {step}: {cause}"
