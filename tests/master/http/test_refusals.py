"""Requests that are refused: the status, words of the message, and a store that stays as it was.

Requests of another account of the machine are in test_hostile.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import yaml

from tests.master.http.test_races import Write, ask, report
from tests.master.world import CONFIG, TASK_TOKEN, UUID, World

E, T, C = "/api/v1/experiments", "/api/v1/trials", "/api/v1/checkpoints"
POLL = "/api/v1/allocations/task-1.1/signals/preemption"
ENDED, OTHER = 3, UUID.replace("6f", "7f")
LATE, EARLY = "9999-12-31T23:59:59-12:00", "0001-01-01T00:00:00+12:00"
SAVED = {"uuid": OTHER, "metadata": {}, "resources": {}, "allocationId": "task-1.1", "taskId": "task-1"}
REPORT = {"trialRunId": 1, "metrics": {"avgMetrics": {}}}


def get(path: str) -> Write:
    return Write("GET", path)


def post(path: str, body: Any = None) -> Write:
    return Write("POST", path, body)


def patch(path: str, **body: Any) -> Write:
    return Write("PATCH", path, body)


def create(**config: Any) -> Write:
    return post(E, {"config": yaml.safe_dump({**CONFIG, **config}), "modelDefinition": [], "activate": True})


def metrics(group: str | None = "training", **changes: Any) -> Write:
    return report(f"{T}/1/metrics", group=group, metrics={**REPORT, **changes})


def steps(**changes: Any) -> Write:
    return report(C, **{**SAVED, **changes})


REFUSED: dict[str, list[tuple[Write, int, str]]] = {
    "experiments": [
        (create(searcher={"name": "nothing"}, max_restarts=-1), 400, "searcher"),
        (create(searcher={"name": "nothing"}, max_restarts=-1), 400, "max_restarts"),
        (create(resources={"slots_per_trial": 3}), 400, "at most 2"),
        (create(resources={"slots_per_trial": 2, "max_slots": 1}), 400, "max_slots"),
        *((create(resources={"slots_per_trial": 0}, entrypoint=entrypoint), 400, "one process per slot") for entrypoint in (
            "model_def:MyTrial", ["python3", "-m", "determined.launch.torch_distributed", "python3", "train.py"],
        )),
        (create(resources={"resource_pool": "gpus"}), 400, "resources.resource_pool"),
        (create(workspace="Mine", project="Uncategorized"), 400, "workspace"),
        (create(workspace="Uncategorized", project="Mine"), 400, "project"),
        (create(searcher={"name": "single", "metric": "val", "source_trial_id": 9}), 400, "source_trial_id"),
        (post(E, {"config": yaml.safe_dump(CONFIG), "modelDefinition": [], "parentId": 9}), 404, "experiment 9"),
        (post(E, {"config": yaml.safe_dump(CONFIG), "modelDefinition": [{"path": "../a", "type": 48}]}), 400, "is outside"),
        *((write(name=name), 400, "control characters") for write in (create, partial(patch, f"{E}/1")) for name in (
            "a\x1b[2J", "a\nb", "\x07", "a\x9b31m",
        )),
        (post(f"{E}/1/archive"), 409, "ACTIVE"),
        (post(f"{E}/{ENDED}/pause"), 409, "CANCELED"),
        (post(f"{E}/{ENDED}/activate"), 409, "CANCELED"),
        *((post(f"{E}/9/{word}"), 404, "experiment 9 not found") for word in ("pause", "cancel", "kill", "unarchive")),
        *((get(f"{E}/9{rest}"), 404, "experiment 9 not found") for rest in ("", "/trials", "/checkpoints", "/model_def")),
        (Write("DELETE", f"{E}/9"), 404, "experiment 9 not found"),
        *((patch(f"{E}/1", **body), 400, "") for body in (
            {"labels": "x"},
            {"labels": [1]},
            {"name": 7},
            {"resources": {"maxSlots": "two"}},
            {"resources": {"maxSlots": -1}},
            {"resources": {"weight": "nan"}},
            {"resources": {"priority": 0}},
            {"checkpointStorage": {"saveExperimentBest": -1, "saveTrialBest": 1, "saveTrialLatest": 1}},
            {"checkpointStorage": {"saveExperimentBest": 1}},
        )),
    ],
    "trials": [
        *((get(f"{T}/9{rest}"), 404, "trial 9 not found") for rest in ("", "/workloads", "/checkpoints", "/logs")),
        (post(f"{T}/9/kill"), 404, "trial 9 not found"),
        *((get(f"/api/v1/tasks/task-9{rest}"), 404, "not found") for rest in ("", "/logs")),
        (post(f"{T}/9/metrics", {"group": "training", "metrics": REPORT}), 404, "trial 9 not found"),
        (metrics(trialRunId=2), 400, "not the trial's latest"),
        (metrics(group=""), 400, "group"),
        (metrics(group=None), 400, "group"),
        (metrics(metrics=None), 400, "metrics"),
        (metrics(metrics={"avgMetrics": [1]}), 400, "avgMetrics"),
        (metrics(trialRunId="x"), 400, "trialRunId"),
        (metrics(stepsCompleted=1.5), 400, "stepsCompleted"),
        (metrics(reportTime="noon"), 400, "reportTime"),
        (metrics(reportTime=LATE), 400, "reportTime"),
        *(
            (metrics(metrics={"avgMetrics": {}, "batchMetrics": batches}), 400, "batchMetrics")
            for batches in ("x", 1, {"loss": 1.0}, [1.0], [{"loss": 1.0}, None])
        ),
        *(
            (Write("GET", f"{POLL}?timeout_seconds={word}", None, TASK_TOKEN, task=True), 400, "timeout_seconds")
            for word in ("x", "-1", "nan")
        ),
    ],
    "logs": [
        *((get(f"{T}/1/logs?{query}"), 400, "") for query in (
            "limit=x",
            "rankIds=x",
            "timestampAfter=noon",
            "enableRegex=true&searchText=(",
            "enableRegex=true&searchText=(a{1000}b{1000}){1,9}",
        )),
        *((report("/task-logs", logs=body), 400, "") for body in ("x", [1])),
        *((Write("POST", "/task-logs", [{"task_id": "task-1", "log": "x", **line}]), 400, "") for line in (
            {"timestamp": "yesterday"},
            {"timestamp": LATE},
            {"timestamp": EARLY},
            *({"rankId": rank} for rank in ("first", 1.5, True, [1])),
            {"rank": "first"},
        )),
        (Write("POST", "/task-logs", [{"log": "no task"}]), 400, ""),
    ],
    "checkpoints": [
        *((steps(**change), 400, "") for change in (
            {"uuid": 7},
            {"reportTime": LATE},
            {"reportTime": "noon"},
            {"metadata": []},
            {"resources": None},
            {"resources": {"a": "x"}},
            {"state": "STATE_MELTED"},
        )),
        *((steps(metadata={"steps_completed": number}), 400, "whole number") for number in (
            "many", "", [], True, [3], 1e400, -1, 10**30,
        )),
        *((steps(resources={"weights": size}), 400, "resources") for size in (1 << 63, -1)),
        *((steps(uuid=name), 400, "not a UUID") for name in (
            "", "weights", "../" * 20, "weights\x1b[2J", "12345678123456781234567812345678", " " * 36,
        )),
        (get(f"{T}/1/checkpoints?sortByAttr=UUID"), 400, "sortByAttr"),
        (get(f"/checkpoints/{UUID}"), 404, ""),  # its files are gone
        (get(f"{C}/none"), 404, "not found"),
        *((Write("DELETE", C, body), 400, "") for body in ({}, {"checkpointUuids": "a"}, {"checkpointUuids": [1]})),
        *((post(f"{C}/rm", body), 400, "") for body in ({}, {"checkpointUuids": "a"}, {"checkpointUuids": [1]})),
    ],
    "users": [
        *((post("/api/v1/users", body), status, "") for body, status in (
            ({"user": {"username": "determined"}, "password": "x"}, 400),
            ({"user": {"username": ""}, "password": "x"}, 400),
            ({"user": {"username": " a"}, "password": "x"}, 400),
            ({"user": {"username": "a\nb"}, "password": "x"}, 400),
            ({"user": {"username": "x" * 200}, "password": "x"}, 400),
            ({"user": {"username": "new"}}, 400),
            ({"user": {"username": "new"}, "password": ""}, 400),
            ({"user": {"username": "new", "remote": True}, "password": "x"}, 501),
            ({"user": 7}, 400),
        )),
        # an administrator must not lock himself out
        *((patch("/api/v1/users/1", **body), status, "") for body, status in (
            ({"active": False}, 409),
            ({"admin": False}, 409),
            ({"username": "other"}, 409),
            ({"password": ""}, 400),
            ({"username": " "}, 400),
            ({"agentUserGroup": {"agentUid": 0}}, 501),
            ({"agentUserGroup": {"agentUid": os.getuid(), "agentGid": os.getgid() + 1}}, 501),
        )),
        (get("/api/v1/users/9"), 404, "user"),
        (get("/api/v1/users/no%20one/by-username"), 404, "user"),
    ],
    "models, jobs and places": [
        *((post("/api/v1/models", {"name": name}), 400, "") for name in (
            "", "  ", "a  b", "a/b", "a\\b", "123", "a\x1b[2J",
        )),
        (post("/api/v1/job-queues", {"updates": [{"jobId": "job-1", "priority": 1}, {"jobId": "job-9"}]}), 404, "job-9"),
        (post("/api/v1/job-queues", {"updates": "x"}), 400, "updates"),
        *((get(f"/api/v1/{path}"), 404, "not found") for path in ("workspaces/2", "workspaces/2/projects", "projects/2")),
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A world with a checkpoint without files, and an experiment that was canceled in the queue."""
    made = World(tmp_path_factory.mktemp("refusals") / "root")
    made.save(UUID)
    made.experiments.kill(made.submit().id)
    yield made
    made.close()


@pytest.mark.parametrize("noun", REFUSED)
def test_requests_that_are_refused(there: World, noun: str) -> None:
    before = there.content()
    for write, status, words in REFUSED[noun]:
        found, answer = ask(there, write)
        assert found == status and words in answer["message"], (write, found, answer)
        assert there.content() == before, write
