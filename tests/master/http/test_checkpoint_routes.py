"""Checkpoints as the original client and Determined's harness ask for them."""

from __future__ import annotations

import io
import tarfile
from typing import Any

import pytest

from tests.master.http.conftest import Ask
from tests.master.world import BEGAN, TASK_TOKEN, UUID, World
from zero_trial.master.records import CheckpointState

bindings = pytest.importorskip("determined.common.api.bindings")
client = pytest.importorskip("determined.experimental.client")
errors = pytest.importorskip("determined.common.api.errors")


def fill(world: World) -> None:
    for name, steps, metric, state in (
        ("a", 5, 0.5, "COMPLETED"),
        ("b", 10, 0.3, "DELETED"),
        ("c", 15, None, "COMPLETED"),
    ):
        world.save(name, steps_completed=steps, state=CheckpointState[state], reported=BEGAN + steps)
        if metric is not None:
            world.report(1, "validation", steps, {"validation_loss": metric, "accuracy": 1 - metric})


def test_lists_are_sorted_as_asked(user: Any, world: World) -> None:
    fill(world)
    by, order = bindings.checkpointv1SortBy, bindings.v1OrderBy
    for asked, expected in (
        ({"sortByAttr": by.END_TIME}, "abc"),
        ({"sortByAttr": by.BATCH_NUMBER, "orderBy": order.DESC}, "cba"),
        ({"sortByAttr": by.SEARCHER_METRIC}, "bac"),
        ({"sortByAttr": by.SEARCHER_METRIC, "limit": 1}, "b"),
        ({"sortByAttr": by.SEARCHER_METRIC, "orderBy": order.DESC}, "abc"),
        ({"sortByMetric": "accuracy", "orderBy": order.DESC}, "bac"),
        ({"sortByMetric": "accuracy", "orderBy": order.ASC}, "abc"),
        ({"states": [bindings.checkpointv1State.COMPLETED], "sortByAttr": by.UUID}, "ac"),
        ({}, "abc"),
    ):
        for found in (
            bindings.get_GetExperimentCheckpoints(user, id=1, **asked),
            bindings.get_GetTrialCheckpoints(user, id=1, **asked),
        ):
            assert "".join(each.uuid for each in found.checkpoints) == expected, asked
            assert found.pagination.endIndex == len(expected)


def test_the_checkpoint_of_a_pause_is_found_though_nothing_was_validated_there(user: Any, world: World) -> None:
    world.save("paused", steps_completed=7, reported=BEGAN)
    determined = client.Determined._from_session(user)
    assert [each.uuid for each in determined.get_experiment(1).list_checkpoints()] == ["paused"]
    assert determined.get_trial(1).list_checkpoints(max_results=1)[0].uuid == "paused"


def test_metadata_is_added_and_removed(user: Any, world: World) -> None:
    world.save(UUID, steps_completed=5)
    found = client.Determined._from_session(user).get_checkpoint(UUID)
    found.add_metadata({"best": True, "by": "hand"})
    found.remove_metadata(["best"])
    kept = world.checkpoints.get(UUID)
    assert (kept.metadata["by"], "best" in kept.metadata, kept.steps_completed) == ("hand", False, 5)


def test_one_checkpoint_has_all_that_a_client_needs_to_download_it(user: Any, world: World) -> None:
    world.save(UUID)
    found = client.Determined._from_session(user).get_checkpoint(UUID)
    assert found.training.experiment_config["checkpoint_storage"]["type"] == "shared_fs"
    assert (found.training.trial_id, found.metadata, found.resources) == (
        1,
        {"steps_completed": 5},
        {"state.json": "11"},
    )
    with pytest.raises(errors.NotFoundException):
        bindings.get_GetCheckpoint(user, checkpointUuid="none")


