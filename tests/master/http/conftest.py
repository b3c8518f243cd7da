"""A server for a master in a known state, and the original clients' sessions to it."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.master.world import TASK_TOKEN, USER_TOKEN, World
from zero_trial.master.http import listen
from zero_trial.master.http.server import HttpServer


class Prepared:
    """A world that goes back to the state that it has now."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._running, self._now = dict(self.world.agent.running), self.world.clock.now
        with self.world.state.database.reading() as connection:
            names = [row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
            self._rows = {name: list(map(tuple, connection.execute(f"SELECT * FROM {name}"))) for name in names}

    def again(self) -> World:
        state = self.world.state
        with state.database.transaction() as connection:
            for name, rows in self._rows.items():
                connection.execute(f"DELETE FROM {name}")
                for row in rows:
                    connection.execute(f"INSERT INTO {name} VALUES ({','.join('?' * len(row))})", row)
        for number in range(1, 10):
            state.forget(number)
        state.waiting.clear()
        self.world.agent.running, self.world.clock.now = dict(self._running), self._now
        return self.world


@pytest.fixture
def server(world: World) -> Iterator[HttpServer]:
    with listen(world, threads=16) as running:
        yield running


@pytest.fixture
def user(server: HttpServer) -> Any:
    """The original client's session with the user's token."""
    api = pytest.importorskip("determined.common.api")
    return api.Session(server.url, "determined", USER_TOKEN, None, max_retries=0)


@pytest.fixture
def task(server: HttpServer) -> Any:
    """The Determined's harness's session with the token of allocation task-1.1."""
    api = pytest.importorskip("determined.common.api")
    return api.TaskSession(server.url, "determined", TASK_TOKEN, None, max_retries=0)


Ask = Callable[..., "tuple[int, dict[str, Any]]"]


@pytest.fixture
def ask(server: HttpServer) -> Ask:
    """Send one request as it is: (method, path, token of a user, token of a task, body, headers) ->
    (status, JSON)."""

    def send(
        method: str,
        path: str,
        *,
        user: str = "",
        task: str = "",
        body: Any = None,
        headers: dict[str, str] | None = None,
    ) -> tuple[int, dict[str, Any]]:
        sent = dict(headers or {})
        if user:
            sent["Authorization"] = f"Bearer {user}"
        if task:
            sent["Grpc-Metadata-x-allocation-token"] = f"Bearer {task}"
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        try:
            connection.request(method, path, None if body is None else json.dumps(body), sent)
            answer = connection.getresponse()
            text = answer.read()
            return answer.status, json.loads(text) if text else {}
        finally:
            connection.close()

    return send
