"""Counting the bytes of live storages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from zero_trial.planning import live_bytes
from zero_trial.planning.live_bytes import AbsentDevice, LiveBytes


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


def test_an_address_that_is_given_again_is_another_storage() -> None:
    live = LiveBytes()
    with live:
        for _ in range(50):
            torch.zeros(1000)
        kept = torch.zeros(7)
    assert live.live == 28 and live.peak == 4000 and kept.numel()


def test_what_fake_tensors_answer() -> None:
    with FakeTensorMode(), LiveBytes():
        x = torch.zeros(3)
        assert x.sum().item() == 1.0
        assert not bool((x == x).all())
        with pytest.raises(LookupError, match="an integer is read"):
            torch.zeros(3, dtype=torch.int64).sum().item()


def test_memory_of_one_device_only() -> None:
    with LiveBytes("cpu") as live:
        here = torch.ones(1000)
        there = torch.ones(1000, device="meta")
        live.hold([here, there])
    assert live.live == here.numel() * 4


def test_the_host_beside_an_absent_device_has_tensors_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """They need none of torch's fake tensors, which import its compiler."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a fake tensor")

    monkeypatch.setattr(FakeTensorMode, "__init__", refuse)
    with AbsentDevice() as live:
        masters = torch.zeros(1 << 40)  # 4 TiB
        assert (live.host, live.live) == (4 << 40, 0)
        low = masters[:100].view(torch.uint8)
        assert (low.shape, low.device.type, live.host) == ((400,), "cpu", 4 << 40)
        gradient = torch.zeros(1 << 40, dtype=torch.bfloat16, device="meta")
        masters.add_(gradient.to("cpu")).mul_(torch.tensor(2.0))
        gradient.copy_(masters)
        assert (live.host, live.live, live.host_peak) == (4 << 40, 2 << 40, 6 << 40)
        weight = torch.nn.Parameter(masters)
        weight.grad = torch.empty_like(masters)
        assert weight.grad.device.type == "cpu" and live.host == 8 << 40
        parts = masters.split(1 << 39)
        assert [part.untyped_storage().nbytes() for part in parts] == [4 << 40] * 2 and live.host == 8 << 40
        assert (masters.norm().item(), str(masters)[:6]) == (1.0, "tensor")
        masters.untyped_storage().resize_(0)
        assert live.host == 4 << 40
        steps = torch.zeros(())  # is counted, and has a value
        assert (steps + 1).item() == 1.0
    del masters, low, weight, parts, steps
    assert live.host == 0


def test_an_operation_on_many_tensors_looks_at_each_of_them_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looks, storages = [], live_bytes._storages
    monkeypatch.setattr(live_bytes, "_storages", lambda args: looks.append(args) or storages(args))
    with LiveBytes() as live:
        tensors = [torch.zeros(10) for _ in range(50)]
        looks.clear()
        torch._foreach_mul(tensors, 2.0)
    assert len(looks) == 1 and live.peak == 2 * 50 * 40


def test_what_only_writes_needs_no_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """normal_() of torch's decompositions imports its compiler."""
    live_bytes.forget_outcomes()
    calls, outcome = [], live_bytes._outcome
    monkeypatch.setattr(live_bytes, "_outcome", lambda func, *rest: calls.append(func) or outcome(func, *rest))
    with live_bytes.RepeatedMeta():
        weight = torch.empty(3, 4, device="meta")
        assert torch.nn.init.normal_(weight) is weight and torch.nn.init.zeros_(weight) is weight
    assert calls == []


@pytest.mark.parametrize(
    "write",
    [
        lambda: torch.empty(3, device="meta").normal_(std=-1),
        lambda: torch.empty(3, device="meta").cumsum_(dim=5),
        lambda: torch.empty(3, device="meta", dtype=torch.long).div_(2),
        lambda: torch.empty(3, device="meta", dtype=torch.long).normal_(),
    ],
)
def test_what_cannot_be_written_is_an_error(write: Callable[[], Any]) -> None:
    live_bytes.forget_outcomes()
    for _ in range(2):
        with live_bytes.RepeatedMeta(), pytest.raises((RuntimeError, IndexError)):
            write()


def test_an_operation_is_computed_once_for_operands_of_one_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """A view stays in the memory of its operand, and a wrong shape is an error each time."""
    known: dict[Any, Any] = {}
    monkeypatch.setattr(live_bytes, "_OUTCOMES", known)
    x, y = torch.empty(3, 4, device="meta"), torch.empty(4, 3, device="meta").t()
    with live_bytes.RepeatedMeta():
        sizes = []
        for _ in range(2):
            twice = [x + 1, x + 1.5, y + 1, x.long() + 1, x.long() + 1.5, torch.nn.functional.gelu(x)]
            assert [each.dtype for each in twice[3:5]] == [torch.int64, torch.float32]
            assert [each.stride() for each in twice[1:3]] == [(4, 1), (1, 3)]
            assert x.normal_() is x and x.add_(y) is x
            assert len({each.untyped_storage()._cdata for each in (x, *twice)}) == 7
            assert x.view(12).untyped_storage()._cdata == x.untyped_storage()._cdata
            assert [each.shape for each in torch.max(x, 0)] == [(4,), (4,)]
            z = torch.empty(2, 1, device="meta")
            assert z.t_() is z and z.shape == (1, 2)
            with pytest.raises(RuntimeError):
                x + torch.empty(5, device="meta")
            sizes.append(len(known))
        assert sizes[0] == sizes[1] > 6
        assert torch.ones(2).add_(1).tolist() == [2, 2]  # what has values is computed


def test_what_else_decides_about_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default dtype, the memory of ``out=``, and subclasses of tensors."""
    monkeypatch.setattr(live_bytes, "_OUTCOMES", {})
    before = torch.get_default_dtype()
    n, x = torch.empty(3, dtype=torch.int64, device="meta"), torch.empty(3, 4, device="meta")

    class Other(torch.Tensor):
        pass

    with live_bytes.RepeatedMeta():
        try:
            found = []
            for dtype in (torch.float32, torch.float64):
                torch.set_default_dtype(dtype)
                found.append((n / n).dtype)
        finally:
            torch.set_default_dtype(before)
        assert found == [torch.float32, torch.float64]
        for _ in range(2):
            out = torch.empty(0, device="meta")
            assert torch.add(x, 1, out=out) is out and out.shape == (3, 4)
            same = torch.empty(3, 4, device="meta")
            assert live_bytes._on_meta(torch.ops.aten.add.out, (x, 1), {"out": same})[0] is same
    plain, other = live_bytes._form(x), live_bytes._form(x.as_subclass(Other))
    assert plain != other
    live_bytes.forget_outcomes()
    assert not live_bytes._OUTCOMES
