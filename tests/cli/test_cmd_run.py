"""``zero-trial run`` and ``resume``: what is asked for; whole runs are in
tests/launch/test_end_to_end.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from zero_trial.cli import cmd_run
from zero_trial.cli.cmd_run import newest_run, request_from, start_lines
from zero_trial.cli.main import build_parser, main
from zero_trial.launch.hosts import PlacementRequest
from zero_trial.launch.run_experiment import RunRequest, check_run
from zero_trial.trial.runs.run_layout import RunFolder


def parse(line: str) -> RunRequest:
    return request_from(build_parser().parse_args(["run", *line.split()]))


def test_the_usual_form():
    assert parse("const.yaml model") == RunRequest(experiment_path=Path("const.yaml"), model_dir=Path("model"))


def test_a_lock_needs_no_model_folder():
    assert parse("runs/0001/config.lock.yaml") == RunRequest(experiment_path=Path("runs/0001/config.lock.yaml"))


def test_all_options():
    request = parse("c.yaml m --slots 4 --seed 9 --run-dir r --nnodes 2 --node-rank 1 --master_addr h --master-port 7")
    assert (request.seed, request.run_dir) == (9, Path("r"))
    assert request.placement == PlacementRequest(slots=4, nnodes="2", node_rank=1, master_addr="h", master_port=7)
    assert parse("--resume runs/0001").resume == Path("runs/0001")


@pytest.mark.parametrize("module", ["zero_trial.run", "zero_trial.as_determined"])
def test_the_first_line_does_not_say_what_a_deepspeedtrial_may_overwrite(tmp_path: Path, module: str) -> None:
    (tmp_path / "model_def.py").write_text("from zero_trial import ZeroTrial\nclass MyTrial(ZeroTrial): ...\n")
    experiment = {
        "name": "tiny",
        "entrypoint": f"python3 -m {module} model_def:MyTrial",
        "searcher": {"name": "single", "metric": "loss", "max_length": {"batches": 1}},
        "data": {"ds_config": {"train_batch_size": 8, "zero_optimization": {"stage": 1}}},
        "hyperparameters": {"overwrite_deepspeed_args": {"zero_optimization.stage": 2}},
    }
    path = tmp_path / "const.yaml"
    path.write_text(json.dumps(experiment))
    first = start_lines(check_run(RunRequest(path, tmp_path), {"CUDA_VISIBLE_DEVICES": ""}), 0.0)[0]
    assert ("ZeRO-2" in first) == (module == "zero_trial.run") and "ZeRO-1" not in first


def make_run(folder: Path, end: str = "") -> Path:
    folder.mkdir(parents=True)
    RunFolder(folder).config_lock.write_text("")
    if end:
        (folder / "summary.json").write_text(json.dumps({"end": end}))
    return folder


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[RunRequest]:
    """What ``run`` would have been asked; it does nothing."""
    requests: list[RunRequest] = []
    monkeypatch.setattr(cmd_run, "_train", lambda request, *, as_json: requests.append(request) or 0)
    return requests


def test_the_newest_run_of_this_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: list) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("0002", "0010", "0009", "report"):
        make_run(tmp_path / "runs" / name)
    assert newest_run(Path("runs")) == Path("runs/0010")
    assert main(["resume"]) == 0
    assert (asked[0].resume, asked[0].experiment_path, asked[0].placement.slots) == (Path("runs/0010"), None, None)


def test_a_named_run_on_other_slots(tmp_path: Path, asked: list, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path / "mine", "preempted")
    assert main(["resume", str(folder), "--slots", "4"]) == 0
    assert (asked[0].resume, asked[0].placement.slots) == (folder, 4)
    assert capsys.readouterr().out == ""


def test_a_run_that_was_complete(tmp_path: Path, asked: list, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is started; how to train longer is said."""
    folder = make_run(tmp_path / "mine", "completed")
    assert main(["resume", str(folder)]) == 0
    assert asked == [] and "is complete" in (said := capsys.readouterr().out) and f"--resume {folder}" in said
    assert main(["resume", str(folder), "--json"]) == 0
    assert asked == [] and json.loads(capsys.readouterr().out)["exit_code"] == 0


@pytest.mark.parametrize("place", [".", "nowhere"])
def test_no_run(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["resume", place]) == 2
    assert f"got {place}, expected a run's folder, such as runs/0001" in capsys.readouterr().err
    assert main(["resume"]) == 2
    assert "there is no run here: got no folder runs/NNNN" in capsys.readouterr().err


def test_names_that_are_nearly_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``int`` does not read a superscript, which ``isdigit`` takes for a digit."""
    monkeypatch.chdir(tmp_path)
    for name in ("0002", "\u00b2"):
        make_run(tmp_path / "runs" / name)
    assert newest_run(Path("runs")) == Path("runs/0002")


def test_the_newest_folder_without_a_run_is_said_and_no_older_one_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: list, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "runs" / "0001")
    (tmp_path / "runs" / "0002").mkdir()
    assert main(["resume"]) == 2 and not asked
    assert "there is no run in this folder: got runs/0002" in capsys.readouterr().err
