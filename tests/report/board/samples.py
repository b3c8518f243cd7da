"""A folder of runs and a master's store, with something of everything, made by formulas."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.report.searched import CONFIG, STARTED, play
from zero_trial.master import logs
from zero_trial.master.directory import MasterDirectory
from zero_trial.master.records import Checkpoint, CheckpointState, MetricReport
from zero_trial.master.store import Database, checkpoint_rows, experiment_rows, metric_rows, trial_rows

LOCK = """name: {name}
searcher: {{name: single, metric: validation_loss, smaller_is_better: true}}
hyperparameters: {{global_batch_size: 64, lr: {lr}}}
data: {{ds_config: {{zero_optimization: {{stage: {stage}}}}}}}
"""


def loss(step: float, lr: float) -> float:
    return (
        2.0
        + 6.0 * math.exp(-step * lr * 4)
        + 0.25 * math.sin(step / 3.0 + lr * 9e3) * math.exp(-step / 900)
        + 300 * lr**1.3
    )


def events(lr: float, steps: int, every: int = 10, total: int | None = None) -> list[dict[str, Any]]:
    """The events of a run's first ``steps`` steps."""
    found: list[dict[str, Any]] = [
        {
            "kind": "start",
            "time": STARTED,
            "step": 0,
            "total_steps": total or steps,
            "parameters": 1_181_440,
            "global_batch_size": 64,
        },
        {
            "kind": "plan",
            "time": STARTED + 1,
            "figures": {
                "parameters": 4_725_760,
                "gradients": 2_362_880,
                "optimizer": 4_725_760,
                "activations": 48_348_288,
                "temporary": 21_518_368,
                "peak": 81_681_056,
            },
        },
    ]
    for end in range(every, steps + 1, every):
        each = [loss(step, lr) for step in range(end - every + 1, end + 1)]
        found.append(
            {
                "kind": "train",
                "time": STARTED + end / 8,
                "step": end,
                "total_steps": total or steps,
                "loss": sum(each) / every,
                "accuracy": 1 - sum(each) / every / 9,
                "lr": lr * (1 - end / (2 * (total or steps))),
                "grad_norm": 0.4 + math.exp(-end / 200) + 0.05 * math.sin(end),
                "samples_per_second": 510 + 40 * math.sin(end / 37),
                "each": {"loss": each, "accuracy": [1 - value / 9 for value in each]},
            }
        )
        if end % (every * 10) == 0:
            found.append(
                {
                    "kind": "checkpoint",
                    "time": STARTED + end / 8,
                    "step": end,
                    "storage_id": f"step-{end:06d}",
                    "bytes": 14_300_000,
                }
            )
    return found


def validations(lr: float, steps: int, every: int = 100) -> list[dict[str, Any]]:
    return [
        {
            "group": "validation",
            "step": step,
            "time": STARTED + step / 8,
            "metrics": {
                "validation_loss": loss(step, lr) + 0.1,
                "val_accuracy": 1 - loss(step, lr) / 8.5,
                "batches": step,
            },
        }
        for step in range(every, steps + 1, every)
    ]


