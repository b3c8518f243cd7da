"""Finding checkpoints: by step, whatever their names, without a pointer file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from zero_trial.checkpoint import Slice, latest_checkpoint, list_checkpoints, save_checkpoint
from zero_trial.checkpoint.folder import checkpoint_folder
from zero_trial.errors import CheckpointError


def save(directory: Path, tag: str, step: int) -> Path:
    return save_checkpoint(directory, tag, [Slice.whole("w", torch.ones(3))], step=step)


def test_latest_is_the_highest_step_not_the_last_name(tmp_path: Path) -> None:
    for tag, step in (("global_step9", 9), ("global_step10", 10), ("best", 3)):
        save(tmp_path, tag, step)
    assert [(found.step, found.tag) for found in list_checkpoints(tmp_path)] == [
        (3, "best"),
        (9, "global_step9"),
        (10, "global_step10"),
    ]
    latest = latest_checkpoint(tmp_path)
    assert latest is not None
    assert latest == (10, "global_step10", tmp_path / "global_step10")


def test_empty_or_absent(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path) is None
    assert latest_checkpoint(tmp_path / "absent") is None


def test_other_things_in_the_folder_do_not_matter(tmp_path: Path) -> None:
    save(tmp_path, "a", 1)
    (tmp_path / "logs").mkdir()
    (tmp_path / "latest").write_text("nonsense")
    (tmp_path / "b.tmp-123").mkdir()
    broken = save(tmp_path, "c", 5) / "manifest.json"
    broken.write_text("{")
    told: list[str] = []
    assert [found.tag for found in list_checkpoints(tmp_path, told.append)] == ["a"]
    assert len(told) == 1
    assert str(broken) in told[0]


def test_a_tag_that_is_being_replaced_is_found_in_its_old_folder(tmp_path: Path) -> None:
    save(tmp_path, "a", 1).rename(tmp_path / "a.old-123")
    assert checkpoint_folder(tmp_path, "a") == tmp_path / "a.old-123"
    save(tmp_path, "b", 2)
    assert [found.tag for found in list_checkpoints(tmp_path)] == ["a", "b"]


def test_an_unknown_tag_lists_what_there_is(tmp_path: Path) -> None:
    save(tmp_path, "step-1", 1)
    with pytest.raises(CheckpointError, match=r"'step-2', expected one of: step-1"):
        checkpoint_folder(tmp_path, "step-2")
