"""Saves that training does not wait for: what is in them, what goes wrong in the background, and
kills at every moment."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.test_writer import WTE, FullDisk, KilledDisk, load, part_of, save_alone
from tests.support.thread_ranks import ThreadRank, on_ranks
from zero_trial.checkpoint import background, writer
from zero_trial.checkpoint.background import BackgroundSaver, SnapshotBuffer
from zero_trial.checkpoint.folder import list_checkpoints
from zero_trial.checkpoint.format import FileRecord, Slice
from zero_trial.checkpoint.range_reader import CheckpointReader
from zero_trial.checkpoint.writer import DurableFiles, SingleRank, save_checkpoint
from zero_trial.errors import CheckpointError


class SlowDisk(DurableFiles):
    """Writes tensors when ``go`` is set."""

    def __init__(self) -> None:
        self.go = threading.Event()

    def write(self, path: Path, chunks: Iterable[bytes | memoryview]) -> FileRecord:
        assert self.go.wait(20.0)
        return super().write(path, chunks)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("size", [1, 3])
def test_it_holds_what_was_there_at_the_call(tmp_path: Path, size: int) -> None:
    """Also where training changes it before a byte is written; bytes and names are those of a save
    that waits."""

    def work(rank: ThreadRank) -> list[Any]:
        facts = {"step": 1, "state": {"lr": 0.1}, "rank_state": {"rank": rank.index}, "world": {"zero_stage": 2}}
        slices = [*part_of(rank.index, size), Slice.whole(f"rank{rank.index}/t", torch.tensor(5.0))]
        save_checkpoint(tmp_path / "waits", "a", slices, **facts, ranks=rank)  # type: ignore[arg-type]
        disk = SlowDisk()
        saver = BackgroundSaver(rank, disk)
        final = saver.save(tmp_path / "does not", "a", slices, **facts)  # type: ignore[arg-type]
        for part in slices:
            part.tensor.fill_(-1.0)
        found = [saver.current is not None, saver.poll(), final.exists()]
        disk.go.set()
        return [*found, saver.wait(), saver.current is not None, saver.wait(), saver.poll()]

    final = tmp_path / "does not" / "a"
    assert on_ranks(size, work) == [[True, None, False, final, False, None, None]] * size
    assert content(final) == content(tmp_path / "waits" / "a")
    CheckpointReader(final).verify()
    assert [path.name for path in final.parent.iterdir()] == ["a"]


def test_a_later_boundary_makes_it_a_checkpoint_on_all_ranks_at_once(tmp_path: Path) -> None:
    def work(rank: ThreadRank) -> list[Path | None]:
        disk = SlowDisk()
        saver = BackgroundSaver(rank, disk)
        saver.save(tmp_path, "a", part_of(rank.index, 2), step=1)
        polled = [saver.poll()]
        if rank.index == 0:
            disk.go.set()
        polled += [saver.poll() for _ in range(3)]  # the other rank has written nothing
        disk.go.set()
        while polled[-1] is None:
            polled.append(saver.poll())
        return polled

    first, second = on_ranks(2, work)
    assert first == second and first[:4] == [None] * 4 and first[-1] == tmp_path / "a"


def test_copies_reuse_their_memory_and_what_is_on_disk_is_streamed(tmp_path: Path) -> None:
    """Also parts of one tensor, in memory and on disk."""
    saver, flat, areas = BackgroundSaver(SingleRank()), WTE.view(-1), set()
    near, far = Slice("w", (24,), 0, 10, flat[:10]), Slice("w", (24,), 10, 24, flat[10:])
    for step in (1, 2):
        saver.save(tmp_path, f"step-{step}", [*part_of(0, 1, WTE * step), near], on_disk=[far], step=step)
        saver.wait()
        areas.add(saver._buffer._area.data_ptr())
    assert len(areas) == 1
    reader = CheckpointReader(tmp_path / "step-2")
    reader.verify()
    assert torch.equal(reader.read("param/wte"), WTE * 2) and torch.equal(reader.read("w"), flat)
    files = {name: [piece.file for piece in entry.pieces] for name, entry in reader.manifest.tensors.items()}
    assert files["param/wte"] == ["rank-00000.safetensors"]
    assert files["w"] == ["rank-00000.safetensors", "rank-00000-nvme.safetensors"]


def test_memory_that_is_not_there_is_not_taken_and_one_rank_refuses_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "available_memory", lambda: 0)

    def work(rank: ThreadRank) -> int:
        saver = BackgroundSaver(rank)
        saver.save(tmp_path, "a", part_of(0, 1) if rank.index else [], step=1)  # one that copies nothing asks nothing
        with pytest.raises(CheckpointError, match=r"checkpoint\.writer\.decoupled"):
            saver.wait()
        return saver._buffer.nbytes

    assert on_ranks(2, work) == [0, 0] and list(tmp_path.iterdir()) == []


class CountingDisk(DurableFiles):
    """Stops after the first chunk of tensors until ``go`` is set; counts chunks."""

    def __init__(self) -> None:
        self.go, self.begun, self.chunks = threading.Event(), threading.Event(), 0

    def write(self, path: Path, chunks: Iterable[bytes | memoryview]) -> FileRecord:
        def counted() -> Iterator[bytes | memoryview]:
            for chunk in chunks:
                self.chunks += 1
                yield chunk
                self.begun.set()
                assert self.go.wait(20.0)

        return super().write(path, counted())


def test_a_save_that_is_given_up_ends_between_two_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "CHUNK_BYTES", 1 << 12)
    disk = CountingDisk()
    saver = BackgroundSaver(SingleRank(), disk)
    saver.save(tmp_path, "a", [Slice.whole("w", torch.ones(1 << 20))], step=1)
    assert disk.begun.wait(20.0) and saver.current is not None
    saver.current._given_up.set()
    disk.go.set()
    saver.abandon()
    assert disk.chunks == 1 and saver.current is None
    assert [path.name.partition("-")[0] for path in tmp_path.iterdir()] == ["a.tmp"]


def test_a_fault_is_logged_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The program may end before it is raised."""
    saver = BackgroundSaver(SingleRank(), FullDisk(0))
    saver.save(tmp_path, "a", part_of(0, 1), step=1)
    assert saver.current is not None
    saver.current.thread.join(20.0)
    [line] = caplog.records
    assert line.levelname == "ERROR" and "No space left" in caplog.text and str(tmp_path / "a") in caplog.text


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("room", [0, 100, 330])
def test_a_disk_that_fills_is_raised_on_all_ranks_and_keeps_the_old(tmp_path: Path, room: int, waits: bool) -> None:
    """At once, or at the next boundary where training does not wait."""
    save_alone(tmp_path, "step-1", 1)

    def work(rank: ThreadRank) -> str:
        # 330 is enough for rank 1's file: then the fault comes from rank 0's manifest
        disk = FullDisk(room) if rank.index == (0 if room == 330 else 1) else DurableFiles()
        saver = BackgroundSaver(rank, disk)
        with pytest.raises(CheckpointError) as raised:
            if waits:
                save_checkpoint(tmp_path, "step-2", part_of(rank.index, 2), step=2, ranks=rank, disk=disk)
            saver.save(tmp_path, "step-2", part_of(rank.index, 2), step=2)
            while True:
                saver.poll()
        assert raised.value.exit_code == 5 and saver.current is None and saver.wait() is None
        return str(raised.value)

    first, second = on_ranks(2, work)
    assert first == second and "No space left" in first and "given up" not in first, (first, second)
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"] and torch.equal(load(tmp_path / "step-1"), WTE)


