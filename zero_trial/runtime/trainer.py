"""``zero_trial.init()`` and ``Trainer``: a trial trained by the user's own script, on a laptop and as a task of a cluster.

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
from pathlib import Path
from typing import Any

import zero_trial
from zero_trial.comm.env import is_cluster_trial, launcher_run_dir
from zero_trial.comm.rendezvous import destroy_distributed, init_distributed
from zero_trial.errors import ConfigError, InvalidHP, ZeroTrialError
from zero_trial.experiment.experiment import read_experiment
from zero_trial.preflight.memory_watch import MemoryWatch
from zero_trial.runs.checkpoints import named_checkpoint, resumed_from
from zero_trial.runs.layout import new_run_folder
from zero_trial.runs.records import has_failed_ranks
from zero_trial.runtime.determined import DeterminedPlatform
from zero_trial.runtime.local import LocalPlatform
from zero_trial.runtime.open import (
    StopRequest,
    agree_on_start,
    error_text,
    forget_errors,
    lock_run_together,
    print_error,
    raise_if_preempted,
    record_error,
    record_provenance,
    write_error_file,
    write_summary,
)
from zero_trial.runtime.protocols import Platform
from zero_trial.runtime.rank import EventLog, RankState, Trained, as_known_error, own_device, rank_world
from zero_trial.trial import Batch, Controller, TrainSettings, ZeroTrial, ZeroTrialContext
from zero_trial.trial.reporting import Outcome
from zero_trial.trial.settings import TrainUnit, read_unit, settings_from_experiment
from zero_trial.trial.trial import seed_everything

Unit = TrainUnit | int | Mapping[str, int] | Any  # Any: Determined's own Batch and Epoch


class ScriptContext(ZeroTrialContext):
    """A context that a script opened. ``run_dir``: where the run's files lie; None on a cluster."""

    def __init__(self, platform: Platform, state: RankState, run_dir: Path | None) -> None:
        watch = MemoryWatch(platform.progress.emit, state.env.local_world_size) if state.env.rank == 0 else None
        factory = watch.around(zero_trial.initialize) if watch is not None else zero_trial.initialize
        super().__init__(platform, factory, own_device(state.env))
        self.watch = watch
        self.run_dir = run_dir
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
    """Collective. Joins the ranks, seeds everything and gives the context for the trial; the end of the block leaves.

    On a cluster, hyperparameters, experiment config and seed are the task's own (``hparams`` may replace the first).
    Elsewhere ``exp_conf`` is an experiment's YAML or the same as a dict, or nothing, and ``run_dir`` the run's folder (default:
    the next of ``runs/NNNN``); a run that lies there already goes on.

    An error of this package that leaves the block ends the process with the error's exit code and its message, so that a launcher
    understands it: 75 for a run that was asked to stop and has saved. Hyperparameters that cannot be trained end every rank.
    """
    state = RankState()
    opened = _on_cluster(state, hparams) if is_cluster_trial() else _on_disk(state, hparams, exp_conf, run_dir, seed)
    with opened as (platform, folder):
        seed_everything(platform.seed)
        context = ScriptContext(platform, state, folder)
        state.context = context
        context.set_enable_tensorboard_logging(enable_tensorboard_logging)
        yield context
        if folder is not None and context.outcome is not None:
            raise_if_preempted(context.outcome)


@contextmanager
def _on_cluster(state: RankState, hparams: Mapping[str, Any] | None) -> Iterator[tuple[Platform, None]]:
    from zero_trial.runtime.open import EARLY_EXIT, is_invalid_hp, open_on_cluster

    with open_on_cluster(state) as (platform, farewell):
        try:
            facts = platform.facts if hparams is None else replace(platform.facts, hparams=hparams)
            yield replace(platform, facts=facts), None
        except (Exception, KeyboardInterrupt) as error:
            if is_invalid_hp(error):
                platform.report_early_exit("INVALID_HP")
                sys.stderr.write(f"hyperparameters that cannot be trained: {error}\n")
                raise SystemExit(0) from None
            if farewell.claimed(EARLY_EXIT):  # only the echo of another rank's leaving
                raise SystemExit(0) from None
            _end(error)
            raise


