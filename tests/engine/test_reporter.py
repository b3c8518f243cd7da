"""Reporters and the null object."""

from __future__ import annotations

import torch

from zero_trial.engine.observe import StepReporter, StepReporterGroup, report_to


class Recorder(StepReporter):
    def __init__(self, log: list[str]) -> None:
        self.log = log

    def saw_loss(self, loss: torch.Tensor) -> None:
        self.log.append(f"loss {loss.item():g}")

    def after_step(self) -> None:
        self.log.append("step")

    def close(self) -> None:
        self.log.append("close")


def test_a_group_tells_all():
    logs: list[list[str]] = [[], []]
    group = report_to([Recorder(log) for log in logs])
    assert isinstance(group, StepReporterGroup)
    group.saw_loss(torch.tensor(2.0))
    group.after_step()
    group.close()
    assert logs == [["loss 2", "step", "close"]] * 2


def test_nobody_and_one():
    nobody = report_to([])
    assert type(nobody) is StepReporter
    nobody.saw_loss(torch.tensor(1.0))
    nobody.after_step()
    nobody.close()
    one = Recorder([])
    assert report_to([one]) is one
