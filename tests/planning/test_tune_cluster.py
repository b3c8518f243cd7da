"""A tuning as an experiment of a master: what is sent, and what is made of its trials."""

from __future__ import annotations

import enum
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import requests
from determined.common.api.errors import (
    APIException,
    BadResponseException,
    ForbiddenException,
    MasterNotFoundException,
    NotFoundException,
    UnauthenticatedException,
)

from tests.planning.project import DS_CONFIG, EXPERIMENT, project
from zero_trial.errors import MasterError
from zero_trial.experiment.changes import read_words
from zero_trial.experiment.experiment import examine_experiment
from zero_trial.launch.run_experiment import CheckedRun, RunRequest, check_run
from zero_trial.planning import tune_cluster as subject
from zero_trial.planning.tune_cluster import MasterSearch, experiment_of, overlay_of, ways_to_send, why_ended
from zero_trial.planning.tune_result import TuneOutcome, TuneTrial, briefly_measured
from zero_trial.planning.tune_search import SearchSettings
from zero_trial.planning.tune_space import ACCUMULATION, MICRO, STAGE, Selection, TrainingWay, Weighed
from zero_trial.util.speed import SPEED_METRIC


def way(stage: int, micro: int, accumulation: int) -> TrainingWay:
    return TrainingWay(((STAGE, stage), (MICRO, micro), (ACCUMULATION, accumulation)), ((STAGE, stage),))


OWN, FAST, SLOW = way(0, 4, 1), way(2, 4, 1), way(3, 1, 4)
FOUND = Selection((SLOW, FAST, OWN), (), {OWN: Weighed(1, 3.0), FAST: Weighed(1, 1.0), SLOW: Weighed(1, 2.0)})
SETTINGS = SearchSettings(3, 4)


def checked(folder: Path, *words: str, **options: Any) -> CheckedRun:
    made = project(folder, **options)
    return check_run(RunRequest(made.experiment, made.folder, changes=read_words(words).changes), os.environ)


def test_the_best_estimates_are_sent_and_the_own_way_first() -> None:
    assert ways_to_send(FOUND, 3, OWN) == (OWN, FAST, SLOW)
    assert ways_to_send(FOUND, 2, OWN) == (OWN, FAST)
    assert ways_to_send(FOUND, 2, None) == (FAST, SLOW)


def test_the_experiment_is_one_that_a_master_accepts(tmp_path: Path) -> None:
    given = checked(tmp_path, ds_config={**DS_CONFIG, "csv_monitor": {"enabled": True}})
    config = experiment_of(given, (OWN, FAST), SETTINGS)
    examined = examine_experiment(json.loads(json.dumps(config)))
    assert not examined.faults and not examined.cluster_faults
    assert config["searcher"]["max_length"] == {"batches": 6} and config["searcher"]["metric"] == SPEED_METRIC
    points = config["hyperparameters"]["ds_config"]["vals"]
    assert points == [overlay_of(FAST, given), overlay_of(OWN, given)]  # tried from the last on
    assert points[0] == {
        "zero_optimization": {"stage": 2},
        MICRO: 4,
        ACCUMULATION: 1,
        "csv_monitor": {"enabled": False},
    }
    assert config["hyperparameters"]["width"] == 4
    assert config["data"] == {"ds_config": "ds_config.json"}


def test_what_the_experiment_lays_over_the_ds_config_stays(tmp_path: Path) -> None:
    given = checked(tmp_path, "gradient_clipping=0.5", "searcher.max_concurrent_trials=4")
    assert overlay_of(FAST, given)["gradient_clipping"] == 0.5
    assert experiment_of(given, (FAST,), SETTINGS)["searcher"]["max_concurrent_trials"] == 4


def test_a_ds_config_that_does_not_go_with_the_model_is_written_out(tmp_path: Path) -> None:
    made = project(tmp_path / "model")
    (tmp_path / "const.yaml").write_text(EXPERIMENT)
    (made.folder / "ds_config.json").rename(tmp_path / "ds_config.json")
    given = check_run(RunRequest(tmp_path / "const.yaml", made.folder), os.environ)
    assert experiment_of(given, (OWN,), SETTINGS)["data"]["ds_config"] == DS_CONFIG


class State(enum.Enum):
    """As Determined's."""

    RUNNING = 1
    COMPLETED = 2
    ERROR = 3
    DELETE_FAILED = 4


@dataclass
class FakeTrial:
    """As Determined's, as far as it is asked."""

    id: int
    hparams: dict[str, Any]
    state: State = State.RUNNING
    reports: dict[int, float] = field(default_factory=dict)
    log: tuple[str, ...] = ()

    def iter_metrics(self, group: str) -> Iterator[Any]:
        assert group == "validation"
        for steps, speed in self.reports.items():
            yield SimpleNamespace(steps_completed=steps, metrics={SPEED_METRIC: speed, "batches": steps})

    def iter_logs(self, tail: int) -> Iterator[str]:
        yield from self.log[-tail:]


@dataclass
class FakeExperiment:
    """One that moves on with each look at it, after the master's ``faults``."""

    trials: list[FakeTrial]
    ends: list[tuple[int, State]]
    faults: list[Exception] = field(default_factory=list)
    state: State = State.RUNNING
    last: State = State.COMPLETED
    killed: bool = False
    id: int = 5

    def reload(self) -> None:
        if self.faults:
            raise self.faults.pop(0)
        if self.ends:
            number, state = self.ends.pop(0)
            next(trial for trial in self.trials if trial.id == number).state = state
        else:
            self.state = self.last

    def list_trials(self) -> list[FakeTrial]:
        return list(self.trials)

    def kill(self) -> None:
        if self.faults:
            raise self.faults.pop(0)
        self.killed = True


