"""``zero-trial run``, ``resume`` and ``launch``: what is asked for; whole runs are in
tests/launch/test_end_to_end.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from zero_trial.cli import cmd_run
from zero_trial.cli.cmd_run import newest_run, request_from, script_request, start_lines
from zero_trial.cli.main import build_parser, main
from zero_trial.launch.hosts import PlacementRequest
from zero_trial.launch.run_experiment import RunRequest, check_run
from zero_trial.launch.script import ScriptRequest
from zero_trial.trial.runs.run_layout import RunFolder


def parse(line: str) -> RunRequest:
    return request_from(build_parser().parse_args(["run", *line.split()]))


def test_what_run_is_asked_for():
    assert parse("const.yaml model") == RunRequest(experiment_path=Path("const.yaml"), model_dir=Path("model"))
    assert parse("runs/0001/config.lock.yaml") == RunRequest(experiment_path=Path("runs/0001/config.lock.yaml"))
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
    for name in ("0002", "0010", "0009", "report", "\u00b2"):  # int() does not read a superscript
        make_run(tmp_path / "runs" / name)
    assert newest_run(Path("runs")) == Path("runs/0010")
    assert main(["resume"]) == 0
    assert (asked[0].resume, asked[0].experiment_path, asked[0].placement.slots) == (Path("runs/0010"), None, None)


def test_a_named_run_goes_on_unless_it_is_complete(
    tmp_path: Path, asked: list, capsys: pytest.CaptureFixture[str]
) -> None:
    """How to train longer is said where nothing is started."""
    folder = make_run(tmp_path / "mine", "preempted")
    assert main(["resume", str(folder), "--slots", "4"]) == 0
    assert (asked[0].resume, asked[0].placement.slots) == (folder, 4)
    assert capsys.readouterr().out == ""
    (folder / "summary.json").write_text(json.dumps({"end": "completed"}))
    assert main(["resume", str(folder)]) == 0
    assert "is complete" in (said := capsys.readouterr().out) and f"--resume {folder}" in said
    assert main(["resume", str(folder), "--json"]) == 0
    assert len(asked) == 1 and json.loads(capsys.readouterr().out)["exit_code"] == 0


def test_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: list, capsys: pytest.CaptureFixture[str]
) -> None:
    """The newest folder without a run is reported, and no older one taken."""
    monkeypatch.chdir(tmp_path)
    for place in (".", "nowhere"):
        assert main(["resume", place]) == 2
        assert f"got {place}, expected a run's folder, such as runs/0001" in capsys.readouterr().err
    assert main(["resume"]) == 2
    assert "no run was found here: got no folder runs/NNNN" in capsys.readouterr().err
    make_run(tmp_path / "runs" / "0001")
    (tmp_path / "runs" / "0002").mkdir()
    assert main(["resume"]) == 2 and not asked
    assert "this folder contains no run: got runs/0002" in capsys.readouterr().err


def parse_launch(line: str) -> ScriptRequest:
    return script_request(build_parser().parse_args(["launch", *line.split()]))


def test_a_script_keeps_its_own_options():
    request = parse_launch("--num_gpus 2 train.py --num_gpus 7 --debug -- x")
    assert (request.target, request.arguments) == ("train.py", ("--num_gpus", "7", "--debug", "--", "x"))
    assert request.placement == PlacementRequest(slots=2)


@pytest.mark.parametrize(
    ("line", "placement"),
    [
        ("--slots 3 t.py", PlacementRequest(slots=3)),
        ("--nproc-per-node 3 t.py", PlacementRequest(slots=3)),
        ("-i localhost:0,1 t.py", PlacementRequest(include="localhost:0,1")),
        ("--exclude a@b t.py", PlacementRequest(exclude="a@b")),
        (
            "--nnodes 2 --node-rank 1 --master-addr h --master_port 7 t.py",
            PlacementRequest(nnodes="2", node_rank=1, master_addr="h", master_port=7),
        ),
        (
            "--nnodes 1:3 --rdzv-endpoint h:1 --rdzv_id x t.py",
            PlacementRequest(nnodes="1:3", rdzv_endpoint="h:1", rdzv_id="x"),
        ),
        ("--standalone t.py", PlacementRequest()),
    ],
)
def test_hosts(line: str, placement: PlacementRequest):
    assert parse_launch(line).placement == placement


def test_a_hostfile_is_read_and_ssh_needs_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "hosts").write_text("a slots=2\n")
    placement = parse_launch(f"-H {tmp_path / 'hosts'} --num_nodes 1 --launcher ssh t.py").placement
    assert (placement.hostfile, placement.num_nodes, placement.spread) == ("a slots=2\n", 1, True)
    assert main(["launch", "--launcher", "ssh", "t.py"]) == 2
    assert "needs a hostfile" in capsys.readouterr().err
    for option in ("--launcher pdsh", "--autotuning run"):  # what DeepSpeed's launcher has and this does not
        with pytest.raises(SystemExit):
            main(["launch", *option.split(), "t.py"])


def test_who_stands_in_for_deepspeed(monkeypatch: pytest.MonkeyPatch):
    for line, variable, asked in (
        ("t.py", "", ""),
        ("t.py", "1", "1"),
        ("--as-deepspeed t.py", "0", "1"),
        ("--replace-deepspeed t.py --as-deepspeed", "", "replace"),
    ):
        monkeypatch.setenv("ZERO_TRIAL_AS_DEEPSPEED", variable)
        assert parse_launch(line).as_deepspeed == asked, line


def test_what_to_run():
    for line, kind, local_rank in (
        ("t.py", "script", None),
        ("-m pkg.mod", "module", None),
        ("--module pkg.mod", "module", None),
        ("--no_python ls", "program", None),
        ("--no_local_rank t.py", "script", False),
        ("--local_rank t.py", "script", True),
    ):
        request = parse_launch(line)
        assert (request.kind, request.local_rank) == (kind, local_rank), line
