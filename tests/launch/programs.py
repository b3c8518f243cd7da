"""Small programs that play ranks, and how a test starts a supervisor around them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from zero_trial.launch.hosts import rank_environment
from zero_trial.launch.supervisor import HostRanks, RankProgram, Supervisor, SupervisorTimeouts

LIMIT = 120  # seconds for a whole run with processes; only a hang reaches it

QUICK = SupervisorTimeouts(tick=0.05, after_failure=1.0, after_stop=20.0, after_kill=10.0)
"""For tests: ranks that will not end by themselves are given up soon."""


class Silent:
    """A watcher that only counts."""

    def __init__(self) -> None:
        self.ticks = 0
        self.closed = False

    def tick(self) -> None:
        self.ticks += 1

    def close(self) -> None:
        self.closed = True


def write_program(folder: Path, body: str, name: str = "program.py") -> Path:
    """A script from an indented text; ``rank`` and ``wait()`` (forever, without using the
    processor) are there for it."""
    head = """
        import os, signal, sys, threading
        rank = int(os.environ.get("RANK", "0"))
        def wait():
            threading.Event().wait()
    """
    path = folder / name
    path.write_text(textwrap.dedent(head) + textwrap.dedent(body), encoding="utf-8")
    return path


def supervisor(
    folder: Path,
    body: str,
    ranks: int = 2,
    timeouts: SupervisorTimeouts = QUICK,
    *,
    watcher: Silent | None = None,
) -> Supervisor:
    """A supervisor over ranks that run ``body``; the run's folder is ``folder/run``."""
    run_dir = folder / "run"
    run_dir.mkdir()
    program = RankProgram(str(write_program(folder, body)))
    command = HostRanks(program, ranks, str(run_dir), cwd=str(folder))
    return Supervisor(command, child_environment(), watcher or Silent(), timeouts=timeouts)


def child_environment() -> dict[str, str]:
    return rank_environment(os.environ, threads=1, interface="lo" if sys.platform == "linux" else None)


def zero_trial(*arguments: object, cwd: Path, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command line to its end."""
    words = [sys.executable, "-m", "zero_trial.cli.main", *map(str, arguments)]
    full = {**child_environment(), **(env or {})}
    return subprocess.run(words, cwd=cwd, env=full, capture_output=True, text=True, timeout=LIMIT, check=False)


def start_zero_trial(*arguments: object, cwd: Path, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """Start the command line in a process group of its own."""
    words = [sys.executable, "-m", "zero_trial.cli.main", *map(str, arguments)]
    return subprocess.Popen(
        words,
        cwd=cwd,
        env={**child_environment(), **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


# A linear model on numbers made from a seed. FAULTS says what goes wrong, on rank 1 where not on
# all; MARKS is a folder for what happens once, or waits.
MODEL_DEF = """
import os, signal, threading
import torch
from torch.utils.data import TensorDataset
from zero_trial import ZeroTrial
from zero_trial.trial import DataLoader

FAULTS, MARKS = os.environ.get("FAULTS", "").split(","), os.environ.get("MARKS", "")


class MyTrial(ZeroTrial):
    def __init__(self, context):
        self.context, self.rank = context, context.distributed.rank
        x = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
        self.data = TensorDataset(x, x.sum(dim=1, keepdim=True))
        torch.manual_seed(context.get_trial_seed())
        self.engine = context.initialize(model=torch.nn.Linear(4, 1))

    def build_training_data_loader(self):
        if "uneven" not in FAULTS:
            return DataLoader(self.data, self.context.get_train_micro_batch_size_per_gpu(), shuffle=True)
        self.context.disable_dataset_reproducibility_checks()
        return [tuple(tensor[:4] for tensor in self.data.tensors) for _ in range(8 - 3 * self.rank)]

    def build_validation_data_loader(self):
        return DataLoader(self.data, self.context.get_train_micro_batch_size_per_gpu())

    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        x, y = next(dataloader_iter)
        if batch_idx == 3 and "hang" in FAULTS and self.rank == 1:
            threading.Event().wait()
        if batch_idx == 3 and "pause" in FAULTS:
            open(os.path.join(MARKS, f"ready-{self.rank}"), "w").close()
            while not os.path.exists(os.path.join(MARKS, "go")):
                threading.Event().wait(0.02)
        mark = os.path.join(MARKS, "killed")
        if batch_idx == 5 and "kill once" in FAULTS and self.rank == 1 and not os.path.exists(mark):
            open(mark, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        if batch_idx == 7 and "bug" in FAULTS and self.rank == 1:
            raise KeyError("no such thing")
        loss = torch.nn.functional.mse_loss(self.engine(x), y)
        self.engine.backward(loss)
        self.engine.step()
        return loss

    def evaluate_batch(self, dataloader_iter, batch_idx):
        x, y = next(dataloader_iter)
        return {"validation_loss": torch.nn.functional.mse_loss(self.engine(x), y)}
"""

EXPERIMENT: dict[str, Any] = {
    "name": "tiny",
    "entrypoint": "model_def:MyTrial",
    "resources": {"slots_per_trial": 2},
    "searcher": {"name": "single", "metric": "validation_loss", "max_length": {"batches": 10}},
    "perform_initial_validation": True,
    "scheduling_unit": 1,  # ranks talk, and look whether to stop, after every step
    "reproducibility": {"experiment_seed": 5},
    "hyperparameters": {},
    "data": {
        "ds_config": {
            "train_batch_size": 8,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.05}},
            "zero_optimization": {"stage": 2},
            "comm_timeout_seconds": 60.0,
        }
    },
}


def write_project(project: Path) -> None:
    (project / "model").mkdir()
    (project / "model" / "model_def.py").write_text(MODEL_DEF)
    write_experiment(project)


def write_experiment(project: Path, **changes: Any) -> None:
    (project / "const.yaml").write_text(yaml.safe_dump({**EXPERIMENT, **changes}, sort_keys=False))


def read_summary(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return found


def read_lines(run: Path, group: str) -> list[int]:
    """The steps of which a run has reported metrics of this group."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["step"] for line in lines if line["group"] == group]


@dataclass(frozen=True)
class Unbroken:
    """A run from its start to its end, which others are compared with."""

    folder: Path
    done: subprocess.CompletedProcess[str]

    @property
    def summary(self) -> dict[str, Any]:
        return read_summary(self.folder / "runs/0001")


def processes_of(project: Path) -> list[str]:
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        words = process.info["cmdline"] or []
        if process.info["status"] != psutil.STATUS_ZOMBIE and any(str(project) in word for word in words):
            found.append(" ".join(words))
    return found