def search_in(experiment: FakeExperiment, folder: Path) -> MasterSearch:
    given = checked(folder)
    overlays = {each: overlay_of(each, given) for each in (OWN, FAST, SLOW)}
    return MasterSearch(experiment, FOUND, overlays, 2, sleep=lambda _: None)


def followed(folder: Path, *trials: FakeTrial, ends: list[tuple[int, State]]) -> MasterSearch:
    return search_in(FakeExperiment(list(trials), ends), folder)


def point(stage: Any, micro: Any, accumulation: Any) -> dict[str, Any]:
    overlay = {"zero_optimization": {"stage": stage}, MICRO: micro, ACCUMULATION: accumulation}
    return {"width": 4, "ds_config": overlay}


def test_trials_become_speeds_of_their_ways(tmp_path: Path) -> None:
    search = followed(
        tmp_path,
        FakeTrial(7, point(0, 4, 1), reports={6: 2.0}),
        FakeTrial(8, point(2.0, 4.0, 1.0), reports={6: 3.0}),  # Go's JSON may say 2.0 for 2
        FakeTrial(9, point(3, 1, 4), log=("[rank=1] error   CUDA out of memory. Tried", "the launcher ended")),
        ends=[(8, State.COMPLETED), (7, State.COMPLETED), (9, State.ERROR)],
    )
    ended = [trial.number for trial in iter(search.next_ended, None)]
    assert ended == [8, 7, 9]
    outcome = search.outcome()
    assert [trial.number for trial in outcome.trials] == [7, 8, 9]
    assert outcome.trials[0].speeds == {4: 2.0}
    assert outcome.trials[2].why == "out of memory: CUDA out of memory. Tried"
    best = outcome.best()
    assert best is not None and best.way == FAST and best.speed == 3.0


def test_trials_that_were_measured_briefly_are_remarked_on() -> None:
    def outcome(searcher: str, **speeds: float) -> TuneOutcome:
        ways = {"own": OWN, "fast": FAST}
        trials = [TuneTrial(1, ways[name], {16: speed}) for name, speed in speeds.items()]
        return TuneOutcome(searcher, FOUND, (*trials, TuneTrial(3, SLOW, why="died")))

    (said,) = briefly_measured(outcome("grid", own=2.0, fast=200.0), 4.0)
    assert "for 0.08 s" in said and "--steps 800 would take 4 s" in said
    assert briefly_measured(outcome("grid", own=2.0, fast=4.0), 4.0) == ()
    assert briefly_measured(outcome("grid", own=200.0), 0.0) == ()  # --steps were asked for
    assert briefly_measured(outcome("adaptive_asha", own=200.0), 4.0) == ()  # which measures more steps
    assert briefly_measured(outcome("grid"), 4.0) == ()


def test_a_trial_of_no_way_is_an_error(tmp_path: Path) -> None:
    search = followed(tmp_path, FakeTrial(7, point(1, 4, 1)), ends=[(7, State.COMPLETED)])
    with pytest.raises(MasterError, match="trial 7"):
        search.next_ended()


def answer(status: int) -> APIException:
    found = requests.Response()
    found.status_code = status
    return APIException(found)


def test_a_master_that_is_started_anew_is_waited_for(tmp_path: Path) -> None:
    faults = [MasterNotFoundException("refused"), answer(502), answer(429), OSError("reset"), BadResponseException("?")]
    trial = FakeTrial(7, point(0, 4, 1), reports={6: 2.0})
    search = search_in(FakeExperiment([trial], [(7, State.COMPLETED)], faults), tmp_path)
    assert [found.number for found in iter(search.next_ended, None)] == [7]


@pytest.mark.parametrize(
    "fault", [UnauthenticatedException(), ForbiddenException("no"), NotFoundException("gone"), answer(400)]
)
def test_what_a_master_refuses_is_not_asked_again(tmp_path: Path, fault: Exception) -> None:
    search = search_in(FakeExperiment([], [], [fault]), tmp_path)
    with pytest.raises(MasterError, match=r"experiment 5: .*det experiment kill 5"):
        search.next_ended()


def test_a_master_that_stays_away_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "_PATIENCE_SECONDS", 0.0)
    search = search_in(FakeExperiment([], [], [MasterNotFoundException("connection refused")]), tmp_path)
    with pytest.raises(MasterError, match="connection refused"):
        search.next_ended()


def test_an_experiment_that_cannot_be_deleted_is_over(tmp_path: Path) -> None:
    assert search_in(FakeExperiment([], [], last=State.DELETE_FAILED), tmp_path).next_ended() is None


def test_stopping_ends_the_experiment_or_says_that_it_goes_on(tmp_path: Path) -> None:
    experiment = FakeExperiment([], [], [MasterNotFoundException("refused")])
    search = search_in(experiment, tmp_path)
    assert "det experiment kill 5" in str(search.stop()) and not experiment.killed
    assert search.stop() is None and experiment.killed


@pytest.mark.parametrize(
    ("log", "why"),
    [
        (("a", "hyperparameters that cannot be trained: width 3"), "width 3"),
        (("nothing",), "COMPLETED: see det trial logs 7"),
    ],
)
def test_why_a_trial_ended_unmeasured(log: tuple[str, ...], why: str) -> None:
    assert why_ended(FakeTrial(7, {}, State.COMPLETED, log=log)) == why
