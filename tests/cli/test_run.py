"""The options of ``run``; whole runs are in tests/launch/test_end_to_end.py."""

from __future__ import annotations

from pathlib import Path

from zero_trial.cli.main import build_parser
from zero_trial.cli.run import request_from
from zero_trial.launch.experiment import RunRequest
from zero_trial.launch.placement import PlacementRequest


def parse(line: str) -> RunRequest:
    return request_from(build_parser().parse_args(["run", *line.split()]))


def test_the_usual_form():
    assert parse("const.yaml model") == RunRequest(experiment=Path("const.yaml"), model_dir=Path("model"))


def test_a_lock_needs_no_model_folder():
    assert parse("runs/0001/config.lock.yaml") == RunRequest(experiment=Path("runs/0001/config.lock.yaml"))


def test_all_options():
    request = parse("c.yaml m --slots 4 --seed 9 --run-dir r --nnodes 2 --node-rank 1 --master_addr h --master-port 7")
    assert (request.slots, request.seed, request.run_dir) == (4, 9, Path("r"))
    assert request.placement == PlacementRequest(slots=4, nnodes="2", node_rank=1, master_addr="h", master_port=7)
    assert parse("--resume runs/0001").resume == Path("runs/0001")
