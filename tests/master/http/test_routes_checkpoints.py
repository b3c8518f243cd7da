"""Checkpoints as the genuine client and the genuine harness ask for them."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tests.master.http.conftest import Ask
from tests.master.http.fake_cluster import TASK_TOKEN, USER_TOKEN, UUID, FakeCluster, checkpoint, trial
from zero_trial.master.records import CheckpointState

bindings = pytest.importorskip("determined.common.api.bindings")
client = pytest.importorskip("determined.experimental.client")
errors = pytest.importorskip("determined.common.api.errors")


def fill(cluster: FakeCluster) -> None:
    for name, steps, metric, state in (
        ("a", 5, 0.5, "COMPLETED"),
        ("b", 10, 0.3, "DELETED"),
        ("c", 15, None, "COMPLETED"),
    ):
        cluster.stored_checkpoints[name] = checkpoint(
            name,
            1,
            1,
            steps_completed=steps,
            searcher_metric=metric,
            state=CheckpointState[state],
            reported=1_700_000_000.0 + steps,
            validation_metrics={} if metric is None else {"validation_loss": metric, "accuracy": 1 - metric},
        )


def test_lists_are_sorted_as_asked(user: Any, cluster: FakeCluster) -> None:
    fill(cluster)
    by, order = bindings.checkpointv1SortBy, bindings.v1OrderBy
    for asked, expected in (
        ({"sortByAttr": by.END_TIME}, "abc"),
        ({"sortByAttr": by.BATCH_NUMBER, "orderBy": order.DESC}, "cba"),
        ({"sortByAttr": by.SEARCHER_METRIC}, "ba"),
        ({"sortByAttr": by.SEARCHER_METRIC, "limit": 1}, "b"),
        ({"sortByAttr": by.SEARCHER_METRIC, "orderBy": order.DESC}, "ab"),
        ({"sortByMetric": "accuracy", "orderBy": order.DESC}, "ba"),
        ({"sortByMetric": "accuracy", "orderBy": order.ASC}, "ab"),
        ({"states": [bindings.checkpointv1State.COMPLETED], "sortByAttr": by.UUID}, "ac"),
        ({}, "ba"),
    ):
        for found in (
            bindings.get_GetExperimentCheckpoints(user, id=1, **asked),
            bindings.get_GetTrialCheckpoints(user, id=1, **asked),
        ):
            assert "".join(each.uuid for each in found.checkpoints) == expected, asked
            assert found.pagination.endIndex == len(expected)


def test_a_wrong_order_is_refused(ask: Ask) -> None:
    assert ask("GET", "/api/v1/trials/1/checkpoints?sortByAttr=UUID", user=USER_TOKEN)[0] == 400


def test_one_checkpoint_has_all_that_a_client_needs_to_download_it(user: Any, cluster: FakeCluster) -> None:
    cluster.stored_checkpoints[UUID] = checkpoint(UUID, 1, 1)
    found = client.Determined._from_session(user).get_checkpoint(UUID)
    assert found.training.experiment_config["checkpoint_storage"]["type"] == "shared_fs"
    assert (found.training.trial_id, found.metadata, found.resources) == (
        1,
        {"steps_completed": 5},
        {"state.json": "11"},
    )
    with pytest.raises(errors.NotFoundException):
        bindings.get_GetCheckpoint(user, checkpointUuid="none")


def test_a_download_through_the_master(user: Any, cluster: FakeCluster, tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "weights.bin").write_bytes(b"w" * 700_000)
    (tmp_path / "metadata.json").write_text("{}")
    cluster.files = tmp_path
    cluster.stored_checkpoints[UUID] = checkpoint(UUID, 1, 1)
    answer = user.get(f"/checkpoints/{UUID}", headers={"Accept": "application/gzip"}, stream=True)
    with tarfile.open(fileobj=io.BytesIO(answer.content), mode="r:gz") as archive:
        assert archive.getnames() == ["deep/weights.bin", "metadata.json"]
        assert archive.extractfile("deep/weights.bin").read() == b"w" * 700_000  # type: ignore[union-attr]


def test_files_that_are_gone_are_404(ask: Ask, cluster: FakeCluster) -> None:
    cluster.stored_checkpoints[UUID] = checkpoint(UUID, 1, 1)
    assert ask("GET", f"/checkpoints/{UUID}", user=USER_TOKEN)[0] == 404


def test_a_trial_reads_its_own_experiments_and_the_one_that_it_starts_from(ask: Ask, cluster: FakeCluster) -> None:
    cluster.stored_checkpoints["own"] = checkpoint("own", 1, 1)
    cluster.stored_checkpoints["other"] = checkpoint("other", 2, 2)
    assert ask("GET", "/api/v1/checkpoints/own", task=TASK_TOKEN)[0] == 200
    assert ask("GET", "/api/v1/checkpoints/other", task=TASK_TOKEN)[0] == 403
    cluster.stored_trials[1] = trial(1, 1, warm_start_checkpoint="other")
    assert ask("GET", "/api/v1/checkpoints/other", task=TASK_TOKEN)[0] == 200


def test_a_checkpoint_is_reported(task: Any, cluster: FakeCluster) -> None:
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
    ((_, found),) = cluster.calls
    assert (found.uuid, found.state, found.resources, found.reported) == (
        UUID,
        CheckpointState.COMPLETED,
        {"rank0.bin": 10},
        1_700_000_010.0,
    )


@pytest.mark.parametrize(
    "change",
    [
        {"uuid": 7},
        {"metadata": []},
        {"resources": None},
        {"resources": {"a": "x"}},
        {"state": "STATE_MELTED"},
        {"reportTime": "noon"},
    ],
)
def test_a_report_that_is_none_is_refused(ask: Ask, cluster: FakeCluster, change: dict[str, Any]) -> None:
    body = {"uuid": UUID, "metadata": {}, "resources": {}, "allocationId": "task-1.1", "taskId": "task-1", **change}
    assert ask("POST", "/api/v1/checkpoints", task=TASK_TOKEN, body=body)[0] == 400
    assert cluster.calls == []


def test_the_harness_deletes_files_of_its_own(task: Any, cluster: FakeCluster) -> None:
    cluster.stored_checkpoints[UUID] = checkpoint(UUID, 1, 1)
    change = bindings.v1PatchCheckpoint(
        uuid=UUID, resources=bindings.PatchCheckpointOptionalResources(resources={"a": "1"})
    )
    bindings.patch_PatchCheckpoints(task, body=bindings.v1PatchCheckpointsRequest(checkpoints=[change]))
    assert cluster.calls == [("patch_resources", UUID, {"a": 1})]


def test_users_delete_checkpoints_and_files(user: Any, cluster: FakeCluster) -> None:
    bindings.delete_DeleteCheckpoints(user, body=bindings.v1DeleteCheckpointsRequest(checkpointUuids=["a", "b", "a"]))
    body = bindings.v1CheckpointsRemoveFilesRequest(checkpointGlobs=["*.bin"], checkpointUuids=["a"])
    bindings.post_CheckpointsRemoveFiles(user, body=body)
    assert cluster.calls == [("delete_checkpoints", ["a", "b"]), ("remove_files", ["a"], ["*.bin"])]


@pytest.mark.parametrize("body", [{}, {"checkpointUuids": "a"}, {"checkpointUuids": [1]}])
def test_a_deletion_that_names_nothing_is_refused(ask: Ask, cluster: FakeCluster, body: dict[str, Any]) -> None:
    assert ask("DELETE", "/api/v1/checkpoints", user=USER_TOKEN, body=body)[0] == 400
    assert ask("POST", "/api/v1/checkpoints/rm", user=USER_TOKEN, body=body)[0] == 400
    assert cluster.calls == []


def test_a_metric_that_is_no_number_everywhere_is_sorted_by_where_it_is_one(user: Any, cluster: FakeCluster) -> None:
    for name, value in (("a", 2), ("b", "NaN"), ("c", 1.5), ("d", [1])):
        cluster.stored_checkpoints[name] = checkpoint(name, 1, 1, validation_metrics={"m": value})
    found = bindings.get_GetExperimentCheckpoints(user, id=1, sortByMetric="m")
    assert [each.uuid for each in found.checkpoints] == ["c", "a"]