@pytest.mark.parametrize("what", ["file", "end of a file", "folder", "mapped file", "no memory"])
def test_what_vanishes_or_fails_on_one_rank_is_raised_on_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    save_alone(tmp_path, "step-1", 1)

    def lose(self: Any, slices: Any, later: Any) -> Any:
        raise MemoryError("no room for copies")

    disks = [SlowDisk(), SlowDisk()]  # else both may be done before anything is removed
    written = {"file": (1, "rank-00001.report"), "folder": (0, "rank-00000.safetensors")}
    written["end of a file"] = written["file"]

    def work(rank: ThreadRank) -> bool:
        saver = BackgroundSaver(rank, FullDisk(0) if what == "mapped file" and rank.index else disks[rank.index])
        if what == "no memory" and rank.index:
            monkeypatch.setattr(saver, "_buffer", type("Small", (), {"take": lose})())
        on_disk = [Slice.whole("there", torch.ones(3))] if rank.index and what == "mapped file" else []
        saver.save(tmp_path, "step-2", part_of(rank.index, 2), on_disk=on_disk, step=2)
        if what in written and rank.index == 0:
            number, name = written[what]
            disks[number].go.set()
            [temporary] = tmp_path.glob("step-2.tmp-*")
            while not (temporary / name).exists():
                time.sleep(0.001)
            if what == "end of a file":
                os.truncate(temporary / "rank-00001.safetensors", 8)
            else:
                disks[0].remove_folder(temporary)
        for disk in disks if rank.index == 0 else ():
            disk.go.set()
        with pytest.raises(CheckpointError):
            saver.wait()
        return saver.current is not None

    assert on_ranks(2, work) == [False, False] and [path.name for path in tmp_path.iterdir()] == ["step-1"]


