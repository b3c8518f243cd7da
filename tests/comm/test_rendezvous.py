"""Rank variables of every launcher, finding each other, the world of ranks, and leaving it early
together."""

from __future__ import annotations

import datetime
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.comm import test_heartbeat as heartbeat
from tests.support.pool import Pools, free_port
from zero_trial.comm import destroy_distributed, init_distributed, is_distributed, world_size
from zero_trial.comm import rendezvous as module
from zero_trial.comm.rendezvous import (
    ExitNotice,
    RankEnv,
    arrive,
    meeting_place,
    missing_ranks,
    open_exit_notice,
    open_store,
    own_store_address,
    read_rank_env,
    world_heartbeat,
)
from zero_trial.errors import MeshError

OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
SLURM = {"SLURM_PROCID": "4", "SLURM_STEP_NUM_TASKS": "6", "SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "2(x3)"}

ENVIRONMENTS = [
    ({}, RankEnv()),
    ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}, RankEnv(5, 8, 1, 4, True)),
    ({"RANK": "1"}, RankEnv()),  # half a set is no one's
    ({"WORLD_SIZE": "4"}, RankEnv()),
    ({"RANK": "0", "WORLD_SIZE": "1"}, RankEnv(0, 1, 0, 1, True)),
    ({"RANK": "2", "WORLD_SIZE": "3"}, RankEnv(2, 3, 2, 3, True)),  # one host unless told otherwise
    ({"RANK": "2", "WORLD_SIZE": "4", "LOCAL_SIZE": "2"}, RankEnv(2, 4, 2, 2, True)),  # DeepSpeed's launcher
    ({"LOCAL_SIZE": "4"}, RankEnv(local_world_size=4)),
    ({"LOCAL_SIZE": "0"}, RankEnv()),
    (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, RankEnv(3, 4, 1, 2, True)),
    (SLURM, RankEnv(4, 6, 0, 2, True)),
    (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "6"}, RankEnv(4, 6, 0, 6, True)),
    (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "?"}, RankEnv(4, 6, 0, 6, True)),
    # torch's own set comes first
    (SLURM | {"RANK": "1", "WORLD_SIZE": "2"}, RankEnv(1, 2, 1, 2, True)),
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
    assert name in str(raised.value) and repr(value) in str(raised.value)


@pytest.mark.parametrize(("rank", "size"), [("2", "2"), ("-1", "2"), ("0", "0")])
def test_a_rank_outside_the_world_is_refused(rank: str, size: str) -> None:
    with pytest.raises(MeshError, match=f"RANK={rank}, WORLD_SIZE={size}"):
        read_rank_env({"RANK": rank, "WORLD_SIZE": size})


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


SOON = datetime.timedelta(seconds=0.6)
# by then even a busy machine has started the ranks that do come
LATER = datetime.timedelta(seconds=2)


def come(ranks: tuple[int, ...], size: int, limit: datetime.timedelta = SOON) -> dict[int, Any]:
    """These ranks of ``size`` arrive, as threads; what each got."""
    place, found = f"tcp://127.0.0.1:{free_port()}", {}

    def work(rank: int) -> None:
        try:
            found[rank] = arrive(place, RankEnv(rank, size, rank, size, True), limit)
        except MeshError as error:
            found[rank] = str(error)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    return found


def test_all_arrive_at_one_store() -> None:
    found = come((0, 1, 2), 3, datetime.timedelta(seconds=60))
    found[1].set("word", "of rank 1")
    assert found[2].get("word") == b"of rank 1" and missing_ranks(found[0], 5) == [3, 4]


