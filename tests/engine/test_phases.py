"""Watchers of phases and the null object."""

from __future__ import annotations

from zero_trial.engine.profile import PhaseGroup, Phases, watch_with


class Recorder(Phases):
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def begin(self, phase: str) -> None:
        self.log.append(f"+{self.name}.{phase}")

    def end(self, phase: str) -> None:
        self.log.append(f"-{self.name}.{phase}")


def test_a_group_nests_its_members():
    log: list[str] = []
    group = watch_with([Recorder("a", log), Recorder("b", log)])
    group.begin("forward")
    group.end("forward")
    assert log == ["+a.forward", "+b.forward", "-b.forward", "-a.forward"]


def test_nobody_and_one():
    assert type(watch_with([])) is Phases
    alone = Recorder("a", [])
    assert watch_with([alone]) is alone
    assert isinstance(watch_with([alone, alone]), PhaseGroup)
