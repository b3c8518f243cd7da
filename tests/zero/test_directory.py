"""Tests for zero_trial/zero/directory.py."""

from __future__ import annotations

import gc
import weakref

import torch
from torch import nn

from zero_trial.zero.directory import by_holder, forget, holder_of, own, register


class Keeper:
    def open(self, params: list[nn.Parameter]) -> None: ...

    def close(self, params: list[nn.Parameter], source: int | None) -> None: ...


def parameter() -> nn.Parameter:
    return nn.Parameter(torch.zeros(2))


def test_from_a_parameter_to_its_holder() -> None:
    keeper, mine, other = Keeper(), parameter(), parameter()
    register([mine], keeper)
    assert holder_of(mine) is keeper
    assert holder_of(other) is None
    assert holder_of(mine.data) is None
    forget([mine, other])
    assert holder_of(mine) is None


def test_the_directory_keeps_neither_alive() -> None:
    keeper, param = Keeper(), parameter()
    register([param], keeper)
    del keeper
    gc.collect()
    assert holder_of(param) is None


def test_an_owned_holder_lives_as_long_as_its_parameters() -> None:
    keeper, param = Keeper(), parameter()
    watch = weakref.ref(keeper)
    own([param], keeper)
    del keeper
    gc.collect()
    assert holder_of(param) is watch()
    assert watch() is not None
    del param
    gc.collect()
    assert watch() is None


def test_the_last_registration_counts() -> None:
    first, second, param = Keeper(), Keeper(), parameter()
    own([param], first)
    register([param], second)
    assert holder_of(param) is second


def test_parameters_by_holder_in_the_order_of_first_sight() -> None:
    first, second = Keeper(), Keeper()
    a, b, c, stranger = (parameter() for _ in range(4))
    register([a, c], first)
    register([b], second)
    found = by_holder([stranger, b, a, c])
    assert [holder for holder, _ in found] == [second, first]
    assert found[1][1][0] is a
    assert found[1][1][1] is c
