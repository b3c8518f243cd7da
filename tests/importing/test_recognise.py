"""Which reader a path is for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.importing.checkpoints import unpack
from zero_trial.checkpoint import Slice, save_checkpoint
from zero_trial.errors import CheckpointError
from zero_trial.importing.imported import ImportOptions
from zero_trial.importing.source import read_source


def test_deepspeed_and_weights(tmp_path: Path) -> None:
    source = unpack("fp32-stage1-ranks2", tmp_path)
    for path in (source, source / "global_step5"):
        assert read_source(path, None, ImportOptions()).kind.startswith("DeepSpeed 0.19.8")
    torch.save({"a": torch.zeros(2)}, tmp_path / "pytorch_model.bin")
    assert read_source(tmp_path / "pytorch_model.bin", None, ImportOptions()).kind == "weights, 1 file"


def test_one_file_of_deepspeed_is_its_weights(tmp_path: Path) -> None:
    path = unpack("fp32-stage1-ranks2", tmp_path) / "global_step5" / "mp_rank_00_model_states.pt"
    found = read_source(path, None, ImportOptions())
    assert found.kind == "weights, 1 file" and len(found.names(lambda name: name.startswith("param/"))) == 10


def test_ours(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "t", [Slice.whole("param/a", torch.zeros(2))], step=1)
    for path in (tmp_path, tmp_path / "t"):
        with pytest.raises(CheckpointError, match="a checkpoint of zero_trial already"):
            read_source(path, None, ImportOptions())


def test_nothing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nothing here that can be imported: got an empty folder"):
        read_source(tmp_path, None, ImportOptions())
    with pytest.raises(CheckpointError, match="there is no such file or folder"):
        read_source(tmp_path / "none", None, ImportOptions())


def test_a_folder_that_is_here_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = unpack("fp32-stage1-ranks2", tmp_path) / "global_step5"
    monkeypatch.chdir(folder)
    assert read_source(Path(), None, ImportOptions()).tag == "global_step5"
    (tmp_path / "gpt2").mkdir()
    torch.save({"a": torch.zeros(2)}, tmp_path / "gpt2" / "pytorch_model.bin")
    monkeypatch.chdir(tmp_path / "gpt2")
    assert read_source(Path(), None, ImportOptions()).tag == "gpt2"
    assert read_source(Path("pytorch_model.bin"), None, ImportOptions()).tag == "gpt2"


@pytest.mark.parametrize(
    "optimizer",
    [
        {"state": {}, "param_groups": [None]},
        {"state": [1], "param_groups": [{"params": [0]}]},
        {"state": {}, "param_groups": [{"params": [[0]]}]},
        {"state": {}, "param_groups": [{"params": [0]}], "cur_scale": torch.zeros(0), "fp32_groups_flat": [3]},
    ],
)
def test_anything_in_the_place_of_something_else_is_one_clean_error(tmp_path: Path, optimizer: object) -> None:
    content = {"module": {"a": torch.zeros(2)}, "buffer_names": [], "optimizer": optimizer}
    torch.save(content, tmp_path / "mp_rank_00_model_states.pt")
    with pytest.raises(CheckpointError, match=r"unexpected content|do not match the groups"):
        read_source(tmp_path, None, ImportOptions())


def test_a_fault_of_the_reader_itself_is_not_blamed_on_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise TypeError("a fault in the reader")

    torch.save({"a": torch.zeros(2)}, tmp_path / "pytorch_model.bin")
    monkeypatch.setattr("zero_trial.importing.source.read_weights", broken)
    with pytest.raises(TypeError, match="a fault in the reader"):
        read_source(tmp_path, None, ImportOptions())
