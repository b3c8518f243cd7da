"""Who is told of losses and finished steps: the null object, and a group of several."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Reporter:
    """Tells nothing: the null object for ranks other than 0 and for runs that ask for nothing."""

    def saw_loss(self, loss: torch.Tensor) -> None:
        """A micro-batch's loss, before any scaling."""

    def saw_evaluation(self, loss: torch.Tensor) -> None:
        """The mean loss of an evaluation that did not call the engine itself: a pipeline's."""

    def after_step(self) -> None:
        """An optimizer step is over, applied or skipped."""

    def close(self) -> None:
        """Nothing more will come."""


class ReporterGroup(Reporter):
    """Several reporters, one after the other."""

    def __init__(self, members: Sequence[Reporter]) -> None:
        self._members = tuple(members)

    def saw_loss(self, loss: torch.Tensor) -> None:
        for member in self._members:
            member.saw_loss(loss)

    def saw_evaluation(self, loss: torch.Tensor) -> None:
        for member in self._members:
            member.saw_evaluation(loss)

    def after_step(self) -> None:
        for member in self._members:
            member.after_step()

    def close(self) -> None:
        for member in self._members:
            member.close()


def report_to(members: Sequence[Reporter]) -> Reporter:
    """One object for all ``members``: the null object for none, the member itself for one."""
    if len(members) == 1:
        return members[0]
    return ReporterGroup(members) if members else Reporter()
