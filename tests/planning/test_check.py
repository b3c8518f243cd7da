"""The check as a whole: everything that is wrong is found at once, and nothing is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.planning.project import DS_CONFIG, EXPERIMENT, MODEL, NO_GPU, messages, project
from zero_trial.planning.check import CheckRequest, check_experiment
from zero_trial.planning.issues import Area

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
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "__pycache__") == [
        "const.yaml",
        "ds_config.json",
        "model_def.py",
    ]


def test_all_faults_at_once(tmp_path: Path):
    experiment = EXPERIMENT.replace("model_def:LineTrial", "model_def:LinTrial").replace(
        "hyperparameters:", "max_restart: 2\nhyperparameters:"
    )
    made = project(
        tmp_path,
        experiment.replace("max_length: {batches: 4}", "max_length: {batchs: 4}"),
        {**DS_CONFIG, "gradient_cliping": 1},
    )
    report = made.check()
    assert messages(report) == [
        'error: const.yaml:11 max_restart: unknown property. Did you mean "max_restarts"?',
        "error: const.yaml:8 searcher.max_length: wrong value: got {batchs: 4}, expected {batches: n}, {epochs: n}, {records: n} or a "
        "number of batches.",
        "error: const.yaml:8 searcher.max_length: the run has no length. Write searcher: {max_length: {batches: 200}}.",
        "error: const.yaml:2 entrypoint: model_def:LinTrial not found in ./model_def.py; it defines LineTrial(ZeroTrial). "
        "Use entrypoint: model_def:LineTrial.",
        'error: ds_config.json:9 gradient_cliping: unknown key. Did you mean "gradient_clipping"? (DeepSpeed would ignore this.)',
    ]
    assert report.exit_code == 2


def test_every_point_of_a_grid(tmp_path: Path):
    report = project(tmp_path, GRID, {"optimizer": {"type": "SGD"}}).check()
    assert report.space is not None and report.space.complete
    assert report.looked[Area.SPACE] == "9 points: 6 legal, 3 would be pruned"
    (text,) = messages(report)
    assert text.startswith("warn: train_batch_size 5 ≠") and "would be pruned: at 3 of 9 points" in text
    assert report.exit_code == 0, "a search goes on without them"


def test_a_part_of_a_grid(tmp_path: Path):
    report = project(tmp_path, GRID, {"optimizer": {"type": "SGD"}}).check(points=4, build=False)
    assert report.looked[Area.SPACE].startswith("4 points of 9: ")


def test_a_trial_that_brings_its_own_ds_config(tmp_path: Path):
    model = MODEL.replace("context.initialize(", "context.initialize(config={'train_batch_size': 7}, ")
    report = project(tmp_path, EXPERIMENT.replace("data:\n  ds_config: ds_config.json\n", ""), model=model).check()
    assert report.looked[Area.DS_CONFIG] == "ds_config is the trial's own"
    assert [text.partition(".")[0] for text in messages(report)] == [
        "error: train_batch_size 7 ≠ micro 3 × accumulation 1 × ranks 2 = 6"
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1", "error: const.yaml:1: not readable as YAML"),
        ("- 1\n", "error: const.yaml: not a YAML mapping"),
        ("a: 1\na: 2\n", "error: const.yaml:2 a: duplicate key"),
    ],
)
def test_what_is_no_experiment(tmp_path: Path, text: str, message: str):
    report = project(tmp_path, text).check()
    assert messages(report)[0].startswith(message) and len(report.issues) == 1 and report.exit_code == 2


def test_files_that_are_not_there(tmp_path: Path):
    made = project(tmp_path)
    report = check_experiment(CheckRequest(made.experiment, tmp_path / "nowhere"), NO_GPU)
    assert any("MODEL_DIR: there is no such folder" in text for text in messages(report))
    report = check_experiment(CheckRequest(tmp_path / "no.yaml", tmp_path), NO_GPU)
    assert "no.yaml: cannot be read" in messages(report)[0] and report.exit_code == 2
    (tmp_path / "ds_config.json").unlink()
    (text,) = messages(made.check(build=False))
    assert text.startswith("error: const.yaml:10 data.ds_config: ds_config.json is not in")


def test_a_range_without_its_ends(tmp_path: Path):
    report = project(tmp_path, GRID + "  lr: {type: double, minval: 0}\n").check()
    assert report.space is None and "hyperparameters.lr.maxval" in messages(report)[0]


def test_a_nested_type_is_a_fault_and_the_rest_is_still_read(tmp_path: Path):
    report = project(tmp_path, EXPERIMENT + "  ds_config: {optimizer: {type: Adam, params: {lrr: 1}}}\n").check(
        build=False
    )
    assert 'a nested key "type"' in messages(report)[0] and "lrr" in messages(report)[1]


def test_a_fault_of_the_trial_s_own_code_is_1(tmp_path: Path):
    report = project(tmp_path, model=MODEL.replace("self.context = context", "self.context = contex")).check()
    assert report.exit_code == 1
    report = project(
        tmp_path, ds_config={}, model=MODEL.replace("self.context = context", "self.context = contex")
    ).check()
    assert report.exit_code == 2


def test_a_large_folder_is_a_fault_for_a_cluster(tmp_path: Path):
    made = project(
        tmp_path,
        EXPERIMENT.replace(
            "model_def:", "python3 -m determined.launch.torch_distributed python3 -m zero_trial.run model_def:"
        ),
    )
    with (tmp_path / "weights.bin").open("wb") as file:
        file.truncate(96 * 2**20)
    (text,) = messages(made.check(build=False))
    assert text.startswith("error: MODEL_DIR") and "weights.bin (96.0 MiB)" in text


def test_what_plan_calls_too_large_is_a_fault_here_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    made = project(tmp_path)
    monkeypatch.setattr("zero_trial.planning.compare.rank_limit", lambda device, ranks: 200)
    assert made.check().faults == [], "states of 80 bytes are too few to be planned"
    monkeypatch.setattr("zero_trial.planning.compare.rank_limit", lambda device, ranks: 100)
    report = made.check()
    assert report.exit_code == 3 and messages(report)[0].startswith("error: rank 0 needs ")


def test_memory_that_runs_out_is_3(tmp_path: Path):
    report = project(tmp_path, model=MODEL.replace("self.context = context", "torch.empty(10**16)", 1)).check()
    assert (
        report.exit_code == 3
        and "model_def.py:9 in __init__: torch.empty(10**16): memory ran out" in messages(report)[0]
    )
