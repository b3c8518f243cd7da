"""The search of `zero-trial tune`: the master's adaptive_asha over ways to train, on their speed,
and its page. Pure.
"""

from __future__ import annotations

import difflib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from zero_trial.ds_config.keys_running import AutotuningSection
from zero_trial.ds_config.overlay import overwrite_ds_config
from zero_trial.errors import ConfigError
from zero_trial.master.search import Create, ExitReason, Stop
from zero_trial.master.search.adaptive_asha import AdaptiveAsha, Budget
from zero_trial.master.search.draws import TrialDraw
from zero_trial.master.search.searcher import Action
from zero_trial.report.data import BestConfig, Memory, Series, Status, SweepReport, Tone, TrialReport, differing_axes
from zero_trial.report.master_reader import RungMeasurement, bracket_histories
from zero_trial.tune.space import Selection, TrainingWay, next_way
from zero_trial.util.text import format_duration

METRIC, UNIT = "steps_per_second", "steps"
_DIVISOR = 4
_FEWEST = 3
_LOWEST_RUNG = 4  # steps: the median of fewer says little


class _Picks:
    """What the searcher draws: the ways that ``pick`` returns, numbered from 1."""

    def __init__(self, pick: Callable[[], TrainingWay]) -> None:
        self._pick = pick
        self.picked: list[TrainingWay] = []

    def trial(self, space: Mapping[str, Any], hparams: Mapping[str, Any] | None = None) -> TrialDraw:
        self.picked.append(self._pick())
        return str(len(self.picked)), {}, 0

    def power(self, base: float, exponent: float) -> float:
        return float(base**exponent)

    def as_json(self) -> dict[str, Any]:
        return {"seed": 0, "drawn": len(self.picked)}


@dataclass
class TuneTrial:
    """One way and what was measured of it: steps per second by measured steps; ``why`` it died, or
    empty."""

    number: int
    way: TrainingWay
    speeds: dict[int, float] = field(default_factory=dict)
    why: str = ""
    seconds: float = 0.0
    measured_bytes: int | None = None

    @property
    def speed(self) -> float | None:
        """Return the speed over most steps; None if it died or was not measured."""
        return None if self.why or not self.speeds else self.speeds[max(self.speeds)]


@dataclass(frozen=True)
class SearchSettings:
    """How long the search is: the most trials, the steps that each is measured for at most, and the
    ``warm_up`` steps before them. Without ``halving`` each trial goes on to its last step."""

    trials: int
    steps: int
    warm_up: int = 2
    halving: bool = True


