"""A folder of runs and a master's store, with something of everything, made by formulas; and
reports whose every text is an attack."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.support.archive import tgz
from zero_trial.master import logs
from zero_trial.master.core.lifecycle import STOPPED_BY_SEARCH
from zero_trial.master.directory import MasterDirectory
from zero_trial.master.records import (
    Checkpoint,
    CheckpointState,
    Experiment,
    ExperimentState,
    MetricReport,
    Trial,
    TrialState,
)
from zero_trial.master.search.searcher import Create, ExitReason, Stop, build
from zero_trial.master.store import Database, checkpoint_rows, experiment_rows, metric_rows, trial_rows
from zero_trial.report.report_data import (
    Axis,
    BestConfig,
    BracketHistory,
    MetricChange,
    RungDecision,
    RungOutcome,
    RunReport,
    Series,
    Setting,
    Status,
    SweepReport,
    Tone,
)

HOSTILE = "</title></script><script>document.body.dataset.owned=1</script><img src=x onerror=alert(1)>\"'`"
TRAVERSALS = ("..", "../0001", "/etc", "0001/..", "0001/logs", "", ".", "%2e%2e", "\0", "0001\n")
HOSTILE_STATUS = Status(HOSTILE, Tone.BAD)


def hostile_run(report: RunReport) -> RunReport:
    """Return the report with an attack as every text."""
    series = Series(HOSTILE, (0.0, 1.0), (1.0, 2.0))
    return replace(
        report,
        **dict.fromkeys(("title", "subtitle", "message", "repeat", "lock", "experiment"), HOSTILE),
        status=HOSTILE_STATUS,
        changes=(MetricChange(HOSTILE, 1.0, 2.0, ((HOSTILE, 1.0),)),),
        facts=((HOSTILE, HOSTILE),),
        training=series,
        validation=(series,),
        progress=(series,),
        settings=(Setting(HOSTILE, HOSTILE, HOSTILE, HOSTILE, True),),
        warnings=(HOSTILE,),
        left_out=(HOSTILE,),
        config={"hyperparameters": {HOSTILE: HOSTILE}},
    )


def hostile_sweep(report: SweepReport) -> SweepReport:
    """Return the report with an attack as every text."""
    attack = {"status": HOSTILE_STATUS, "point": {HOSTILE: HOSTILE}, "why": HOSTILE}
    trials = tuple(
        replace(trial, id=f"{HOSTILE}{at}", curve=replace(trial.curve, name=HOSTILE), **attack)
        for at, trial in enumerate(report.trials)
    )
    decision = RungDecision(f"{HOSTILE}0", RungOutcome.STOPPED, 1, 0, 5, 1.0, HOSTILE)
    return replace(
        report,
        **dict.fromkeys(("title", "metric", "unit", "subtitle", "searcher", "throughput_unit"), HOSTILE),
        trials=trials,
        axes=(Axis(HOSTILE, choices=(HOSTILE,)),),
        ladders=(BracketHistory(1, (5,), (decision,)),),
        pruned=((HOSTILE, 1),),
        facts=((HOSTILE, HOSTILE),),
        best=BestConfig(f"{HOSTILE}0", 1.0, HOSTILE),
        metrics=((HOSTILE, HOSTILE), ("a", "b")),
    )


# Searches in a master's store.

CONFIG: dict[str, Any] = {
    "name": "small search",
    "entrypoint": "model_def:GPTTrial",
    "resources": {"slots_per_trial": 2},
    "searcher": {
        "name": "adaptive_asha",
        "metric": "validation_loss",
        "smaller_is_better": True,
        "max_trials": 8,
        "time_metric": "batches",
        "max_time": 60,
        "max_concurrent_trials": 2,
        "divisor": 4,
    },
    "min_validation_period": {"batches": 15},
    "reproducibility": {"experiment_seed": 7},
    "data": {"ds_config": "ds_config.json", "source": "stdlib"},
    "hyperparameters": {
        "global_batch_size": 16,
        "ds_config": {
            "optimizer": {"params": {"lr": {"type": "log", "base": 10, "minval": -4.5, "maxval": -1}}},
            "zero_optimization": {"stage": {"type": "categorical", "vals": [0, 1, 2, 3]}},
        },
        "model": {"width": 64},
    },
}
DS_CONFIG = {"optimizer": {"type": "AdamW", "params": {"lr": 0.1}}, "zero_optimization": {"stage": 1}}
STARTED = 1_790_000_000.0


@dataclass
class Searched:
    """What really happened, to compare with what a report says. Trials by the store's ids."""

    stopped: list[str] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    pruned: list[str] = field(default_factory=list)
    best: tuple[float, str] = (float("inf"), "")