def as_lines(records: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def run(
    folder: Path,
    name: str,
    lr: float,
    *,
    stage: int = 2,
    steps: int = 2000,
    done: bool = True,
    total: int = 2000,
    title: str = "quickstart",
) -> Path:
    """One run, ended or under way."""
    path = folder / name
    (path / "logs").mkdir(parents=True)
    (path / "events.jsonl").write_text(as_lines(events(lr, steps, total=total)))
    (path / "metrics.jsonl").write_text(as_lines(validations(lr, steps)))
    (path / "config.lock.yaml").write_text(LOCK.format(name=json.dumps(title), lr=lr, stage=stage))
    last = max(steps // 100 * 100, 0)
    for at in (last - 100, last):
        (path / "checkpoints" / f"step-{at:06d}").mkdir(parents=True)
    said = [f"step {step} of {total}: loss {loss(step, lr):.4f}" for step in range(10, steps + 1, 10)]
    (path / "logs" / "rank-0.log").write_text("ZeRO-2, 2 ranks on CPU (gloo)\n" + "\n".join(said) + "\n")
    (path / "logs" / "rank-1.log").write_text("rank 1 is ready\n")
    if done:
        summary = {
            "end": "completed",
            "step": steps,
            "total_steps": total,
            "train_seconds": steps / 8,
            "samples_per_second": 512.3,
            "ranks": 2,
            "zero_stage": stage,
            "seed": 7,
            "global_batch_size": 64,
            "initial_validation": {"validation_loss": 8.4},
            "memory_planned_bytes": 81_681_056,
            "memory_measured_peak_bytes": 79_900_000,
            "peak_memory_bytes": [397_824_000, 387_846_144],
            "peak_memory_kind": "resident set",
        }
        (path / "summary.json").write_text(json.dumps(summary))
    return path


def runs(folder: Path) -> Path:
    """Four runs: two ended, one failed, one under way."""
    run(folder, "0001", 0.0005)
    run(folder, "0002", 0.002, stage=3)
    failed = run(folder, "0003", 0.006, steps=700, done=False)
    (failed / "errors").mkdir()
    error = {
        "rank": 1,
        "type": "Diverged",
        "message": "the loss became nan at step 701",
        "exit_code": 4,
        "time": STARTED + 90,
        "step": 700,
    }
    (failed / "errors" / "rank-1.json").write_text(json.dumps(error))
    run(folder, "0004", 0.001, steps=900, done=False)
    return folder


def store(root: Path) -> MasterDirectory:
    """A master's folder with a search that has ended, one that is under way and one that failed."""
    directory = MasterDirectory(root)
    directory.prepare()
    searcher = {**CONFIG["searcher"], "max_trials": 16, "max_concurrent_trials": 6}
    big: Mapping[str, Any] = {**CONFIG, "name": "learning rates of a small GPT", "searcher": searcher}
    play(directory.database, big, pruned=2)
    play(directory.database, {**CONFIG, "name": "second search"})
    database = Database(directory.database)
    with database.transaction() as connection:
        experiment_rows.change(connection, 2, state="ACTIVE", ended=None, progress=0.42)
        connection.execute("DELETE FROM metrics WHERE grp = 'training' AND trial_id <= 16")
        for trial in trial_rows.of_experiment(connection, 1):
            end = trial.steps_completed
            for step in range(1, end + 1):
                values = {
                    "loss": loss(step * 8, 0.001) + trial.id / 40,
                    "accuracy": 0.9 - loss(step * 8, 0.001) / 10,
                    "lr": 0.001 * (1 - step / 90),
                }
                at = STARTED + step / 5 + trial.id
                metric_rows.add(connection, MetricReport(trial.id, 1, "training", step, values, reported=at))
            for step in range(15, end + 1, 15):
                _save(connection, trial, step)
            lines = [
                logs.entry(f"[rank={step % 2}] step {step}: loss {loss(step * 8, 0.001):.4f}", STARTED + step)
                for step in range(1, end + 1)
            ]
            logs.append(logs.path_of(directory.trial_logs(trial.id), 1), lines)
    database.close()
    return directory


def _save(connection: Any, trial: Any, step: int) -> None:
    state = CheckpointState.COMPLETED if step > 15 else CheckpointState.DELETED
    checkpoint_rows.put(
        connection,
        Checkpoint(
            f"6f1c8d2e-0000-4000-8000-{trial.id:06d}{step:06d}",
            state,
            trial.id,
            trial.experiment_id,
            trial.task_id,
            f"{trial.task_id}.1",
            STARTED + step,
            {"steps_completed": step},
            {"manifest.json": 900, "shard-0.bin": 14_000_000},
            14_000_900,
            step,
        ),
    )
