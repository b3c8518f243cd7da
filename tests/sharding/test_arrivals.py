"""Tests for zero_trial/sharding/param_group.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from zero_trial.sharding.param_group import ParamPublisher


class Parcel:
    """A pending exchange that notes what was asked of it."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def wait_result(self, **_: Any) -> None:
        self.asked.append("result")

    def settle(self) -> None:
        self.asked.append("settle")

    def start_next(self, **_: Any) -> None:
        pass

    def wait(self) -> None:
        self.asked.append("wait")


def test_what_is_under_way_arrives_once() -> None:
    publisher, parcel = ParamPublisher(nn.Linear(2, 2), ()), Parcel()
    publisher._under_way.append(parcel)  # type: ignore[arg-type]
    assert publisher.wait_result() == [parcel]
    assert not publisher.wait_result()
    assert parcel.asked == ["result"]


def test_whoever_calls_a_part_of_the_module_waits_and_strangers_do_not() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    publisher, parcel = ParamPublisher(module, ()), Parcel()
    publisher._under_way.append(parcel)  # type: ignore[arg-type]
    publisher.wait_at_next_forward()
    publisher.wait_at_next_forward()
    nn.Linear(2, 2)(torch.ones(1, 2))
    assert parcel.asked == []
    module[1](torch.ones(1, 2))
    assert parcel.asked == ["result"]
    assert not torch.nn.modules.module._global_forward_pre_hooks


def test_nothing_under_way_needs_no_hook() -> None:
    ParamPublisher(nn.Linear(2, 2), ()).wait_at_next_forward()
    assert not torch.nn.modules.module._global_forward_pre_hooks
