"""Grid search."""

from __future__ import annotations

from typing import Any

from tests.master.search.driving import Play
from zero_trial.master.search import ExitReason, build

STAGES = {"stage": {"type": "categorical", "vals": [0, 1, 2, 3]}, "model": {}}


def play(space: dict[str, Any] = STAGES, most: int = 2) -> Play:
    return Play(build({"name": "grid", "metric": "loss", "max_concurrent_trials": most}, space, seed=1))


def test_every_point_once_from_the_end():
    it = play()
    assert it.start() == "+1 +2"
    assert [it.exit(1), it.exit(2), it.exit(4), it.exit(3)] == ["+3", "+4", "", "."]
    assert [values["stage"] for values in it.hparams] == [3, 2, 1, 0]
    assert it.hparams[0]["model"] == {}


def test_an_invalid_point_is_gone():
    it = play(most=1)
    it.start()
    assert [it.exit(number, ExitReason.INVALID_HP) for number in (1, 2, 3)] == ["+2", "+3", "+4"]
    assert it.exit(4) == "."


def test_all_at_once():
    assert play(most=0).start() == "+1 +2 +3 +4"


def test_no_axes_is_one_point():
    it = play({"lr": 0.1})
    assert (it.start(), it.exit(1)) == ("+1", ".")


def test_progress():
    it = play()
    it.start()
    it.exit(1, ExitReason.INVALID_HP)
    assert it.search.progress({it.ids[1]: 0.5}) == (1 + 0.5) / 4
