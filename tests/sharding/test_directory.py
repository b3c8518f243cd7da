"""Tests for zero_trial/sharding/full_params.py."""

from __future__ import annotations

import gc
import weakref

import torch
from torch import nn

from zero_trial.sharding.full_params import by_owner, forget_owner, own_params, owner_of_param, register_owner


class Keeper:
    def open(self, params: list[nn.Parameter]) -> None: ...

    def close(self, params: list[nn.Parameter], source: int | None) -> None: ...


def parameter() -> nn.Parameter:
    return nn.Parameter(torch.zeros(2))


def test_from_a_parameter_to_its_holder() -> None:
    keeper, mine, other = Keeper(), parameter(), parameter()
    register_owner([mine], keeper)
    assert owner_of_param(mine) is keeper
    assert owner_of_param(other) is None
    assert owner_of_param(mine.data) is None
    forget_owner([mine, other])
    assert owner_of_param(mine) is None


def test_the_directory_keeps_neither_alive() -> None:
    keeper, param = Keeper(), parameter()
    register_owner([param], keeper)
    del keeper
    gc.collect()
    assert owner_of_param(param) is None


def test_an_owned_holder_lives_as_long_as_its_parameters() -> None:
    keeper, param = Keeper(), parameter()
    watch = weakref.ref(keeper)
    own_params([param], keeper)
    del keeper
    gc.collect()
    assert owner_of_param(param) is watch()
    assert watch() is not None
    del param
    gc.collect()
    assert watch() is None


def test_the_last_registration_counts() -> None:
    first, second, param = Keeper(), Keeper(), parameter()
    own_params([param], first)
    register_owner([param], second)
    assert owner_of_param(param) is second


def test_parameters_by_holder_in_the_order_of_first_sight() -> None:
    first, second = Keeper(), Keeper()
    a, b, c, stranger = (parameter() for _ in range(4))
    register_owner([a, c], first)
    register_owner([b], second)
    found = by_owner([stranger, b, a, c])
    assert [holder for holder, _ in found] == [second, first]
    assert found[1][1][0] is a
    assert found[1][1][1] is c
