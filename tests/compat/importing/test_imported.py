"""What a reader has found, written as a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from zero_trial.checkpoint.folder import list_checkpoints
from zero_trial.checkpoint.format import Slice
from zero_trial.checkpoint.range_reader import CheckpointReader
from zero_trial.checkpoint.state_tree import decode_state
from zero_trial.compat.importing.imported import ImportedState, ImportOptions, fresh_state, write_imported
from zero_trial.errors import CheckpointError


def test_a_prefix_is_taken_off_where_it_is() -> None:
    assert ImportOptions(strip="module.").own("module.a.weight") == "a.weight"
    assert ImportOptions(strip="module.").own("a.module.weight") == "a.module.weight"
    assert ImportOptions().own("module.a") == "module.a"


def test_names_and_step() -> None:
    part = Slice("param/a", (4,), 0, 2, torch.zeros(2)), Slice("param/a", (4,), 2, 4, torch.zeros(2))
    found = ImportedState("test", "t", [[part[0]], [part[1], Slice.whole("buffer/b", torch.zeros(1))]], fresh_state())
    assert found.names(lambda name: True) == ["buffer/b", "param/a"] and found.step == 0


def test_a_fresh_state_is_one_that_an_engine_reads() -> None:
    assert fresh_state()["counters"] == dict.fromkeys(
        ("global_steps", "global_samples", "micro_steps", "skipped_steps"), 0
    )
    assert fresh_state()["client"] is not fresh_state()["client"]


def findings(**state: object) -> ImportedState:
    first = [Slice("param/a", (2, 3), 0, 4, torch.arange(4.0)), Slice.whole("buffer/b", torch.tensor(7))]
    second = [Slice("param/a", (2, 3), 4, 6, torch.arange(4.0, 6))]
    return ImportedState("test", "t", [first, second], fresh_state() | state, world={"zero_stage": 2})


def test_one_file_per_shard_and_no_state_of_ranks(tmp_path: Path) -> None:
    folder = write_imported(findings(client={"curve": torch.arange(3)}), tmp_path / "new")
    assert folder == tmp_path / "new" / "t" and [found.tag for found in list_checkpoints(tmp_path / "new")] == ["t"]
    reader = CheckpointReader(folder)
    reader.verify()
    assert len(reader.manifest.files) == 2 and reader.manifest.rank_state == ()
    assert torch.equal(reader.read("param/a"), torch.arange(6.0).reshape(2, 3)) and reader.read("buffer/b") == 7
    assert torch.equal(decode_state(reader.manifest.state, reader.read)["client"]["curve"], torch.arange(3))
    assert reader.manifest.world["zero_stage"] == 2


def test_what_has_the_name_stays_as_it_is(tmp_path: Path) -> None:
    folder = write_imported(findings(), tmp_path)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(CheckpointError, match=r"a checkpoint of that name already.*--as"):
        write_imported(findings(client={"other": 1}), tmp_path)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "mp_rank_00_model_states.pt").touch()
    with pytest.raises(CheckpointError, match="something that is not a checkpoint"):
        write_imported(findings(), tmp_path, "mine")


def test_nothing_is_left_of_a_fault(tmp_path: Path) -> None:
    broken = findings()
    twice = ImportedState("test", "t", [*broken.shards, broken.shards[1]], broken.state)
    with pytest.raises(CheckpointError):
        write_imported(twice, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not a tag"):
        write_imported(findings(), tmp_path, "../x")
