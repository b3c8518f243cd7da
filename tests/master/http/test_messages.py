"""What a route reads of a request, and what it answers: JSON, streams, directories as .tar.gz, and
records as the dicts that the original bindings read."""

from __future__ import annotations

import io
import json
import math
import tarfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.master.world import UUID, World, allocation, checkpoint, experiment, trial
from zero_trial.master.core.accounts import Principal
from zero_trial.master.http import messages
from zero_trial.master.http.checkpoint_routes import checkpoint_json
from zero_trial.master.http.experiment_routes import experiment_json
from zero_trial.master.http.machine_routes import device_json
from zero_trial.master.http.messages import (
    BadRequest,
    Request,
    RequestHead,
    Waits,
    encode,
    lines,
    pack,
    parse_query,
    real,
    split_path,
    when,
    whole,
)
from zero_trial.master.http.trial_routes import allocation_json, allocation_summary_json, trial_json
from zero_trial.master.records import (
    AllocationState,
    CheckpointState,
    ExperimentState,
    Invalid,
    User,
    parse_time,
)


def test_a_path_is_unquoted_part_by_part() -> None:
    assert split_path("/api/v1/users/a%2Fb%20c/") == ["api", "v1", "users", "a/b c"]
    assert split_path("/a//b") == ["a", "", "b"]


USER = Principal(user=User(1, "someone", admin=False, active=True, password=""))


def call(query: str = "", body: bytes = b"", principal: Principal = USER) -> Request:
    master: Any = None  # none of these questions needs one
    head = RequestHead("GET", "/", "", {}, 0)
    return Request(master, head, {}, {}, parse_query(query), body, principal, Waits(1))


@pytest.mark.parametrize(
    ("query", "expected", "account"),
    [
        ("", [0, 1, 2, 3, 4], (0, 5)),
        ("offset=1&limit=2", [1, 2], (1, 3)),
        ("offset=4&limit=2", [4], (4, 5)),
        ("offset=9&limit=2", [], (5, 5)),
        ("limit=0", [0, 1, 2, 3, 4], (0, 5)),
        ("limit=-1", [0, 1, 2, 3, 4], (0, 5)),
        ("limit=-2", [], (0, 0)),
        ("offset=-3", [0, 1, 2, 3, 4], (0, 5)),
    ],
)
def test_pages_are_counted_as_clients_expect(query: str, expected: list[int], account: tuple[int, int]) -> None:
    page, pagination = call(query).page(range(5))
    assert (list(page), pagination["total"]) == (expected, 5)
    assert (pagination["startIndex"], pagination["endIndex"]) == account


@pytest.mark.parametrize(
    "value", ["", "x", "1.5", 1.5, True, None, [], "１", "1_0", 2**40, float("nan"), float("inf"), " 1"]
)
def test_a_whole_number_is_one(value: Any) -> None:
    with pytest.raises(Invalid):
        whole(value, "limit")
    assert (whole("-3", "limit"), whole(7, "limit"), whole(4.0, "limit")) == (-3, 7, 4)
    for odd in ("x", None, True, math.nan, math.inf, "1e999", {}):
        with pytest.raises(Invalid):
            real(odd, "weight")
    assert real("0.5", "weight") == 0.5


def test_a_time_without_a_zone_is_in_utc_on_every_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        for text in ("1970-01-01T00:00:01", "1970-01-01T00:00:01Z", "1970-01-01T01:00:01.000+01:00"):
            assert parse_time(text, "reportTime") == 1.0
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize("text", ["9999-12-31T23:59:59-12:00", "0001-01-01T00:00:00+00:01"])
def test_a_moment_can_be_written_in_utc(text: str) -> None:
    with pytest.raises(Invalid, match="years 1 to 9999"):
        parse_time(text, "reportTime")
    with pytest.raises(Invalid, match="reportTime must be a time"):
        parse_time("yesterday", "reportTime")
    assert when(None) is None
    for edge in ("9999-12-31T23:59:59Z", "0001-01-01T00:00:00Z"):
        assert when(parse_time(edge, "reportTime")) == edge.replace("Z", ".000Z")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"lines": [{"log": "a\\ud800"}]}', r"unpaired surrogate.* at \$\.lines\[0\]\.log"),
        (b'{"a": {"\\udc00": 1}}', r"at a key of \$\.a"),
        (b'{"a": "\xed\xa0\x80"}', "not JSON"),
        ('{"a": 1}'.encode("utf-16"), "not JSON"),
        (b'{"a":' + b"[" * 101 + b"]" * 101 + b"}", "more than 100 levels"),
        (b'{"a":' * 5000 + b"1" + b"}" * 5000, "not JSON|levels"),
        (b"[" * 100_000, "not JSON"),
        (b"[1]", "not a JSON object"),
    ],
)  # fmt: skip
def test_bodies_that_cannot_be_stored_or_walked(body: bytes, words: str) -> None:
    with pytest.raises(BadRequest, match=words) as caught:
        call(body=body).body()
    assert caught.value.status == 400
    assert call(body=b'{"a": "\\ud83d\\ude00\\u00e9", "b": [[[1]]]}').body()["a"] == "\U0001f600\u00e9"
    wide = b'{"a": [' + b",".join([b"[1]"] * 500) + b"]}"
    assert len(call(body=wide).body()["a"]) == 500


