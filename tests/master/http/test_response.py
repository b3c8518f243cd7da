"""Answers: JSON, streams, directories as .tar.gz, and records as the dicts that the original
bindings read."""

from __future__ import annotations

import io
import json
import math
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.master.world import UUID, World, allocation, checkpoint, experiment, trial
from zero_trial.master.http import messages
from zero_trial.master.http.messages import encode, lines, maybe_when, pack, when
from zero_trial.master.http.routes.checkpoint_routes import checkpoint_json
from zero_trial.master.http.routes.experiment_routes import experiment_json
from zero_trial.master.http.routes.machine_routes import agent_json, device_json
from zero_trial.master.http.routes.task_routes import allocation_json, allocation_summary_json
from zero_trial.master.http.routes.trial_routes import (
    metrics_json,
    trial_json,
)
from zero_trial.master.records import (
    AllocationState,
    CheckpointState,
    ExperimentState,
    MetricReport,
    TrialState,
)


def test_numbers_that_json_does_not_know_become_protobufs_words() -> None:
    value = {"a": math.nan, "b": [math.inf, -math.inf, 1.5], "c": (math.nan,)}
    assert json.loads(encode(value)) == {"a": "NaN", "b": ["Infinity", "-Infinity", 1.5], "c": ["NaN"]}


def test_text_that_is_not_unicode_does_not_break_an_answer() -> None:
    assert json.loads(encode({"a": "\udcff"})) == {"a": "?"}


def test_lines_go_out_together_unless_they_are_followed() -> None:
    values = [{"n": 1}, {"n": 2}]
    assert list(lines(values, follow=False).pieces) == [b'{"result":{"n":1}}\n{"result":{"n":2}}\n']
    assert list(lines([*values, None], follow=True).pieces) == [b'{"result":{"n":1}}\n', b'{"result":{"n":2}}\n', b""]


def test_many_lines_are_sent_before_the_last_one_is_made() -> None:
    made = []

    def values():  # type: ignore[no-untyped-def]
        for number in range(1000):
            made.append(number)
            yield {"text": "x" * 1000}

    first = next(lines(values(), follow=False).pieces)
    assert 64 * 1024 <= len(first) < 70 * 1024
    assert len(made) < 100


def test_a_stream_that_was_never_begun_lets_go_what_it_holds() -> None:
    ended = []
    stream = lines(iter(()), follow=True, done=lambda: ended.append("done"))
    stream.close()
    assert ended == ["done"]


def test_files_come_out_as_they_went_in(tmp_path: Path) -> None:
    contents = {"a.txt": b"", "b/c.bin": bytes(512), "b/d/e.bin": bytes(range(256)) * 3000, "ü.txt": b"x"}
    for name, content in contents.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    with tarfile.open(fileobj=io.BytesIO(b"".join(pack(tmp_path))), mode="r:gz") as archive:
        found = {member.name: archive.extractfile(member).read() for member in archive}  # type: ignore[union-attr]
    assert found == contents


def test_links_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    inside = tmp_path / "checkpoint"
    inside.mkdir()
    (inside / "link").symlink_to(tmp_path / "secret")
    (inside / "up").symlink_to(tmp_path)
    with tarfile.open(fileobj=io.BytesIO(b"".join(pack(inside))), mode="r:gz") as archive:
        assert archive.getnames() == []


def test_a_file_that_shrinks_breaks_the_archive_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(b"x" * 100_000)
    monkeypatch.setattr(messages, "_PIECE", 10)

    def shrink(pieces: Iterator[bytes]) -> Iterator[bytes]:
        for number, piece in enumerate(pieces):
            if number == 2:
                (tmp_path / "a").write_bytes(b"")
            yield piece

    with pytest.raises(OSError, match="became shorter"):
        list(shrink(messages._blocks(tmp_path)))


bindings = pytest.importorskip("determined.common.api.bindings")


def test_times_are_utc_with_milliseconds() -> None:
    assert when(1_700_000_000.1234) == "2023-11-14T22:13:20.123Z"
    assert maybe_when(None) is None


@pytest.mark.parametrize("seconds", [253402343999.0, 253402300799.9999999, -1e12, 1e18, float("inf")])
def test_a_time_that_an_older_master_stored_is_shown_whatever_it_is(seconds: float) -> None:
    report = MetricReport(1, 1, "validation", 1, {"loss": 1.0}, reported=seconds)
    shown = bindings.v1MetricsWorkload.from_json(metrics_json(report)).endTime
    assert shown in ("9999-12-31T23:59:59.000Z", "0001-01-01T00:00:00.000Z")


def test_a_checkpoint_without_a_trial() -> None:
    record = replace(
        checkpoint(UUID, 1, 1),
        trial_id=None,
        experiment_id=None,
        validation_metrics={},
        searcher_metric=None,
        allocation_id="",
    )
    found = bindings.v1Checkpoint.from_json(checkpoint_json(record))
    assert (found.training.trialId, found.allocationId, found.training.validationMetrics.avgMetrics) == (None, None, {})


def test_a_slot_whose_holder_is_unknown_is_free(world: World) -> None:
    (agent,) = world.machine.agents()
    found = bindings.v1Agent.from_json(agent_json(agent, []))
    assert [slot.container for slot in found.slots.values()] == [None, None]


def test_a_gpu_is_a_cuda_device(world: World) -> None:
    (agent,) = world.machine.agents()
    slot = replace(agent.slots[0], device_type="cuda", name="H200", uuid="GPU-1")
    found = bindings.v1Device.from_json(device_json(slot))
    assert (found.type, found.brand, found.uuid) == (bindings.devicev1Type.CUDA, "H200", "GPU-1")


@pytest.mark.parametrize("state", ["QUEUED", "STARTING", "RUNNING", *(state.value for state in ExperimentState)])
def test_every_state_is_one_that_clients_know(state: str) -> None:
    found = bindings.v1Experiment.from_json(experiment_json(experiment(1, shown_state=state)))
    assert found.state.value == f"STATE_{state}"
    if state in {"QUEUED", "STARTING", "RUNNING", *(each.value for each in TrialState)}:
        shown = bindings.trialv1Trial.from_json(trial_json(trial(1, 1, shown_state=state)))
        assert shown.state.value == f"STATE_{state}"
    if state in CheckpointState.__members__:
        record = checkpoint(UUID, 1, 1, state=CheckpointState[state])
        assert bindings.v1Checkpoint.from_json(checkpoint_json(record)).state.value == f"STATE_{state}"
    if state in AllocationState.__members__:
        run = replace(allocation(1, 1), state=AllocationState[state])
        assert bindings.v1Allocation.from_json(allocation_json(run)).state.name == state


def test_a_queued_allocation_has_no_resources(world: World) -> None:
    task = replace(world.tasks.task("task-1"), resources={"slots_per_trial": 2})
    queued = replace(allocation(1, 1), state=AllocationState.QUEUED, slots=())
    found = bindings.v1AllocationSummary.from_json(allocation_summary_json(task, queued, ["laptop"]))
    assert (found.resources, found.slotsNeeded) == ([], 2)
