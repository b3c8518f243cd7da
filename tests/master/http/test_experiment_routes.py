"""Experiments as the original client asks for them: each answer is read with Determined's own
bindings."""

from __future__ import annotations

import base64
import io
import tarfile
from typing import Any

import pytest
import yaml

from tests.master.world import CONFIG, UUID, World
from zero_trial.master.core.checkpoints import policy_of
from zero_trial.master.records import CheckpointState, ExperimentState, GcPolicy

bindings = pytest.importorskip("determined.common.api.bindings")
errors = pytest.importorskip("determined.common.api.errors")


TEXT = yaml.safe_dump(CONFIG)


def file(path: str, content: bytes = b"", **changes: Any) -> Any:
    values = {
        "path": path,
        "type": 48,
        "content": base64.b64encode(content).decode(),
        "mtime": "1",
        "mode": 33188,
        "uid": 0,
        "gid": 0,
    }
    return bindings.v1File(**{**values, **changes})


def request(**changes: Any) -> Any:
    files = [file("sub", type=53, mode=16877), file("sub/data.txt", b"data"), file("model_def.py", b"print()")]
    return bindings.v1CreateExperimentRequest(**{"activate": True, "config": TEXT, "modelDefinition": files, **changes})


def test_create_stores_a_clean_context_and_the_text_as_it_came(user: Any, world: World) -> None:
    answer = bindings.post_CreateExperiment(user, body=request())
    assert answer.experiment.id == 3
    assert answer.experiment.originalConfig == TEXT
    assert answer.experiment.username == "determined"
    assert answer.warnings == []
    assert bindings.post_CreateExperiment(user, body=request(validateOnly=True)).experiment.id == 0
    made = bindings.post_CreateExperiment(user, body=request(activate=False, parentId=1)).experiment
    assert (made.id, made.state, made.forkedFrom) == (4, bindings.experimentv1State.PAUSED, 1)
    with tarfile.open(fileobj=io.BytesIO(world.experiments.context(3))) as archive:
        assert archive.getnames() == ["model_def.py", "sub", "sub/data.txt"]


def test_the_completed_configuration_is_the_same_everywhere_but_for_the_pool(user: Any, world: World) -> None:
    text = "entrypoint: x\nsearcher: {name: single, metric: loss}\nhyperparameters: {a: {b: y, c: [1.0]}}\n"
    answer = bindings.post_CreateExperiment(user, body=request(config=text))
    kept = bindings.get_GetExperiment(user, experimentId=answer.experiment.id).experiment.config
    assert answer.config["hyperparameters"] == {
        "a": {"b": {"type": "const", "val": True}, "c": {"type": "const", "val": [1]}}
    }
    assert answer.config["name"].startswith("Experiment (")
    assert (answer.config["resources"]["priority"], answer.config["resources"]["resource_pool"]) == (42, "")
    assert kept == {**answer.config, "resources": {**answer.config["resources"], "resource_pool": "default"}}


def test_lists_are_newest_first_and_filtered(user: Any, world: World) -> None:
    world.create(**{**CONFIG, "name": "Other", "labels": ["a", "b"]}, owner="someone")
    world.change_experiment(3, state=ExperimentState.COMPLETED, archived=1)
    everything = bindings.get_GetExperiments(user, offset=0, limit=200)
    assert [each.id for each in everything.experiments] == [3, 2, 1]
    assert (everything.pagination.total, everything.pagination.endIndex) == (3, 3)
    for asked, expected in (
        ({"archived": False}, [2, 1]),
        ({"archived": True}, [3]),
        ({"users": ["someone"]}, [3]),
        ({"labels": ["a"]}, [3]),
        ({"name": "oth"}, [3]),
        ({"states": [bindings.experimentv1State.COMPLETED]}, [3]),
        ({"orderBy": bindings.v1OrderBy.ASC}, [1, 2, 3]),
        ({"limit": 1, "offset": 1}, [2]),
        ({"userIds": [1]}, [2, 1]),
    ):
        assert [each.id for each in bindings.get_GetExperiments(user, **asked).experiments] == expected, asked