def test_numbers_that_json_does_not_know_become_protobufs_words() -> None:
    value = {"a": math.nan, "b": [math.inf, -math.inf, 1.5], "c": (math.nan,)}
    assert json.loads(encode(value)) == {"a": "NaN", "b": ["Infinity", "-Infinity", 1.5], "c": ["NaN"]}
    assert json.loads(encode({"a": "\udcff"})) == {"a": "?"}


def test_lines_go_out_together_unless_they_are_followed() -> None:
    values = [{"n": 1}, {"n": 2}]
    assert list(lines(values, follow=False).pieces) == [b'{"result":{"n":1}}\n{"result":{"n":2}}\n']
    ended: list[str] = []
    followed = lines([*values, None], follow=True, done=lambda: ended.append("done"))
    assert list(followed.pieces) == [b'{"result":{"n":1}}\n', b'{"result":{"n":2}}\n', b""]
    followed.close()
    assert ended == ["done"]
    made: list[int] = []
    many = ({"text": "x" * 1000, "n": made.append(n)} for n in range(1000))  # type: ignore[func-returns-value]
    assert 64 * 1024 <= len(next(lines(many, follow=False).pieces)) < 70 * 1024
    assert len(made) < 100, "a batch is sent before the last line is made"


def test_files_come_out_as_they_went_in(tmp_path: Path) -> None:
    contents = {"a.txt": b"", "b/c.bin": bytes(512), "b/d/e.bin": bytes(range(256)) * 3000, "ü.txt": b"x"}
    for name, content in contents.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    (tmp_path / "b" / "link").symlink_to("/etc/hostname")  # is left out
    (tmp_path / "b" / "up").symlink_to(tmp_path)
    with tarfile.open(fileobj=io.BytesIO(b"".join(pack(tmp_path))), mode="r:gz") as archive:
        found = {member.name: archive.extractfile(member).read() for member in archive}  # type: ignore[union-attr]
    assert found == contents


def test_a_file_that_shrinks_breaks_the_archive_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(b"x" * 100_000)
    monkeypatch.setattr(messages, "_PIECE", 10)

    def shrink(pieces: Iterator[bytes]) -> Iterator[bytes]:
        for number, piece in enumerate(pieces):
            if number == 2:
                (tmp_path / "a").write_bytes(b"")
            yield piece

    with pytest.raises(OSError, match="was truncated"):
        list(shrink(messages._blocks(tmp_path)))


bindings = pytest.importorskip("determined.common.api.bindings")


def test_a_checkpoint_without_a_trial() -> None:
    nothing: dict[str, Any] = dict.fromkeys(("trial_id", "experiment_id", "searcher_metric"))
    record = replace(checkpoint(UUID, 1, 1), **nothing, validation_metrics={}, allocation_id="")
    found = bindings.v1Checkpoint.from_json(checkpoint_json(record))
    assert (found.training.trialId, found.allocationId, found.training.validationMetrics.avgMetrics) == (None, None, {})


def test_a_gpu_is_a_cuda_device(world: World) -> None:
    (agent,) = world.machine.agents()
    slot = replace(agent.slots[0], device_type="cuda", name="H200", uuid="GPU-1")
    found = bindings.v1Device.from_json(device_json(slot))
    assert (found.type, found.brand, found.uuid) == (bindings.devicev1Type.CUDA, "H200", "GPU-1")


@pytest.mark.parametrize("state", ["QUEUED", "STARTING", "RUNNING", *(state.value for state in ExperimentState)])
def test_every_state_is_one_that_clients_know(state: str) -> None:
    found = bindings.v1Experiment.from_json(experiment_json(experiment(1, shown_state=state)))
    assert found.state.value == f"STATE_{state}"
    if not state.startswith("DELET"):  # of experiments
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