def play(path: Path, config: Mapping[str, Any] = CONFIG, *, pruned: int = 0) -> Searched:
    """Make the store at ``path`` with one experiment, and search to the end. The first ``pruned``
    points cannot be reconciled."""
    database, found = Database(path), Searched()
    search = build(config["searcher"], config["hyperparameters"], 7)
    files = tgz({"model_def.py": "", "ds_config.json": json.dumps(DS_CONFIG)})
    with database.transaction() as connection:
        experiment = experiment_rows.add(connection, experiment_of(config), files)
        ids: dict[str, int] = {}
        work: list[tuple[str, int]] = []  # request id and steps done
        actions = list(search.start())
        while actions or work:
            if not actions:
                request, steps = work.pop(0)
                loss = _trial_loss(trial_rows.of_request(connection, experiment, request), steps)
                _report(connection, ids[request], steps, loss)
                found.best = min(found.best, (loss, str(ids[request])))
                actions = list(search.on_validation(request, {"validation_loss": loss, "batches": steps}))
                if not any(isinstance(action, Stop) for action in actions):
                    work.append((request, steps + 15))
                continue
            action = actions.pop(0)
            if isinstance(action, Create):
                number = ids[action.request_id] = trial_rows.add(connection, trial_of(experiment, action))
                if len(found.pruned) >= pruned:
                    work.append((action.request_id, 15))
                    continue
                found.pruned.append(str(number))
                ended = {"state": TrialState.ERROR, "pruned": 1, "reason": "train_batch_size 6 is not 2 x 2"}
                trial_rows.change(connection, number, ended=STARTED, **ended)
            elif isinstance(action, Stop):
                number = ids[action.request_id]
                trial = trial_rows.get(connection, number)
                finished = trial is not None and trial.steps_completed >= 60
                (found.finished if finished else found.stopped).append(str(number))
                why = "" if action.finished else STOPPED_BY_SEARCH
                trial_rows.change(connection, number, state=TrialState.COMPLETED, reason=why, ended=STARTED + 10)
            else:
                continue
            actions += search.on_exited(action.request_id, ExitReason.COMPLETED)
        ended = {"state": ExperimentState.COMPLETED, "snapshot": search.snapshot()}
        experiment_rows.change(connection, experiment, ended=STARTED + 240, **ended)
    database.close()
    return found


def experiment_of(config: Mapping[str, Any]) -> Experiment:
    given = (config, json.dumps(config), "me", "job", STARTED)
    return Experiment(0, ExperimentState.ACTIVE, *given, name=str(config["name"]))


def trial_of(experiment: int, action: Create) -> Trial:
    task = f"{experiment}.{action.request_id}"
    return Trial(0, experiment, action.request_id, task, TrialState.ACTIVE, action.hparams, action.seed, STARTED)


def _trial_loss(trial: Trial | None, steps: int) -> float:
    assert trial is not None
    return 2.0 + (trial.seed % 97) / 30 + 8 / (steps + 5)


