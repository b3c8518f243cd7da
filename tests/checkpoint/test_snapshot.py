"""Copies of a rank's slices: their order, who waits for them, and what writes to them meanwhile."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

from zero_trial.checkpoint import Slice, snapshot
from zero_trial.checkpoint.snapshot import CopyOrder, SnapshotBuffer

WTE = torch.arange(24.0).view(4, 6)


@pytest.mark.parametrize(
    ("blocks", "calls", "expected"),
    [
        ([2, 1], [None] * 4, [(0, 0), (0, 1), (1, 0), None]),
        ([2, 0, 2], [2, None, None, None, 2], [(2, 0), (0, 0), (0, 1), (2, 1), None]),
        ([1, 2], [1, 1, 1, None, None], [(1, 0), (1, 1), None, (0, 0), None]),
        ([], [None], [None]),
        ([0], [0, None], [None, None]),
    ],
)
def test_blocks_are_taken_in_order_unless_a_part_is_asked_for(
    blocks: list[int], calls: list[int | None], expected: list[tuple[int, int] | None]
) -> None:
    order = CopyOrder(blocks)
    assert [order.take(part) for part in calls] == expected


def test_a_part_is_complete_when_its_last_block_is_copied_and_not_when_it_is_taken() -> None:
    order = CopyOrder([2, 0])
    assert order.complete(1) and not order.complete(0)
    assert order.take() == (0, 0) and order.take() == (0, 1)
    assert not order.finish(0) and not order.complete(0)
    assert order.finish(0) and order.complete(0)


def test_what_nobody_has_begun_can_be_left_out() -> None:
    order = CopyOrder([3, 2])
    assert order.take() == (0, 0)
    order.drop()
    assert order.take() is None and not order.complete(0) and order.complete(1)
    assert order.finish(0)


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


def test_writers_find_what_they_write_to_copied_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 1 KiB, so that there are many; the background copies between the writers."""
    monkeypatch.setattr(snapshot, "_BLOCK", 1 << 10)
    monkeypatch.setattr(snapshot, "_SMALL", 1 << 8)
    owners = [Owner(5000, 3), Owner(1), Owner(0, 70_000)]
    parts = [(owner, owner.slices(str(index))) for index, owner in enumerate(owners)]
    expected = {part.name: part.tensor.clone() for _, own in parts for part in own}
    taken = SnapshotBuffer().take([Slice.whole("at once", WTE)], parts)
    thread = threading.Thread(target=taken.finish)
    owners[2].write()
    thread.start()
    owners[0].write()
    owners[1].write()
    thread.join()
    found = values(taken.slices)
    assert torch.equal(found.pop("at once"), WTE.view(-1)) and found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert taken.fault is None and taken.waited > 0


def test_a_writer_waits_for_a_block_that_the_background_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go = threading.Event(), threading.Event()
    move = snapshot.ctypes.memmove

    def slow(*block: int) -> None:
        if threading.current_thread() is thread:
            begun.set()
            assert go.wait(20.0)
        move(*block)

    monkeypatch.setattr(snapshot.ctypes, "memmove", slow)
    owner = Owner(5000)
    before = owner.tensors[0].clone()
    taken = SnapshotBuffer().take([], [(owner, owner.slices("w"))])
    thread = threading.Thread(target=taken.finish)
    thread.start()
    assert begun.wait(20.0)
    writer = threading.Thread(target=owner.write)
    writer.start()
    writer.join(0.02)
    assert writer.is_alive() and torch.equal(owner.tensors[0], before)
    go.set()
    writer.join()
    thread.join()
    assert torch.equal(taken.slices[0].tensor, before) and taken.fault is None


@pytest.mark.parametrize("when", ["before it is copied", "after it is copied"])
def test_a_write_without_asking_is_found(when: str) -> None:
    owner, calm = Owner(5000), Owner(5000)
    taken = SnapshotBuffer().take([], [(owner, owner.slices("state/exp_avg/w")), (calm, calm.slices("v"))])
    if when == "after it is copied":
        taken.finish()
    owner.tensors[0].view(2, -1)[0].mul_(0.5)
    taken.finish()
    calm.write()
    assert (taken.fault is not None) == (when == "before it is copied")
    assert taken.fault is None or "state/exp_avg/w" in taken.fault


def test_a_snapshot_that_is_given_up_holds_nobody_back() -> None:
    owner = Owner(5000)
    taken = SnapshotBuffer().take([], [(owner, owner.slices("w"))])
    taken.give_up()
    owner.write()
    taken.finish()
    assert owner.tensors[0].eq(-1.0).all()


def test_copies_of_every_size_and_dtype() -> None:
    torch.manual_seed(1)
    tensors = [torch.randn(9_000_000), torch.rand(3).bfloat16(), torch.rand(()), torch.arange(7), torch.zeros(0)]
    buffer = SnapshotBuffer()
    copies = buffer.take([Slice.whole(str(number), tensor) for number, tensor in enumerate(tensors)]).slices
    for tensor, copy in zip(tensors, copies, strict=True):
        assert torch.equal(copy.tensor, tensor.view(-1)) and copy.shape == tuple(tensor.shape)
        assert not tensor.numel() or copy.tensor.data_ptr() != tensor.data_ptr()


@pytest.mark.parametrize("hint", ["of another kernel", "of another system"])
def test_memory_of_a_kernel_that_knows_no_huge_pages(monkeypatch: pytest.MonkeyPatch, hint: str) -> None:
    if hint == "of another kernel":
        monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 12345)
    else:
        monkeypatch.delattr(mmap, "MADV_HUGEPAGE")
    [copy] = SnapshotBuffer().take([Slice.whole("w", WTE)]).slices
    assert torch.equal(copy.tensor, WTE.view(-1))


def test_all_copies_are_in_one_area() -> None:
    """Also where another thread makes a larger one meanwhile."""
    buffer = SnapshotBuffer()

    class Parts(list[Slice]):
        def __iter__(self) -> Iterator[Slice]:
            for part in super().__iter__():
                yield part
                buffer.reserve(buffer.nbytes + 4096)

    copies = buffer.take(Parts([Slice.whole("a", WTE), Slice.whole("b", WTE)])).slices
    assert len({copy.tensor.untyped_storage().data_ptr() for copy in copies}) == 1
    assert all(torch.equal(copy.tensor, WTE.view(-1)) for copy in copies)
