"""Some of the faults, once each: what the whole table promises, and that it says so where a promise
is broken."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.faults import FAULTS, Fault, counted, measure
from benchmarks.faults_runs import (
    DECOUPLED,
    Plan,
    Result,
    Workbench,
    break_disk,
    kill_at,
    moments,
    named_rightly,
    small_disk,
    unreadable,
)


@pytest.fixture(scope="module")
def workbench(tmp_path_factory: pytest.TempPathFactory) -> Workbench:
    return Workbench(tmp_path_factory.mktemp("faults"), seed=1)


def test_all_ranks_killed_inside_a_save(workbench: Workbench) -> None:
    """Half a file of rank 1 is written; all is written but the name. The sweep over all moments is
    the script's."""
    known = moments(workbench)
    names = [f"{rank}: {name}" for rank, _, name in known]
    assert len(names) >= 20 and names[-1].startswith("1: fsync")
    half = next(moment for moment in known if moment[0] == 1 and moment[2].startswith("write"))
    nameless = next(moment for moment in known if moment[2] == "os.rename step-000008.tmp-*")
    for moment in (half, nameless):
        result = kill_at(workbench, *moment)
        assert result.held, result


def test_all_ranks_killed_while_a_save_goes_on_beside_training(workbench: Workbench) -> None:
    """The engine's manifest is not yet there; the sweep over all moments is the script's."""
    known = moments(workbench, DECOUPLED)
    assert any("os.rename" in name and name.endswith("rank-00001.part") for _, _, name in known)
    manifest = next(moment for moment in known if moment[2].startswith("begin") and "manifest" in moment[2])
    result = kill_at(workbench, *manifest, DECOUPLED)
    assert result.held, result


def test_a_full_disk_ends_all_ranks_with_5(workbench: Workbench) -> None:
    with small_disk(workbench.folder / "small") as folder:
        if folder is None:
            pytest.skip("this user may not mount a small file system")
        plan = Plan("full", step=7, number=20_000)
        result = break_disk(workbench, "full", plan, workbench.new_run(plan, folder))
    assert result.held, result


def test_one_rank_that_can_open_no_file_ends_all_with_5(workbench: Workbench) -> None:
    plan = Plan("open files", step=7, ranks=(1,), number=3)
    result = break_disk(workbench, "no files", plan, workbench.new_run(plan))
    assert result.held, result


def test_what_a_run_must_not_leave_is_named(workbench: Workbench) -> None:
    run = workbench.copy(workbench.unbroken(Plan()))
    assert unreadable(run) == "checkpoints [4, 8, 12]"
    path = run / "checkpoints/step-000008/model0/rank-00001.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert str(path) in unreadable(run)


def test_the_rank_that_was_named_as_slow_is_checked(tmp_path: Path) -> None:
    def judge(*notes: str, rank: int | None = 1) -> str:
        lines = [json.dumps({"kind": "note", "message": note}) + "\n" for note in notes]
        (tmp_path / "events.jsonl").write_text("".join(lines))
        return named_rightly(tmp_path, rank, first=4)

    named = "rank {} keeps the others waiting: in steps {} to {} it was busy"
    assert judge("another note", named.format(1, 8, 15)) == ""
    assert "named only after step 31" in judge(named.format(1, 16, 31))
    assert "rank 1 was slow" in judge() and "rank 1 was slow" in judge(named.format(0, 8, 15))
    assert judge(rank=None) == "" and judge(named.format(0, 8, 15), rank=None).startswith("a false alarm")


def test_what_is_not_held_is_counted_and_printed() -> None:
    def inject(workbench: Workbench, count: int) -> Iterator[Result]:
        yield from (Result("a", True, 0.5), Result("b", False, 2.0, "it was lost"))

    said: list[str] = []
    row = measure(Fault("F0", "what", "promise", inject, 2, 1), 2, 0, said.append)
    assert (row["runs"], row["held"], row["worst_seconds"]) == (2, 1, 2.0)
    assert row["kinds"]["a"] == {"runs": 1, "held": 1, "worst_seconds": 0.5}
    assert said == ["F0 not held: b: it was lost"] and row["faults"] == ["b: it was lost"]
    assert counted([])["worst_seconds"] is None
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
