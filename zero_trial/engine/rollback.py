"""A schedule and the settings that it writes, as they were before a step that may turn out to be skipped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


def can_go_back(schedule: Any) -> bool:
    """Whether ``schedule`` can be put back to an earlier state: torch's and ours can, and whatever else a checkpoint holds."""
    return hasattr(schedule, "state_dict") and hasattr(schedule, "load_state_dict")


def remember(schedule: Any, groups: Sequence[dict[str, Any]]) -> Callable[[], None]:
    """What puts ``schedule`` and ``groups`` (an optimizer's, which it writes its values into) back to what they are now."""
    state = _kept(schedule.state_dict())
    settings = [_kept({key: value for key, value in group.items() if key != "params"}) for group in groups]

    def go_back() -> None:
        schedule.load_state_dict(state)
        for group, kept in zip(groups, settings, strict=True):
            group.update(kept)

    return go_back


def _kept(value: Any) -> Any:
    """A copy that later writes do not reach: of plain containers and tensors; what else a schedule may hold is kept as it is."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if type(value) is dict:
        return {key: _kept(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_kept(each) for each in value)
    return value
