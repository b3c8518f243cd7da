"""Users as the original client asks for them: log in and out, accounts and their limits."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from tests.master.http.conftest import Ask
from tests.master.world import CONFIG, USER_TOKEN, World
from zero_trial.master.core import accounts as auth
from zero_trial.master.http.server import HttpServer
from zero_trial.master.records import ExperimentState

authentication = pytest.importorskip("determined.common.api.authentication")
bindings = pytest.importorskip("determined.common.api.bindings")
client = pytest.importorskip("determined.experimental.client")
errors = pytest.importorskip("determined.common.api.errors")

PASSWORD = "Correct1horse"


@pytest.fixture
def known(world: World) -> World:
    world.set_user(1, password=auth.store_password(auth.client_hash(PASSWORD)))
    return world


def test_the_genuine_client_logs_in_and_out(server: HttpServer, known: World) -> None:
    session = authentication.login(server.url, "determined", PASSWORD)
    assert bindings.get_GetMe(session).user.username == "determined"
    bindings.post_Logout(session)
    with pytest.raises(errors.UnauthenticatedException):
        bindings.get_GetMe(session)


def test_a_plain_password_is_understood_too(ask: Ask, known: World) -> None:
    status, answer = ask("POST", "/api/v1/auth/login", body={"username": "determined", "password": PASSWORD})
    assert status == 200
    assert answer["user"] == {
        "id": 1,
        "username": "determined",
        "displayName": "",
        "admin": True,
        "active": True,
        "remote": False,
    }


def test_accounts_through_the_genuine_client(user: Any, server: HttpServer) -> None:
    determined = client.Determined._from_session(user)
    made = determined.create_user("someone", admin=False, password="Another1word")
    assert [each.username for each in determined.list_users()] == ["determined", "someone"]
    session = authentication.login(server.url, "someone", "Another1word")
    made.change_password("Other2words")
    made.rename("someone")
    made.change_display_name("Some One")
    assert determined.get_user_by_name("someone").display_name == "Some One"
    assert determined.get_user_by_id(made.user_id).username == "someone"
    assert authentication.login(server.url, "someone", "Other2words").token != session.token
    made.deactivate()
    assert [each.username for each in determined.list_users(active=True)] == ["determined"]
    with pytest.raises(errors.UnauthenticatedException):
        bindings.get_GetMe(session)
    with pytest.raises(errors.ForbiddenException):
        authentication.login(server.url, "someone", "Other2words")


def test_a_renamed_user_keeps_what_they_own(user: Any, server: HttpServer, world: World) -> None:
    determined = client.Determined._from_session(user)
    made = determined.create_user("old", admin=False, password="Another1word")
    own = authentication.login(server.url, "old", "Another1word")
    body = bindings.v1PostWorkspaceRequest(name="w")
    workspace = bindings.post_PostWorkspace(own, body=body).workspace
    project = bindings.v1PostProjectRequest(name="p", workspaceId=workspace.id)
    bindings.post_PostProject(own, body=project, workspaceId=workspace.id)
    number = world.create(**CONFIG, owner="old").id
    world.change_experiment(number, state=ExperimentState.COMPLETED)
    made.rename("new")
    determined.create_user("old", admin=False, password="Another1word")
    found = bindings.get_GetExperiment(user, experimentId=number).experiment
    assert (found.userId, found.username) == (made.user_id, "new")
    other = authentication.login(server.url, "old", "Another1word")
    for archive in (
        lambda session: bindings.post_ArchiveProject(session, id=2),
        lambda session: bindings.post_ArchiveWorkspace(session, id=workspace.id),
        lambda session: bindings.delete_DeleteExperiment(session, experimentId=number),
    ):
        with pytest.raises(errors.ForbiddenException):
            archive(other)
        archive(own)


def test_a_new_password_revokes_the_other_tokens(server: HttpServer, world: World, ask: Ask) -> None:
    file = world.directory.account
    first = world.accounts.ensure_local_user(file)
    world.set_user(1, password=auth.store_password(auth.client_hash(PASSWORD)))
    sessions = [authentication.login(server.url, "determined", PASSWORD) for _ in range(2)]
    tokens = [first.token, *(session.token for session in sessions)]

    def good() -> list[bool]:
        return [ask("GET", "/api/v1/me", user=token)[0] == 200 for token in tokens]

    body = bindings.v1PatchUser(password="Other2words", isHashed=False)
    bindings.patch_PatchUser(sessions[0], body=body, userId=1)
    assert good() == [False, True, False]
    kept = json.loads(file.read_text())
    assert kept["password"] == "" and world.accounts.identify(kept["token"], None) is not None
    assert ask("PATCH", "/api/v1/users/1", user=USER_TOKEN, body={"displayName": "D"})[0] == 401
    other = client.Determined._from_session(sessions[0]).create_user("other", admin=False, password="Another1word")
    tokens = [authentication.login(server.url, "other", "Another1word").token]
    other.rename("another")
    assert good() == [True]
    other.change_password("Third3words")
    assert good() == [False]


def test_without_administrator_rights_only_some_own_fields_can_be_changed(user: Any, server: HttpServer) -> None:
    client.Determined._from_session(user).create_user("someone", admin=False, password="Another1word")
    own = authentication.login(server.url, "someone", "Another1word")
    determined = client.Determined._from_session(own)
    determined.get_user_by_name("someone").change_password("Other2words")
    for forbidden in (
        lambda: determined.create_user("third", admin=True, password="Another1word"),
        lambda: determined.get_user_by_name("determined").change_password("Other2words"),
        lambda: determined.get_user_by_name("someone").rename("root"),
        lambda: bindings.patch_PatchUser(own, body=bindings.v1PatchUser(admin=True), userId=2),
    ):
        with pytest.raises(errors.ForbiddenException):
            forbidden()


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"active": False}, 409),
        ({"admin": False}, 409),
        ({"username": "other"}, 409),
        ({"password": ""}, 400),
        ({"username": " "}, 400),
        ({"agentUserGroup": {"agentUid": 0}}, 501),
        ({"agentUserGroup": {"agentUid": os.getuid(), "agentGid": os.getgid() + 1}}, 501),
        ({"agentUserGroup": {"agentUid": os.getuid(), "agentGid": os.getgid()}}, 200),
    ],
)
def test_an_administrator_does_not_lock_himself_out(ask: Ask, world: World, body: dict[str, Any], status: int) -> None:
    before = world.accounts.users()
    assert ask("PATCH", "/api/v1/users/1", user=USER_TOKEN, body=body)[0] == status
    assert world.accounts.users() == before
