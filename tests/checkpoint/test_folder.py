"""The checkpoints in a folder: which are there, which is the latest, and what is damaged."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.thread_ranks import on_ranks
from zero_trial.checkpoint.folder import bytes_to_read, checkpoint_folder, find_damage, inspect_folder, list_checkpoints
from zero_trial.checkpoint.format import Slice
from zero_trial.checkpoint.writer import Ranks, save_checkpoint
from zero_trial.errors import CheckpointError, ConfigError


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
    assert list_checkpoints(tmp_path)[-1] == (10, "global_step10", tmp_path / "global_step10")


def test_other_things_in_the_folder_do_not_matter(tmp_path: Path) -> None:
    save(tmp_path, "a", 1)
    (tmp_path / "logs").mkdir()
    (tmp_path / "latest").write_text("nonsense")
    (tmp_path / "b.tmp-123").mkdir()
    broken = save(tmp_path, "c", 5) / "manifest.json"
    broken.write_text("{")
    reports: list[str] = []
    assert [found.tag for found in list_checkpoints(tmp_path, reports.append)] == ["a"] and len(reports) == 1
    assert str(broken) in reports[0]


def test_a_tag_that_is_being_replaced_is_found_in_its_old_folder(tmp_path: Path) -> None:
    save(tmp_path, "a", 1).rename(tmp_path / "a.old-123")
    assert checkpoint_folder(tmp_path, "a") == tmp_path / "a.old-123"
    save(tmp_path, "b", 2)
    assert [found.tag for found in list_checkpoints(tmp_path)] == ["a", "b"]


def test_a_checkpoint_that_lost_its_manifest_is_reported(tmp_path: Path) -> None:
    save(tmp_path, "a", 1)
    save(tmp_path, "b", 2)
    (tmp_path / "b" / "manifest.json").unlink()
    (tmp_path / "plots").mkdir()  # another folder of the user's
    (tmp_path / "c.tmp-host-1-2").mkdir()  # and a save under way
    (tmp_path / "c.tmp-host-1-2" / "rank-00000.safetensors").write_bytes(b"")
    said: list[str] = []
    assert [found.tag for found in list_checkpoints(tmp_path, said.append)] == ["a"]
    assert said == [f"{tmp_path / 'b'}: a checkpoint without its manifest.json"]


def test_an_unknown_tag_lists_what_there_is(tmp_path: Path) -> None:
    save(tmp_path, "step-1", 1)
    with pytest.raises(CheckpointError, match=r"'step-2', expected one of: step-1"):
        checkpoint_folder(tmp_path, "step-2")


def engine(folder: Path, tag: str, step: int, **world: Any) -> Path:
    """A small checkpoint of one engine."""
    slices = [Slice.whole("param/w", torch.arange(5.0)), Slice.whole("state/exp_avg/w", torch.zeros(5))]
    return save_checkpoint(folder, tag, slices, step=step, state={"aliases": {}}, world={"zero_stage": 2} | world)


def trial(folder: Path, step: int, models: int = 1, trial_id: str = "x") -> Path:
    """A trial's checkpoint as a run's folder holds it."""
    place = folder / f"step-{step:06d}"
    for index in range(models):
        engine(place, f"model{index}", step)
    (place / "metadata.json").write_text(json.dumps({"steps_completed": step, "trial_id": trial_id}))
    (place / "trial_state.json").write_text("{}")
    return place


def seen(folder: Path) -> list[tuple[str, int | None, bool, bool]]:
    return [(one.folder.name, one.step, one.whole, one.leftover) for one in inspect_folder(folder).saved]


def test_a_runs_folder(tmp_path: Path) -> None:
    for step in (20, 100, 3):
        trial(tmp_path / "checkpoints", step)
    shelf = inspect_folder(tmp_path)
    assert [one.step for one in shelf.saved] == [3, 20, 100] and shelf.latest() is shelf.saved[-1] and not shelf.single
    one = shelf.saved[0]
    assert (one.files, one.facts("ranks"), one.facts("zero_stage"), one.facts("mesh")) == (4, (1,), (2,), ())
    assert one.bytes == sum(path.stat().st_size for path in one.folder.rglob("*") if path.is_file())
    assert one.saved == max(path.stat().st_mtime for path in one.folder.rglob("*") if path.is_file())


def test_one_checkpoint_alone(tmp_path: Path) -> None:
    place = trial(tmp_path, 7, models=2)
    for folder, engines in ((place, ["model0", "model1"]), (place / "model1", ["model1"])):
        shelf = inspect_folder(folder)
        assert shelf.single and [engine.folder.name for engine in shelf.saved[0].engines] == engines
        assert shelf.saved[0].step == 7


def test_an_engines_folder(tmp_path: Path) -> None:
    for tag, step in (("b", 4), ("a", 9)):
        engine(tmp_path, tag, step)
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "empty").mkdir()
    assert seen(tmp_path) == [("b", 4, True, False), ("a", 9, True, False)]


def test_checkpoints_of_several_trials(tmp_path: Path) -> None:
    """As in a cluster's storage."""
    for step, name in ((1, "a"), (2, "b"), (3, "a")):
        trial(tmp_path, step, trial_id=name)
    shelf = inspect_folder(tmp_path)
    assert shelf.trials == ("a", "b") and [shelf.is_latest(one) for one in shelf.saved] == [False, True, True]


