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


def fault(act: Callable[..., Any], *args: Any) -> str:
    """What the device says of ``act``; empty where it finds nothing wrong."""
    here = device.use()
    try:
        act(*args)
        here.scheduler.wait_stream(-1)
    except (DeviceFault, RuntimeError) as error:
        return str(error)
    return ""


def faults_on_two_streams() -> dict[str, str]:
    """What the device says of work on a second stream, by what is done."""
    side = torch.standin.Stream()

    def on_side(act: Callable[[], torch.Tensor], *, ordered: bool = True) -> torch.Tensor:
        if ordered:
            side.wait_stream(torch.standin.current_stream())
        with torch.standin.stream(side):
            return act()

    def reads(ordered: bool) -> None:
        value = there(64) * 2
        on_side(lambda: (value + 1).sum(), ordered=ordered)
        torch.standin.current_stream().wait_stream(side)

    def writes_back(ordered: bool) -> None:
        value = there(64)
        on_side(lambda: value.add_(1))
        if ordered:
            torch.standin.current_stream().wait_stream(side)
        value.sum()

    def elsewhere() -> None:  # other bytes of the same allocation
        value = there(64)
        on_side(lambda: value[:32].add_(1))
        value[32:].mul_(2)
        torch.standin.current_stream().wait_stream(side)

    def free(how: str) -> None:
        value = there(256) + 1
        total = on_side(value.sum)
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

    acts: dict[str, tuple[Any, ...]] = {"elsewhere": (elsewhere,)}
    acts |= {how: (free, how) for how in ("recorded", "waited", "synchronized", "freed too early")}
    for act in (reads, writes_back):
        acts |= {act.__name__: (act, False), f"{act.__name__} in order": (act, True)}
    found = {}
    for name, (act, *args) in acts.items():
        found[name] = fault(act, *args)
        fault(torch.standin.synchronize)  # what is left over is freed
    return found


def test_a_second_stream_without_an_event_between_is_an_error(ranks: RankPool) -> None:
    found = {name: said for name, said in ranks.run(faults_on_two_streams)[0].items() if said}
    words = {
        "reads": ("aten::mul", "no event orders them", "test_standin.py:"),
        "writes_back": ("aten::sum", "aten::add"),
        "freed too early": ("freed", "aten::sum"),
    }
    assert found.keys() == words.keys(), found
    assert all(word in found[name] for name, expected in words.items() for word in expected)


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
