"""Writing routes that meet on one object: each request is as if it came before or after the other.

For each pair, the second request is answered right before the first one opens its transaction. So
a route that writes what it has read before its transaction undoes the second request.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.master.http.conftest import Prepared
from tests.master.world import TASK_TOKEN, USER_TOKEN, UUID, World
from zero_trial.master.core import accounts as auth
from zero_trial.master.http.app import Application, Router, all_routes
from zero_trial.master.http.messages import RequestHead, StreamingResponse

OWN_TOKEN, ADMIN_TOKEN = "own-token", "second-admin"
E, T, M, P = "/api/v1/experiments", "/api/v1/trials", "/api/v1/models/gpt", "/api/v1/templates/t"
EXAMPLE = "name: a, searcher: {name: single, metric: m}, reproducibility: {experiment_seed: 1}"
W, J, C = "/api/v1/workspaces/2", "/api/v1/projects/2", "/api/v1/checkpoints"


@dataclass(frozen=True)
class Write:
    """One request. ``task``: with an allocation's token."""

    method: str
    path: str
    body: Any = None
    token: str = USER_TOKEN
    task: bool = False


def patch(path: str, **body: Any) -> Write:
    return Write("PATCH", path, body)


def posts(path: str, *endings: str) -> tuple[Write, ...]:
    return tuple(Write("POST", f"{path}/{ending}", {}) for ending in endings)


def report(path: str, **body: Any) -> Write:
    return Write("POST", path, body, TASK_TOKEN, task=True)


def points(group: str, steps: int) -> Write:
    values = {"avgMetrics": {"validation_loss": steps / 10}}
    return report(f"{T}/1/metrics", group=group, metrics={"trialRunId": 1, "stepsCompleted": steps, "metrics": values})


def add_people(world: World) -> None:
    world.add_user("ann", OWN_TOKEN, admin=True)
    world.set_user(2, password=auth.store_password(auth.client_hash("Passw0rd1")))
    world.add_user("second", ADMIN_TOKEN, admin=True)


def end_trial(world: World) -> None:
    world.exit(1)


def stop_trial(world: World) -> None:
    world.experiments.kill(1)
    world.exit(1)


def save_checkpoint(world: World) -> None:
    end_trial(world)
    world.save(UUID)


def add_model(world: World) -> None:
    world.save(UUID)
    ask(world, Write("POST", "/api/v1/models", {"name": "gpt", "labels": ["a"]}))
    ask(world, Write("POST", f"{M}/versions", {"checkpointUuid": UUID}))


def add_template(world: World) -> None:
    ask(world, Write("POST", P, {"config": {"max_restarts": 1}}))


def add_places(world: World) -> None:
    ask(world, Write("POST", "/api/v1/workspaces", {"name": "two"}))
    ask(world, Write("POST", f"{W}/projects", {"name": "inner"}))
    ask(world, Write("POST", f"{E}/1/move", {"destinationProjectId": 2}))
    end_trial(world)


def add_unmanaged(world: World) -> None:
    number = world.add_unmanaged("outside")
    world.unmanaged.create(number, {}, "trial")


SUBMITTED = f"{{{EXAMPLE}, entrypoint: b}}"


def outside(name: str) -> dict[str, Any]:
    return {"unmanaged": True, "config": f"{{{EXAMPLE}, description: {name}}}", "modelDefinition": []}


CHANGES = (
    *(patch(f"{E}/1", name="new"), patch(f"{E}/1", labels=["x"]), patch(f"{E}/1", resources={"maxSlots": 7})),
    patch(f"{E}/1", notes="n", description="d"),
    patch(f"{E}/1", checkpointStorage={"saveExperimentBest": 3, "saveTrialBest": 1, "saveTrialLatest": 1}),
    *(Write("PUT", f"{E}/1/labels/y"), Write("DELETE", f"{E}/1/labels/y")),
    Write("POST", "/api/v1/job-queues", {"updates": [{"jobId": "job-1", "priority": 3}]}),
    Write("POST", f"{E}/1/move", {"destinationProjectId": 1}),
)
STEERING = posts(f"{E}/1", "pause", "activate", "cancel", "kill", "archive", "unarchive")
CONTINUE = Write("POST", f"{E}/continue", {"id": 1, "overrideConfig": "max_restarts: 3"})

