"""``zero_trial.init()`` and ``Trainer``: train a trial from the user's own script, on a laptop or
as a task of a cluster.

with zero_trial.init(hparams={"lr": 0.1}) as context:
    trial = MyTrial(context)
    zero_trial.Trainer(trial, context).fit(max_length=zero_trial.Batch(200))
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import zero_trial
from zero_trial.comm.rendezvous import init_distributed, is_cluster_trial, launcher_run_dir
from zero_trial.errors import ConfigError
from zero_trial.experiment.experiment import read_experiment
from zero_trial.trial import Batch, Controller, TrainSettings, ZeroTrial, ZeroTrialContext
from zero_trial.trial.context import EngineFactory
from zero_trial.trial.reporting import Outcome
from zero_trial.trial.runs.run_layout import make_folder, new_run_folder
from zero_trial.trial.runtime.determined import DeterminedPlatform
from zero_trial.trial.runtime.local import LocalPlatform
from zero_trial.trial.runtime.protocols import Platform
from zero_trial.trial.runtime.rank import EventLog, RankState, Trained, open_context, rank_world
from zero_trial.trial.runtime.run_folder import (
    LocalRun,
    StopRequest,
    finish_folder,
    lock_run_together,
    open_folder,
    raise_if_preempted,
    rank_of_folder,
)
from zero_trial.trial.runtime.task import finish_task, open_task
from zero_trial.trial.settings import TrainUnit, read_unit, settings_from_experiment

_Unit = TrainUnit | int | Mapping[str, int] | Any  # Any: Determined's own Batch and Epoch


class _ScriptContext(ZeroTrialContext):
    """A context that a script opened."""

    platform: LocalPlatform | DeterminedPlatform

    def __init__(
        self, platform: Platform, engine_factory: EngineFactory, device: torch.device, state: RankState
    ) -> None:
        super().__init__(platform, engine_factory, device)
        self.state = state
        self.outcome: Outcome | None = None  # of the last fit


@contextmanager
def init(
    *,
    hparams: Mapping[str, Any] | None = None,
    exp_conf: Mapping[str, Any] | str | Path | None = None,
    enable_tensorboard_logging: bool = True,
    run_dir: str | Path | None = None,
    seed: int | None = None,
) -> Iterator[ZeroTrialContext]:
    """Join the ranks, seed all generators, and yield the trial's context; close it at the end of
    the block. Collective.

    On a cluster, the task provides the experiment config, the seed, and the hyperparameters unless
    they are passed.

    Args:
        hparams: the trial's hyperparameters, instead of the experiment's.
        exp_conf: an experiment's YAML, or the same as a dict.
        enable_tensorboard_logging: whether reported metrics are also written by the TensorBoard
            writer, if the trial creates one.
        run_dir: the run's folder (default: the next of ``runs/NNNN``). An existing run in it is
            continued.
        seed: instead of the experiment's seed.

    A zero_trial error that leaves the block ends the process with its message and an exit code that
    launchers understand: 75 for a run that was asked to stop and has saved. Hyperparameters that
    cannot be trained end every rank.
    """
    state = RankState()
    with ExitStack() as stack:
        platform: LocalPlatform | DeterminedPlatform
        if is_cluster_trial():
            platform = stack.enter_context(open_task(state, script=True))
            if hparams is not None:
                platform = replace(platform, hparams=hparams)
        else:
            stop = stack.enter_context(rank_of_folder(state, script=True))
            platform = _open_folder(stack, state, stop, hparams, exp_conf, run_dir, seed)
        make = partial(_ScriptContext, state=state)
        context = open_context(platform, state, zero_trial.initialize, make)
        context.set_enable_tensorboard_logging(enable_tensorboard_logging)
        yield context
        if state.folder is not None and context.outcome is not None:
            raise_if_preempted(context.outcome, f"With run_dir={str(state.folder)!r} it continues from there.")


def _open_folder(
    stack: ExitStack,
    state: RankState,
    stop: StopRequest,
    hparams: Mapping[str, Any] | None,
    exp_conf: Mapping[str, Any] | str | Path | None,
    run_dir: str | Path | None,
    seed: int | None,
) -> LocalPlatform:
    """Collective. Open the platform of a script's run, in a folder that it locks."""
    state.env = init_distributed()
    ranks = rank_world(state.env)
    experiment, own, own_seed = _experiment(exp_conf)
    folder = Path(ranks.broadcast(str(_run_folder(run_dir)) if ranks.rank == 0 else None))
    stack.enter_context(lock_run_together(folder, ranks))
    show = EventLog(live=None) if ranks.rank == 0 else None
    if show is not None:
        stack.callback(show.close)
    run = LocalRun(
        folder=folder,
        experiment=experiment,
        hparams=own if hparams is None else hparams,
        model_dir=Path.cwd(),
        seed=own_seed if seed is None else seed,
        experiment_id=str(experiment.get("name") or Path(sys.argv[0]).stem),
    )
    return stack.enter_context(open_folder(run, state, stop, show=show))