def _report(connection: Any, trial: int, steps: int, loss: float) -> None:
    at = STARTED + steps / 5 + trial
    values = {"validation_loss": loss, "batches": steps}
    metric_rows.add(connection, MetricReport(trial, 1, "training", steps, {"loss": loss}, reported=at))
    metric_rows.add(connection, MetricReport(trial, 1, "validation", steps, values, reported=at), loss)
    facts = {"memory_planned_bytes": 1000 * trial, "memory_measured_peak_bytes": 900 * trial}
    trial_rows.change(connection, trial, steps_completed=steps, metadata={"zero_trial": facts})


def store(root: Path) -> MasterDirectory:
    """A master's folder with a search that has ended, one that is under way and one that failed."""
    directory = MasterDirectory(root)
    directory.prepare()
    searcher = {**CONFIG["searcher"], "max_trials": 16, "max_concurrent_trials": 6}
    play(directory.database, {**CONFIG, "name": "learning rates of a small GPT", "searcher": searcher}, pruned=2)
    play(directory.database, {**CONFIG, "name": "second search"})
    database = Database(directory.database)
    with database.transaction() as connection:
        experiment_rows.change(connection, 2, state="ACTIVE", ended=None, progress=0.42)
        connection.execute("DELETE FROM metrics WHERE grp = 'training' AND trial_id <= 16")
        for trial in trial_rows.of_experiment(connection, 1):
            lines = []
            for step in range(1, trial.steps_completed + 1):
                own = loss(step * 8, 0.001)
                values = {"loss": own + trial.id / 40, "accuracy": 0.9 - own / 10, "lr": 0.001 * (1 - step / 90)}
                at = STARTED + step / 5 + trial.id
                metric_rows.add(connection, MetricReport(trial.id, 1, "training", step, values, reported=at))
                lines.append(logs.entry(f"[rank={step % 2}] step {step}: loss {own:.4f}", STARTED + step))
                if step % 15 == 0:
                    _save(connection, trial, step)
            logs.append(logs.path_of(directory.trial_logs(trial.id), 1), lines)
    database.close()
    return directory


def _save(connection: Any, trial: Any, step: int) -> None:
    state = CheckpointState.COMPLETED if step > 15 else CheckpointState.DELETED
    name = f"6f1c8d2e-0000-4000-8000-{trial.id:06d}{step:06d}"
    of = (trial.id, trial.experiment_id, trial.task_id, f"{trial.task_id}.1")
    files = {"manifest.json": 900, "shard-0.bin": 14_000_000}
    saved = Checkpoint(name, state, *of, STARTED + step, {"steps_completed": step}, files, 14_000_900, step)
    checkpoint_rows.put(connection, saved)


# Folders of runs.

LOCK = """name: {name}
searcher: {{name: single, metric: validation_loss, smaller_is_better: true}}
hyperparameters: {{global_batch_size: 64, lr: {lr}}}
data: {{ds_config: {{zero_optimization: {{stage: {stage}}}}}}}
"""

RESOLVED = {
    "values": [
        {"key": "optimizer.type", "value": "AdamW", "source": "ds_config.json:4", "answer": "supported", "remark": ""},
        {"key": "overlap", "value": None, "source": "default", "answer": "supported", "remark": ""},
        {"key": "bucket", "value": 5, "source": "default", "answer": "supported", "remark": "0 before 0.19"},
        {"key": "nothing", "value": 5, "source": "default", "answer": "no effect", "remark": ""},
    ],
    "batch": [{"name": "ranks", "value": 2, "source": "launcher", "remark": ""}],
    "warnings": ["careful"],
}


def loss(step: float, lr: float) -> float:
    wave = 0.25 * math.sin(step / 3.0 + lr * 9e3) * math.exp(-step / 900)
    return 2.0 + 6.0 * math.exp(-step * lr * 4) + wave + 300 * lr**1.3


SIZES = ("parameters", "gradients", "optimizer", "activations", "temporary", "peak")
FIGURES = dict(zip(SIZES, (4_725_760, 2_362_880, 4_725_760, 48_348_288, 21_518_368, 81_681_056), strict=True))