@contextmanager
def _on_disk(
    state: RankState,
    hparams: Mapping[str, Any] | None,
    exp_conf: Mapping[str, Any] | str | Path | None,
    run_dir: str | Path | None,
    seed: int | None,
) -> Iterator[tuple[Platform, Path]]:
    stop = StopRequest(lambda: folder is not None and has_failed_ranks(folder))
    log: EventLog | None = None
    folder: Path | None = None
    platform: LocalPlatform | None = None
    try:
        with stop.listening(), ExitStack() as stack:
            state.env = init_distributed()
            ranks = rank_world(state.env)
            experiment, own, own_seed = _experiment(exp_conf)
            named = Path(ranks.broadcast(str(_run_folder(run_dir)) if ranks.rank == 0 else None))
            stack.enter_context(lock_run_together(named, ranks))
            folder = named  # from now on errors are left there
            forget_errors(folder, state.env)
            notes: list[str] = []
            start = agree_on_start(ranks, folder, note=notes.append)
            log = EventLog(live=None) if ranks.rank == 0 else None
            platform = LocalPlatform(
                run_dir=folder,
                experiment=experiment,
                hparams=own if hparams is None else hparams,
                model_dir=Path.cwd(),
                seed=own_seed if seed is None else seed,
                trial_id=start["trial_id"],
                experiment_id=str(experiment.get("name") or Path(sys.argv[0]).stem),
                latest_checkpoint=start["checkpoint"],
                steps_completed=start["step"],
                distributed=ranks,
                asked=stop,
                show=log,
            )
            if ranks.rank == 0:
                platform.tidy()
                record_provenance(platform, own_device(state.env))
            for note in notes:
                platform.progress.emit({"kind": "note", "message": note})
            yield platform, folder
    except (Exception, KeyboardInterrupt) as error:
        if folder is not None:
            record_error(as_known_error(error), folder, state)
        if platform is not None and isinstance(error, InvalidHP):
            platform.report_early_exit("INVALID_HP")
        _end(error)
        raise
    finally:
        if log is not None:
            log.close()
        destroy_distributed()


def _end(error: BaseException) -> None:
    """SystemExit for an error of this package, whose message is printed; anything else is left to whoever calls, and told to the launcher."""
    error = as_known_error(error)
    if isinstance(error, ZeroTrialError):
        print_error(error)
        raise SystemExit(error.exit_code) from None
    write_error_file(error_text(error), printed=False)


