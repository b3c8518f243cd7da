"""The disk: files get their content and sums in one pass, nothing is overwritten."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from zero_trial.checkpoint.reader import read_digest
from zero_trial.checkpoint.writer import DurableFiles


def test_write_gives_size_and_sum_of_what_is_on_the_disk(tmp_path: Path) -> None:
    record = DurableFiles().write(tmp_path / "f", [b"ab", memoryview(b"cd"), memoryview(bytearray(6)).cast("B")])
    content = (tmp_path / "f").read_bytes()
    assert content == b"abcd" + bytes(6)
    assert (record.bytes, record.sha256) == (10, hashlib.sha256(content).hexdigest())
    assert read_digest(tmp_path / "f", block=3) == record


def test_an_existing_file_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"old")
    with pytest.raises(FileExistsError):
        DurableFiles().write(tmp_path / "f", [b"new"])
    assert (tmp_path / "f").read_bytes() == b"old"


def test_an_existing_folder_is_never_replaced(tmp_path: Path) -> None:
    for name in ("a", "b"):
        DurableFiles().make_folder(tmp_path / "deep" / name)
    with pytest.raises(FileExistsError):
        DurableFiles().rename(tmp_path / "deep" / "a", tmp_path / "deep" / "b")
    with pytest.raises(FileExistsError):
        DurableFiles().make_folder(tmp_path / "deep" / "a")
    DurableFiles().rename(tmp_path / "deep" / "a", tmp_path / "deep" / "c")
    assert sorted(path.name for path in (tmp_path / "deep").iterdir()) == ["b", "c"]


def test_removing_what_is_not_there_is_no_fault(tmp_path: Path) -> None:
    DurableFiles().remove_folder(tmp_path / "absent")
    DurableFiles().sync_folder(tmp_path)
