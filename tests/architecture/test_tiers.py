"""The choice of what `make test` leaves out."""

from __future__ import annotations

from pathlib import Path

from tests.support.tiers import BUDGET, LONGEST, group, read_durations, seconds_by_file, slow_cases, write_durations


def test_a_short_function_runs_as_a_whole():
    assert slow_cases({"t[a]": BUDGET / 2, "t[b]": BUDGET / 2}) == set()


def test_of_many_cases_some_stay_spread_over_the_parameters():
    cases = {f"t[{n}]": BUDGET / 10 for n in range(100)}
    kept = [int(name[2:-1]) for name in cases if name not in slow_cases(cases)]
    assert 4 <= len(kept) <= 10 and kept[0] < 20 and kept[-1] >= 70


def test_one_case_always_stays_unless_it_takes_too_long():
    assert slow_cases({"t[a]": 2 * BUDGET, "t[b]": BUDGET * 1.5}) == {"t[a]"}
    assert slow_cases({"t": LONGEST + 1}) == {"t"} and slow_cases({"t": LONGEST + 1}, smoke=True) == set()


def test_cases_without_a_record_count_as_the_mean():
    assert group(["a::t[1]", "a::t[2]", "b::u"], {"a::t[1]": 3.0}) == {"a::t": {"a::t[1]": 3.0, "a::t[2]": 3.0}}


def test_only_functions_that_matter_are_recorded(tmp_path: Path):
    write_durations({"a::t[1]": 0.4, "a::t[2]": 0.4, "b::u": 0.1}, tmp_path / "d.json")
    assert read_durations(tmp_path / "d.json") == {"a::t[1]": 0.4, "a::t[2]": 0.4}


def test_the_seconds_of_a_file_are_those_of_its_tests():
    assert seconds_by_file({"a::t[1]": 0.5, "a::u": 1.0, "b::t": 0.25}) == {"a": 1.5, "b": 0.25}
