"""Sweeps driven by Determined's ``det``: searchers, crashes, crowds, and a master that is killed in
the middle."""

from __future__ import annotations

import json
import random
import socket
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.master.det import Det, running, until
from zero_trial.master.search.searcher import Stream

RECORDED: dict[str, Any] = json.loads((Path(__file__).parent / "search" / "determined.json").read_text())


@pytest.fixture(scope="module")
def det(tmp_path_factory: pytest.TempPathFactory, master_options: tuple[str, ...]) -> Iterator[Det]:
    with running(tmp_path_factory.mktemp("sweeps"), *master_options) as made:
        yield made


def states(det: Det, number: int) -> Counter[str]:
    return Counter(trial["state"].removeprefix("STATE_") for trial in det.trials(number))


def searcher(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "metric": "validation_loss", "smaller_is_better": True, **more}


@pytest.mark.smoke
def test_a_grid_has_every_point_once_and_goes_on_past_those_that_crash(det: Det) -> None:
    """Four trials on four slots; half of them crash, and are tried again as often as they may."""
    number = det.create(
        searcher=searcher("grid"),
        data={"ds_config": {"train_micro_batch_size_per_gpu": 1}},
        hyperparameters={
            "steps": 2,
            "crash": {"type": "categorical", "vals": [False, True]},
            "ds_config": {"zero_optimization": {"stage": {"type": "int", "minval": 1, "maxval": 2, "count": 2}}},
        },
        max_restarts=1,
    )
    assert det.wait(number) == "COMPLETED"
    found = det.trials(number)
    points = [(each["hparams"]["crash"], each["hparams"]["ds_config"]["zero_optimization"]["stage"]) for each in found]
    assert sorted(points) == [(crash, stage) for crash in (False, True) for stage in (1, 2)]
    assert states(det, number) == {"COMPLETED": 2, "ERROR": 2}
    assert {(each["hparams"]["crash"], each["restarts"]) for each in found} == {(False, 0), (True, 1)}
    crashed = next(each for each in found if each["hparams"]["crash"])
    assert det.logs(crashed["id"]).count("crashes on purpose") == 2
    assert det.experiment(number)["bestTrialSearcherMetric"] == 0.5


ASHA = {
    "searcher": searcher(
        "adaptive_asha",
        max_trials=5,
        max_time=4,
        time_metric="batches",
        divisor=2,
        max_concurrent_trials=4,
        mode="aggressive",
    ),
    "hyperparameters": {"steps": 4, "pause": 0.2, "x": {"type": "double", "minval": 1.0, "maxval": 9.0}},
    "reproducibility": {"experiment_seed": 7},
}


def test_a_master_killed_while_trials_start_and_in_mid_search_goes_on(det: Det) -> None:
    """Five trials of adaptive_asha. The trials that run while the master is away go on, and none
    is lost or run twice."""
    begun, moments = set((det.root / "allocations").iterdir()), random.Random(1)
    number = det.create(**ASHA)
    until(lambda: set((det.root / "allocations").iterdir()) > begun, "no trial begins")
    for _ in range(2):  # four trials start on four slots
        time.sleep(moments.uniform(0.0, 0.5))
        det.kill_9()
        det.up()
    until(lambda: any(trial["totalBatchesProcessed"] >= 1 for trial in det.trials(number)), "no trial ever reports")
    before = {trial["id"]: trial["hparams"]["x"] for trial in det.trials(number)}
    det.kill_9()
    with pytest.raises(ConnectionError):  # at once, where det would try for 16 seconds
        socket.create_connection(("127.0.0.1", int(det.url.rpartition(":")[2])))
    address = det.url
    det.up()
    assert det.url == address, "the running trials know the master by its address"
    assert det.wait(number) == "COMPLETED"
    trials = det.trials(number)
    assert len(trials) == 5
    assert before.items() <= {trial["id"]: trial["hparams"]["x"] for trial in trials}.items()
    assert {(trial["state"], trial["restarts"]) for trial in trials} == {("STATE_COMPLETED", 0)}
    stream, space = Stream(7), ASHA["hyperparameters"]
    drawn = [(f"{number}.{name}", hparams) for name, hparams, _ in (stream.trial(space) for _ in range(5))]
    assert [(trial["taskId"], trial["hparams"]) for trial in trials] == drawn
    reached = sorted(trial["totalBatchesProcessed"] for trial in trials)
    assert reached[-1] == 4
    for trial in trials:
        reports = [
            each["training"]["totalBatches"]
            for each in det.json("trial", "describe", str(trial["id"]))["workloads"]
            if each.get("training")
        ]
        assert reports == list(range(1, trial["totalBatchesProcessed"] + 1)), "no step lost, none counted twice"