def _experiment(given: Mapping[str, Any] | str | Path | None) -> tuple[dict[str, Any], Mapping[str, Any], int]:
    """The experiment as plain data, its hyperparameters and its seed."""
    if isinstance(given, (str, Path)):
        read = read_experiment(Path(given))
        return read.plain(), read.hyperparameters, read.experiment_seed or 0
    plain = dict(_mapping(given, "exp_conf"))
    for name in ("searcher", "hyperparameters", "data", "resources", "checkpoint_storage"):
        _mapping(plain.get(name), f"exp_conf: {name}")
    seed = _mapping(plain.get("reproducibility"), "exp_conf: reproducibility").get("experiment_seed") or 0
    if not isinstance(seed, int):
        raise ConfigError(
            "no seed", where="exp_conf: reproducibility.experiment_seed", got=repr(seed), expected="a whole number"
        )
    return plain, plain.get("hyperparameters") or {}, seed


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    """``value`` if it is a mapping, an empty one for nothing."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError("not a mapping", where=where, got=type(value).__name__, expected="keys with values")
    return value


def _run_folder(given: str | Path | None) -> Path:
    """The run's folder, absolute: the given one, that of ``zero-trial launch``, or the next of ``runs/NNNN``."""
    named = given if given is not None else launcher_run_dir()
    folder = Path(named) if named is not None else new_run_folder(Path("runs"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"the run's folder cannot be made ({error.strerror or error})",
            where="run_dir",
            got=str(folder),
            fix="Name another folder.",
        ) from None
    return folder.resolve()


def _check_trial(given: object) -> None:
    if isinstance(given, ZeroTrial):
        return
    is_class = isinstance(given, type)
    name = given.__name__ if isinstance(given, type) else type(given).__name__
    raise ConfigError(
        "this is no trial",
        where="Trainer",
        got=f"the class {name}" if is_class else f"an object of class {name}",
        expected="an object of a class that derives from ZeroTrial",
        fix=f"Write Trainer({name}(context), context)." if is_class else None,
    )


class Trainer:
    """Trains ``trial``, which was made with ``context``, inside of the block of ``zero_trial.init()``."""

    def __init__(self, trial: ZeroTrial, context: ZeroTrialContext) -> None:
        if not isinstance(context, ScriptContext):
            raise ConfigError(
                "this context is not a script's",
                where="Trainer",
                got=type(context).__name__,
                fix="Write with zero_trial.init() as context: and pass that one.",
            )
        _check_trial(trial)
        self._trial = trial
        self._context = context

    def fit(
        self,
        checkpoint_period: Unit | None = None,
        validation_period: Unit | None = None,
        max_length: Unit | None = None,
        reporting_period: Unit | None = None,
        checkpoint_policy: str | None = None,
        latest_checkpoint: str | Path | None = None,
        step_zero_validation: bool | None = None,
        test_mode: bool = False,
        profiling_enabled: bool = False,
    ) -> Outcome:
        """Collective. Trains until ``max_length`` steps or epochs of the trial are complete, also those before a resume.

        What is left out is the experiment config's, else Determined's default: never validated or saved on the way, reported
        every 100 steps, the best validation saved, and the last step always validated and saved. ``latest_checkpoint``: start
        from this one (default: the task's own on a cluster, the run folder's newest elsewhere). ``test_mode`` takes one step and
        one validation batch, off a cluster only. ``profiling_enabled`` reports this host's load to a cluster.

        A second ``fit`` goes on where the first has ended, from its last checkpoint. Returns how it ended; a run that was asked to stop
        has saved by then.
        """
        context = self._context
        self._start_from(latest_checkpoint)
        given = {
            "checkpoint_period": checkpoint_period,
            "validation_period": validation_period,
            "max_length": max_length,
            "reporting_period": reporting_period,
        }
        units = {name: read_unit(value, f"fit({name}=...)") for name, value in given.items() if value is not None}
        settings = self._settings(units, checkpoint_policy, step_zero_validation)
        if test_mode:
            settings = self._one_step(settings)
        if profiling_enabled and not context.platform.profile_system():
            context.note("profiling_enabled: this machine's load is reported on a cluster only")
        outcome = Controller(self._trial, context, settings).run()
        context.outcome = outcome
        self._go_on_from(outcome)
        trained = Trained(outcome, self._trial, context, context.watch)
        if context.run_dir is not None:
            write_summary(trained, context.run_dir, shlex.join(["python", *sys.argv]))
        if isinstance(context.platform, DeterminedPlatform):
            from zero_trial.runtime.open import emit_done, keep_memory_figures

            keep_memory_figures(trained, context.platform)
            emit_done(trained)
        return outcome

    def _settings(
        self, units: Mapping[str, TrainUnit], policy: str | None, step_zero_validation: bool | None
    ) -> TrainSettings:
        platform = self._context.platform
        try:
            base = settings_from_experiment(platform.experiment, platform.hparams, units.get("max_length"))
        except ConfigError as error:
            if error.where != "searcher.max_length" or "max_length" in units:
                raise
            fix = "Write fit(max_length=zero_trial.Batch(200))."
            raise ConfigError("the run has no length", where="Trainer.fit", fix=fix) from None
        changes: dict[str, Any] = dict(units)
        changes |= {"checkpoint_policy": policy} if policy is not None else {}
        changes |= {"step_zero_validation": step_zero_validation} if step_zero_validation is not None else {}
        settings = replace(base, **changes)
        self._warn_of_another_length(settings.max_length)
        if settings.checkpoint_policy == "best" and settings.metric is None:
            self._context.note("no searcher.metric says what is best: every validation is saved")
            settings = replace(settings, checkpoint_policy="all")
        return settings

    def _warn_of_another_length(self, length: TrainUnit) -> None:
        """A search that stops trials early measures them by its own idea of how long they are."""
        searcher = self._context.platform.experiment.get("searcher") or {}
        most, metric = searcher.get("max_time"), searcher.get("time_metric")
        own = {"batches": "Batch", "epochs": "Epoch"}.get(str(metric))
        if most is not None and own is not None and (type(length).__name__ != own or length.value != most):
            self._context.note(
                f"max_length is {length}, and searcher.max_time is {most} {metric}: the search counts on the latter"
            )

    def _one_step(self, settings: TrainSettings) -> TrainSettings:
        if self._context.run_dir is None:
            raise ConfigError("only off a cluster", where="fit(test_mode=True)", fix="Leave it out here.")
        return replace(settings, max_length=Batch(1), validation_batches=1)

    def _go_on_from(self, outcome: Outcome) -> None:
        """What is trained is trained: the next ``fit`` neither does these steps again nor reports them twice."""
        context, platform = self._context, self._context.platform
        if isinstance(platform, LocalPlatform) and outcome.checkpoint is not None:
            context.platform = replace(platform, latest_checkpoint=outcome.checkpoint, steps_completed=outcome.step)
        elif isinstance(platform, DeterminedPlatform) and outcome.checkpoint is not None:
            facts = replace(platform.facts, latest_checkpoint=outcome.checkpoint, steps_completed=outcome.step)
            context.platform = replace(platform, facts=facts)

    def _start_from(self, named: str | Path | None) -> None:
        """Puts another checkpoint where the platform has its own."""
        context, platform = self._context, self._context.platform
        if named is None:
            return
        if isinstance(platform, LocalPlatform):
            point = resumed_from(named_checkpoint(Path(named)))
            context.platform = replace(
                platform,
                latest_checkpoint=point["checkpoint"],
                steps_completed=point["step"],
                trial_id=point["trial_id"],
            )
        elif isinstance(platform, DeterminedPlatform):
            facts = replace(platform.facts, latest_checkpoint=str(named))
            context.platform = replace(platform, facts=facts)
