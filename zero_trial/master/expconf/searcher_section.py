"""``searcher``: the four searches that a new experiment may ask for, and what to write instead of those that are gone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zero_trial.master.expconf.lengths import SEARCHER_LENGTH, TIMED_LENGTH
from zero_trial.master.expconf.rules import Flag, Key, Kinds, Many, Number, Refused, Section, Text, Whole


def _one_source(section: Mapping[str, Any]) -> str | None:
    both = section.get("source_trial_id") is not None and section.get("source_checkpoint_uuid") is not None
    return "at most one of source_trial_id or source_checkpoint_uuid may be set" if both else None


def _has_length(section: Mapping[str, Any]) -> str | None:
    time, metric, length = (section.get(key) for key in ("max_time", "time_metric", "max_length"))
    if length is not None:
        if time is None and metric is None:
            return None
        return "max_length is the older form of max_time and time_metric: write one of the two forms"
    if time is not None and metric is not None:
        return None
    return "max_time and time_metric are required, such as max_time: 1000 with time_metric: batches"


COMMON = {
    "metric": Key(Text(), required=True),
    "smaller_is_better": Key(Flag(), True),
    "source_trial_id": Key(Whole()),
    "source_checkpoint_uuid": Key(Text()),
}


def _kind(name: str, *checks: Any, **keys: Key) -> Section:
    named = {"name": Key(Text((name,)), required=True), **COMMON, **keys}
    return Section(named, (_one_source, *checks))


_CONCURRENT = Key(Whole(0), 16)
_TRIALS = Key(Whole(1), required=True)

SEARCHER = Kinds(
    "name",
    {
        "single": _kind("single", max_length=Key(SEARCHER_LENGTH)),
        "random": _kind(
            "random", max_length=Key(SEARCHER_LENGTH), max_trials=_TRIALS, max_concurrent_trials=_CONCURRENT
        ),
        "grid": _kind("grid", max_length=Key(SEARCHER_LENGTH), max_concurrent_trials=_CONCURRENT),
        "adaptive_asha": _kind(
            "adaptive_asha",
            _has_length,
            max_trials=_TRIALS,
            max_time=Key(Whole(1)),
            time_metric=Key(Text()),
            max_length=Key(TIMED_LENGTH),
            max_concurrent_trials=_CONCURRENT,
            mode=Key(Text(("aggressive", "standard", "conservative")), "standard"),
            divisor=Key(Number(above=1), 4),
            max_rungs=Key(Whole(1), 5),
            bracket_rungs=Key(Many(Whole(1)), []),
            stop_once=Key(Refused("adaptive_asha always stops trials for good. Remove stop_once.")),
        ),
    },
    'is not an object where object["name"] is one of single, random, grid or adaptive_asha',
    {
        "adaptive": "adaptive exists no more. Use adaptive_asha with max_trials instead of budget.",
        "adaptive_simple": "adaptive_simple exists no more. Use adaptive_asha with the same max_trials.",
        "sync_halving": "sync_halving exists no more. Use adaptive_asha with bracket_rungs: [num_rungs].",
        "async_halving": "async_halving exists no more. Use adaptive_asha with bracket_rungs: [num_rungs].",
        "pbt": "pbt exists no more. Use adaptive_asha, or random.",
        "custom": "custom searchers exist no more. Use single, random, grid or adaptive_asha.",
    },
)
