"""A tiny trial, the faults that can happen to it, and its ranks as fresh processes, for
faults.py.

The model is an MLP with dropout, so that a resumed run is bit-identical only if the random state is
restored. Every sample has a number, and every rank records the numbers that it has seen.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from torch.utils.data import TensorDataset

from benchmarks.faults_tap import Tap, kill_all
from zero_trial import ZeroTrial
from zero_trial.checkpoint.range_reader import CheckpointReader
from zero_trial.trial import DataLoader

SAMPLES = 48
STEPS = 12
PERIOD = 4
SEEN, FIRED, PIDS = "seen", "fired", "pids"  # files in the run's folder, one per rank
COMM_TIMEOUT = 20.0


@dataclass(frozen=True)
class Plan:
    """What happens in a run: ``what`` at step ``step`` (complete steps before it) on the ranks
    ``ranks``; see :func:`act`.

    ``tap``: (rank, event) of a save at which all ranks are killed. ``steps``, ``ranks_of``: the
        experiment.
    """

    what: str = ""
    step: int = -1
    ranks: tuple[int, ...] = (0, 1)
    number: float = 0
    tap: tuple[int, int] | None = None
    count_taps: bool = False
    ds_config: Mapping[str, Any] = field(default_factory=dict)
    hparams: Mapping[str, Any] = field(default_factory=dict)
    experiment: Mapping[str, Any] = field(default_factory=dict)
    pause: float = 0.0  # seconds added to every step, for faults at a random time


@dataclass
class Here:
    """The task of this process; set by :func:`rank_main` before the trial is built."""

    plan: Plan = field(default_factory=Plan)
    run: Path = field(default_factory=Path)


HERE = Here()


class FaultTrial(ZeroTrial):
    """The trial that the module's docstring describes."""

    def __init__(self, context: Any) -> None:
        self.context = context
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(SAMPLES, 8, generator=generator)
        self.data = TensorDataset(torch.arange(SAMPLES), x, x.sum(1, keepdim=True))
        torch.manual_seed(context.get_trial_seed())
        model = torch.nn.Sequential(
            torch.nn.Linear(8, 32),
            torch.nn.Tanh(),
            torch.nn.Dropout(0.2),
            torch.nn.Linear(32, 32),
            torch.nn.Linear(32, 1),
        )
        self.engine = context.initialize(model=model)

    def build_training_data_loader(self) -> Any:
        micro = self.context.get_train_micro_batch_size_per_gpu()
        uneven = int(self.context.get_hparams().get("uneven", 0))
        if not uneven:
            return DataLoader(
                self.data, micro, shuffle=True, num_workers=int(self.context.get_hparams().get("workers", 0))
            )
        self.context.disable_dataset_reproducibility_checks()
        batches = 9 - uneven * self.context.distributed.rank
        return [tuple(tensor[:micro] for tensor in self.data.tensors) for _ in range(batches)]

    def build_validation_data_loader(self) -> Any:
        return DataLoader(self.data, self.context.get_train_micro_batch_size_per_gpu())

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> Any:
        ids, x, y = next(dataloader_iter)
        rank = self.context.distributed.rank
        _note(SEEN, rank, {"step": batch_idx, "ids": ids.tolist()})
        if HERE.plan.pause:
            time.sleep(HERE.plan.pause)
        loss = torch.nn.functional.mse_loss(self.engine(x), y)
        if HERE.plan.what == "slow" and batch_idx >= HERE.plan.step and rank in HERE.plan.ranks:
            time.sleep(HERE.plan.number)
        elif HERE.plan.what and batch_idx == HERE.plan.step and rank in HERE.plan.ranks:
            loss = act(HERE.plan, rank, loss)
        self.engine.backward(loss)
        self.engine.step()
        return loss

    def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> Any:
        _, x, y = next(dataloader_iter)
        return {"validation_loss": torch.nn.functional.mse_loss(self.engine(x), y)}


def act(plan: Plan, rank: int, loss: torch.Tensor) -> torch.Tensor:
    """Inject the fault in the forward of a step; return the loss to continue with."""
    _note(FIRED, rank, {"time": time.monotonic()})
    match plan.what:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "term":
            os.kill(os.getpid(), signal.SIGTERM)
        case "preempt":
            (HERE.run / "preempt").touch()
        case "nan" | "inf":
            return loss * float(plan.what)
        case "nan gradient":
            loss.register_hook(lambda gradient: gradient * float("nan"))
        case "out of memory":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
        case "file size":
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (int(plan.number), resource.RLIM_INFINITY))
        case "open files":
            resource.setrlimit(resource.RLIMIT_NOFILE, (int(plan.number), int(plan.number)))
        case "no folder":
            if rank == min(plan.ranks):
                folder = HERE.run / "checkpoints"
                folder.rename(folder.with_name("moved"))
                folder.write_text("a file now")
        case "full":
            if rank == min(plan.ranks):
                fill(HERE.run, int(plan.number))
        case _:
            raise ValueError(plan.what)
    return loss


