"""Checkpoints, the model registry and templates as the original client and Determined's harness ask
for them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.master.http.conftest import Ask
from tests.master.world import BEGAN, CONFIG, TASK_TOKEN, USER_TOKEN, UUID, World
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
    world.report(1, "validation", 5, {"m": "NaN"})
    world.report(1, "validation", 15, {"m": 1.5})
    found = bindings.get_GetExperimentCheckpoints(user, id=1, sortByMetric="m").checkpoints
    assert "".join(each.uuid for each in found) == "cab"  # those without a number come last


def test_a_checkpoint_is_reported_and_has_all_that_a_client_needs(task: Any, user: Any, world: World) -> None:
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
    kept = world.checkpoints.get(UUID)
    assert (kept.state, kept.resources, kept.reported) == (CheckpointState.COMPLETED, {"rank0.bin": 10}, BEGAN + 10)
    found = client.Determined._from_session(user).get_checkpoint(UUID)
    assert found.training.experiment_config["checkpoint_storage"]["type"] == "shared_fs"
    assert (found.training.trial_id, found.metadata) == (1, {"steps_completed": 5})
    assert found.resources == {"rank0.bin": "10"}
    found.add_metadata({"best": True, "by": "hand"})
    found.remove_metadata(["best"])
    kept = world.checkpoints.get(UUID)
    assert (kept.metadata["by"], "best" in kept.metadata, kept.steps_completed) == ("hand", False, 5)
    change = bindings.v1PatchCheckpoint(
        uuid=UUID, resources=bindings.PatchCheckpointOptionalResources(resources={"a": "1"})
    )
    bindings.patch_PatchCheckpoints(task, body=bindings.v1PatchCheckpointsRequest(checkpoints=[change]))
    kept = world.checkpoints.get(UUID)
    assert (kept.state, kept.resources) == (CheckpointState.PARTIALLY_DELETED, {"a": 1})
    with pytest.raises(errors.NotFoundException):
        bindings.get_GetCheckpoint(user, checkpointUuid="none")


def test_a_trial_reads_its_own_experiments_and_the_one_that_it_starts_from(ask: Ask, world: World) -> None:
    world.save("own")
    world.save("other", 2)
    assert ask("GET", "/api/v1/checkpoints/own", task=TASK_TOKEN)[0] == 200
    assert ask("GET", "/api/v1/checkpoints/other", task=TASK_TOKEN)[0] == 403
    world.change_trial(1, warm_start_checkpoint="other")
    assert ask("GET", "/api/v1/checkpoints/other", task=TASK_TOKEN)[0] == 200


# -- the model registry and templates

OTHER = UUID.replace("6f", "7f")


@pytest.fixture
def sdk(user: Any) -> Any:
    return client.Determined._from_session(user)


def test_a_model_keeps_what_is_written_on_it(sdk: Any, world: World, ask: Ask) -> None:
    made = sdk.create_model("gpt", "small", metadata={"a": 1}, labels=["x", "y"])
    assert (made.name, made.description, made.metadata, made.labels) == ("gpt", "small", {"a": 1}, ["x", "y"])
    assert (made.username, made.workspace_id, made.archived) == ("determined", 1, False)
    world.clock.now += 60
    made.add_metadata({"b": [1, None], "a": 2})
    made.remove_metadata(["none"])
    made.set_labels(["z", "z", "y"])
    made.set_description("large")
    for found in (sdk.get_model("gpt"), sdk.get_model(made.model_id), sdk.get_model_by_id(made.model_id)):
        assert (found.metadata, found.labels, found.description) == ({"a": 2, "b": [1, None]}, ["z", "y"], "large")
        assert found.creation_time.timestamp() == BEGAN and found.last_updated_time.timestamp() == BEGAN + 60
    made.set_labels([])
    made.move_to_workspace("Uncategorized")
    assert sdk.get_model("gpt").labels == []
    made.archive()
    assert sdk.get_model("gpt").archived
    with pytest.raises(errors.APIException, match="archived and cannot have attributes updated"):
        made.set_description("no")
    made.unarchive()
    world.add_user("other", "other-token")
    assert ask("DELETE", "/api/v1/models/gpt", user="other-token")[0] == 403
    made.delete()
    with pytest.raises(errors.NotFoundException):
        sdk.get_model("gpt")


def test_models_are_filtered_and_sorted_as_asked(sdk: Any, user: Any, world: World) -> None:
    world.add_user("other")
    for name, description, labels in (("b", "first", ["x"]), ("A", "second", ["x", "y"]), ("c", "third", [])):
        sdk.create_model(name, description, labels=labels)
        world.clock.now += 1
    sdk.get_model("c").archive()
    sdk.get_model("b").set_description("zeroth")
    by, order = bindings.v1GetModelsRequestSortBy, bindings.v1OrderBy
    for asked, expected in (
        ({}, "bAc"),
        ({"orderBy": order.DESC}, "cAb"),
        ({"sortBy": by.NAME}, "Abc"),
        ({"sortBy": by.NAME, "orderBy": order.DESC}, "cbA"),
        ({"sortBy": by.DESCRIPTION}, "Acb"),
        ({"sortBy": by.CREATION_TIME, "limit": 2}, "bA"),
        ({"sortBy": by.LAST_UPDATED_TIME, "orderBy": order.ASC}, "Abc"),
        ({"sortBy": by.WORKSPACE, "orderBy": order.DESC, "offset": 1}, "Ab"),
        ({"archived": True}, "c"),
        ({"archived": False}, "bA"),
        ({"labels": ["y", "z"]}, "A"),
        ({"labels": ["x"]}, "bA"),
        ({"name": "a"}, "A"),
        ({"description": "HIRD"}, "c"),
        ({"id": 2}, "A"),
        ({"users": ["other"]}, ""),
        ({"userIds": [1]}, "bAc"),
        ({"workspaceIds": [2]}, ""),
        ({"workspaceNames": ["Uncategorized"]}, "bAc"),
        ({"workspaceNames": ["else"]}, ""),
    ):
        assert "".join(each.name for each in bindings.get_GetModels(user, **asked).models) == expected, asked
    assert [model.name for model in sdk.list_models(sort_by=client.ModelSortBy.NAME)] == ["A", "b", "c"]
    assert list(sdk.get_model_labels()) == ["x", "y"]


def test_versions_are_checkpoints_in_order(sdk: Any, world: World) -> None:
    world.save(UUID)
    world.save(OTHER, 2)
    model = sdk.create_model("gpt")
    sdk.create_model("GPT")
    with pytest.raises(errors.APIException):  # a name is used once
        sdk.create_model("gpt")
    assert model.get_version() is None
    first, second = model.register_version(UUID), model.register_version(OTHER)
    assert [version.model_version for version in (first, second)] == [1, 2]
    second.set_name("best")
    second.set_notes("# Notes")
    latest = model.get_version()
    assert (latest.name, latest.notes, latest.checkpoint.uuid, latest.model_id) == ("best", "# Notes", OTHER, 1)
    assert latest.checkpoint.training.trial_id == 2
    assert [version.model_version for version in model.list_versions()] == [2, 1]
    assert [v.model_version for v in model.list_versions(order_by=client.OrderBy.ASC)] == [1, 2]
    assert model.get_version(1).checkpoint.uuid == UUID
    second.delete()
    assert [version.model_version for version in model.list_versions()] == [1]
    assert model.register_version(OTHER).model_version == 2
    with pytest.raises(errors.NotFoundException):
        model.get_version(3)
    model.delete()
    assert sdk.get_checkpoint(UUID).state.value == "STATE_COMPLETED"


def test_a_registered_checkpoint_is_complete_and_kept_from_everyone(ask: Ask, sdk: Any, world: World) -> None:
    model = sdk.create_model("gpt")

    def register(uuid: str) -> int:
        return ask("POST", "/api/v1/models/gpt/versions", user=USER_TOKEN, body={"checkpointUuid": uuid})[0]

    world.save("part", state=CheckpointState.PARTIALLY_DELETED)
    world.save("marked", 2)
    world.checkpoints.delete(["marked"])  # and not yet deleted on the disk
    assert [register(uuid) for uuid in ("part", "marked", OTHER)] == [409, 409, 404]
    world.save(UUID)
    model.archive()
    assert register(UUID) == 409
    model.unarchive()
    assert register(UUID) == 200
    before = world.content()
    named = f"{UUID}, registered to gpt (model #1), version 1."
    for method, path, body in (
        ("DELETE", "/api/v1/checkpoints", {"checkpointUuids": [UUID]}),
        ("POST", "/api/v1/checkpoints/rm", {"checkpointUuids": [UUID], "checkpointGlobs": ["*"]}),
        ("POST", "/api/v1/checkpoints/rm", {"checkpointUuids": [UUID], "checkpointGlobs": []}),
        ("PATCH", "/api/v1/checkpoints", {"checkpoints": [{"uuid": UUID, "resources": {"resources": {}}}]}),
    ):
        status, answer = ask(method, path, user=USER_TOKEN, body=body)
        assert status == 400 and answer["message"].endswith(named), (path, answer)
    assert ask("PATCH", "/api/v1/checkpoints", task=TASK_TOKEN, body=body)[0] == 400
    assert world.content() == before


def test_only_owners_and_administrators_change_models_and_templates(sdk: Any, ask: Ask, world: World) -> None:
    world.add_user("other", "other-token")
    world.save(UUID)
    sdk.create_model("gpt").register_version(UUID)
    assert ask("POST", "/api/v1/templates/t", user=USER_TOKEN, body={"config": {"max_restarts": 1}})[0] == 200
    large = {"config": {"hyperparameters": {"values": [1] * 300_000}}}
    for method, path, body in (("POST", "u", large), ("PATCH", "t", large["config"])):
        assert ask(method, f"/api/v1/templates/{path}", user=USER_TOKEN, body=body)[0] == 400
    before = world.content()
    requests: list[tuple[str, str, Any]] = [
        ("PATCH", "/api/v1/models/gpt", {"description": "d"}),
        ("POST", "/api/v1/models/gpt/archive", {}),
        ("POST", "/api/v1/models/gpt/unarchive", {}),
        ("POST", "/api/v1/models/gpt/versions", {"checkpointUuid": UUID}),
        ("PATCH", "/api/v1/models/gpt/versions/1", {"name": "v"}),
        ("PATCH", "/api/v1/templates/t", {"max_restarts": 2}),
        ("DELETE", "/api/v1/models/gpt/versions/1", None),
        ("DELETE", "/api/v1/models/gpt", None),
        ("DELETE", "/api/v1/templates/t", None),
    ]
    for method, path, body in requests:
        assert ask(method, path, user="other-token", body=body)[0] == 403, path
    assert world.content() == before
    assert ask("POST", "/api/v1/templates/mine", user="other-token", body={"config": {}})[0] == 200
    for method, path, body in [*requests, ("DELETE", "/api/v1/templates/mine", None)]:
        assert ask(method, path, user=USER_TOKEN, body=body)[0] == 200, path


def test_templates_are_kept_under_their_names(user: Any) -> None:
    made = bindings.v1Template(name="small", config={"resources": {"slots_per_trial": 1}}, workspaceId=0)
    answered = bindings.post_PostTemplate(user, body=made, template_name="small").template
    assert (answered.name, answered.config, answered.workspaceId) == ("small", made.config, 1)
    with pytest.raises(errors.APIException) as caught:
        bindings.post_PostTemplate(user, body=made, template_name="small")
    assert caught.value.status_code == 409
    changed = bindings.patch_PatchTemplateConfig(user, templateName="small", body={"description": "d"}).template
    assert changed.config == {"description": "d"}
    bindings.post_PostTemplate(user, body=made, template_name="other")
    found = bindings.get_GetTemplates(user, orderBy=bindings.v1OrderBy.DESC).templates
    assert [(each.name, each.config) for each in found] == [("small", {"description": "d"}), ("other", made.config)]
    assert [each.name for each in bindings.get_GetTemplates(user, name="SMA").templates] == ["small"]
    bindings.delete_DeleteTemplate(user, templateName="small")
    for action in (bindings.get_GetTemplate, bindings.delete_DeleteTemplate):
        with pytest.raises(errors.NotFoundException):
            action(user, templateName="small")


def test_a_template_lies_under_the_experiment(user: Any, ask: Ask) -> None:
    template = {
        "description": "of the template",
        "max_restarts": 7,
        "labels": ["t"],
        "searcher": {"name": "random", "max_trials": 3, "metric": "loss"},
        "hyperparameters": {"lr": {"type": "double", "minval": 0, "maxval": 1}, "width": 3},
        "environment": {"environment_variables": ["A=template", "B=template"]},
    }
    body = bindings.v1Template(name="small", config=template, workspaceId=0)
    bindings.post_PostTemplate(user, body=body, template_name="small")
    own = {**CONFIG, "max_restarts": 1, "labels": ["own"]}

    def create(**more: Any) -> tuple[int, dict[str, Any]]:
        sent = {"config": bindings.json.dumps(own), "validateOnly": True, **more}
        return ask("POST", "/api/v1/experiments", user=USER_TOKEN, body=sent)

    config = create(template="small")[1]["config"]
    assert (config["description"], config["max_restarts"]) == ("of the template", 1)
    assert sorted(config["labels"]) == ["own", "t"]
    assert config["searcher"]["name"] == "single" and "max_trials" not in config["searcher"]
    assert config["searcher"]["metric"] == "validation_loss"
    assert config["hyperparameters"]["lr"] == {"type": "const", "val": 0.1}
    assert config["hyperparameters"]["width"] == {"type": "const", "val": 3}
    assert config["environment"]["environment_variables"]["cpu"] == ["A=template", "B=template"]
    assert create()[1]["config"].get("description") is None
    assert create(template="none")[0] == 404
    bindings.patch_PatchTemplateConfig(user, templateName="small", body={"unheard_of": 1})
    status, answer = create(template="small")
    assert status == 400 and "unheard_of" in answer["message"]


def test_models_and_templates_are_in_workspaces(sdk: Any, user: Any, ask: Ask) -> None:
    made = ask("POST", "/api/v1/workspaces", user=USER_TOKEN, body={"name": "a team"})[1]["workspace"]["id"]
    one, other = sdk.create_model("one", workspace_name="a team"), sdk.create_model("other")
    assert (one.workspace_id, other.workspace_id) == (made, 1)
    by = bindings.v1GetModelsRequestSortBy
    assert [m.name for m in sdk.list_models(workspace_names=["a team"])] == ["one"]
    assert [m.name for m in bindings.get_GetModels(user, sortBy=by.WORKSPACE).models] == ["other", "one"]
    other.move_to_workspace("a team")
    one.move_to_workspace("Uncategorized")
    assert [sdk.get_model(name).workspace_id for name in ("one", "other")] == [1, made]
    body = bindings.v1Template(name="small", config={}, workspaceId=made)
    bindings.post_PostTemplate(user, body=body, template_name="small")
    for path, sent in (
        ("models", {"name": "x", "workspaceId": 99}),
        ("models", {"name": "x", "workspaceName": "none"}),
        ("models/one/move", {"destinationWorkspaceId": 99}),
        ("templates/large", {"config": {}, "workspaceId": 99}),
    ):
        assert ask("POST", f"/api/v1/{path}", user=USER_TOKEN, body=sent)[0] == 404, path
    status, answer = ask("DELETE", f"/api/v1/workspaces/{made}", user=USER_TOKEN)
    assert status == 409 and "contains models" in answer["message"]
    other.delete()
    assert ask("DELETE", f"/api/v1/workspaces/{made}", user=USER_TOKEN)[0] == 200
    assert ask("GET", "/api/v1/templates/small", user=USER_TOKEN)[0] == 404