def test_a_folder_of_folders_of_checkpoints(tmp_path: Path) -> None:
    for place, tag, step in (("a", "x", 1), ("a", "y", 2), ("b", "x", 3), ("hf/checkpoint-4", "global_step4", 4)):
        engine(tmp_path / place, tag, step)
    engine(tmp_path / "hf/checkpoint-5", "global_step5", 5)
    (tmp_path / "hf/weights").mkdir()
    (tmp_path / "hf/weights/model.safetensors").write_bytes(b"")  # exported: not a checkpoint
    shelf = inspect_folder(tmp_path)
    assert [(shelf.name(one), one.whole, shelf.is_latest(one)) for one in shelf.saved] == [
        ("a/x", True, False),
        ("a/y", True, True),
        ("b/x", True, True),
        ("hf/checkpoint-4/global_step4", True, False),
        ("hf/checkpoint-5/global_step5", True, True),
    ]
    newest = inspect_folder(tmp_path / "hf").latest()
    assert newest is not None and newest.step == 5


def test_what_is_broken_is_said_and_is_not_the_latest(tmp_path: Path) -> None:
    for step in range(1, 6):
        trial(tmp_path, step)
    (tmp_path / "step-000005/model0/rank-00000.safetensors").unlink()
    manifest = tmp_path / "step-000004/model0/manifest.json"
    manifest.write_text(manifest.read_text().replace('"step": 4', '"step": 5'))
    (tmp_path / "step-000003/metadata.json").unlink()
    (tmp_path / "step-000002/model0/manifest.json").unlink()
    shelf = inspect_folder(tmp_path)
    latest = shelf.latest()
    assert latest is not None and latest.step == 1
    faults = {one.folder.name: one.fault or "" for one in shelf.saved}
    assert "a file is missing" in faults["step-000005"] and "rank-00000" in faults["step-000005"]
    assert "the manifest is damaged" in faults["step-000004"]
    assert "metadata.json: a part of the checkpoint cannot be read: got the file is missing" in faults["step-000003"]
    assert "model0: the manifest is missing" in faults["step-000002"] and faults["step-000001"] == ""


def test_what_a_killed_save_leaves_is_left_over(tmp_path: Path) -> None:
    kept = engine(tmp_path, "a", 4)
    shutil.copytree(kept, tmp_path / "a.old-1")
    shutil.copytree(kept, tmp_path / "b.old-1")
    shutil.copytree(kept, tmp_path / "a.tmp-1")
    (tmp_path / "c.tmp-1").mkdir()
    assert sorted(seen(tmp_path)) == [
        ("a", 4, True, False),
        ("a.old-1", 4, False, True),
        ("a.tmp-1", 4, False, True),
        ("b.old-1", 4, True, False),  # what was to replace it is not there: loaders take it
        ("c.tmp-1", None, False, True),
    ]


def test_a_folder_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise PermissionError(13, "Permission denied", str(tmp_path))

    monkeypatch.setattr(Path, "iterdir", refused)
    with pytest.raises(CheckpointError, match="cannot be read: got Permission denied"):
        inspect_folder(tmp_path)


@pytest.mark.parametrize("odd", ["[]", "3", "{", '{"steps_completed": "x", "trial_id": [1]}', "\udcff", "[" * 100_000])
def test_odd_metadata(tmp_path: Path, odd: str) -> None:
    folder = trial(tmp_path, 4)
    (folder / "metadata.json").write_bytes(odd.encode("utf-8", "surrogateescape"))
    assert inspect_folder(tmp_path).saved[0].step == 4  # as the engine has it


@pytest.mark.parametrize("kind", ["missing", "file", "empty"])
def test_where_there_is_none(tmp_path: Path, kind: str) -> None:
    place = tmp_path / "x"
    if kind == "file":
        place.write_text("")
    if kind == "empty":
        place.mkdir()
    with pytest.raises(ConfigError, match=r"folder does not exist|is a file|no checkpoints were found"):
        inspect_folder(place)


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
    assert one.file == folder / "rank-00001.safetensors" and "a file is damaged" in one.what
    assert one.tensors == ("param/w[6:10]",)
    flip(folder / "rank-00000.safetensors")
    assert [set(one.tensors) for one in find_damage(inspect_folder(folder).saved[0])] == [
        {"param/b", "param/w[0:6]"},
        {"param/w[6:10]"},
    ]


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
