"""One rank of a trial: ``python -m zero_trial.run model_def:MyTrial``.

On a Determined cluster that is all (the experiment is the task's own, and the class may be left to
it too); elsewhere with ``--run-dir DIR --experiment CONST.yaml``. Every rank of a launcher runs it.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import zero_trial
from zero_trial.comm.rendezvous import init_distributed, is_cluster_trial, read_rank_env
from zero_trial.errors import ConfigError
from zero_trial.experiment.entrypoint import parse_entrypoint
from zero_trial.experiment.experiment import read_experiment
from zero_trial.trial.context import EngineFactory
from zero_trial.trial.runtime.protocols import Platform
from zero_trial.trial.runtime.rank import RankState, load_trial_class, train
from zero_trial.trial.runtime.run_folder import (
    LocalRun,
    finish_folder,
    forget_errors,
    open_folder,
    raise_if_preempted,
    rank_of_folder,
)
from zero_trial.trial.runtime.task import train_task


def _parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments of one rank, which are the same for every rank."""
    parser = argparse.ArgumentParser(prog="python -m zero_trial.run", description=__doc__)
    parser.add_argument("entrypoint", nargs="?", help="module:Class; the experiment's entrypoint unless given")
    parser.add_argument("--run-dir", type=Path, help="the run's folder; a checkpoint in it is continued")
    parser.add_argument("--experiment", type=Path, help="the experiment's YAML")
    parser.add_argument("--model-dir", type=Path, default=Path(), help="where the module and relative paths are found")
    parser.add_argument("--seed", type=int, help="instead of reproducibility.experiment_seed")
    parser.add_argument(
        "--resume", type=Path, help="continue the trial of another run's folder, or from one checkpoint"
    )
    parser.add_argument(
        "--warm-start", type=Path, help="a new trial from the weights of a run's folder or a checkpoint"
    )
    parser.add_argument("--repeat", help="the command that summary.json records to repeat this run")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None, engine_factory: EngineFactory | None = None) -> int:
    """Run one rank; return the exit code. Errors go to ``<run>/errors/rank-<r>.json``."""
    words = list(sys.argv[1:] if argv is None else argv)
    options = _parse_arguments(words)
    options.supervised = options.repeat is not None
    options.repeat = options.repeat or shlex.join(["python", "-m", "zero_trial.run", *words])
    run = _run_task if options.run_dir is None and is_cluster_trial() else _run_folder
    try:
        run(options, engine_factory or zero_trial.initialize)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        sys.stderr.write(f"{end.code}\n")  # sys.exit("message") of the user's module
        return 1
    return 0


def _run_task(options: argparse.Namespace, engine_factory: EngineFactory) -> None:
    """Run one rank of a task of a Determined master."""

    def load(platform: Platform) -> type[zero_trial.ZeroTrial]:
        name = parse_entrypoint(options.entrypoint or platform.experiment.get("entrypoint"))
        return load_trial_class(name, options.model_dir.resolve())

    train_task(load, engine_factory)


def _run_folder(options: argparse.Namespace, engine_factory: EngineFactory) -> None:
    """Run one rank of a run in a folder."""
    state = RankState(folder=options.run_dir)
    with rank_of_folder(state) as stop:
        if options.run_dir is None or options.experiment is None:
            raise ConfigError(
                "this is not a task of a Determined cluster, so the run needs a folder and an experiment",
                where="python -m zero_trial.run",
                fix="Use zero-trial run const.yaml model_def_folder, or give --run-dir and --experiment.",
            )
        state.env = read_rank_env()
        forget_errors(state)
        experiment = read_experiment(options.experiment)
        model_dir = options.model_dir.resolve()
        # Before the ranks join: a model that cannot be imported is said at once, by each of them.
        kind = load_trial_class(parse_entrypoint(options.entrypoint or experiment.entrypoint), model_dir)
        state.env = init_distributed()
        run = LocalRun(
            folder=options.run_dir,
            experiment=experiment.plain(),
            hparams=experiment.hyperparameters,
            model_dir=model_dir,
            seed=options.seed if options.seed is not None else experiment.experiment_seed or 0,
            experiment_id=experiment.name,
            resume=options.resume,
            warm_start=options.warm_start,
        )
        with open_folder(run, state, stop) as platform:
            trained = train(kind, platform, state, engine_factory)
            finish_folder(trained, platform, options.repeat)
            # zero-trial run names its own command to go on
            raise_if_preempted(
                trained.outcome, None if options.supervised else "The same command continues from there."
            )


if __name__ == "__main__":
    sys.exit(main())