def events(lr: float, steps: int, every: int = 10, total: int | None = None) -> list[dict[str, Any]]:
    """The events of a run's first ``steps`` steps."""
    whole = {"total_steps": total or steps}
    start = {"kind": "start", "time": STARTED, "step": 0, "parameters": 1_181_440, "global_batch_size": 64}
    found: list[dict[str, Any]] = [start | whole, {"kind": "plan", "time": STARTED + 1, "figures": FIGURES}]
    for end in range(every, steps + 1, every):
        at = {"time": STARTED + end / 8, "step": end}
        each = [loss(step, lr) for step in range(end - every + 1, end + 1)]
        mean = sum(each) / every
        exchanged = {
            "loss": mean,
            "accuracy": 1 - mean / 9,
            "lr": lr * (1 - end / (2 * (total or steps))),
            "grad_norm": 0.4 + math.exp(-end / 200) + 0.05 * math.sin(end),
            "samples_per_second": 510 + 40 * math.sin(end / 37),
            "each": {"loss": each, "accuracy": [1 - value / 9 for value in each]},
        }
        found.append({"kind": "train"} | at | whole | exchanged)
        if end % (every * 10) == 0:
            found.append({"kind": "checkpoint", "storage_id": f"step-{end:06d}", "bytes": 14_300_000} | at)
    return found


def validations(lr: float, steps: int, every: int = 100) -> list[dict[str, Any]]:
    def metrics(value: float) -> dict[str, float]:
        return {"validation_loss": value + 0.1, "val_accuracy": 1 - value / 8.5}

    return [
        {"kind": "validation", "step": step, "time": STARTED + step / 8, "metrics": metrics(loss(step, lr))}
        for step in range(every, steps + 1, every)
    ]


def as_lines(records: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


SUMMARY = {"end": "completed", "samples_per_second": 512.3, "ranks": 2, "seed": 7, "global_batch_size": 64} | {
    "initial_validation": {"validation_loss": 8.4},
    "memory_planned_bytes": 81_681_056,
    "memory_measured_peak_bytes": 79_900_000,
    "peak_memory_bytes": [397_824_000, 387_846_144],
    "peak_memory_kind": "resident set",
}


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
    (path / "events.jsonl").write_text(as_lines([*events(lr, steps, total=total), *validations(lr, steps)]))
    (path / "config.lock.yaml").write_text(LOCK.format(name=json.dumps(title), lr=lr, stage=stage))
    last = max(steps // 100 * 100, 0)
    for at in (last - 100, last):
        (path / "checkpoints" / f"step-{at:06d}").mkdir(parents=True)
    said = [f"step {step} of {total}: loss {loss(step, lr):.4f}" for step in range(10, steps + 1, 10)]
    (path / "logs" / "rank-0.log").write_text("ZeRO-2, 2 ranks on CPU (gloo)\n" + "\n".join(said) + "\n")
    (path / "logs" / "rank-1.log").write_text("rank 1 is ready\n")
    if done:
        reached = {"step": steps, "total_steps": total, "train_seconds": steps / 8, "zero_stage": stage}
        (path / "summary.json").write_text(json.dumps(SUMMARY | reached))
        (path / "resolved_config.json").write_text(json.dumps(RESOLVED))
    return path


def runs(folder: Path) -> Path:
    """Four runs: two ended, one failed, one under way."""
    run(folder, "0001", 0.0005)
    run(folder, "0002", 0.002, stage=3)
    failed = run(folder, "0003", 0.006, steps=700, done=False)
    (failed / "errors").mkdir()
    error = {"rank": 1, "type": "Diverged", "message": "the loss became nan at step 701", "exit_code": 4, "step": 700}
    (failed / "errors" / "rank-1.json").write_text(json.dumps(error | {"time": STARTED + 90}))
    run(folder, "0004", 0.001, steps=900, done=False)
    return folder
