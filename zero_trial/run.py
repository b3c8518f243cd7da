"""One rank of a trial: ``python -m zero_trial.run model_def:MyTrial --run-dir DIR --experiment CONST.yaml``.

The composition root: the only place that knows the platform, the trial, the mesh and the engine at once. Every rank
of a launcher runs it.
"""

from __future__ import annotations

import argparse
import json
import resource
import shlex
import sys
import time
import traceback
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import zero_trial
from zero_trial.config import ExperimentConfig, read_experiment
from zero_trial.config.report import REPORT, entries_of, short_report
from zero_trial.errors import ConfigError, DoesNotFit, InvalidHP, Preempted, ZeroTrialError
from zero_trial.launch.entrypoint import Entrypoint, check_entrypoint, parse_entrypoint
from zero_trial.mesh.env import RankEnv, read_rank_env
from zero_trial.mesh.mesh import build_mesh
from zero_trial.mesh.topology import MeshShape
from zero_trial.mesh.world import destroy_distributed, init_distributed
from zero_trial.planning.watch import MemoryWatch
from zero_trial.platform.collectives import JsonDistributed
from zero_trial.platform.local import LocalPlatform, checkpoint_step, latest_checkpoint
from zero_trial.platform.protocols import Distributed
from zero_trial.platform.run_folder import RunFolder, append_line, error_record, write_json
from zero_trial.trial import Controller, ZeroTrial, ZeroTrialContext
from zero_trial.trial.context import EngineFactory
from zero_trial.trial.loading import import_trial_class
from zero_trial.trial.outcome import End, Outcome
from zero_trial.trial.seeding import seed_everything
from zero_trial.trial.settings import settings_from_experiment
from zero_trial.trial.summary import build_summary


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The arguments of one rank; the same for every rank."""
    parser = argparse.ArgumentParser(prog="python -m zero_trial.run", description=__doc__)
    parser.add_argument("entrypoint", nargs="?", help="module:Class; the experiment's entrypoint unless given")
    parser.add_argument("--run-dir", type=Path, required=True, help="the run's folder; a checkpoint in it is continued")
    parser.add_argument("--experiment", type=Path, required=True, help="the experiment's YAML")
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
    state = RankState(RunFolder(options.run_dir))
    try:
        run_rank(options, state, engine_factory or zero_trial.initialize)
    except (Exception, KeyboardInterrupt) as error:
        return fail(known(error), state)
    finally:
        destroy_distributed()
    return 0


@dataclass
class RankState:
    """What a failing rank knows of itself."""

    folder: RunFolder
    env: RankEnv = RankEnv()  # noqa: RUF009 - frozen
    context: ZeroTrialContext | None = None

    @property
    def step(self) -> int | None:
        position = self.context.position if self.context is not None else None
        return None if position is None else position.step


def known(error: BaseException) -> BaseException:
    """Memory that ran out, as DoesNotFit; anything else as it is."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        fix = "Halve train_micro_batch_size_per_gpu and double gradient_accumulation_steps, or raise the ZeRO stage."
        wrapped = DoesNotFit(f"memory ran out: {str(error).splitlines()[0] if str(error) else 'MemoryError'}", fix=fix)
        wrapped.__cause__ = error
        return wrapped
    return error


def fail(error: BaseException, state: RankState) -> int:
    """Leaves the error for the supervisor. The log gets a traceback only if the error is nobody's expected one."""
    now = time.time()
    record = error_record(error, state.env.rank, state.step, now)
    path = state.folder.error(state.env.rank)
    if not path.exists():  # the first error is the cause
        write_json(path, record)
    if state.env.rank == 0:
        append_line(state.folder.events, {"kind": "error", **{key: record[key] for key in ("time", "step", "message")}})
    if isinstance(error, ZeroTrialError):
        sys.stderr.write(f"{error}\n")
    else:
        traceback.print_exception(error, file=sys.stderr)
    return int(record["exit_code"])


def run_rank(options: argparse.Namespace, state: RankState, engine_factory: EngineFactory) -> None:
    """Builds everything around the trial, the trial, and runs it."""
    state.env = read_rank_env()
    experiment = read_experiment(options.experiment)
    model_dir = options.model_dir.resolve()
    name = parse_entrypoint(options.entrypoint or experiment.entrypoint)
    kind = load_trial_class(name, model_dir)
    state.env = init_distributed()
    ranks = world(state.env)
    platform = build_platform(options, experiment, model_dir, ranks)
    if ranks.rank == 0:
        platform.checkpoints.sweep()
        say_config(options.run_dir)
    watch = MemoryWatch(platform.progress.emit, state.env.local_world_size) if ranks.rank == 0 else None
    seed_everything(platform.seed)
    factory = watch.around(engine_factory) if watch is not None else engine_factory
    context = ZeroTrialContext(platform, factory, own_device(state.env))
    state.context = context
    try:
        trial = kind(context)
    except InvalidHP:
        platform.report_early_exit("INVALID_HP")
        raise
    controller = Controller(trial, context, settings_from_experiment(platform.experiment, platform.hparams))
    finish(controller.run(), trial, context, options, watch)