def test_one_experiment_with_its_place_in_the_queue(user: Any, world: World) -> None:
    answer = bindings.get_GetExperiment(user, experimentId=1)
    assert answer.experiment.state is bindings.experimentv1State.RUNNING
    assert answer.experiment.config["searcher"]["metric"] == "validation_loss"
    assert (answer.jobSummary.state, answer.jobSummary.jobsAhead) == (bindings.jobv1State.SCHEDULED, 0)
    world.exit(2)
    assert bindings.get_GetExperiment(user, experimentId=2).jobSummary is None
    with pytest.raises(errors.NotFoundException, match="experiment 9 not found"):
        bindings.get_GetExperiment(user, experimentId=9)


def test_the_client_changes_what_it_read(user: Any, world: World) -> None:
    """``det experiment set description`` and ``label add`` send the whole experiment back as a
    patch."""
    before = world.experiments.get(1).config
    patch = bindings.v1PatchExperiment.from_json(bindings.get_GetExperiment(user, experimentId=1).experiment.to_json())
    patch.description, patch.labels = "new words", ["x", "y", "x"]
    answer = bindings.patch_PatchExperiment(user, body=patch, experiment_id=1)
    assert (answer.experiment.description, answer.experiment.labels, answer.experiment.name) == (
        "new words",
        ["x", "y"],
        "example",
    )
    kept = ("resources", "checkpoint_storage")
    after = world.experiments.get(1).config
    assert {key: after[key] for key in kept} == {key: before[key] for key in kept}


def test_resources_and_gc_policy_are_changed_apart(user: Any, world: World) -> None:
    resources, storage = bindings.PatchExperimentPatchResources, bindings.PatchExperimentPatchCheckpointStorage
    for sent, expected in (
        (resources(maxSlots=2), {"max_slots": 2}),
        (resources(maxSlots=None), {"max_slots": None}),
        (resources(weight=1.5), {"weight": 1.5}),
        (resources(priority=3), {"priority": 3}),
    ):
        bindings.patch_PatchExperiment(user, body=bindings.v1PatchExperiment(id=1, resources=sent), experiment_id=1)
        found = world.experiments.get(1).config["resources"]
        assert {key: found[key] for key in expected} == expected
    policy = storage(saveExperimentBest=0, saveTrialBest=1, saveTrialLatest=2)
    bindings.patch_PatchExperiment(
        user, body=bindings.v1PatchExperiment(id=1, checkpointStorage=policy), experiment_id=1
    )
    found = world.experiments.get(1).config
    assert policy_of(found) == GcPolicy(0, 1, 2)
    assert found["resources"]["priority"] == 3


def test_the_best_metric_is_404_until_there_is_one(task: Any, world: World) -> None:
    with pytest.raises(errors.NotFoundException):
        bindings.get_GetBestSearcherValidationMetric(task, experimentId=1)
    world.report(1, "validation", 1, {"validation_loss": 0.25})
    assert bindings.get_GetBestSearcherValidationMetric(task, experimentId=1).metric == 0.25


def test_what_a_gc_policy_would_delete_is_shown_in_the_old_words(user: Any, world: World) -> None:
    world.save(UUID)
    world.save("newer", steps_completed=6)
    params = {"save_experiment_best": 0, "save_trial_best": 0, "save_trial_latest": 1}
    answer = user.get("experiments/1/preview_gc", params=params).json()
    assert answer["metric_name"] == "validation_loss"
    assert [(each["UUID"], each["StepsCompleted"], each["Resources"]) for each in answer["checkpoints"]] == [
        (UUID, 5, {"state.json": "11"})
    ]
    assert world.checkpoints.get(UUID).state is CheckpointState.COMPLETED
