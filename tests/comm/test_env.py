"""Rank variables of every launcher, and the meeting place that follows from them."""

from __future__ import annotations

import pytest

from zero_trial.comm.rendezvous import RankEnv, meeting_place, own_store_address, read_rank_env
from zero_trial.errors import MeshError


def test_a_launcher_says_where_this_process_stands() -> None:
    environ = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    assert read_rank_env(environ) == RankEnv(rank=5, world_size=8, local_rank=1, local_world_size=4, launched=True)


OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
SLURM = {"SLURM_PROCID": "4", "SLURM_STEP_NUM_TASKS": "6", "SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "2(x3)"}

ENVIRONMENTS = [
    ({}, RankEnv()),
    ({"RANK": "1"}, RankEnv()),  # half a set is nobody's
    ({"WORLD_SIZE": "4"}, RankEnv()),
    ({"RANK": "0", "WORLD_SIZE": "1"}, RankEnv(0, 1, 0, 1, True)),
    ({"RANK": "2", "WORLD_SIZE": "3"}, RankEnv(2, 3, 2, 3, True)),  # one host unless told otherwise
    (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, RankEnv(3, 4, 1, 2, True)),
    (SLURM, RankEnv(4, 6, 0, 2, True)),
    (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "6"}, RankEnv(4, 6, 0, 6, True)),
    (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "?"}, RankEnv(4, 6, 0, 6, True)),
    (SLURM | {"RANK": "1", "WORLD_SIZE": "2"}, RankEnv(1, 2, 1, 2, True)),  # torch's own set comes first
    (SLURM | {"RANK": "1"}, RankEnv(4, 6, 0, 2, True)),  # but only when it is whole
]


@pytest.mark.parametrize(("environ", "expected"), ENVIRONMENTS)
def test_variable_sets(environ: dict[str, str], expected: RankEnv) -> None:
    assert read_rank_env(environ) == expected


@pytest.mark.parametrize(("name", "value"), [("RANK", "one"), ("WORLD_SIZE", ""), ("LOCAL_RANK", "1.0")])
def test_a_value_that_is_no_integer_is_named(name: str, value: str) -> None:
    environ = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"} | {name: value}
    with pytest.raises(MeshError) as raised:
        read_rank_env(environ)
    assert name in str(raised.value)
    assert repr(value) in str(raised.value)


@pytest.mark.parametrize(("rank", "size"), [("2", "2"), ("-1", "2"), ("0", "0")])
def test_a_rank_outside_the_world_is_refused(rank: str, size: str) -> None:
    with pytest.raises(MeshError, match=f"RANK={rank}, WORLD_SIZE={size}"):
        read_rank_env({"RANK": rank, "WORLD_SIZE": size})


def test_the_environment_of_the_process_is_read_when_none_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert read_rank_env().rank == 1
    monkeypatch.setenv("MASTER_ADDR", "h")
    monkeypatch.setenv("MASTER_PORT", "1")
    assert meeting_place(5) == "env://"


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        ({"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "5"}, "env://"),
        ({"MASTER_ADDR": "10.0.0.1"}, "tcp://10.0.0.1:29511"),
        ({"MASTER_PORT": "5"}, "tcp://127.0.0.1:29511"),
        ({}, "tcp://127.0.0.1:29511"),
    ],
)
def test_meeting_place(environ: dict[str, str], place: str) -> None:
    assert meeting_place(29511, environ) == place


@pytest.mark.parametrize(
    ("method", "environ", "address"),
    [
        ("tcp://node7:29500", {}, ("node7", 29500)),
        ("env://", {"MASTER_ADDR": "node7", "MASTER_PORT": "1234"}, ("node7", 1234)),
        ("env://", {"MASTER_ADDR": "n", "MASTER_PORT": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}, None),
        ("env://", {}, None),
        ("env://?rank=1", {}, None),
        ("tcp://node7", {}, None),
        ("tcp://node7:29500?rank=1", {}, None),
        ("file://shared/meet", {}, None),
    ],
)
def test_where_rank_0_keeps_the_store(method: str, environ: dict[str, str], address: tuple[str, int] | None) -> None:
    assert own_store_address(method, environ) == address