def test_absent_ranks_are_named_by_all(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """After a while a line says who waits, so that the terminal is not silent until then, and later
    lines say for whom."""
    monkeypatch.setattr(module, "_LONG_WAIT_SECONDS", 0.2)
    monkeypatch.setattr(module, "_LINES_SECONDS", 0.5)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    found = come((0, 2), 4, LATER)
    starts = [f"rank {rank} of 4 has waited " for rank in (0, 2)]
    late, rest = ([text for text in caplog.messages if text.startswith(start)] for start in starts)
    assert len(late) > 1 and len(late) + len(rest) == len(caplog.messages)
    assert all(" s of 2 (comm_timeout_seconds) for rank 1, rank 3 at 127.0.0.1:" in text for text in late[1:])
    assert " for the other ranks at " in rest[0]
    for rank in (0, 2):
        assert found[rank].startswith(f"rank {rank} of 4, init_distributed: the ranks did not find each other: ")
        assert "rank 1, rank 3 never arrived" in found[rank] and found[rank].endswith("unset RANK and WORLD_SIZE.")


def test_rank_0_which_keeps_the_store_is_named_by_the_others() -> None:
    text = come((1,), 2)[1]
    assert "rank 0 never arrived: got 127.0.0.1:" in text and "Connection refused" in text


def test_other_meeting_places_are_torchs_own(tmp_path: Any) -> None:
    assert isinstance(open_store(f"file://{tmp_path}/meet", RankEnv(0, 1), SOON), dist.FileStore)
    with pytest.raises(MeshError, match="did not find each other"):
        arrive("nowhere://x", RankEnv(0, 2), SOON)


NCCL = ("nccl", "NCCL", "cpu:gloo,cuda:nccl")


@pytest.mark.parametrize("given", NCCL)
def test_nccl_is_gloo_and_a_warning_where_torch_is_built_for_cpus(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    """The first rank of each host warns: rank 3 of 6 is one here."""
    monkeypatch.setattr(module, "accelerator", lambda: None)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr(module, "arrive", lambda *_: dist.HashStore())
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **_: begun.append(backend))
    begun: list[str] = []
    init_distributed(dist_backend=given, rank=3, world_size=6)
    assert begun == ["gloo"] and "the ranks use gloo" in caplog.text


@pytest.mark.parametrize("given", NCCL)
def test_nccl_is_refused_where_torch_could_use_gpus_and_sees_none(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setattr(module, "accelerator", lambda: None)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(
        MeshError, match=r"\(dist_backend\): no GPU is visible to torch on this host: the driver"
    ) as refused:
        init_distributed(dist_backend=given)
    assert given in str(refused.value) and "omit dist_backend" in str(refused.value) and not is_distributed()


def test_a_backend_that_torch_does_not_have_is_named() -> None:
    with pytest.raises(
        MeshError, match=r"init_distributed\(dist_backend\): this torch was built without that backend: got 'glo'"
    ):
        init_distributed(dist_backend="glo")


def test_without_a_launcher_a_process_is_a_world_of_one() -> None:
    assert not is_distributed() and world_size() == 1
    try:
        assert init_distributed() == RankEnv() and is_distributed() and world_size() == 1
    finally:
        destroy_distributed()
    assert not is_distributed()
    destroy_distributed()


def test_leaving_stops_the_boards_thread() -> None:
    init_distributed(rank=0, world_size=1, init_method=f"tcp://127.0.0.1:{free_port()}", timeout=20)
    try:
        assert world_heartbeat() is world_heartbeat() and world_heartbeat().rank == 0
    finally:
        destroy_distributed()
    assert not [thread for thread in threading.enumerate() if thread.name == "zero_trial-heartbeat"]


def test_ranks_that_do_not_find_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MeshError, match=r"rank 1 of 2, init_distributed: the ranks did not find each other"):
        init_distributed(rank=1, world_size=2, init_method=f"tcp://127.0.0.1:{free_port()}", timeout=1)
    assert not dist.is_initialized()


def test_a_world_that_must_run_already(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MeshError, match="dist_init_required=False"):
        init_distributed(dist_init_required=False)


PATIENCE = 30.0


class FakeStore(heartbeat.FakeStore):
    def add(self, key: str, amount: int) -> int:
        if self.gone:
            raise RuntimeError("Connection reset by peer")
        return super().add(key, amount)


def test_the_first_of_all_ranks_has_the_claim() -> None:
    store = FakeStore()
    first, second = ExitNotice(store), ExitNotice(store)
    assert not first.claimed("early exit")
    assert [second.claim("early exit"), first.claim("early exit"), second.claim("early exit")] == [True, False, False]
    assert first.claimed("early exit") and not first.claimed("another")


def test_a_world_of_one_and_a_store_that_is_gone_leave_it_to_each() -> None:
    alone = ExitNotice()
    alone.watch("x", pytest.fail)  # nothing watches
    assert [alone.claim("x"), alone.claim("x"), alone.claimed("x"), alone.claimed("y")] == [True, False, True, False]
    store = FakeStore()
    store.gone = True
    assert ExitNotice(store).claim("x") and not ExitNotice(store).claimed("x")


@pytest.fixture()
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PERIOD_SECONDS", 0.01)
    monkeypatch.setattr(module, "GRACE_SECONDS", 0.02)


@pytest.mark.usefixtures("hasty")
def test_a_rank_leaves_soon_after_another_has_claimed() -> None:
    store, left = FakeStore(), threading.Event()
    watching = ExitNotice(store)
    watching.watch("early exit", left.set)
    assert not left.is_set()
    ExitNotice(store).claim("early exit")
    assert left.wait(PATIENCE)
    watching.close()


@pytest.mark.usefixtures("hasty")
def test_a_rank_that_claims_itself_or_has_stopped_watching_is_left_alone() -> None:
    store, left = FakeStore(), threading.Event()
    own, closed = ExitNotice(store), ExitNotice(store)
    own.watch("early exit", left.set)
    closed.watch("early exit", left.set)
    closed.close()
    own.claim("early exit")
    own.close()
    assert not left.is_set()


def claim_together() -> bool:
    return open_exit_notice().claim("test_farewell")


def test_real_ranks_agree_on_one(ranks: Pools) -> None:
    assert sorted(ranks(2).run(claim_together)) == [False, True]
