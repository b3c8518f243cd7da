"""Copies of a rank's slices, and writers that wait for them."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import pytest
import torch

from zero_trial.checkpoint import snapshot
from zero_trial.checkpoint.format import Slice
from zero_trial.checkpoint.snapshot import SnapshotBuffer

WTE = torch.arange(24.0).view(4, 6)


class Owner:
    """Writes to its tensors when it is told to, after the copies."""

    def __init__(self, *sizes: int) -> None:
        self.tensors = [torch.randn(size) for size in sizes]
        self.calls: list[Callable[[], None]] = []

    def copy_before_write(self, copy: Callable[[], None]) -> None:
        self.calls.append(copy)

    def slices(self, name: str) -> list[Slice]:
        return [Slice.whole(f"{name}{index}", tensor) for index, tensor in enumerate(self.tensors)]

    def write(self) -> None:
        [copy] = self.calls
        copy()
        for tensor in self.tensors:
            tensor.fill_(-1.0)


def values(found: Sequence[Slice]) -> dict[str, torch.Tensor]:
    return {part.name: part.tensor.clone() for part in found}


def test_a_writer_finds_copied_what_it_writes_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """The background is held up before the second part: the owner of the first can write, that of
    the second waits."""
    begun, go = threading.Event(), threading.Event()
    move = ctypes.memmove

    def slow(target: int, source: int, nbytes: int) -> None:
        if source == owners[1].tensors[0].data_ptr():
            begun.set()
            assert go.wait(20.0)
        move(target, source, nbytes)

    monkeypatch.setattr(snapshot.ctypes, "memmove", slow)
    owners = [Owner(5000, 3), Owner(70_000), Owner(0, 1)]
    parts = [(owner.copy_before_write, owner.slices(str(index))) for index, owner in enumerate(owners)]
    expected = {part.name: part.tensor.clone() for _, own in parts for part in own} | {"at once": WTE.view(-1).clone()}
    at_once = WTE.clone()
    taken = SnapshotBuffer().take([Slice.whole("at once", at_once)], parts)
    at_once.zero_()
    thread = threading.Thread(target=taken.finish)
    thread.start()
    assert begun.wait(20.0)
    owners[0].write()
    writers = [threading.Thread(target=owner.write) for owner in owners[1:]]
    for writer in writers:
        writer.start()
    writers[0].join(0.02)
    assert all(writer.is_alive() for writer in writers)
    go.set()
    for each in (thread, *writers):
        each.join()
    found = values(taken.slices)
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
    assert taken.waited > 0


@pytest.mark.parametrize("how", ["given up", "failed"])
def test_a_snapshot_that_will_not_be_finished_holds_no_writer_back(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: int) -> None:
        raise MemoryError

    owner = Owner(5000)
    taken = SnapshotBuffer().take([], [(owner.copy_before_write, owner.slices("w"))])
    monkeypatch.setattr(snapshot.ctypes, "memmove", fail)
    if how == "given up":
        taken.given_up = True
    with pytest.raises(MemoryError) if how == "failed" else nullcontext():
        taken.finish()
    owner.write()
    assert owner.tensors[0].eq(-1.0).all()


def test_copies_of_every_size_and_dtype() -> None:
    torch.manual_seed(1)
    tensors = [torch.randn(9_000_000), torch.rand(3).bfloat16(), torch.rand(()), torch.arange(7), torch.zeros(0)]
    buffer = SnapshotBuffer()
    copies = buffer.take([Slice.whole(str(number), tensor) for number, tensor in enumerate(tensors)]).slices
    for tensor, copy in zip(tensors, copies, strict=True):
        assert torch.equal(copy.tensor, tensor.view(-1)) and copy.shape == tuple(tensor.shape)
        assert not tensor.numel() or copy.tensor.data_ptr() != tensor.data_ptr()


def test_memory_of_a_kernel_that_knows_no_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 12345)
    [copy] = SnapshotBuffer().take([Slice.whole("w", WTE)]).slices
    assert torch.equal(copy.tensor, WTE.view(-1))
