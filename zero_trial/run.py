"""One rank of a trial: ``python -m zero_trial.run model_def:MyTrial``.

On a Determined cluster that is all (the experiment is the task's own, and the class may be left to it too); elsewhere with
``--run-dir DIR --experiment CONST.yaml``. Every rank of a launcher runs it.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import zero_trial
from zero_trial.comm.env import is_cluster_trial, read_rank_env
from zero_trial.comm.rendezvous import destroy_distributed, init_distributed
from zero_trial.errors import ConfigError
from zero_trial.experiment.experiment import ExperimentConfig, read_experiment
from zero_trial.launch.entrypoint import parse_entrypoint
from zero_trial.runs.records import has_failed_ranks
from zero_trial.runtime.local import LocalPlatform
from zero_trial.runtime.open import (
    StopRequest,
    agree_on_start,
    forget_errors,
    print_config_report,
    print_error,
    raise_if_preempted,
    record_error,
    record_provenance,
    write_summary,
)
from zero_trial.runtime.protocols import Distributed
from zero_trial.runtime.rank import RankState, as_known_error, load_trial_class, own_device, rank_world, train
from zero_trial.trial.context import EngineFactory


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The arguments of one rank; the same for every rank."""
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
    parser.add_argument("--repeat", help="the command that summary.json names as the one to repeat this run")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None, engine_factory: EngineFactory | None = None) -> int:
    """Runs one rank; returns the exit code. What goes wrong is left in ``<run>/errors/rank-<r>.json``."""
    words = list(sys.argv[1:] if argv is None else argv)
    options = parse_arguments(words)
    options.repeat = options.repeat or shlex.join(["python", "-m", "zero_trial.run", *words])
    factory = engine_factory or zero_trial.initialize
    if options.run_dir is None and is_cluster_trial():
        return cluster_main(options, factory)
    return local_main(options, factory)


def cluster_main(options: argparse.Namespace, engine_factory: EngineFactory) -> int:
    """One rank of a task of a Determined master."""
    from zero_trial.runtime.determined import require_facts
    from zero_trial.runtime.open import run_on_cluster

    def load() -> type[zero_trial.ZeroTrial]:
        name = parse_entrypoint(options.entrypoint or require_facts().experiment.get("entrypoint"))
        return load_trial_class(name, options.model_dir.resolve())

    return run_on_cluster(load, engine_factory)


def local_main(options: argparse.Namespace, engine_factory: EngineFactory) -> int:
    """One rank of a run in a folder."""
    state, folder = RankState(), options.run_dir
    stop = StopRequest(lambda: has_failed_ranks(folder))
    try:
        if options.run_dir is None or options.experiment is None:
            raise ConfigError(
                "this is no task of a Determined cluster, so the run needs a folder and an experiment",
                where="python -m zero_trial.run",
                fix="Use zero-trial run const.yaml model_def_folder, or give --run-dir and --experiment.",
            )
        with stop.listening():
            run_rank(options, state, engine_factory, stop)
    except (Exception, KeyboardInterrupt) as error:
        return fail(as_known_error(error), options, state)
    finally:
        destroy_distributed()
    return 0


def fail(error: BaseException, options: argparse.Namespace, state: RankState) -> int:
    """The exit code; the error is left in the run's folder if there is one."""
    print_error(error)
    if options.run_dir is not None:
        return record_error(error, options.run_dir, state)
    return error.exit_code if isinstance(error, ConfigError) else 1


def run_rank(options: argparse.Namespace, state: RankState, engine_factory: EngineFactory, stop: StopRequest) -> None:
    """Builds everything around the trial, the trial, and runs it."""
    state.env = read_rank_env()
    forget_errors(options.run_dir, state.env)
    experiment = read_experiment(options.experiment)
    model_dir = options.model_dir.resolve()
    name = parse_entrypoint(options.entrypoint or experiment.entrypoint)
    kind = load_trial_class(name, model_dir)
    state.env = init_distributed()
    ranks = rank_world(state.env)
    platform = build_platform(options, experiment, model_dir, ranks, stop)
    if ranks.rank == 0:
        platform.tidy()
        record_provenance(platform, own_device(state.env))
        print_config_report(options.run_dir)
    trained = train(kind, platform, state, engine_factory)
    write_summary(trained, options.run_dir, options.repeat)
    raise_if_preempted(trained.outcome)


def build_platform(
    options: argparse.Namespace,
    experiment: ExperimentConfig,
    model_dir: Path,
    ranks: Distributed,
    stop: StopRequest,
) -> LocalPlatform:
    """Collective. The run's folder as platform, and the checkpoint from which the trial starts."""
    notes: list[str] = []
    start = agree_on_start(ranks, options.run_dir, options.resume, options.warm_start, note=notes.append)
    seed = options.seed if options.seed is not None else experiment.experiment_seed or 0
    platform = LocalPlatform(
        run_dir=options.run_dir,
        experiment=experiment.plain(),
        hparams=experiment.hyperparameters,
        model_dir=model_dir,
        seed=seed,
        trial_id=start["trial_id"],
        experiment_id=experiment.name,
        latest_checkpoint=start["checkpoint"],
        steps_completed=start["step"],
        distributed=ranks,
        asked=stop,
    )
    for note in notes:
        platform.progress.emit({"kind": "note", "message": note})
    return platform


if __name__ == "__main__":
    sys.exit(main())