def test_a_further_save_waits_for_the_first_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    disk = SlowDisk()
    saver = BackgroundSaver(SingleRank(), disk)
    saver.save(tmp_path, "a", part_of(0, 1), step=1)
    threading.Timer(0.05, disk.go.set).start()
    saver.save(tmp_path, "b", part_of(0, 1, WTE * 2), step=2)
    assert torch.equal(load(tmp_path / "a"), WTE) and "waits" in caplog.text
    saver.wait()
    assert torch.equal(load(tmp_path / "b"), WTE * 2)


def test_a_program_that_changes_its_folder_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    disk = SlowDisk()
    saver = BackgroundSaver(SingleRank(), disk)
    saver.save("here", "a", part_of(0, 1), step=1)
    monkeypatch.chdir(tmp_path / "elsewhere")
    disk.go.set()
    assert saver.wait() == tmp_path / "here" / "a" and torch.equal(load(tmp_path / "here" / "a"), WTE)


@pytest.mark.parametrize("broken", [{"state": {1, 2}}, {"state": float("nan")}, {"rank_state": {1, 2}}])
def test_state_that_is_not_json_is_refused_before_anything_is_replaced(tmp_path: Path, broken: dict[str, Any]) -> None:
    save_alone(tmp_path, "a", 1)
    with pytest.raises(CheckpointError):
        save_checkpoint(tmp_path, "a", part_of(0, 1), step=2, **broken)
    saver = BackgroundSaver(SingleRank())
    saver.save(tmp_path, "a", part_of(0, 1), step=2, **broken)
    with pytest.raises(CheckpointError):
        saver.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["a"] and CheckpointReader(tmp_path / "a").manifest.step == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(("how", "tag"), [("before", "b"), ("after", "a"), ("half", "a")])
def test_killed_at_every_change_of_the_disk(tmp_path: Path, how: str, tag: str) -> None:
    """Of two ranks, of which one is killed; the other's thread would end with its process."""
    outcomes, number = set(), 0
    for killed in (0, 1):
        for at in range(1, 30):
            number += 1
            directory = tmp_path / str(number)
            save_alone(directory, "a", 1, value=1.0)
            disks = [DurableFiles(), DurableFiles()]
            disks[killed] = KilledDisk(at, how)

            def work(rank: ThreadRank, directory: Path = directory, disks: list[Any] = disks) -> None:
                saver = BackgroundSaver(rank, disks[rank.index])
                try:
                    saver.save(directory, tag, part_of(rank.index, 2, WTE * 2), step=2)
                except BaseException:
                    rank.abort()
                    return
                if saver.current is not None:
                    saver.current.thread.join(0.05 if isinstance(disks[1], KilledDisk) else 5.0)
                    saver.abandon()

            on_ranks(2, work)
            *_, found = list_checkpoints(directory)
            CheckpointReader(found.folder).verify()
            assert torch.equal(load(found.folder), WTE * found.step)
            outcomes.add(found.step)
            save_alone(directory, tag, 3, value=3.0)
            assert torch.equal(load(directory / tag), WTE * 3)
            assert {path.name for path in directory.iterdir()} <= {"a", "b"}
            if disks[killed].count < at:
                break  # it was complete before
    assert outcomes == {1, 2}


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

    monkeypatch.setattr(background.ctypes, "memmove", slow)
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
    for each in writers:
        each.start()
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
    monkeypatch.setattr(background.ctypes, "memmove", fail)
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


PROGRAM = """
import sys, torch
from pathlib import Path
from zero_trial.checkpoint.background import BackgroundSaver
from zero_trial.checkpoint.format import Slice
from zero_trial.checkpoint.writer import SingleRank
BackgroundSaver(SingleRank()).save(Path(sys.argv[1]), "a", [Slice.whole("w", torch.ones(3_000_000))], step=1)
raise SystemExit("an error that leaves the program")
"""


@pytest.mark.slow
def test_a_program_that_ends_finishes_it(tmp_path: Path) -> None:
    """Also one that an error ends."""
    assert subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], timeout=60, check=False).returncode == 1
    reader = CheckpointReader(tmp_path / "a")
    reader.verify()
    assert torch.equal(reader.read("w"), torch.ones(3_000_000))