def fill(folder: Path, room: int) -> None:
    """Fill the file system of ``folder``, which must be small, up to ``room`` bytes."""
    state = os.statvfs(folder)
    free = state.f_bavail * state.f_frsize
    with (folder / "ballast").open("wb") as file, suppress(OSError):
        file.write(b"x" * max(free - room, 0))


def _note(kind: str, rank: int, row: Mapping[str, Any]) -> None:
    """Append a line to a file of this rank outside the run's folder, so that the fault does not
    affect the record."""
    folder = HERE.run.with_name(HERE.run.name + "." + kind)
    folder.mkdir(exist_ok=True)
    with (folder / str(rank)).open("a") as file:
        file.write(json.dumps(row) + "\n")


def noted(run: Path, kind: str) -> dict[int, list[dict[str, Any]]]:
    """Return what the ranks have recorded."""
    folder = run.with_name(run.name + "." + kind)
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    return {int(path.name): [json.loads(line) for line in path.read_text().splitlines()] for path in files}


def write_project(folder: Path) -> None:
    """Write the folder of the trial's module, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model_def.py").write_text(
        "from benchmarks.faults_trial import FaultTrial\n\n\nclass MyTrial(FaultTrial):\n    pass\n"
    )


def experiment(plan: Plan) -> dict[str, Any]:
    """Return the experiment's YAML as plain data."""
    config = {
        "train_batch_size": 8,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": 2},
        "comm_timeout_seconds": COMM_TIMEOUT,
        **plan.ds_config,
    }
    return {
        "name": "faults",
        "entrypoint": "model_def:MyTrial",
        "searcher": {"name": "single", "metric": "validation_loss", "max_length": {"batches": STEPS}},
        "min_checkpoint_period": {"batches": PERIOD},
        "scheduling_unit": 1,
        "reproducibility": {"experiment_seed": 5},
        "hyperparameters": dict(plan.hparams),
        "checkpoint_storage": {"type": "shared_fs", "host_path": "/tmp", "save_trial_latest": 3},
        "data": {"ds_config": config},
        **plan.experiment,
    }


def rank_main(project: str, run: str, plan: Plan) -> int:
    """Run one rank in the folder ``run``, as the launcher starts it; return the exit code."""
    import zero_trial.run

    HERE.plan, HERE.run = plan, Path(run)
    rank = int(os.environ["RANK"])
    _note(PIDS, rank, {"pid": os.getpid()})
    if plan.tap is not None or plan.count_taps:
        mark = f"step-{2 * PERIOD:06d}"
        at = plan.tap[1] if plan.tap is not None and plan.tap[0] == rank else None
        Tap(mark, at, lambda name: _note(FIRED, rank, {"time": time.monotonic(), "event": name}), _kill_all).install()
    words = ["model_def:MyTrial", "--run-dir", run, "--experiment", f"{run}.yaml", "--model-dir", project]
    return zero_trial.run.main(words)


def _kill_all() -> None:
    kill_all([rows[-1]["pid"] for rows in noted(HERE.run, PIDS).values()])


def write_experiment(run: Path, plan: Plan) -> None:
    """Write it next to the run's folder, which the run creates itself."""
    Path(f"{run}.yaml").write_text(yaml.safe_dump(experiment(plan)))


# --- what is left of a run ------------------------------------------------------------------------


def bits(run: Path, step: int = STEPS) -> dict[str, Any]:
    """Return what must be equal: the checksums of the checkpoint's files at ``step``, and the last
    validation."""
    folder = run / "checkpoints" / f"step-{step:06d}" / "model0"
    files = {name: record.sha256 for name, record in CheckpointReader(folder).manifest.files.items()}
    return {"files": files, "validation": json.loads((run / "summary.json").read_text())["final_validation"]}


def whole_steps(run: Path) -> list[int]:
    """Return the steps of the finished checkpoints whose files verify."""
    found = []
    for folder in sorted((run / "checkpoints").glob("step-??????")):
        if (folder / "metadata.json").is_file():
            CheckpointReader(folder / "model0").verify()
            found.append(int(folder.name.removeprefix("step-")))
    return found


def leftovers(run: Path) -> list[str]:
    """Return the names in the checkpoints' folder that are not finished checkpoints."""
    folder = run / "checkpoints"
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return sorted(name for name in names if len(name) != len("step-000004"))


def words_of(log: Path, ranks: Sequence[int]) -> str:
    """Return what the ranks have printed."""
    paths = [log / f"rank-{rank}.log" for rank in ranks]
    return "\n".join(path.read_text(errors="replace") for path in paths if path.is_file())


def ids_by_step(run: Path) -> dict[int, list[int]]:
    """Return the samples of each step over all ranks, sorted; if a step was repeated after a kill,
    the last time counts."""
    found: dict[int, dict[int, list[int]]] = {}
    for rank, rows in noted(run, SEEN).items():
        mine: dict[int, list[int]] = {}
        for row in rows:
            mine.setdefault(row["step"], []).extend(row["ids"])
        for step, ids in mine.items():
            found.setdefault(step, {})[rank] = ids
    return {step: sorted(number for ids in ranks.values() for number in ids) for step, ranks in sorted(found.items())}


if __name__ == "__main__":
    sys.exit("this is a part of faults.py")
