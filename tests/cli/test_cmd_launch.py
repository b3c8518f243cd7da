"""The options of ``launch``: DeepSpeed's launcher and torchrun, in either spelling, done or
answered."""

from __future__ import annotations

from pathlib import Path

import pytest

from zero_trial.cli.cmd_launch import REFUSED, WITHOUT_EFFECT, request_from
from zero_trial.cli.main import build_parser, main
from zero_trial.launch.hosts import PlacementRequest
from zero_trial.launch.script import ScriptRequest


def parse(line: str) -> ScriptRequest:
    request = request_from(build_parser().parse_args(["launch", *line.split()]))
    assert isinstance(request, ScriptRequest)
    return request


def test_a_script_keeps_its_own_options():
    request = parse("--num_gpus 2 train.py --num_gpus 7 --debug -- x")
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
        ("--standalone --no_ssh t.py", PlacementRequest()),
    ],
)
def test_hosts(line: str, placement: PlacementRequest):
    assert parse(line).placement == placement


def test_a_hostfile_is_read(tmp_path: Path):
    (tmp_path / "hosts").write_text("a slots=2\n")
    placement = parse(f"-H {tmp_path / 'hosts'} --num_nodes 1 --launcher ssh t.py").placement
    assert (placement.hostfile, placement.num_nodes, placement.spread) == ("a slots=2\n", 1, True)


@pytest.mark.parametrize(
    ("line", "variable", "asked"),
    [
        ("t.py", "", ""),
        ("t.py", "1", "1"),
        ("--as-deepspeed t.py", "0", "1"),
        ("--replace-deepspeed t.py --as-deepspeed", "", "replace"),
    ],
)
def test_who_stands_in_for_deepspeed(monkeypatch: pytest.MonkeyPatch, line: str, variable: str, asked: str):
    monkeypatch.setenv("ZERO_TRIAL_AS_DEEPSPEED", variable)
    assert parse(line).as_deepspeed == asked


@pytest.mark.parametrize(
    ("line", "kind", "local_rank"),
    [
        ("t.py", "script", None),
        ("-m pkg.mod", "module", None),
        ("--module pkg.mod", "module", None),
        ("--no_python ls", "program", None),
        ("--no_local_rank t.py", "script", False),
        ("--local_rank t.py", "script", True),
    ],
)
def test_what_to_run(line: str, kind: str, local_rank: bool | None):
    request = parse(line)
    assert (request.kind, request.local_rank) == (kind, local_rank)


@pytest.mark.parametrize("option", sorted(REFUSED))
def test_what_is_not_done_says_so(option: str, capsys: pytest.CaptureFixture[str]):
    assert main(["launch", option, "1", "t.py"]) == 2
    assert capsys.readouterr().err.startswith(f"error   launch {option}: {REFUSED[option][:40]}")


@pytest.mark.parametrize("option", sorted(WITHOUT_EFFECT))
def test_what_is_not_needed_says_so(option: str, capsys: pytest.CaptureFixture[str]):
    value = "logs " if option == "--enable_each_rank_log" else ""
    assert parse(f"{option} {value}t.py").target == "t.py"
    assert WITHOUT_EFFECT[option] in capsys.readouterr().err


def test_ssh_needs_a_hostfile(capsys: pytest.CaptureFixture[str]):
    assert main(["launch", "--launcher", "ssh", "t.py"]) == 2
    assert "needs a hostfile" in capsys.readouterr().err


def test_other_launchers_are_named(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main(["launch", "--launcher", "pdsh", "t.py"])
    assert ended.value.code == 2 and "'none', 'ssh'" in capsys.readouterr().err.replace("none, ssh", "'none', 'ssh'")
