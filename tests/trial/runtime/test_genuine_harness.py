"""Whole trials under Determined's harness (prep_container, exec.launch, the launch layer, core), by
each way in, on two and four ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.stub_master import StubMaster, Task
from tests.trial.runtime.line_model import FILES, experiment

pytest.importorskip("determined")


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StubMaster]:
    stub = StubMaster(tmp_path_factory.mktemp("cluster"))
    yield stub
    stub.close()


def run(master: StubMaster, front: str, slots: int, **hyperparameters: Any) -> Task:
    """A trial from its start to its end."""
    master.preempt_after = hyperparameters.get("wait_at")
    return master.run(FILES, experiment(front, **hyperparameters), slots=slots)


def go_on(master: StubMaster, front: str, slots: int, task: Task, **hyperparameters: Any) -> Task:
    """The trial again, from the last checkpoint that ``task`` reported."""
    saved = task.asked.checkpoints[-1]
    master.preempt_after = hyperparameters.get("wait_at")
    point = {"latest_checkpoint": saved["uuid"], "steps_completed": saved["metadata"]["steps_completed"]}
    return master.run(FILES, experiment(front, **hyperparameters), slots=slots, **point)


def tensorboard_files(master: StubMaster) -> int:
    """Files in the storage."""
    return len(list((master.root / "shared_fs").rglob("*tfevents*")))


def complete(task: Task) -> None:
    assert task.code == 0, task.log
    assert task.asked.acks == 0 and task.asked.early_exits == []
    assert [step for step, _ in task.asked.validations()][-1] == 8
    assert task.asked.validations()[-1][1].keys() == {"validation_loss", "batches", "epochs"}
    assert task.asked.progress[-1] == 1.0
    assert task.asked.checkpoints[-1]["metadata"]["steps_completed"] == 8


def paused(task: Task, asked_at: int) -> None:
    """It was asked while rank 0 reported step ``asked_at`` or waited in the next: it has saved one
    of the two."""
    assert task.code == 0, task.log
    assert task.asked.acks == 1 and task.asked.early_exits == []
    last = task.asked.losses()[-1][0]
    assert last in (asked_at, asked_at + 1)
    assert task.asked.checkpoints[-1]["metadata"]["steps_completed"] == last


@pytest.mark.parametrize(
    ("slots", "whole", "first", "second"),
    [
        (2, "class", "module", "script"),
        pytest.param(4, "module", "script", "class", marks=pytest.mark.extended),  # the same on more ranks than cores
    ],
)
def test_paused_and_resumed_the_losses_are_those_of_one_go(
    master: StubMaster, slots: int, whole: str, first: str, second: str
) -> None:
    """What one front has saved another goes on from, to the last bit."""
    before = tensorboard_files(master)
    one_go = run(master, whole, slots, tensorboard=slots == 2)
    complete(one_go)
    assert tensorboard_files(master) - before == (slots == 2)
    begun = run(master, first, slots, wait_at=2)
    paused(begun, 2)
    ended = go_on(master, second, slots, begun)
    complete(ended)
    assert [step for step, _ in one_go.asked.losses()] == list(range(1, 9))
    assert begun.asked.losses() + ended.asked.losses() == one_go.asked.losses()
    assert ended.asked.validations()[-1] == one_go.asked.validations()[-1]
    assert master.unknown == []


@pytest.mark.parametrize(("front", "fault"), [("module", "invalid"), ("class", "invalid at once")])
def test_hyperparameters_that_one_rank_cannot_train_end_all_ranks_and_are_reported_once(
    master: StubMaster, front: str, fault: str
) -> None:
    task = run(master, front, 2, fault=fault, at=2)
    assert task.code == 0, task.log
    assert task.asked.early_exits == ["EXITED_REASON_INVALID_HP"]
    assert task.log.count("hyperparameters that cannot be trained: too small") == 1
    assert "Traceback" not in task.log and "the script goes on" not in task.log
