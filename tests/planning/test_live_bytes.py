"""Counting the bytes of live storages."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from zero_trial.planning import live_bytes
from zero_trial.planning.live_bytes import LiveBytes


def test_live_and_peak() -> None:
    live = LiveBytes()
    with live:
        a = torch.zeros(100)
        b = a + 1  # 800 bytes now
        del a
        c = b.view(10, 10)  # a view costs nothing
        assert (live.live, live.peak) == (400, 800)
        live.restart()
        c += 1
        assert live.peak == 400
    del b, c
    assert live.live == 0
    with LiveBytes("cpu") as live:  # memory of one device only; an address that is given again is another storage
        for _ in range(50):
            torch.zeros(1000)
        here, there = torch.ones(7), torch.ones(1000, device="meta")
        live.hold([here, there])
    assert live.live == 28 and live.peak == 4000


def test_memory_that_no_operation_made_counts_only_when_it_is_held() -> None:
    before, live = torch.zeros(100), LiveBytes()
    with live:
        before.view(10, 10).add_(1)
        assert live.live == 0
        live.hold([before, before[:50]])
        assert (live.live, live.peak) == (400, 400)


def test_storages_that_are_resized() -> None:
    live, resize = LiveBytes(), torch.UntypedStorage.resize_
    with live:
        full = torch.zeros(100)
        full.untyped_storage().resize_(0)
        live.restart()
        assert (live.live, live.peak) == (0, 0)
        full.untyped_storage().resize_(800)
        assert live.live == 800
        small = torch.zeros(1)
        assert live.peak == 804 and small.numel()
    assert torch.UntypedStorage.resize_ is resize


def test_saved_for_backward_without_parameters_and_each_storage_once() -> None:
    weight = torch.nn.Parameter(torch.ones(10, 10))
    live = LiveBytes()
    with live:
        live.hold([weight])
        x = torch.ones(4, 10)  # the batch: there before
        with live.saving():
            hidden = torch.tanh(x @ weight)  # saved: tanh's result, 160 bytes
            loss = (hidden * hidden).sum()  # saved: the same storage, twice
            assert live.saved == 160
            del hidden
            loss.backward()
        assert (live.saved, live.saved_peak) == (0, 160)


def test_what_fake_tensors_answer() -> None:
    with FakeTensorMode(), LiveBytes():
        x = torch.zeros(3)
        assert x.sum().item() == 1.0
        assert not bool((x == x).all())
        with pytest.raises(LookupError, match="an integer is read"):
            torch.zeros(3, dtype=torch.int64).sum().item()


def test_an_operation_on_many_tensors_looks_at_each_of_them_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looks, storages = [], live_bytes._storages
    monkeypatch.setattr(live_bytes, "_storages", lambda args: looks.append(args) or storages(args))
    with LiveBytes() as live:
        tensors = [torch.zeros(10) for _ in range(50)]
        looks.clear()
        torch._foreach_mul(tensors, 2.0)
    assert len(looks) == 1 and live.peak == 2 * 50 * 40
