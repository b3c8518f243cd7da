"""A file of weights replaces another one whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from zero_trial.checkpoint import export
from zero_trial.checkpoint.export import write_weights


def test_written_and_replaced(tmp_path: Path):
    path = tmp_path / "model.safetensors"
    for value in (1.0, 2.0):
        write_weights(path, {"w": torch.full((3,), value)}, {"format": "pt"})
        assert load_file(path)["w"].tolist() == [value] * 3
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.safetensors"]


def test_a_full_disk_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "model.safetensors"
    write_weights(path, {"w": torch.ones(3)}, {})

    def full(tensors: object, target: str, metadata: object) -> None:
        Path(target).write_bytes(b"half")
        raise SafetensorError("I/O error: No space left on device")

    monkeypatch.setattr(export, "save_file", full)
    with pytest.raises(SafetensorError):
        write_weights(path, {"w": torch.zeros(3)}, {})
    assert load_file(path)["w"].tolist() == [1, 1, 1] and [entry.name for entry in tmp_path.iterdir()] == [
        "model.safetensors"
    ]
