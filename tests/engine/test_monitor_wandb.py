"""Weights & Biases, with a stand-in for its package."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from zero_trial.ds_config.keys_running import WandbSection
from zero_trial.engine.monitors import Wandb


class Run:
    def __init__(self) -> None:
        self.logged: list[tuple[dict[str, float], int]] = []
        self.finished = False

    def log(self, values: dict[str, float], step: int) -> None:
        self.logged.append((values, step))

    def finish(self) -> None:
        self.finished = True


def test_the_section_and_the_events_arrive(monkeypatch: pytest.MonkeyPatch):
    run, given = Run(), {}
    package = ModuleType("wandb")

    def init(**options: Any) -> Run:
        given.update(options)
        return run

    package.init = init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", package)
    writer = Wandb(WandbSection(enabled=True, group="g", team="t", project="p"))
    writer.write([("a", 1, 8), ("b", 2.5, 8)])
    writer.flush()
    writer.close()
    assert given == {"project": "p", "group": "g", "entity": "t"}
    assert run.logged == [({"a": 1.0}, 8), ({"b": 2.5}, 8)]
    assert run.finished
