"""Users, workspaces and projects as the original client asks for them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.master.http.conftest import Ask
from tests.master.world import CONFIG, TASK_TOKEN, USER_TOKEN, World
from zero_trial.master.core import accounts as auth
from zero_trial.master.http.server import HttpServer
from zero_trial.master.records import ExperimentState, Invalid

authentication = pytest.importorskip("determined.common.api.authentication")
bindings = pytest.importorskip("determined.common.api.bindings")
client = pytest.importorskip("determined.experimental.client")
errors = pytest.importorskip("determined.common.api.errors")

PASSWORD = "Correct1horse"


@pytest.fixture
def known(world: World) -> World:
    world.set_user(1, password=auth.store_password(auth.client_hash(PASSWORD)))
    return world


def test_a_client_logs_in_and_out(server: HttpServer, known: World, ask: Ask) -> None:
    plain = ask("POST", "/api/v1/auth/login", body={"username": "determined", "password": PASSWORD})
    assert plain[0] == 200 and "password" not in plain[1]["user"]
    group = {"agentUserGroup": {"agentUid": os.getuid(), "agentGid": os.getgid()}}  # those that trials have
    assert ask("PATCH", "/api/v1/users/1", user=USER_TOKEN, body=group)[0] == 200
    session = authentication.login(server.url, "determined", PASSWORD)
    assert bindings.get_GetMe(session).user.username == "determined"
    bindings.post_Logout(session)
    with pytest.raises(errors.UnauthenticatedException):
        bindings.get_GetMe(session)


def test_accounts_through_the_genuine_client(user: Any, server: HttpServer) -> None:
    determined = client.Determined._from_session(user)
    made = determined.create_user("someone", admin=False, password="Another1word")
    assert [each.username for each in determined.list_users()] == ["determined", "someone"]
    session = authentication.login(server.url, "someone", "Another1word")
    client.Determined._from_session(session).get_user_by_name("someone").change_password("Other2words")
    session = authentication.login(server.url, "someone", "Other2words")
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


# -- workspaces and projects


def workspace(user: Any, name: str, **more: Any) -> Any:
    return bindings.post_PostWorkspace(user, body=bindings.v1PostWorkspaceRequest(name=name, **more)).workspace


def project(user: Any, workspace_id: int, name: str, **more: Any) -> Any:
    body = bindings.v1PostProjectRequest(name=name, workspaceId=workspace_id, **more)
    return bindings.post_PostProject(user, body=body, workspaceId=workspace_id).project


def names(found: Any) -> list[str]:
    return [each.name for each in found]


def test_workspaces_are_made_listed_archived_and_deleted(user: Any) -> None:
    made = workspace(user, "b")
    workspace(user, "A")
    listed = bindings.get_GetWorkspaces
    by_name = bindings.v1GetWorkspacesRequestSortBy.NAME
    assert names(listed(user).workspaces) == ["Uncategorized", "b", "A"]
    assert names(listed(user, sortBy=by_name).workspaces) == ["A", "b", "Uncategorized"]
    assert names(listed(user, nameCaseSensitive="B").workspaces) == []
    change = bindings.v1PatchWorkspace(name="c")
    bindings.post_ArchiveWorkspace(user, id=made.id)
    assert names(listed(user, archived=True).workspaces) == ["b"]
    with pytest.raises(errors.APIException):
        bindings.patch_PatchWorkspace(user, body=change, id=made.id)
    bindings.post_UnarchiveWorkspace(user, id=made.id)
    assert bindings.patch_PatchWorkspace(user, body=change, id=made.id).workspace.name == "c"
    with pytest.raises(errors.APIException) as caught:
        workspace(user, "c")
    assert caught.value.status_code == 409
    assert bindings.delete_DeleteWorkspace(user, id=made.id).completed
    assert names(listed(user).workspaces) == ["Uncategorized", "A"]


def test_a_list_without_what_is_archived_leaves_out_archived_projects(user: Any, world: World) -> None:
    made = project(user, workspace(user, "one").id, "first")
    there = world.submit(made.id).id

    def listed(**more: Any) -> list[int]:
        return [each.id for each in bindings.get_GetExperiments(user, **more).experiments]

    assert listed(archived=False) == [there, 2, 1]
    bindings.post_ArchiveProject(user, id=made.id)
    assert listed(archived=False) == [2, 1]
    assert listed(archived=False, projectId=made.id) == [there]
    assert listed() == [there, 2, 1]
    assert listed(archived=True) == []
    bindings.post_UnarchiveProject(user, id=made.id)
    bindings.post_ArchiveWorkspace(user, id=made.workspaceId)
    assert listed(archived=False) == [2, 1]


def test_experiments_move_between_projects(user: Any, world: World) -> None:
    one = workspace(user, "one")
    made = project(user, one.id, "first", description="d")
    note = bindings.v1PutProjectNotesRequest(notes=[bindings.v1Note(name="n", contents="c")], projectId=made.id)
    assert len(bindings.put_PutProjectNotes(user, body=note, projectId=made.id).notes) == 1
    assert bindings.get_GetProject(user, id=made.id).project.notes[0].contents == "c"
    second = project(user, one.id, "firs")
    assert (made.key, second.key, made.workspaceName) == ("FIR", "FIR1", "one")
    experiment = world.submit(workspace="one", project="first")
    assert bindings.get_GetExperiment(user, experimentId=experiment.id).experiment.projectId == made.id
    assert world.submit(made.id).project_id == made.id
    shown = bindings.get_GetExperiment(user, experimentId=experiment.id).experiment
    assert (shown.workspaceName, shown.projectName) == ("one", "first")
    target = bindings.v1MoveExperimentRequest(destinationProjectId=second.id, experimentId=experiment.id)
    bindings.post_MoveExperiment(user, body=target, experimentId=experiment.id)
    listed = bindings.get_GetExperiments(user, projectId=second.id).experiments
    assert [each.id for each in listed] == [experiment.id]
    for action in (
        lambda: bindings.delete_DeleteProject(user, id=second.id),
        lambda: bindings.delete_DeleteWorkspace(user, id=one.id),
    ):
        with pytest.raises(errors.APIException):  # an experiment in it has not ended
            action()
    assert bindings.get_GetProject(user, id=second.id).project.numExperiments == 1
    bindings.post_ArchiveWorkspace(user, id=one.id)
    assert bindings.get_GetProject(user, id=second.id).project.archived
    with pytest.raises(errors.APIException):
        bindings.post_MoveExperiment(user, body=target, experimentId=experiment.id)
    with pytest.raises(Invalid):
        world.submit(workspace="one", project="firs")


def test_ended_experiments_are_deleted_with_their_project_or_workspace(user: Any, world: World) -> None:
    place = workspace(user, "w")
    numbers = [project(user, place.id, name).id for name in ("a", "b")]
    made = [world.submit(number).id for number in numbers]
    for number in made:
        world.experiments.kill(number)
    assert bindings.delete_DeleteProject(user, id=numbers[0]).completed is False
    assert bindings.delete_DeleteWorkspace(user, id=place.id).completed is False
    for number in made:
        assert world.experiments.get(number).state is ExperimentState.DELETING
        assert world.experiments.get(number).project_id == 1
    assert [each.name for each in bindings.get_GetWorkspaces(user).workspaces] == ["Uncategorized"]


def test_experiments_take_the_storage_of_their_workspace(user: Any, world: World, tmp_path: Path) -> None:
    storage = {"type": "shared_fs", "host_path": str(tmp_path / "w"), "save_trial_latest": 3}
    made = workspace(user, "w", checkpointStorageConfig=storage)
    number = project(user, made.id, "p").id
    section = world.submit(number).config["checkpoint_storage"]
    assert (section["host_path"], section["save_trial_latest"]) == (str(tmp_path / "w"), 3)
    own = {"type": "directory", "container_path": "/own"}
    kept = world.submit(number, checkpoint_storage=own).config["checkpoint_storage"]
    assert (kept["type"], kept["container_path"], kept["save_trial_latest"]) == ("directory", "/own", 3)
    with pytest.raises(errors.APIException):
        workspace(user, "bad", checkpointStorageConfig={"type": "nothing"})
    reset = bindings.v1PatchWorkspace(checkpointStorageConfig={})
    assert bindings.patch_PatchWorkspace(user, body=reset, id=made.id).workspace.checkpointStorageConfig is None
    assert world.submit(number).config["checkpoint_storage"]["host_path"] == str(world.directory.storage)


def test_the_first_stays_and_others_are_changed_by_their_owners(ask: Ask, user: Any, world: World) -> None:
    made = workspace(user, "w")
    number = project(user, made.id, "p").id
    world.add_user("other", "other-token")
    before = world.content()
    for noun, own in (("workspaces", made.id), ("projects", number)):
        for method, path in (("POST", "/archive"), ("POST", "/unarchive"), ("DELETE", ""), ("PATCH", "")):
            assert ask(method, f"/api/v1/{noun}/1{path}", user=USER_TOKEN, body={"name": "x"})[0] == 409
            for asked in (1, own):
                target = f"/api/v1/{noun}/{asked}{path}"
                refused = 409 if (method, asked) == ("PATCH", 1) else 403  # as on a cluster
                assert ask(method, target, user="other-token", body={"name": "x"})[0] == refused, target
                assert ask(method, target, task=TASK_TOKEN, body={"name": "x"})[0] in (401, 403)
    create = ("POST", "/api/v1/workspaces/1/projects")
    assert ask(*create, user=USER_TOKEN, body={"name": "x"})[0] == 409
    assert world.content() == before
