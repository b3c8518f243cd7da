"""Saving: files, folders, kills at every moment, and ranks that disagree."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from tests.support.thread_ranks import ThreadRank, on_ranks
from zero_trial.checkpoint.folder import checkpoint_folder, list_checkpoints
from zero_trial.checkpoint.format import FileRecord, Slice
from zero_trial.checkpoint.range_reader import CheckpointReader, read_digest
from zero_trial.checkpoint.writer import (
    CHUNK_BYTES,
    DurableFiles,
    begin,
    commit,
    piece_key,
    save_checkpoint,
    shard_chunks,
    write_rank,
)
from zero_trial.errors import CheckpointError


def test_an_existing_file_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"old")
    with pytest.raises(FileExistsError):
        DurableFiles().write(tmp_path / "f", [b"new"])
    assert (tmp_path / "f").read_bytes() == b"old"


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool]


def test_every_dtype_comes_back_bit_for_bit(tmp_path: Path) -> None:
    """Also odd numbers, parts of one tensor, and names with any characters."""
    raw, flat = torch.arange(48, dtype=torch.uint8).remainder(2), torch.arange(10.0)
    slices = [Slice.whole(f"t/{dtype}", raw.to(dtype).view(6, 8)) for dtype in DTYPES]
    slices.append(Slice.whole('a "quoted" é/名\\', torch.tensor([float("nan"), float("inf"), -0.0, 1e-45])))
    slices += [Slice("w", (20,), 0, 4, flat[:4]), Slice("w", (20,), 10, 16, flat[4:])]
    record = DurableFiles().write(tmp_path / "x.safetensors", shard_chunks(slices))
    assert record == read_digest(tmp_path / "x.safetensors")
    with safe_open(tmp_path / "x.safetensors", framework="pt") as file:
        assert set(file.keys()) == {piece_key(part) for part in slices}
        for part in slices:
            read = file.get_tensor(piece_key(part))
            assert read.dtype == part.dtype and torch.equal(read.view(torch.uint8), part.flat.view(torch.uint8))


def test_systems_without_posix_fadvise_write_large_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "posix_fadvise")
    record = DurableFiles().write(tmp_path / "f", [bytes(CHUNK_BYTES + 1)])
    assert record == read_digest(tmp_path / "f")


def test_memory_is_not_copied() -> None:
    tensor = torch.zeros(1000)
    chunks = shard_chunks([Slice.whole("t", tensor)])
    next(chunks)
    view = next(chunks)
    tensor[0] = 1.0
    assert bytes(view[:4]) == b"\x00\x00\x80\x3f"


WTE = torch.arange(24.0).view(4, 6)


def part_of(rank: int, size: int, value: torch.Tensor = WTE) -> list[Slice]:
    """This rank's share of one tensor laid flat and cut into equal parts (the last may be short or
    empty)."""
    per_rank = -(-value.numel() // size)
    start, stop = min(rank * per_rank, value.numel()), min((rank + 1) * per_rank, value.numel())
    return [Slice("param/wte", tuple(value.shape), start, stop, value.reshape(-1)[start:stop].clone())]


def save_alone(directory: Path, tag: str, step: int, value: float = 1.0, disk: DurableFiles | None = None) -> Path:
    return save_checkpoint(directory, tag, part_of(0, 1, WTE * value), step=step, state={"value": value}, disk=disk)


def load(folder: Path) -> torch.Tensor:
    return CheckpointReader(folder).read("param/wte")


@pytest.mark.parametrize("size", [1, 2, 3, 30])
def test_ranks_together(tmp_path: Path, size: int) -> None:
    def work(rank: ThreadRank) -> Path:
        slices = part_of(rank.index, size) + ([Slice.whole("t", torch.tensor(5.0))] if rank.index == size - 1 else [])
        facts = {"step": 3, "state": {"lr": 0.1}, "rank_state": {"rank": rank.index}}
        return save_checkpoint(tmp_path, "a", slices, **facts, ranks=rank)  # type: ignore[arg-type]

    assert on_ranks(size, work) == [tmp_path / "a"] * size
    reader = CheckpointReader(tmp_path / "a")
    reader.verify()
    assert torch.equal(reader.read("param/wte"), WTE) and reader.read("t").item() == 5.0
    assert (reader.manifest.step, reader.manifest.state) == (3, {"lr": 0.1})
    assert reader.manifest.rank_state == tuple({"rank": index} for index in range(size))
    assert reader.manifest.world == {"ranks": size} and [path.name for path in tmp_path.iterdir()] == ["a"]


def test_same_content_gives_same_files(tmp_path: Path) -> None:
    contents = [
        {path.name: path.read_bytes() for path in save_alone(tmp_path / name, "a", 1).iterdir()} for name in ("x", "y")
    ]
    assert contents[0] == contents[1]


def test_missing_and_doubled_elements_are_named_on_every_rank(tmp_path: Path) -> None:
    hole = on_ranks(2, lambda r: save_checkpoint(tmp_path, "a", part_of(r.index, 3), step=1, ranks=r))
    twice = on_ranks(2, lambda r: save_checkpoint(tmp_path, "a", part_of(0, 1), step=1, ranks=r))
    for errors, message in ((hole, "no piece for 16 to 24"), (twice, "elements 0 to 24 again")):
        for error in errors:
            assert isinstance(error, CheckpointError) and "param/wte" in str(error) and message in str(error)
    assert list(tmp_path.iterdir()) == []


class FullDisk(DurableFiles):
    """Takes ``room`` bytes, then no more."""

    def __init__(self, room: int) -> None:
        self.room = room

    def write(self, path: Path, chunks: Iterable[bytes | memoryview]) -> FileRecord:
        def counted() -> Iterable[bytes | memoryview]:
            for chunk in chunks:
                self.room -= len(chunk)
                if self.room < 0:
                    raise OSError(errno.ENOSPC, "No space left on device")
                yield chunk

        return super().write(path, counted())


class SharedDisk(DurableFiles):
    """Another run saves under the same tag in the middle of this one's save."""

    def write(self, path: Path, chunks: Iterable[bytes | memoryview]) -> FileRecord:
        if path.name != "manifest.json":
            save_alone(path.parent.parent, "a", 7)
        return super().write(path, chunks)


