"""Comet, with a stand-in for its package."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from zero_trial.ds_config.keys_running import CometSection
from zero_trial.engine.monitors import Comet


class Experiment:
    def __init__(self) -> None:
        self.name: str | None = None
        self.logged: list[tuple[str, float, int]] = []
        self.ended = False

    def set_name(self, name: str) -> None:
        self.name = name

    def log_metric(self, name: str, value: float, step: int) -> None:
        self.logged.append((name, value, step))

    def flush(self) -> None:
        pass

    def end(self) -> None:
        self.ended = True


@pytest.fixture
def comet(monkeypatch: pytest.MonkeyPatch) -> tuple[Experiment, dict[str, Any]]:
    experiment, given = Experiment(), {}
    package = ModuleType("comet_ml")

    def start(**options: Any) -> Experiment:
        given.update(options)
        return experiment

    package.start = start  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "comet_ml", package)
    return experiment, given


def test_what_the_section_says_is_passed_on(comet: tuple[Experiment, dict[str, Any]]):
    experiment, given = comet
    section = CometSection(
        enabled=True,
        project="p",
        workspace="w",
        api_key="k",
        experiment_key="e",
        online=False,
        mode="get",
        experiment_name="n",
    )
    Comet(section).close()
    assert given == {
        "project": "p",
        "workspace": "w",
        "api_key": "k",
        "experiment_key": "e",
        "online": False,
        "mode": "get",
    }
    assert experiment.name == "n" and experiment.ended


def test_what_is_not_said_is_left_to_comet(comet: tuple[Experiment, dict[str, Any]]):
    Comet(CometSection(enabled=True))
    assert comet[1] == {} and comet[0].name is None


def test_the_interval_is_per_name(comet: tuple[Experiment, dict[str, Any]]):
    writer = Comet(CometSection(enabled=True, samples_log_interval=10))
    for samples in (4, 8, 12, 14, 20, 24):
        writer.write([("a", samples, samples)])
    writer.write([("b", 1.0, 24)])
    assert comet[0].logged == [("a", 4.0, 4), ("a", 14.0, 14), ("a", 24.0, 24), ("b", 1.0, 24)]