def search_settings(
    tuning: AutotuningSection, fitting: int, *, trials: int | None = None, steps: int | None = None
) -> SearchSettings:
    """Return the settings of a search among so many ways that fit, by ds_config's autotuning
    section and what the command line asks for. Raises ConfigError."""
    for option, value in ("--trials", trials), ("--steps", steps):
        if value is not None and value < 1:
            raise ConfigError("there is nothing to measure", where=option, got=value, expected="at least 1")
    whole = tuning.tuner_type == "gridsearch" or not tuning.fast
    wanted = trials or tuning.tuner_num_trials or (fitting if whole else max(_FEWEST, fitting // 4))
    measured = steps or tuning.end_profile_step - tuning.start_profile_step + 1
    return SearchSettings(min(wanted, fitting), measured, tuning.start_profile_step - 1, not whole)


def refuse_autotuning(tuning: AutotuningSection, batch: int) -> None:
    """Raise ConfigError for what the autotuning section asks for and this tuner does not do, at a
    global batch of so many samples."""
    if tuning.tuner_type == "random":
        raise ConfigError(
            "ways are not tried in random order",
            where="autotuning.tuner_type",
            got="random",
            expected="model_based or gridsearch",
        )
    most = tuning.max_train_batch_size
    if batch < tuning.min_train_batch_size or (most is not None and batch > most):
        raise ConfigError(
            "the global batch stays as it is, because another one trains something else",
            where=f"autotuning.{'min' if batch < tuning.min_train_batch_size else 'max'}_train_batch_size",
            got=f"train_batch_size {batch}",
            fix="Set train_batch_size, or remove the limit.",
        )
    if tuning.end_profile_step < tuning.start_profile_step:
        raise ConfigError(
            "there are no steps to measure",
            where="autotuning.end_profile_step",
            got=tuning.end_profile_step,
            expected=f"at least start_profile_step {tuning.start_profile_step}",
        )


def _most_rungs(steps: int) -> int:
    """Return how many rungs there are between the lowest one and so many steps."""
    rungs = 1
    while steps // _DIVISOR**rungs >= _LOWEST_RUNG:
        rungs += 1
    return rungs


class TuneSearch:
    """Successive halving of the ways of a selection, one trial at a time.

    At each of ``rungs`` (steps that were measured) only the fastest quarter of the trials that came
    so far goes on, at least one.
    """

    def __init__(self, selection: Selection, settings: SearchSettings, own: TrainingWay | None = None) -> None:
        self.warm_up = settings.warm_up
        self._selection = selection
        self._own = own if own in selection.ways else None
        self.trials: list[TuneTrial] = []
        self._events: list[RungMeasurement] = []
        self._picks = _Picks(self._pick)
        budget = Budget(
            max_trials=min(settings.trials, len(selection.ways)),
            max_time=settings.steps,
            mode="aggressive",
            divisor=_DIVISOR,
            max_rungs=_most_rungs(settings.steps) if settings.halving else 1,
            max_concurrent_trials=1,
        )
        self._searcher = AdaptiveAsha({}, self._picks, budget, metric=METRIC, time_metric=UNIT, smaller_is_better=False)
        self._budget = budget
        self._waiting = self._searcher.start()

    @property
    def rungs(self) -> tuple[int, ...]:
        return tuple(rung.units for rung in self._searcher.brackets[0].rungs)

    @property
    def planned(self) -> int:
        """Return how many trials there will be."""
        return self._budget.max_trials

    def next_trial(self) -> TuneTrial | None:
        """Return the trial to start now; None when the search is over."""
        created = next((action for action in self._waiting if isinstance(action, Create)), None)
        self._waiting = []
        if created is None:
            return None
        number = int(created.request_id)
        self.trials.append(TuneTrial(number, self._picks.picked[number - 1]))
        return self.trials[-1]

    def measured(self, trial: TuneTrial, steps: int, speed: float) -> bool:
        """Take the speed of a trial at a rung; return whether it goes on."""
        trial.speeds[steps] = speed
        self._events.append(RungMeasurement(str(trial.number), steps, speed))
        actions = self._searcher.on_validation(str(trial.number), {METRIC: speed, UNIT: steps})
        self._waiting += actions
        return not any(isinstance(action, Stop) for action in actions)

    def ended(self, trial: TuneTrial, why: str = "") -> None:
        """Take the end of a trial: stopped by the search, or dead for the reason ``why``."""
        trial.why = why
        reason = ExitReason.ERRORED if why else ExitReason.COMPLETED
        actions: Sequence[Action] = self._searcher.on_exited(str(trial.number), reason)
        self._waiting += actions

    def best(self) -> TuneTrial | None:
        """Return the fastest of the trials that were measured longest."""
        alive = [trial for trial in self.trials if trial.speed is not None]
        return max(alive, key=lambda trial: (max(trial.speeds), trial.speed or 0.0), default=None)

    def report(self, result: TuneResult) -> SweepReport:
        """Return the page's content."""
        trials = tuple(self._trial(trial) for trial in self.trials)
        names = {str(trial.number): str(trial.number) for trial in self.trials}
        section = {
            "name": "adaptive_asha",
            "metric": METRIC,
            "smaller_is_better": False,
            "max_trials": self._budget.max_trials,
            "max_time": self._budget.max_time,
            "time_metric": UNIT,
            "mode": "aggressive",
            "divisor": float(_DIVISOR),
            "max_rungs": self._budget.max_rungs,
            "max_concurrent_trials": 1,
        }
        spoken = Counter(
            why if why.startswith("not needed") else f"{way.name}: {why}" for way, why in self._selection.pruned
        )
        best = self.best()
        return SweepReport(
            title=result.title,
            status=result.status if best is not None else Status("nothing ran", Tone.BAD),
            searcher="adaptive_asha",
            metric="steps/s",
            smaller_is_better=False,
            trials=trials,
            unit=UNIT,
            axes=differing_axes([trial.point for trial in trials]),
            ladders=bracket_histories({"searcher": section}, self._searcher.snapshot(), self._events, names),
            pruned=tuple(sorted(spoken.items(), key=lambda item: item[0].startswith("not needed"))),
            best=None
            if best is None
            else BestConfig(str(best.number), best.speed or 0.0, "ds_config.diff", result.diff, result.command),
            notes=result.notes,
            subtitle=f"{len(trials)} trials of {len(self._selection.ways)} ways that fit",
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
            memory=Memory(planned=self._selection.weighed[trial.way].bytes, measured=trial.measured_bytes),
            seconds=trial.seconds,
        )

    def _pick(self) -> TrainingWay:
        speeds = {trial.way: trial.speed for trial in self.trials}
        found = next_way(self._selection.ways, self._selection.weighed, speeds, self._own)
        # the searcher creates at most as many trials as there are ways
        return found if found is not None else self._selection.ways[0]


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
    said = trial.why or (f"{speed:.3g} steps/s over {max(trial.speeds)} steps" if speed is not None else "not measured")
    mark = " (as configured)" if trial.way == own else ""
    return f"trial   {trial.number}/{total} {trial.way.name}{mark}: {said}  {format_duration(trial.seconds)}"