def _experiment(given: Mapping[str, Any] | str | Path | None) -> tuple[dict[str, Any], Mapping[str, Any], int]:
    """Return the experiment as plain data, with its hyperparameters and seed."""
    if isinstance(given, (str, Path)):
        read = read_experiment(Path(given))
        return read.plain(), read.hyperparameters, read.experiment_seed or 0
    plain = dict(_mapping(given, "exp_conf"))
    for name in ("searcher", "hyperparameters", "data", "resources", "checkpoint_storage"):
        _mapping(plain.get(name), f"exp_conf: {name}")
    seed = _mapping(plain.get("reproducibility"), "exp_conf: reproducibility").get("experiment_seed") or 0
    if not isinstance(seed, int):
        raise ConfigError(
            "not a seed", where="exp_conf: reproducibility.experiment_seed", got=repr(seed), expected="a whole number"
        )
    return plain, plain.get("hyperparameters") or {}, seed


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    """Return ``value`` if it is a mapping, an empty one for None. Raises ConfigError otherwise."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError("not a mapping", where=where, got=type(value).__name__, expected="keys with values")
    return value


def _run_folder(given: str | Path | None) -> Path:
    """Return the run's folder: the given one, the launcher's, or the next of ``runs/NNNN``."""
    named = given if given is not None else launcher_run_dir()
    folder = Path(named) if named is not None else new_run_folder(Path("runs"))
    make_folder(folder, "run_dir", "Use another folder.")
    return folder.resolve()


def _check_trial(given: object) -> None:
    if isinstance(given, ZeroTrial):
        return
    is_class = isinstance(given, type)
    name = given.__name__ if isinstance(given, type) else type(given).__name__
    raise ConfigError(
        "this is not a trial",
        where="Trainer",
        got=f"the class {name}" if is_class else f"an object of class {name}",
        expected="an object of a class that derives from ZeroTrial",
        fix=f"Write Trainer({name}(context), context)." if is_class else None,
    )


class Trainer:
    """Trains ``trial``, built with ``context``, inside ``zero_trial.init()``."""

    def __init__(self, trial: ZeroTrial, context: ZeroTrialContext) -> None:
        if not isinstance(context, _ScriptContext):
            raise ConfigError(
                "this context was not created by zero_trial.init()",
                where="Trainer",
                got=type(context).__name__,
                fix="Write with zero_trial.init() as context: and pass that context.",
            )
        _check_trial(trial)
        self._trial = trial
        self._context = context

    def fit(
        self,
        checkpoint_period: _Unit | None = None,
        validation_period: _Unit | None = None,
        max_length: _Unit | None = None,
        reporting_period: _Unit | None = None,
        checkpoint_policy: str | None = None,
        latest_checkpoint: str | Path | None = None,
        step_zero_validation: bool | None = None,
        test_mode: bool = False,
        profiling_enabled: bool = False,
    ) -> Outcome:
        """Train until the trial has completed ``max_length`` steps or epochs, including those
        before a resume. Collective.

        Arguments that are not set come from the experiment config, or have Determined's defaults:
        no validation and no checkpoint before the end, a report every 100 steps, a checkpoint of
        the best validation. The last step is always validated and saved.

        Args:
            checkpoint_period: how often to save: a Batch, an Epoch, a Record, a number of steps, or
                a dict such as ``{"batches": n}``.
            validation_period: how often to validate, in the same forms.
            max_length: when to end, in the same forms.
            reporting_period: how often to report training metrics, in the same forms.
            checkpoint_policy: after a validation, save if it is the ``"best"`` so far, save after
                ``"all"`` validations, or ``"none"``.
            latest_checkpoint: the checkpoint to start from (default: the task's on a cluster,
                otherwise the newest in the run folder).
            step_zero_validation: validate before the first step.
            test_mode: run only one step and one validation batch; not on a cluster.
            profiling_enabled: report this host's load; only on a cluster.

        A second ``fit`` continues from the last checkpoint of the first. Returns how the run ended;
        a run that was asked to stop has saved before this returns.
        """
        context = self._context
        if latest_checkpoint is not None:
            context.platform = context.platform.started_from(latest_checkpoint, context.note)
        given = {
            "checkpoint_period": checkpoint_period,
            "validation_period": validation_period,
            "max_length": max_length,
            "reporting_period": reporting_period,
        }
        batch = context.known_batch_size
        units = {
            name: read_unit(value, f"fit({name}=...)", batch) for name, value in given.items() if value is not None
        }
        settings = self._settings(units, checkpoint_policy, step_zero_validation)
        if test_mode and context.state.folder is None:
            raise ConfigError("test_mode is not available on a cluster", where="fit(test_mode=True)", fix="Omit it.")
        if test_mode:
            settings = replace(settings, max_length=Batch(1), validation_batches=1)
        if profiling_enabled and not context.platform.profile_system():
            context.note("profiling_enabled: this machine's load is only reported on a cluster")
        outcome = Controller(self._trial, context, settings).run()
        context.outcome = outcome
        if outcome.checkpoint is not None:  # the next fit continues from there
            context.platform = context.platform.resumed_at(outcome.checkpoint, outcome.step)
        trained = Trained(outcome, self._trial, context, context.state.watch)
        if isinstance(context.platform, LocalPlatform):
            finish_folder(trained, context.platform, shlex.join(["python", *sys.argv]))
        else:
            finish_task(trained, context.platform)
        return outcome

    def _settings(
        self, units: Mapping[str, TrainUnit], policy: str | None, step_zero_validation: bool | None
    ) -> TrainSettings:
        platform = self._context.platform
        try:
            base = settings_from_experiment(
                platform.experiment, self._context.known_batch_size, units.get("max_length")
            )
        except ConfigError as error:
            if error.where != "searcher.max_length" or "max_length" in units:
                raise
            fix = "Write fit(max_length=zero_trial.Batch(200))."
            raise ConfigError("the run has no length", where="Trainer.fit", fix=fix) from None
        changes: dict[str, Any] = dict(units)
        changes |= {"checkpoint_policy": policy} if policy is not None else {}
        changes |= {"step_zero_validation": step_zero_validation} if step_zero_validation is not None else {}
        settings = replace(base, **changes)
        if settings.checkpoint_policy == "best" and settings.metric is None:
            self._context.note("searcher.metric is not set, so every validation is saved")
            settings = replace(settings, checkpoint_policy="all")
        return settings
