"""The stand-in device keeps its word: what a GPU would answer with wrong values is an error."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.device import device
from tests.support.device.scheduler import DeviceFault
from tests.support.pool import Pools, RankPool, server


@pytest.fixture
def ranks(devices: Pools) -> RankPool:
    return devices(2)


def there(*size: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(size).numel())).view(size).to("standin")


def fault(act: Callable[[], Any]) -> str:
    """What the device says of ``act``; empty where it finds nothing wrong."""
    here = device.use()
    try:
        act()
        here.scheduler.wait_stream(-1)
    except (DeviceFault, RuntimeError) as error:
        return str(error)
    return ""


def wrong_streams() -> dict[str, str]:
    side = torch.standin.Stream()
    found = {}

    def on_side(act: Callable[[], Any], *, ordered: bool) -> None:
        if ordered:
            side.wait_stream(torch.standin.current_stream())
        with torch.standin.stream(side):
            act()

    def reads(ordered: bool) -> None:
        value = there(64) * 2
        on_side(lambda: (value + 1).sum(), ordered=ordered)
        torch.standin.current_stream().wait_stream(side)

    def writes_back(ordered: bool) -> None:
        value = there(64)
        on_side(lambda: value.add_(1), ordered=True)
        if ordered:
            torch.standin.current_stream().wait_stream(side)
        value.sum()

    def elsewhere(_: bool) -> None:  # other bytes of the same allocation
        value = there(64)
        on_side(lambda: value[:32].add_(1), ordered=True)
        value[32:].mul_(2)
        torch.standin.current_stream().wait_stream(side)

    for name, act in {"reads": reads, "writes back": writes_back, "elsewhere": elsewhere}.items():
        for ordered in (True, False):
            found[f"{name} {ordered}"] = fault(lambda: act(ordered))  # noqa: B023
            fault(torch.standin.synchronize)  # what is left over is freed
    return found


def test_another_stream_without_an_event_between_is_an_error(ranks: RankPool) -> None:
    found = ranks.run(wrong_streams)[0]
    assert {key for key, said in found.items() if said} == {"reads False", "writes back False"}, found
    assert "aten::mul" in found["reads False"] and "no event orders them" in found["reads False"]
    assert "aten::sum" in found["writes back False"] and "aten::add" in found["writes back False"]
    assert "test_standin.py:" in found["reads False"]


def early_frees() -> dict[str, str]:
    found, side = {}, torch.standin.Stream()

    def free(how: str) -> None:
        value = there(256) + 1
        side.wait_stream(torch.standin.current_stream())
        with torch.standin.stream(side):
            total = value.sum()
        if how == "recorded":
            value.record_stream(side)
        if how == "waited":
            torch.standin.current_stream().wait_stream(side)
        if how == "synchronized":
            side.synchronize()
        del value
        other = there(256) * 100  # gets the pages where they may be used again
        torch.standin.synchronize()
        assert total.item() == 256 * 255 / 2 + 256, total
        del other

    for how in ("recorded", "waited", "synchronized", "too early"):
        found[how] = fault(lambda: free(how))  # noqa: B023
        fault(torch.standin.synchronize)
    return found


def test_memory_that_is_freed_too_early_is_an_error(ranks: RankPool) -> None:
    found = ranks.run(early_frees)[0]
    assert {key for key, said in found.items() if said} == {"too early"}, found
    assert "freed" in found["too early"] and "aten::sum" in found["too early"]


def touch(log: str) -> None:
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 2)
    faulthandler.enable()
    device.use()
    value = there(8).exp_()
    torch.standin.synchronize()
    ctypes.memmove(value.data_ptr(), b"\0" * 4, 4)


def test_host_code_that_touches_the_device_ends_there(tmp_path: Path) -> None:
    log = tmp_path / "stderr"
    process = server().Process(target=touch, args=(str(log),))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGSEGV
    said = log.read_text()
    assert "host code touches device memory" in said and "aten::exp" in said
    assert "in touch" in said  # faulthandler says where


def summed(*, waits: bool) -> tuple[str, float]:
    value = there(4) + dist.get_rank()
    results: list[torch.Tensor] = []

    def act() -> None:
        work = dist.all_reduce(value, async_op=True)
        if waits:
            work.wait()
        results.append(value * 2)
        work.wait()

    said = fault(act)
    torch.standin.synchronize()
    return said, results[0].sum().item() if results else 0.0


def test_a_collective_is_work_of_the_device(ranks: RankPool) -> None:
    assert ranks.run(summed, waits=True) == [("", 32.0), ("", 32.0)]
    for said, _ in ranks.run(summed, waits=False):
        assert "all_reduce" in said and "aten::mul" in said