def say_config(run_dir: Path) -> None:
    """What of the ds_config the user did not write, and what has no effect, into this rank's log."""
    path = run_dir / REPORT
    if path.is_file():
        sys.stdout.write(short_report(entries_of(json.loads(path.read_text(encoding="utf-8")))) + "\n")


def world(env: RankEnv) -> JsonDistributed:
    """The trial's ranks over the mesh's communicator.

    Its groups are those that the engines use; its traffic is not counted with theirs.
    """
    if env.world_size == 1:
        return JsonDistributed()
    comm = build_mesh(MeshShape(replica=env.world_size)).world
    return JsonDistributed(env.rank, env.world_size, env.local_rank, lambda value: comm.gather_json(value, "trial"))


def own_device(env: RankEnv) -> torch.device:
    """The CUDA device of this local rank, or the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", env.local_rank % torch.cuda.device_count())
    return torch.device("cpu")


def build_platform(
    options: argparse.Namespace, experiment: ExperimentConfig, model_dir: Path, ranks: Distributed
) -> LocalPlatform:
    """Collective. The run's folder as platform; rank 0 decides where the trial starts."""
    start = ranks.broadcast(starting_point(options) if ranks.rank == 0 else None)
    seed = options.seed if options.seed is not None else experiment.experiment_seed or 0
    return LocalPlatform(
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
    )


def starting_point(options: argparse.Namespace) -> dict[str, Any]:
    """The checkpoint to start from, its step, and the trial's id: the run's own latest one, or what --resume or
    --warm-start names.
    """
    own = latest_checkpoint(RunFolder(options.run_dir).checkpoints)
    named = options.resume or options.warm_start
    path = own if own is not None or named is None else named_checkpoint(named)
    fresh = {"checkpoint": None, "step": 0, "trial_id": uuid.uuid4().hex}
    if path is None:
        return fresh
    metadata = json.loads((path / "metadata.json").read_text())
    weights_only = own is None and options.resume is None
    trial_id = fresh["trial_id"] if weights_only else metadata["trial_id"]
    return {"checkpoint": str(path.resolve()), "step": metadata["steps_completed"], "trial_id": trial_id}


def named_checkpoint(path: Path) -> Path:
    """``path`` itself if it is a checkpoint, or the latest of a run's folder. Raises ConfigError if it is neither."""
    found = path if checkpoint_step(path) is not None else latest_checkpoint(RunFolder(path).checkpoints)
    if found is None:
        raise ConfigError(
            "there is no finished checkpoint", where=str(path), expected="a run's folder or a folder step-NNNNNN"
        )
    return found


def load_trial_class(name: Entrypoint, model_dir: Path) -> type[ZeroTrial]:
    """The user's class. Raises ConfigError, naming the trials that there are, if it is not one."""
    check_entrypoint(name, model_dir, where="entrypoint")
    return import_trial_class(name.module, name.name, model_dir)


def finish(
    outcome: Outcome,
    trial: ZeroTrial,
    context: ZeroTrialContext,
    options: argparse.Namespace,
    watch: MemoryWatch | None = None,
) -> None:
    """Collective.

    summary.json and the last event; a preempted run ends in Preempted, so that it is known as resumable.
    """
    memory = context.distributed.gather(peak_memory(context.device))
    if context.distributed.rank == 0:
        kind = "CUDA memory allocated" if context.device.type == "cuda" else "resident set"
        more = {"peak_memory_bytes": memory, "peak_memory_kind": kind, "repeat": options.repeat}
        more |= watch.summary() if watch is not None else {}
        summary = build_summary(outcome, trial, context, more)
        write_json(RunFolder(options.run_dir).summary, summary)
        done = {"kind": "done", "step": outcome.step, "total_steps": outcome.total_steps, "end": outcome.end.value}
        context.platform.progress.emit(done)
    context.distributed.barrier()  # the summary is there before any rank is gone
    if outcome.end is End.PREEMPTED:
        raise Preempted(
            f"stopped at step {outcome.step} of {outcome.total_steps} and saved {outcome.checkpoint}",
            fix="The same command with this run folder goes on from there.",
        )


def peak_memory(device: torch.device) -> int:
    """Bytes: of this process's device memory on CUDA, of its resident set on CPU (interpreter and libraries included)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if status.is_file():  # ru_maxrss can be that of the parent, from before exec
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    sys.exit(main())
