"""Which tests ``make test`` leaves out, decided from the durations that ``make durations`` has
recorded.

A test function whose cases take more than `BUDGET` seconds together keeps the cases that fit into
the budget, spread evenly over its parameters, and always one; the others become ``slow``. A
function that cannot run one case within `LONGEST` seconds is slow as a whole, unless it carries
``@pytest.mark.smoke``: one such test stands for each family of processes (Determined's det, run,
launch, a crash, two hosts). ``@pytest.mark.slow`` on a test says so by hand. Tests without a record
run.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

BUDGET = 0.3  # seconds per test function
LONGEST = 1.2  # seconds for one case
RECORDED = 0.5  # functions that take less together are not recorded
DURATIONS = Path(__file__).parents[1] / "durations.json"


def function_of(node_id: str) -> str:
    """Drop the parameters from the name of a test."""
    return node_id.partition("[")[0]


def file_of(node_id: str) -> str:
    """Keep the file from the name of a test."""
    return node_id.partition("::")[0]


def seconds_by_file(durations: Mapping[str, float]) -> dict[str, float]:
    """Add up the recorded seconds of each file."""
    total: dict[str, float] = {}
    for node_id, seconds in durations.items():
        total[file_of(node_id)] = total.get(file_of(node_id), 0.0) + seconds
    return total


def slow_cases(cases: Mapping[str, float], smoke: bool = False) -> set[str]:
    """Choose the cases of one function to leave out; ``cases`` are seconds by name, in the order of
    collection."""
    if sum(cases.values()) <= BUDGET:
        return set()
    cheapest = min(cases, key=lambda name: cases[name])
    if cases[cheapest] > LONGEST and not smoke:
        return set(cases)
    names = list(cases)
    share = BUDGET / sum(cases.values())
    count = max(1, int(len(names) * share))
    kept, spent = {cheapest}, cases[cheapest]
    for name in names[:: max(1, len(names) // count)]:
        if name not in kept and spent + cases[name] <= BUDGET:
            kept.add(name)
            spent += cases[name]
    return set(names) - kept


def read_durations(path: Path = DURATIONS) -> dict[str, float]:
    """Read the recorded seconds by test; none where nothing is recorded."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def write_durations(seconds: Mapping[str, float], path: Path = DURATIONS) -> None:
    """Write the seconds of every function that takes long enough to matter."""
    together: dict[str, float] = {}
    for name, taken in seconds.items():
        together[function_of(name)] = together.get(function_of(name), 0.0) + taken
    kept = {name: round(taken, 2) for name, taken in seconds.items() if together[function_of(name)] > RECORDED}
    path.write_text(json.dumps(dict(sorted(kept.items())), indent=0) + "\n", encoding="utf-8")


def group(node_ids: Iterable[str], durations: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Put the recorded cases of each function together; a case without a record counts as its
    function's mean."""
    found: dict[str, dict[str, float]] = {}
    for node_id in node_ids:
        found.setdefault(function_of(node_id), {})[node_id] = durations.get(node_id, -1.0)
    groups = {}
    for name, cases in found.items():
        known = [seconds for seconds in cases.values() if seconds >= 0]
        if known:
            mean = sum(known) / len(known)
            groups[name] = {case: seconds if seconds >= 0 else mean for case, seconds in cases.items()}
    return groups
