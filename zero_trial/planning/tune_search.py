"""The search of `zero-trial tune` on this host: the master's adaptive_asha over ways to train, on
their speed. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from zero_trial.ds_config.keys_running import AutotuningSection
from zero_trial.errors import ConfigError
from zero_trial.master.search import Create, ExitReason, Stop
from zero_trial.master.search.searcher import Action, TrialDraw
from zero_trial.master.search.searchers import AdaptiveAsha, Budget
from zero_trial.planning.tune_result import UNIT, TuneOutcome, TuneTrial
from zero_trial.planning.tune_space import Selection, TrainingWay, next_way
from zero_trial.report.master_reader import RungMeasurement, bracket_histories
from zero_trial.util.speed import WARM_UP

METRIC = "steps_per_second"
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

    def as_json(self) -> dict[str, Any]:
        return {"seed": 0, "words": 0}  # nothing is drawn again


@dataclass(frozen=True)
class SearchSettings:
    """How long the search is: the most trials, the steps that each is measured for at most, and the
    ``warm_up`` steps before them. Without ``halving`` each trial goes on to its last step.

    ``seconds``: a trial that is not ended early is measured for so long at least, where its steps
    take less: a second of a machine that is not quiet says little.
    """

    trials: int
    steps: int
    warm_up: int = WARM_UP
    halving: bool = True
    seconds: float = 4.0


def search_settings(
    tuning: AutotuningSection, fitting: int, *, trials: int | None = None, steps: int | None = None
) -> SearchSettings:
    """Return the settings of a search among so many ways that fit, by ds_config's autotuning
    section and what the command line asks for; ``steps`` of it are exact. Raises ConfigError."""
    for option, value in ("--trials", trials), ("--steps", steps):
        if value is not None and value < 1:
            raise ConfigError("there is nothing to measure", where=option, got=value, expected="at least 1")
    whole = tuning.tuner_type == "gridsearch" or not tuning.fast
    wanted = trials or tuning.tuner_num_trials or (fitting if whole else max(_FEWEST, fitting // 4))
    measured = steps or tuning.end_profile_step - tuning.start_profile_step + 1
    shortest = SearchSettings.seconds if steps is None else 0.0
    return SearchSettings(min(wanted, fitting), measured, tuning.start_profile_step - 1, not whole, shortest)


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
        self._seconds = settings.seconds
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

    def rung_reached(self, trial: TuneTrial, steps: int, seconds: float) -> int | None:
        """Return the rung that a trial has reached with so many measured steps, which took
        ``seconds`` together; None between two rungs."""
        rung = next((rung for rung in self.rungs if rung not in trial.speeds), None)
        if rung is None or steps < rung or seconds < self._seconds * rung / self.rungs[-1]:
            return None
        return rung

    def measured(self, trial: TuneTrial, steps: int, speed: float) -> bool:
        """Take the speed of a trial at a rung; return whether it goes on."""
        trial.speeds[steps] = speed
        self._events.append(RungMeasurement(str(trial.number), steps, speed))
        actions = self._searcher.on_validation(str(trial.number), {METRIC: speed, UNIT: steps})
        self._waiting += actions
        return not any(isinstance(action, Stop) for action in actions)

    def outcome(self) -> TuneOutcome:
        """Return what was measured so far, with the decisions at the rungs."""
        section = {"name": "adaptive_asha", "metric": METRIC, "smaller_is_better": False, "time_metric": UNIT}
        section |= asdict(self._budget)
        names = {str(trial.number): str(trial.number) for trial in self.trials}
        ladders = bracket_histories({"searcher": section}, self._searcher.snapshot(), self._events, names)
        return TuneOutcome("adaptive_asha", self._selection, tuple(self.trials), ladders)

    def ended(self, trial: TuneTrial, why: str = "") -> None:
        """Take the end of a trial: stopped by the search, or dead for the reason ``why``."""
        trial.why = why
        reason = ExitReason.ERRORED if why else ExitReason.COMPLETED
        actions: Sequence[Action] = self._searcher.on_exited(str(trial.number), reason)
        self._waiting += actions

    def _pick(self) -> TrainingWay:
        speeds = {trial.way: trial.speed for trial in self.trials}
        found = next_way(self._selection.ways, self._selection.weighed, speeds, self._own)
        # the searcher creates at most as many trials as there are ways
        return found if found is not None else self._selection.ways[0]