def test_a_save_whose_folder_another_run_removes_says_so(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"a\.tmp-.*: the folder is gone: another run .*Give each run its own folder"
    ):
        save_alone(tmp_path, "a", 1, disk=SharedDisk())
    assert [found[:2] for found in list_checkpoints(tmp_path)] == [(7, "a")]


@pytest.mark.parametrize(
    "tag", ["", ".", "..", "a/b", "x.tmp-1", "x.old-1", "a\\b", "a\0", "a\nb", "\ud800", "x" * 201]
)
def test_tags_are_plain_names(tmp_path: Path, tag: str) -> None:
    with pytest.raises(CheckpointError, match=r"not a tag|the tag is too long"):
        save_alone(tmp_path, tag, 1)


class Killed(BaseException):
    """The process is gone: nothing after it runs, not even clean-up."""


class KilledDisk(DurableFiles):
    """Dies at the ``at``-th change of the disk: before it, after it, or with half of a file
    written."""

    def __init__(self, at: int, how: str) -> None:
        self.at, self.how, self.count = at, how, 0

    def _now(self) -> bool:
        self.count += 1
        if self.count > self.at:
            raise Killed  # whatever the dead process would have done next
        return self.count == self.at

    def _around(self, act: Any, *arguments: Any) -> Any:
        here = self._now()
        if here and self.how == "before":
            raise Killed
        result = act(*arguments)
        if here:
            raise Killed
        return result

    def make_folder(self, folder: Path) -> None:
        self._around(super().make_folder, folder)

    def write(self, path: Path, chunks: Iterable[bytes | memoryview]) -> FileRecord:
        if self.how == "half" and self.count + 1 == self.at:
            self._now()
            content = b"".join(bytes(chunk) for chunk in chunks)
            path.write_bytes(content[: len(content) // 2])
            raise Killed
        record: FileRecord = self._around(super().write, path, chunks)
        return record

    def sync_folder(self, folder: Path) -> None:
        self._around(super().sync_folder, folder)

    def rename(self, source: Path, destination: Path) -> None:
        self._around(super().rename, source, destination)

    def remove_folder(self, folder: Path) -> None:
        self._around(super().remove_folder, folder)


def changes_of_a_save(directory: Path, tag: str) -> int:
    save_alone(directory, "a", 1)
    disk = KilledDisk(10_000, "before")
    save_alone(directory, tag, 2, disk=disk)
    return disk.count


# a new tag, and one that replaces the only checkpoint there is
@pytest.mark.parametrize(("how", "tag"), [("before", "a"), ("after", "a"), ("half", "a"), ("half", "b")])
def test_killed_at_every_change_of_the_disk(tmp_path: Path, how: str, tag: str) -> None:
    changes = changes_of_a_save(tmp_path / "count", tag)
    assert changes == (6 if tag == "b" else 8)
    outcomes = set()
    for at in range(1, changes + 1):
        directory = tmp_path / str(at)
        save_alone(directory, "a", 1, value=1.0)
        with contextlib.suppress(Killed):
            save_alone(directory, tag, 2, value=2.0, disk=KilledDisk(at, how))
        *_, found = list_checkpoints(directory)
        CheckpointReader(found.folder).verify()
        assert torch.equal(load(found.folder), WTE * found.step)
        assert load(checkpoint_folder(directory, "a")).numel() == 24
        outcomes.add(found.step)
        # the next save of the same tag works and clears what the kill left behind
        save_alone(directory, tag, 3, value=3.0)
        assert torch.equal(load(directory / tag), WTE * 3) and {path.name for path in directory.iterdir()} <= {"a", "b"}
    assert outcomes == {1, 2}


def test_a_folder_that_rank_0_does_not_see_is_explained(tmp_path: Path) -> None:
    reports = [
        write_rank(begin(tmp_path / "here" / "a", DurableFiles()), 0, part_of(0, 2), DurableFiles(), rank_state=None)
    ]
    other_host = begin(tmp_path / "there" / "a", DurableFiles())
    reports.append(write_rank(other_host, 1, part_of(1, 2), DurableFiles(), rank_state=None))
    with pytest.raises(CheckpointError, match="all hosts share"):
        commit(other_host, tmp_path / "there" / "a", reports, 1, None, {}, DurableFiles())
    assert not other_host.exists()


def test_a_folder_of_the_user_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "thesis.txt").write_text("years of work")
    (tmp_path / "notes").write_text("a file")
    for tag in ("models", "notes"):
        with pytest.raises(CheckpointError, match="another file or folder has the name"):
            save_alone(tmp_path, tag, 1)
    assert (tmp_path / "models" / "thesis.txt").read_text() == "years of work"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["models", "notes"]


def test_an_empty_folder_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    assert torch.equal(load(save_alone(tmp_path, "a", 1)), WTE) and [path.name for path in tmp_path.iterdir()] == ["a"]


def test_all_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: set[int] = set()
    monkeypatch.setattr(os, "fsync", lambda file: synced.add(os.fstat(file).st_ino))
    save_alone(tmp_path, "a", 1)
    assert {path.stat().st_ino for path in (tmp_path, *tmp_path.rglob("*"))} <= synced