def test_a_download_through_the_master(user: Any, world: World) -> None:
    folder = world.directory.storage / UUID
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "weights.bin").write_bytes(b"w" * 700_000)
    (folder / "metadata.json").write_text("{}")
    world.save(UUID)
    answer = user.get(f"/checkpoints/{UUID}", headers={"Accept": "application/gzip"}, stream=True)
    with tarfile.open(fileobj=io.BytesIO(answer.content), mode="r:gz") as archive:
        assert archive.getnames() == ["deep/weights.bin", "metadata.json"]
        assert archive.extractfile("deep/weights.bin").read() == b"w" * 700_000  # type: ignore[union-attr]


def test_a_trial_reads_its_own_experiments_and_the_one_that_it_starts_from(ask: Ask, world: World) -> None:
    world.save("own")
    world.save("other", 2)
    assert ask("GET", "/api/v1/checkpoints/own", task=TASK_TOKEN)[0] == 200
    assert ask("GET", "/api/v1/checkpoints/other", task=TASK_TOKEN)[0] == 403
    world.change_trial(1, warm_start_checkpoint="other")
    assert ask("GET", "/api/v1/checkpoints/other", task=TASK_TOKEN)[0] == 200


def test_a_checkpoint_is_reported(task: Any, world: World) -> None:
    body = bindings.v1Checkpoint(
        allocationId="task-1.1",
        metadata={"steps_completed": 5},
        resources={"rank0.bin": "10"},
        taskId="task-1",
        training=bindings.v1CheckpointTrainingMetadata(),
        uuid=UUID,
        reportTime="2023-11-14T22:13:30+00:00",
        state=bindings.checkpointv1State.COMPLETED,
    )
    bindings.post_ReportCheckpoint(task, body=body)
    found = world.checkpoints.get(UUID)
    assert (found.uuid, found.state, found.resources, found.reported) == (
        UUID,
        CheckpointState.COMPLETED,
        {"rank0.bin": 10},
        1_700_000_010.0,
    )


def test_the_harness_deletes_files_of_its_own(task: Any, world: World) -> None:
    world.save(UUID)
    change = bindings.v1PatchCheckpoint(
        uuid=UUID, resources=bindings.PatchCheckpointOptionalResources(resources={"a": "1"})
    )
    bindings.patch_PatchCheckpoints(task, body=bindings.v1PatchCheckpointsRequest(checkpoints=[change]))
    found = world.checkpoints.get(UUID)
    assert (found.state, found.resources) == (CheckpointState.PARTIALLY_DELETED, {"a": 1})


def test_users_delete_checkpoints_and_files(user: Any, world: World) -> None:
    gone, kept = UUID, UUID.replace("6f", "7f")
    for name in (gone, kept):
        world.save(name)
        folder = world.directory.storage / name
        folder.mkdir(parents=True)
        for file in ("a.bin", "b.json"):
            (folder / file).write_text(file)
    bindings.delete_DeleteCheckpoints(user, body=bindings.v1DeleteCheckpointsRequest(checkpointUuids=[gone, gone]))
    world.garbage_collector.collect()
    assert not (world.directory.storage / gone).exists()
    ended = world.checkpoints.get(gone)
    assert (ended.state, ended.resources) == (CheckpointState.DELETED, world.checkpoints.get(kept).resources)
    body = bindings.v1CheckpointsRemoveFilesRequest(checkpointGlobs=["*.bin"], checkpointUuids=[kept])
    bindings.post_CheckpointsRemoveFiles(user, body=body)
    assert [path.name for path in (world.directory.storage / kept).iterdir()] == ["b.json"]
    assert world.checkpoints.get(kept).resources == {"b.json": 6}


def test_a_metric_that_is_no_number_everywhere_is_sorted_by_where_it_is_one(user: Any, world: World) -> None:
    for steps, (name, value) in enumerate((("a", 2), ("b", "NaN"), ("c", 1.5), ("d", [1]))):
        world.save(name, steps_completed=steps)
        world.report(1, "validation", steps, {"m": value})
    found = bindings.get_GetExperimentCheckpoints(user, id=1, sortByMetric="m")
    assert [each.uuid for each in found.checkpoints] == ["c", "a", "b", "d"]
