"""A master's store after a search: every trial, report and snapshot as a master leaves them, with
learning curves by a formula."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.archive import tgz
from zero_trial.master.core.lifecycle import STOPPED_BY_SEARCH
from zero_trial.master.records import Experiment, ExperimentState, MetricReport, Trial, TrialState
from zero_trial.master.search import Create, ExitReason, Stop, build
from zero_trial.master.store import Database, experiment_rows, metric_rows, trial_rows

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
        experiment = experiment_rows.add(connection, _experiment(config), files)
    ids: dict[str, int] = {}
    work: list[tuple[str, int]] = []  # request id and steps done
    actions = list(search.start())
    while actions or work:
        with database.transaction() as connection:
            if not actions:
                request, steps = work.pop(0)
                loss = _loss(trial_rows.of_request(connection, experiment, request), steps)
                _report(connection, ids[request], steps, loss)
                found.best = min(found.best, (loss, str(ids[request])))
                actions = list(search.on_validation(request, {"validation_loss": loss, "batches": steps}))
                if not any(isinstance(action, Stop) for action in actions):
                    work.append((request, steps + 15))
            else:
                action = actions.pop(0)
                if isinstance(action, Create):
                    number = trial_rows.add(connection, _trial(experiment, action))
                    ids[action.request_id] = number
                    if len(found.pruned) < pruned:
                        found.pruned.append(str(number))
                        why = "train_batch_size 6 is not 2 x 2"
                        trial_rows.change(
                            connection, number, state=TrialState.ERROR, pruned=1, reason=why, ended=STARTED
                        )
                        actions += search.on_exited(action.request_id, ExitReason.COMPLETED)
                    else:
                        work.append((action.request_id, 15))
                elif isinstance(action, Stop):
                    number = ids[action.request_id]
                    trial = trial_rows.get(connection, number)
                    (found.finished if trial is not None and trial.steps_completed >= 60 else found.stopped).append(
                        str(number)
                    )
                    why = "" if action.finished else STOPPED_BY_SEARCH
                    trial_rows.change(connection, number, state=TrialState.COMPLETED, reason=why, ended=STARTED + 10)
                    actions += search.on_exited(action.request_id, ExitReason.COMPLETED)
            experiment_rows.change(connection, experiment, snapshot=search.snapshot())
    with database.transaction() as connection:
        experiment_rows.change(connection, experiment, state=ExperimentState.COMPLETED, ended=STARTED + 240)
    database.close()
    return found


def _experiment(config: Mapping[str, Any]) -> Experiment:
    return Experiment(
        0, ExperimentState.ACTIVE, config, json.dumps(config), "me", "job", STARTED, name=str(config["name"])
    )


def _trial(experiment: int, action: Create) -> Trial:
    return Trial(
        0,
        experiment,
        action.request_id,
        f"{experiment}.{action.request_id}",
        TrialState.ACTIVE,
        action.hparams,
        action.seed,
        STARTED,
    )


def _loss(trial: Trial | None, steps: int) -> float:
    assert trial is not None
    return 2.0 + (trial.seed % 97) / 30 + 8 / (steps + 5)


def _report(connection: Any, trial: int, steps: int, loss: float) -> None:
    at = STARTED + steps / 5 + trial
    values = {"validation_loss": loss, "batches": steps}
    metric_rows.add(connection, MetricReport(trial, 1, "training", steps, {"loss": loss}, reported=at))
    metric_rows.add(connection, MetricReport(trial, 1, "validation", steps, values, reported=at), loss)
    facts = {"memory_planned_bytes": 1000 * trial, "memory_measured_peak_bytes": 900 * trial}
    trial_rows.change(connection, trial, steps_completed=steps, metadata={"zero_trial": facts})
