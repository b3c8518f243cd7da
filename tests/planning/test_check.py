"""The check as a whole: everything that is wrong is found at once, where it is and how to fix it,
and nothing is started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.planning.project import DS_CONFIG, EXPERIMENT, MODEL, NO_GPU, messages, project
from tests.trial.harness import LineTrial, run_rank, steps
from zero_trial.errors import Diverged, InvalidHP
from zero_trial.experiment.experiment import examine_experiment, read_experiment
from zero_trial.experiment.space import explore
from zero_trial.planning.check import (
    CheckReport,
    CheckRequest,
    ConfigChecks,
    check_as_json,
    check_ds_configs,
    check_experiment,
    check_searcher,
    first_legal,
    render_check,
)
from zero_trial.planning.issues import Area, Severity
from zero_trial.trial import Batch

GRID = (
    EXPERIMENT.replace("name: single", "name: grid")
    + "  global_batch_size: {type: categorical, vals: [4, 5, 6]}\n"
    + "  ds_config: {zero_optimization: {stage: {type: int, minval: 1, maxval: 3, count: 3}}}\n"
)


def test_a_good_experiment(tmp_path: Path):
    report = project(tmp_path).check(dry_run=True)
    assert messages(report) == [] and report.exit_code == 0
    assert report.looked[Area.ENTRYPOINT] == "model_def:LineTrial"
    assert report.looked[Area.LOADERS] == "5 steps per epoch, 2 validation batches"
    assert report.looked[Area.METRIC] == "reports validation_loss"
    written = {path.name for path in tmp_path.iterdir() if path.name != "__pycache__"}
    assert written == {"const.yaml", "ds_config.json", "model_def.py"}
    (line,) = render_check(project(tmp_path).check(build=False, slots=1))
    assert line.startswith("check   const.yaml ok · model_def:LineTrial ok · ds_config ok · 1 slots on ")
    assert line.endswith(" s")


def test_all_faults_at_once(tmp_path: Path):
    experiment = EXPERIMENT.replace("model_def:LineTrial", "model_def:LinTrial").replace(
        "hyperparameters:", "max_restart: 2\nhyperparameters:"
    )
    made = project(
        tmp_path,
        experiment.replace("max_length: {batches: 4}", "max_length: {batchs: 4}") + "hyperparameter: {}\nlabels: 3\n",
        {**DS_CONFIG, "gradient_cliping": 1, "bfloat16": {"enabled": False}},
    )
    report = made.check()
    assert messages(report) == [
        'error: const.yaml:11 max_restart: unknown property. Did you mean "max_restarts"?',
        'error: const.yaml:14 hyperparameter: unknown property. Did you mean "hyperparameters"?',
        "error: const.yaml:8 searcher.max_length: wrong value: got {batchs: 4}, expected {batches: n}, {epochs: n}, {records: n} or a "
        "number of batches.",
        "error: const.yaml:8 searcher.max_length: the run has no length. Write searcher: {max_length: {batches: 200}}.",
        "error: const.yaml:15 labels: a master rejects this: 3 is not a list.",
        "error: const.yaml:2 entrypoint: model_def:LinTrial not found in ./model_def.py; it defines LineTrial(ZeroTrial). "
        "Use entrypoint: model_def:LineTrial.",
        'error: ds_config.json:9 gradient_cliping: unknown key. Did you mean "gradient_clipping"? (DeepSpeed would ignore this.)',
    ]
    assert report.exit_code == 2
    body = json.loads(json.dumps(check_as_json(report)))
    assert (body["ok"], body["exit_code"], body["looked"]["experiment"]) == (False, 2, "const.yaml")
    issue = body["issues"][-1]
    assert (issue["file"], issue["line"], issue["key"]) == ("ds_config.json", 9, "gradient_cliping")
    assert body["points"] == {"total": 1, "looked_at": [{"number": 1, "values": {}}], "legal": [], "pruned": []}
    assert "const.yaml wrong" in render_check(report)[0] and "model_def" not in render_check(report)[0]


def test_the_points_of_a_grid(tmp_path: Path):
    made = project(tmp_path, GRID, {"optimizer": {"type": "SGD"}})
    report = made.check()
    assert report.space is not None and report.space.complete
    assert report.looked[Area.SPACE] == "9 points: 6 legal, 3 would be pruned"
    assert render_check(report)[1] == "search  9 points: 6 legal, 3 would be pruned"
    (text,) = messages(report)
    assert text.startswith("warn: train_batch_size 5 ≠") and "would be pruned: at 3 of 9 points" in text
    assert report.exit_code == 0, "a search goes on without them"
    assert made.check(points=4, build=False).looked[Area.SPACE].startswith("4 points of 9: ")
    report = project(tmp_path, GRID + "  lr: {type: double, minval: 0}\n").check()
    assert report.space is None and "hyperparameters.lr.maxval" in messages(report)[0], "a range without its ends"


def test_faults_of_the_experiment_and_its_hyperparameters(tmp_path: Path):
    """The rules have tests of their own; here is their place: the overlay's, the trial's metric's,
    and that what follows a fault is still read."""
    overlay = EXPERIMENT + "  ds_config:\n    zero_optimisation: {stage: 2}\n"
    slip = "hyperparameters.ds_config.zero_optimisation: unknown key. "
    slip += 'Did you mean "zero_optimization"? (DeepSpeed would ignore this and train without ZeRO.)'
    unknown = 'searcher.metric: "val_loss" never reported; the trial reports ["validation_loss"]. '
    for experiment, texts, exit_code in (
        (overlay, [f"error: const.yaml:14 {slip}"], 2),
        (
            EXPERIMENT + "  ds_config:\n    optimizer: {params: {lr: 1e-4}}\n",
            ["warn: const.yaml:14 hyperparameters.ds_config.optimizer.params.lr: '1e-4' is a string in YAML 1.1. Write 1.0e-4."],
            0,
        ),
        (
            EXPERIMENT + "  global_batch_sise: 16\n  batch_size: 4\n  ds_configs: {}\n  ds_config: {}\n",
            [
                "warn: const.yaml:13 hyperparameters.global_batch_sise: only the trial's own code reads this name. "
                "Did you mean global_batch_size?"
            ],
            0,
        ),
        (
            EXPERIMENT.replace("metric: validation_loss", "metric: val_loss"),
            [f"error: const.yaml:7 {unknown}Write metric: validation_loss."],
            2,
        ),
    ):  # fmt: skip
        report = project(tmp_path, experiment).check()
        assert (messages(report), report.exit_code) == (texts, exit_code)
    nested = EXPERIMENT + "  ds_config: {optimizer: {type: Adam, params: {lrr: 1}}}\n"
    first, second, *_ = messages(project(tmp_path, nested).check(build=False))
    assert 'a nested key "type"' in first and "lrr" in second
    for text, message in (
        ("a: [1", "error: const.yaml:1: not readable as YAML"),
        ("- 1\n", "error: const.yaml: not a YAML mapping"),
        ("a: 1\na: 2\n", "error: const.yaml:2 a: duplicate key"),
    ):
        report = project(tmp_path, text).check()
        assert messages(report)[0].startswith(message) and len(report.issues) == 1 and report.exit_code == 2


def test_files_that_are_not_there_and_how_a_report_is_shown(tmp_path: Path):
    made = project(tmp_path)
    report = check_experiment(CheckRequest(made.experiment, tmp_path / "nowhere"), NO_GPU)
    assert any("MODEL_DIR: the folder does not exist" in text for text in messages(report))
    report = check_experiment(CheckRequest(tmp_path / "no.yaml", tmp_path), NO_GPU)
    assert "no.yaml: cannot be read" in messages(report)[0] and report.exit_code == 2
    (tmp_path / "ds_config.json").unlink()
    (text,) = messages(made.check(build=False))
    assert text.startswith("error: const.yaml:10 data.ds_config: ds_config.json is not in")
    config = {**DS_CONFIG, "bfloat16": {"enabled": False}, "train_batch_size": 3}
    report = project(tmp_path, EXPERIMENT + "records_per_epoch: 7\nlabels: 3\n", config).check(slots=1)
    order = [line.split()[0] for line in render_check(report)[1:] if line[0] != " "]
    assert order == sorted(order) and set(order) == {"error", "warn"}, "faults come before warnings"
    assert render_check(CheckReport())[0].startswith("check   nothing could be read")


def test_nan_stops_a_run_with_what_to_try(tmp_path: Path):
    class Breaks(LineTrial):
        def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> Any:
            loss = super().train_batch(dataloader_iter, epoch_idx, batch_idx)
            return loss * float("nan") if batch_idx == 2 else loss

    with pytest.raises(Diverged) as caught:
        run_rank(Breaks, steps(5, checkpoint_period=Batch(1)), storage=tmp_path)
    assert str(caught.value) == (
        "rank 0, step 3: the loss became nan: expected a finite loss. Try half the learning rate, gradient_clipping: 1.0, "
        "or look at that step's batch. The last checkpoint is step-000002."
    )
    assert caught.value.exit_code == 4


def test_a_trial_that_brings_its_own_ds_config(tmp_path: Path):
    model = MODEL.replace("context.initialize(", "context.initialize(config={'train_batch_size': 7}, ")
    report = project(tmp_path, EXPERIMENT.replace("data:\n  ds_config: ds_config.json\n", ""), model=model).check()
    assert report.looked[Area.DS_CONFIG] == "the trial passes its own ds_config"
    assert [text.partition(".")[0] for text in messages(report)] == [
        "error: train_batch_size 7 ≠ micro 3 × accumulation 1 × ranks 2 = 6"
    ]


def test_exit_codes_of_the_trial_s_own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    wrong = MODEL.replace("self.context = context", "self.context = contex")
    assert project(tmp_path, model=wrong).check().exit_code == 1
    assert project(tmp_path, ds_config={}, model=wrong).check().exit_code == 2
    report = project(tmp_path, model=MODEL.replace("self.context = context", "torch.empty(10**16)", 1)).check()
    assert report.exit_code == 3
    assert "model_def.py:9 in __init__: torch.empty(10**16): memory ran out" in messages(report)[0]
    made = project(tmp_path)
    for limit, exit_code in ((200, 0), (100, 3)):  # states of 80 bytes are planned only if they are much
        monkeypatch.setattr("zero_trial.planning.lone_task.rank_limit", lambda device, ranks, limit=limit: limit)
        report = made.check()
        assert (report.exit_code == exit_code and not exit_code) or messages(report)[0].startswith(
            "error: rank 0 needs "
        )


# --- the searcher, and what a master refuses ---

RANGE = {"lr": {"type": "double", "minval": 0, "maxval": 1}}


@pytest.mark.parametrize(
    ("searcher", "hyperparameters", "message"),
    [
        ({"name": "single"}, {"lr": 1}, ""),
        ({"name": "random", "max_trials": 3}, RANGE, ""),
        ({"name": "adaptive_asha", "max_trials": 3, "max_length": None, "max_time": 9}, RANGE, ""),
        (
            {"name": "single", "max_length": None},
            {},
            "error: searcher.max_length: the run has no length. Write searcher: {max_length: {batches: 200}}.",
        ),
        (
            {"name": "grid"},
            {"lr": 1},
            "warn: searcher.name: there is nothing to search: all hyperparameters are constants, so grid would repeat the same point. "
            "Use searcher: {name: single}.",
        ),
        (
            {"name": "single"},
            RANGE,
            "warn: searcher.name: single draws one point, but zero-trial run only accepts constants: lr. "
            "Use constants, or another searcher.",
        ),
    ],
)
def test_what_a_searcher_misses(searcher: dict[str, Any], hyperparameters: dict[str, Any], message: str):
    whole = {"metric": "loss", "max_length": {"batches": 3}, **searcher}
    base = {"entrypoint": "m:T", "hyperparameters": hyperparameters, "searcher": whole}
    found = check_searcher(examine_experiment(base).config)
    assert [f"{issue.severity.value}: {issue.text}" for issue in found] == [message] * bool(message)


@pytest.mark.parametrize("name", ["n", "Yes", "False"])
def test_a_hyperparameter_that_would_arrive_under_another_name_stops_a_run(name: str):
    text = EXPERIMENT.replace("hyperparameters:\n", f"hyperparameters:\n  {name}: 3\n")
    (fault,) = examine_experiment(text, "const.yaml").faults
    assert fault.where is not None and fault.where.endswith(("hyperparameters.true", "hyperparameters.false"))
    assert f"'{name}'" in str(fault)
    assert examine_experiment(text.replace(f"{name}: 3", f"'{name}': 3"), "const.yaml").faults == ()


# --- the ds_configs of a search ---


def check(
    hyperparameters: dict[str, Any], ds_config: dict[str, Any], slots: int = 2, name: str = "grid"
) -> ConfigChecks:
    searcher, data = {"name": name, "metric": "loss"}, {"ds_config": ds_config}
    base = {"entrypoint": "m:T", "searcher": searcher, "hyperparameters": hyperparameters, "data": data}
    experiment = read_experiment(base)
    found = check_ds_configs(experiment, Path(), slots, explore(experiment.hyperparameters, name, 100))
    if found.legal:
        assert first_legal(experiment, Path(), slots).point == found.legal[0].point
    elif found.pruned:
        with pytest.raises(InvalidHP):
            first_legal(experiment, Path(), slots)
    return found


def one_of(*values: Any) -> dict[str, Any]:
    return {"type": "categorical", "vals": list(values)}


def test_points_that_contradict_are_pruned_and_said_once():
    hyperparameters = {"global_batch_size": one_of(8, 10, 12, 14), "lr": one_of(0.1, 0.2)}
    found = check(hyperparameters, {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD"}})
    assert [resolved.point.values["global_batch_size"] for resolved in found.legal] == [8, 8, 12, 12]
    assert found.pruned == (3, 4, 7, 8)
    (issue,) = found.issues
    assert issue.severity is Severity.WARNING and issue.points == (3, 4, 7, 8)
    assert issue.text.startswith("train_batch_size 10 ≠ micro 2 × accumulation 2 × ranks 2 = 8.")
    assert found.legal[0].batch.batch.accumulation == 2
    assert found.legal[1].config.optimizer is not None and found.legal[1].config.optimizer.params == {"lr": 0.2}


@pytest.mark.parametrize(
    ("hyperparameters", "ds_config", "name", "severity", "text", "points"),
    [
        (
            *({"global_batch_size": one_of(8, 10)}, {"train_micro_batch_size_per_gpu": 4}, "grid", "warn"),
            "(would be pruned: at 1 of 2 points, first global_batch_size=10)",
            (2,),
        ),
        ({"global_batch_size": one_of(3, 5)}, {}, "grid", "error", "(would be pruned: at every point)", (1, 2)),
        (
            *({"ds_config": {"zero_optimization": {"stage": one_of(1, 7)}}}, {"train_batch_size": 8}, "grid", "error"),
            "got 7, expected an integer from 0 to 3. (at 1 of 2 points, first ds_config.zero_optimization.stage=7)",
            (2,),
        ),
        (
            *({"x": one_of(1, 2)}, {"train_batch_size": 8, "bfloat16": {"enabled": True}}, "grid", "warn"),
            "data.ds_config.bfloat16: read as bf16. (at every point)",
            (1, 2),
        ),
        ({}, {"train_batch_size": 3}, "single", "error", "2 = 2 x 1 x 1.", (1,)),
    ],
)
def test_one_issue_for_the_same_fault(
    hyperparameters: dict[str, Any],
    ds_config: dict[str, Any],
    name: str,
    severity: str,
    text: str,
    points: tuple[int, ...],
):
    (issue,) = check(hyperparameters, ds_config, name=name).issues
    assert (issue.severity.value, issue.points) == (severity, points)
    assert issue.text.endswith(text) or (name == "single" and issue.at == "")
