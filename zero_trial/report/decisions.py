"""Why a search stopped whom: its brackets played again, validation by validation, with the search's own rules.

A search keeps who stands where, and not what it saw when it decided; but its decisions follow from the validations in the order in which
they came.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from zero_trial.errors import ZeroTrialError
from zero_trial.master.searchers import restore
from zero_trial.master.searchers.adaptive_asha import AdaptiveAsha
from zero_trial.master.searchers.rungs import WORST, Bracket, Rung
from zero_trial.report.data import Decision, Ladder, Verdict


@dataclass(frozen=True)
class Measured:
    """One validation as it came to the search: whose, after how many units, and the metric as it was reported."""

    request_id: str
    time: float
    metric: float


def ladders(
    config: Mapping[str, Any], snapshot: Mapping[str, Any], measured: Iterable[Measured], names: Mapping[str, str]
) -> tuple[Ladder, ...]:
    """The brackets of an adaptive_asha search with their decisions; nothing for another search, or a snapshot that is not one.

    ``names``: what each request id is called on the page.
    """
    try:
        search = restore(config["searcher"], config.get("hyperparameters") or {}, snapshot)
    except (ZeroTrialError, KeyError, TypeError, ValueError):
        return ()
    if not isinstance(search, AdaptiveAsha):
        return ()
    events = list(measured)
    return tuple(
        _replayed(
            number, bracket, [event for event in events if event.request_id in bracket.position], search.sign, names
        )
        for number, bracket in enumerate(search.brackets, 1)
    )


def _replayed(number: int, bracket: Bracket, events: list[Measured], sign: float, names: Mapping[str, str]) -> Ladder:
    fresh = Bracket(
        [Rung(rung.units) for rung in bracket.rungs], bracket.divisor, bracket.max_trials, bracket.max_concurrent
    )
    found: list[Decision] = []
    stopped: set[str] = set()
    for event in events:
        if event.request_id in stopped:
            continue
        before = [len(rung.entries) for rung in fresh.rungs]
        fresh.position.setdefault(event.request_id, 0)
        value = WORST if math.isnan(event.metric) else sign * event.metric
        stop = fresh.climb(event.request_id, int(event.time), value)
        passed = [index for index, rung in enumerate(fresh.rungs) if len(rung.entries) > before[index]]
        for index in passed:
            ends = stop and index == passed[-1]
            found.append(_decision(number, fresh, index, event, ends, names))
        if stop:
            stopped.add(event.request_id)
    return Ladder(number, tuple(rung.units for rung in bracket.rungs), tuple(found))


def _decision(
    number: int, bracket: Bracket, index: int, event: Measured, ends: bool, names: Mapping[str, str]
) -> Decision:
    rung = bracket.rungs[index]
    rank = 1 + next(at for at, (_, request_id) in enumerate(rung.entries) if request_id == event.request_id)
    count = len(rung.entries)
    top = index == len(bracket.rungs) - 1
    if top:
        verdict, why = Verdict.FINISHED, f"{ordinal(rank)} of {count} that came this far."
    else:
        may = max(int(count / bracket.divisor), 1)
        verdict = Verdict.STOPPED if ends else Verdict.WENT_ON
        why = (
            f"{ordinal(rank)} of the {count} measured here so far; the best {may} may go on (1 in {bracket.divisor:g})."
        )
        if count == 1:
            why = "The first to be measured here goes on."
    return Decision(
        names.get(event.request_id, event.request_id), verdict, number, index, rung.units, event.metric, why
    )


def ordinal(number: int) -> str:
    """1st, 2nd, 3rd, 4th, 11th."""
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
