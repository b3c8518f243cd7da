"""Whatever happens to a checkpoint's files is found, and what was in them is named."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.checkpoint.rank_threads import on_ranks
from tests.checkpoint.test_shelf import trial
from zero_trial.checkpoint import CheckpointReader, Slice, save_checkpoint
from zero_trial.checkpoint.folder import bytes_to_read, find_damage, inspect_folder
from zero_trial.checkpoint.writer import Ranks
from zero_trial.errors import CheckpointError


def saved_by_two(folder: Path) -> Path:
    """``w`` of 10 elements is cut at 6; ``b`` lies with rank 0."""

    def save(ranks: Ranks) -> Path:
        parts = [Slice("param/w", (10,), 0, 6, torch.arange(6.0)), Slice.whole("param/b", torch.ones(3))]
        if ranks.index == 1:
            parts = [Slice("param/w", (10,), 6, 10, torch.arange(6.0, 10.0))]
        return save_checkpoint(folder, "a", parts, step=3, ranks=ranks)

    return on_ranks(2, save)[0]


def flip(path: Path, at: int = -1) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(bytes(content))


def test_a_flipped_bit_is_found_and_what_lies_there_is_named(tmp_path: Path) -> None:
    folder = saved_by_two(tmp_path)
    read: list[int] = []
    saved = inspect_folder(folder).saved[0]
    assert find_damage(saved, read.append) == []
    assert sum(read) == bytes_to_read(saved) == sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    flip(folder / "rank-00001.safetensors")
    (one,) = find_damage(inspect_folder(folder).saved[0])
    assert one.file == folder / "rank-00001.safetensors" and "its content has changed" in one.what
    assert one.tensors == ("param/w[6:10]",)
    flip(folder / "rank-00000.safetensors")
    assert [set(one.tensors) for one in find_damage(inspect_folder(folder).saved[0])] == [
        {"param/b", "param/w[0:6]"},
        {"param/w[6:10]"},
    ]


@pytest.mark.parametrize(
    ("harm", "what"),
    [
        (lambda path: path.unlink(), "it is missing"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), r"\d+ bytes, \d+ were written"),
        (lambda path: path.write_bytes(path.read_bytes() + b"x"), r"\d+ bytes, \d+ were written"),
    ],
)
def test_missing_short_and_grown_files(tmp_path: Path, harm: Callable[[Path], object], what: str) -> None:
    folder = saved_by_two(tmp_path)
    harm(folder / "rank-00000.safetensors")
    (one,) = find_damage(inspect_folder(folder).saved[0])
    assert one.tensors and re.fullmatch(what, one.what)


def test_a_link_out_of_the_folder_is_not_a_file_of_the_checkpoint(tmp_path: Path) -> None:
    folder = saved_by_two(tmp_path)
    shard = folder / "rank-00000.safetensors"
    elsewhere = tmp_path / "elsewhere.safetensors"
    shard.rename(elsewhere)
    shard.symlink_to(elsewhere)
    (one,) = find_damage(inspect_folder(folder).saved[0])
    assert one.file == shard and "symbolic link" in one.what and str(elsewhere) in one.what
    assert not inspect_folder(folder).saved[0].whole
    with pytest.raises(CheckpointError, match="symbolic link"):
        CheckpointReader(folder)
    elsewhere.rename(folder / "blob.safetensors")
    shard.unlink()
    shard.symlink_to("blob.safetensors")  # a link within the folder goes where the folder goes
    assert find_damage(inspect_folder(folder).saved[0]) == [] and inspect_folder(folder).saved[0].whole
    alias = tmp_path / "alias"
    alias.symlink_to(folder)  # so does the folder itself under another name
    assert CheckpointReader(alias).read("param/b").tolist() == [1.0] * 3


def test_a_damaged_manifest(tmp_path: Path) -> None:
    folder = trial(tmp_path, 5)
    flip(folder / "model0/manifest.json", 200)
    (one,) = find_damage(inspect_folder(folder).saved[0])
    assert one.file == folder / "model0/manifest.json" and one.tensors == ()


def test_what_a_trial_adds_is_looked_at_too(tmp_path: Path) -> None:
    folder = trial(tmp_path, 5)
    (folder / "trial_state.json").write_text("{")
    (one,) = find_damage(inspect_folder(folder).saved[0])
    assert "trial_state.json" in one.what