NOUNS: dict[str, tuple[Callable[[World], object], tuple[Write, ...]]] = {
    "user": (
        add_people,
        (
            Write("PATCH", "/api/v1/users/2", {"password": "Passw0rd2"}, OWN_TOKEN),
            Write("PATCH", "/api/v1/users/2", {"displayName": "Ann"}, OWN_TOKEN),
            *(patch("/api/v1/users/2", active=False), patch("/api/v1/users/2", admin=False)),
            *(patch("/api/v1/users/2", username="anna"), patch("/api/v1/users/2", password="Passw0rd3")),
            Write("PATCH", "/api/v1/users/3", {"admin": False}, OWN_TOKEN),
            Write("PATCH", "/api/v1/users/2", {"admin": False}, ADMIN_TOKEN),
            Write("POST", "/api/v1/users", {"user": {"username": "anna"}, "password": "Passw0rd4"}),
            Write("POST", "/api/v1/auth/login", {"username": "ann", "password": "Passw0rd1"}, ""),
        ),
    ),
    "running experiment": (lambda _: None, (*CHANGES, *STEERING[:4], Write("POST", f"{T}/1/kill", {}))),
    "ended experiment": (stop_trial, (*CHANGES, *STEERING, CONTINUE, Write("DELETE", f"{E}/1"))),
    "unmanaged experiment": (
        add_unmanaged,
        (
            patch(f"{E}/3", name="new"),
            *(Write("PUT", f"{E}/by-external-id/outside", outside(name)) for name in "ab"),
            Write("PUT", T, {"externalTrialId": "more", "createTrialRequest": {"experimentId": 3, "unmanaged": True}}),
            Write("POST", T, {"experimentId": 3, "unmanaged": True, "hparams": {}}),
            *(Write("POST", f"{T}/3/start", {"resume": True}), patch(f"{T}/3", state="COMPLETED"), patch(f"{T}/3")),
            Write("POST", f"{E}/3/kill", {}),
        ),
    ),
    "trial": (
        lambda _: None,
        (
            *(points("training", 1), points("training", 2), points("validation", 1), points("validation", 2)),
            report(f"{T}/1/progress", progress=0.5),
            report(f"{T}/1/runner/metadata", state="x"),
            report("/api/v1/runs/1/metadata", metadata={"a": 1}),
            report("/api/v1/runs/start", runId=1),
            report(f"{T}/1/early_exit", reason="EXITED_REASON_INVALID_HP"),
            report("/api/v1/allocations/task-1.1/acceleratorData", accelerators=["cpu"]),
            report("/api/v1/allocations/task-1.1/signals/ack_preemption"),
            *(Write("POST", f"{T}/1/kill", {}), Write("POST", f"{E}/1/pause", {}), Write("POST", f"{E}/1/kill", {})),
            Write("POST", "/api/v1/agents/laptop/slots/0/disable", {}),
            Write("POST", "/api/v1/agents/laptop/slots/0/enable", {}),
            *posts("/api/v1/agents/laptop", "enable", "disable"),
        ),
    ),
    "checkpoint": (
        save_checkpoint,
        (
            Write("POST", f"{C}/{UUID}/metadata", {"checkpoint": {"uuid": UUID, "metadata": {"a": 1}}}),
            Write("PATCH", C, {"checkpoints": [{"uuid": UUID, "resources": {"resources": {}}}]}),
            Write("DELETE", C, {"checkpointUuids": [UUID]}),
            Write("POST", f"{C}/rm", {"checkpointUuids": [UUID], "checkpointGlobs": ["**/*"]}),
            Write("POST", "/api/v1/models", {"name": "gpt"}),
            *(Write("DELETE", f"{E}/1"), CONTINUE),
        ),
    ),
    "model": (
        add_model,
        (
            *(patch(M, name="gpt2"), patch(M, labels=["b"]), patch(M, metadata={"a": 1}), Write("DELETE", M)),
            *posts(M, "archive", "unarchive"),
            *(Write("POST", f"{M}/versions", {"checkpointUuid": UUID}), Write("DELETE", f"{M}/versions/1")),
            *(patch(f"{M}/versions/1", name="v"), patch(f"{M}/versions/1", notes="n")),
            Write("PATCH", C, {"checkpoints": [{"uuid": UUID, "resources": {"resources": {}}}]}),
            Write("POST", "/api/v1/models", {"name": "gpt2"}),
        ),
    ),
    "registration": (  # of a checkpoint that is about to lose its files
        lambda world: (add_model(world), ask(world, Write("DELETE", f"{M}/versions/1"))),
        (
            Write("POST", f"{M}/versions", {"checkpointUuid": UUID}),
            Write("PATCH", C, {"checkpoints": [{"uuid": UUID, "resources": {"resources": {}}}]}),
            Write("DELETE", C, {"checkpointUuids": [UUID]}),
        ),
    ),
    "template": (
        add_template,
        (
            *(patch(P, max_restarts=2), patch(P, max_restarts=3), Write("DELETE", P)),
            Write("POST", P, {"config": {"max_restarts": 4}}),
            Write("POST", "/api/v1/templates/u", {"config": {"max_restarts": 6}}),
        ),
    ),
    "workspace and project": (
        add_places,
        (
            *(patch(W, name="three"), patch(W, checkpointStorageConfig={"type": "shared_fs", "host_path": "/tmp"})),
            *(*posts(W, "archive", "unarchive"), Write("DELETE", W)),
            *(patch(J, name="outer"), patch(J, description="d"), *posts(J, "archive", "unarchive"), Write("DELETE", J)),
            Write("PUT", f"{J}/notes", {"notes": [{"name": "m"}]}),
            Write("POST", f"{E}/1/move", {"destinationProjectId": 2}),
            Write("POST", f"{E}/1/move", {"destinationProjectId": 1}),
            *(
                Write("POST", f"{W}/projects", {"name": "outer"}),
                Write("POST", "/api/v1/workspaces", {"name": "three"}),
            ),
            Write("POST", E, {"projectId": 2, "activate": False, "config": SUBMITTED, "modelDefinition": []}),
        ),
    ),
}

