"""What tuning has found: trials and their speeds, the fastest, the lines of the ds_config that
change, and the page. Pure.
"""

from __future__ import annotations

import difflib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from zero_trial.ds_config.overlay import overwrite_ds_config
from zero_trial.planning.tune_space import Selection, TrainingWay
from zero_trial.report.report_data import (
    BestConfig,
    BracketHistory,
    Memory,
    Series,
    Status,
    SweepReport,
    Tone,
    TrialReport,
    differing_axes,
)
from zero_trial.util.text import format_duration

UNIT = "steps"


@dataclass
class TuneTrial:
    """One way and what was measured of it: steps per second by the rung, in measured steps; ``why``
    it died, or empty; ``steps`` that were measured, if they are more than the rung's."""

    number: int
    way: TrainingWay
    speeds: dict[int, float] = field(default_factory=dict)
    why: str = ""
    seconds: float = 0.0
    steps: int = 0
    measured_bytes: int | None = None

    @property
    def speed(self) -> float | None:
        """Return the speed over most steps; None if it died or was not measured."""
        return None if self.why or not self.speeds else self.speeds[max(self.speeds)]


@dataclass(frozen=True)
class TuneOutcome:
    """The trials of a search among the ways of a selection, with the decisions of the ``searcher``
    if it made any."""

    searcher: str
    selection: Selection
    trials: tuple[TuneTrial, ...]
    ladders: tuple[BracketHistory, ...] = ()

    def best(self) -> TuneTrial | None:
        """Return the fastest of the trials that were measured longest."""
        alive = [trial for trial in self.trials if trial.speed is not None]
        return max(alive, key=lambda trial: (max(trial.speeds), trial.speed or 0.0), default=None)

    def report(self, result: TuneResult) -> SweepReport:
        """Return the page's content."""
        trials = tuple(self._trial(trial) for trial in self.trials)
        spoken = Counter(
            why if why.startswith("not needed") else f"{way.name}: {why}" for way, why in self.selection.pruned
        )
        best = self.best()
        return SweepReport(
            title=result.title,
            status=result.status if best is not None else Status("nothing ran", Tone.BAD),
            searcher=self.searcher,
            metric="steps/s",
            smaller_is_better=False,
            trials=trials,
            unit=UNIT,
            axes=differing_axes([trial.point for trial in trials]),
            ladders=self.ladders,
            pruned=tuple(sorted(spoken.items(), key=lambda item: item[0].startswith("not needed"))),
            best=None
            if best is None
            else BestConfig(str(best.number), best.speed or 0.0, "ds_config.diff", result.diff, result.command),
            notes=result.notes,
            subtitle=f"{len(trials)} trials of {len(self.selection.ways)} ways that fit",
            facts=result.facts,
            created=result.created,
        )

    def _trial(self, trial: TuneTrial) -> TrialReport:
        steps = tuple(sorted(trial.speeds))
        tone = Status("died", Tone.BAD) if trial.why else Status("measured", Tone.GOOD)
        return TrialReport(
            id=str(trial.number),
            status=tone,
            point=trial.way.mapping,
            curve=Series("steps/s", steps, tuple(trial.speeds[step] for step in steps)),
            best=trial.speed,
            steps=max(steps, default=0),
            why=trial.why,
            memory=Memory(planned=self.selection.weighed[trial.way].bytes, measured=trial.measured_bytes),
            seconds=trial.seconds,
        )


@dataclass(frozen=True)
class TuneResult:
    """What a page says beside the search: its title, the lines of ds_config that change, the
    command that trains with them, facts and remarks."""

    title: str
    diff: str
    command: str
    facts: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()
    created: str = ""
    interrupted: bool = False

    @property
    def status(self) -> Status:
        """Return how a search with a winner ended."""
        return Status("interrupted", Tone.QUIET) if self.interrupted else Status("complete", Tone.GOOD)


def changed_ds_config(before: Mapping[str, Any], changes: Mapping[str, Any]) -> str:
    """Return the ds_config with ``changes`` (by dotted key) as JSON text."""
    return _as_text(overwrite_ds_config(dict(before), changes) if changes else before)


def difference(before: Mapping[str, Any], changes: Mapping[str, Any], name: str) -> str:
    """Return the lines that ``changes`` change in the ds_config, as a diff; empty if none."""
    lines = difflib.unified_diff(
        _as_text(before).splitlines(),
        changed_ds_config(before, changes).splitlines(),
        name,
        f"{name}, tuned",
        lineterm="",
    )
    return "\n".join(lines)


def is_plain_json(text: str) -> bool:
    """Return whether a ds_config has nothing that writing it again would lose, such as comments."""
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _as_text(value: Mapping[str, Any]) -> str:
    return json.dumps(value, indent=2) + "\n"


def trial_line(trial: TuneTrial, total: int, own: TrainingWay | None) -> str:
    """Return what is printed of a trial when it is over."""
    speed = trial.speed
    said = trial.why or (
        f"{speed:.3g} steps/s over {trial.steps or max(trial.speeds)} steps" if speed is not None else "not measured"
    )
    mark = " (as configured)" if trial.way == own else ""
    return f"trial   {trial.number}/{total} {trial.way.name}{mark}: {said}  {format_duration(trial.seconds)}"
