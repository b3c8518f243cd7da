"""Two runs compared: settings, and the first step at which their values part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from zero_trial.report.difference import ABSENT, RunRecord, SettingChange, Trace, changes, compare_runs


def run(steps: Mapping[int, Any] | None = None, **more: Any) -> RunRecord:
    values = {1: 5.0, 2: 4.0, 3: 3.0} if steps is None else steps
    fields: dict[str, Any] = {
        "settings": {"seed": 7},
        "code": {"a.py": "1"},
        "data": {"sha256": "d"},
        "end": "completed",
    }
    return RunRecord(Path("r"), traces=(Trace("loss", values),) if values else (), **(fields | more))


def test_the_same() -> None:
    found = compare_runs(run(), run())
    assert found.same and found.first is None and found.notes == ()
    assert [(trace.name, trace.steps, trace.parting) for trace in found.traces] == [("loss", 3, None)]


def test_the_first_step_that_differs_and_the_largest_difference() -> None:
    found = compare_runs(run({1: 5.0, 2: 4.0, 3: 3.0, 9: 1.0}), run({1: 5.0, 3: 3.5, 9: 3.0}))
    assert not found.same and found.same_origin and not found.same_values
    assert found.first is not None and found.first.parting is not None
    parting = found.first.parting
    assert (parting.step, parting.a, parting.b, parting.before, parting.difference) == (3, 3.0, 3.5, 1, 0.5)
    assert (parting.largest, parting.at, found.first.steps) == (2.0, 9, 3)


def test_of_several_traces_the_first_to_part_counts() -> None:
    def both(late: float, early: float) -> RunRecord:
        return replace(run(), traces=(Trace("late", {1: 1.0, 8: late}), Trace("early", {1: 1.0, 4: early})))

    found = compare_runs(both(1.0, 2.0), both(1.5, 2.5))
    assert found.first is not None and found.first.name == "early"


@pytest.mark.parametrize(
    ("a", "b", "equal"),
    [
        (float("nan"), float("nan"), True),
        ("inf", "inf", True),
        ("inf", 1.0, False),
        (None, None, True),
        (None, 1.0, False),
        (1.0, 1.0 + 2**-52, False),
    ],
)
def test_values_are_equal_in_every_bit_or_not(a: Any, b: Any, equal: bool) -> None:
    found = compare_runs(run({1: a}), run({1: b}))
    assert found.same_values is equal
    if not equal and not isinstance(a, float):
        assert found.first is not None and found.first.parting is not None and found.first.parting.largest is None


def test_a_tolerance() -> None:
    a, b = run({1: 1.0, 2: 0.0}), run({1: 1.001, 2: 0.0})
    assert compare_runs(a, b, rtol=0.01).same and not compare_runs(a, b, rtol=0.0001).same


def test_one_that_went_further_is_not_the_same() -> None:
    found = compare_runs(run(), run({1: 5.0, 2: 4.0}))
    assert found.ends == (3, 2) and found.first is None and not found.same_values


def test_settings_code_and_data() -> None:
    found = compare_runs(run(), run(settings={"seed": 8, "x": None}, code={"b.py": "2"}, data={"sha256": "e"}))
    assert found.settings == (SettingChange("seed", 7, 8), SettingChange("x", ABSENT, None))
    assert found.code == (SettingChange("a.py", "1", ABSENT), SettingChange("b.py", ABSENT, "2"))
    assert found.data == (SettingChange("sha256", "d", "e"),)
    assert found.same_values and not found.same_origin and not found.same
    assert changes({"a": 1}, {"a": 1.0}) == ()


def test_the_machine_is_told_and_does_not_count() -> None:
    found = compare_runs(run(made_with={"versions.torch": "2.6"}), run(made_with={"versions.torch": "2.7"}))
    assert found.made_with == (SettingChange("versions.torch", "2.6", "2.7"),) and found.same


def test_what_a_run_lacks_is_said() -> None:
    found = compare_runs(run(code=None, data=None), run(data=None, starts=2))
    assert found.same
    assert [note.split(":")[0] for note in found.notes[:2]] == ["code is not compared", "data is not compared"]
    assert found.notes[0].endswith("A has no certificate") and "A and B have no fingerprint" in found.notes[1]
    assert found.notes[2] == "B was started 2 times; its last start is compared"


def test_nothing_in_common_is_not_the_same() -> None:
    found = compare_runs(run({}), run({}))
    assert not found.same and found.notes[-1] == "the runs have no values in common"


def test_rank_0_of_another_number_of_ranks_has_seen_other_samples() -> None:
    def shared(ranks: int, own: float) -> RunRecord:
        traces = (Trace("own", {1: own}, local=True), Trace("mean", {1: 2.0}))
        return replace(run(settings={"batch: data-parallel ranks": ranks}), traces=traces)

    found = compare_runs(shared(1, 1.0), shared(2, 3.0))
    assert [trace.name for trace in found.traces] == ["mean"] and found.same_values
    assert "rank 0's own values are not compared" in found.notes[-1]