# routes that change nothing, or nothing that another request changes
WITHOUT_RACE = {
    "POST /api/v1/auth/logout",
    "POST /api/v1/preview-hp-search",
    "POST /task-logs",
    "POST /api/v1/allocations/{allocationId}/all_gather",
    "POST /api/v1/checkpoints",
}


def ask(world: World, write: Write) -> tuple[int, Any]:
    """Answer a request; return status and JSON."""
    header = auth.TASK_HEADER if write.task else auth.USER_HEADER
    content = b"" if write.body is None else json.dumps(write.body).encode()
    path, _, query = write.path.partition("?")
    headers = {"host": "127.0.0.1:1", header: f"Bearer {write.token}"}
    head = RequestHead(write.method, path, query, headers, len(content))
    answer = Application(world, router(), port=1, waits=4)(head, lambda limit: content)
    assert not isinstance(answer, StreamingResponse)
    return answer.status, json.loads(answer.body)


@cache
def router() -> Router:
    return Router(all_routes())


@contextmanager
def interrupted(world: World, write: Write, answers: list[tuple[int, Any]]) -> Iterator[None]:
    """Answer ``write`` right before the next transaction."""
    database = world.state.database
    original = database.transaction

    def transaction() -> Any:
        vars(database).pop("transaction", None)
        answers.append(ask(world, write))
        return original()

    vars(database)["transaction"] = transaction
    yield
    vars(database).pop("transaction", None)


def outcome(world: World, *answers: tuple[int, Any]) -> Any:
    """Return statuses, and all rows without what is random."""
    with world.state.database.reading() as connection:
        tokens = list(map(tuple, connection.execute("SELECT user_id, count(*) FROM tokens GROUP BY user_id")))
    refused = {401: 403}  # by a token that was revoked a moment earlier or later
    statuses = [refused.get(status, status) for status, _ in answers]
    text = json.dumps([statuses, tokens, world.content()], default=repr)
    return re.sub(r"[0-9a-f]{8}-[0-9a-f-]{27}|scrypt\$[0-9a-f]+|\(ms\)", "#", text)


@pytest.mark.parametrize("noun", NOUNS)
def test_each_pair_of_requests_has_an_order(noun: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth, "_scrypt", lambda text, salt: text.encode())  # the salt is random
    prepare, writes = NOUNS[noun]
    world = World(tmp_path / "root")
    prepare(world)
    prepared = Prepared(world)

    done: set[int] = set()  # those that were accepted once

    def in_order(first: int, second: int) -> tuple[Any, Any]:
        world = prepared.again()
        answers = ask(world, writes[first]), ask(world, writes[second])
        done.update(at for at, (status, _) in zip((first, second), answers, strict=True) if status == 200)
        return outcome(world, *answers), outcome(world, *answers[::-1])

    pairs = list(product(range(len(writes)), repeat=2))
    orders = {(a, b): in_order(a, b) for a, b in pairs}
    lost = []
    for a, b in pairs:
        late, early = writes[a], writes[b]
        world = prepared.again()
        answers: list[tuple[int, Any]] = []
        with interrupted(world, early, answers):
            answer = ask(world, late)
        if answers and outcome(world, answer, *answers) not in (orders[a, b][0], orders[b, a][1]):
            lost.append(f"{early} during {late}: {answers[0][0]} and {answer[0]}")
    assert not lost, "\n".join(lost)
    assert done == set(range(len(writes))), [writes[at] for at in set(range(len(writes))) - done]


def test_every_route_that_writes_is_raced() -> None:
    raced = {
        f"{route.route.method} {route.route.path}"
        for _, writes in NOUNS.values()
        for write in writes
        if (route := router().find(write.method, write.path.strip("/").split("/"))) is not None
    }
    writing = {f"{route.method} {route.path}" for route in all_routes() if route.method != "GET"}
    assert writing - raced == WITHOUT_RACE
