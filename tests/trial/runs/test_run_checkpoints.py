"""A checkpoint with its checksums is whole; any other bit, size or name is a fault that names the
file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from zero_trial.trial.runs import run_checkpoints
from zero_trial.trial.runs.run_checkpoints import add_checksums, find_fault, manifests
from zero_trial.util.files import METADATA


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint with a state, an engine's files and a file of the user's."""
    (tmp_path / "model0").mkdir()
    (tmp_path / "trial_state.json").write_text('{"step": 4}')
    (tmp_path / "model0/manifest.json").write_text('{"sha256": "00",\n"files": {}}')
    (tmp_path / "model0/rank-00000.safetensors").write_bytes(b"tensors")
    (tmp_path / "notes.bin").write_bytes(b"of the user")
    write(tmp_path)
    return tmp_path


def write(folder: Path) -> None:
    (folder / METADATA).write_text(
        json.dumps(add_checksums({"steps_completed": 4, "trial_id": "t"}, folder), indent=1) + "\n"
    )


def test_what_was_sealed_is_whole(folder: Path) -> None:
    assert find_fault(folder) is None
    noted = json.loads((folder / METADATA).read_text())["files"]
    assert set(noted) == {"trial_state.json", "model0/manifest.json", "model0/rank-00000.safetensors", "notes.bin"}
    assert noted["model0/rank-00000.safetensors"] == {"bytes": 7}, "its sum stands in the manifest"
    assert manifests(folder) == [folder / "model0/manifest.json"]


@pytest.mark.parametrize("name", ["metadata.json", "trial_state.json", "model0/manifest.json", "notes.bin"])
def test_a_flipped_bit_is_found(folder: Path, name: str) -> None:
    path = folder / name
    content = path.read_bytes()
    for bit in range(0, 8 * len(content), 11):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(bytes(changed))
        fault = find_fault(folder)
        assert fault is not None and str(path) in fault, f"bit {bit}"
    path.write_bytes(content)
    assert find_fault(folder) is None


@pytest.mark.parametrize("name", ["metadata.json", "trial_state.json", "model0/rank-00000.safetensors", "notes.bin"])
def test_a_file_that_is_short_or_gone_is_named(folder: Path, name: str) -> None:
    (folder / name).write_bytes((folder / name).read_bytes()[:-2])
    assert name in str(find_fault(folder))
    (folder / name).unlink()
    assert name in str(find_fault(folder))


@pytest.mark.parametrize("text", ["[" * 200_000, "\xff", "{", "[]", '{"steps_completed": 1, "files": 3}'])
def test_a_description_that_is_none_is_a_fault(folder: Path, text: str) -> None:
    (folder / "metadata.json").write_text(text, encoding="latin-1")
    assert (find_fault(folder) or "").startswith(f"{folder / 'metadata.json'}: ")


def test_a_large_file_is_known_by_its_size(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_checkpoints, "SUMMED_BYTES", 10)
    write(folder)
    assert json.loads((folder / METADATA).read_text())["files"]["notes.bin"] == {"bytes": 11}
    (folder / "notes.bin").write_bytes(b"shorter")
    assert find_fault(folder) == f"{folder / 'notes.bin'}: the file has 7 bytes, but had 11 when it was written"


def test_without_a_seal_nothing_is_known_to_be_wrong(tmp_path: Path) -> None:
    """Checkpoints of versions that made none."""
    (tmp_path / METADATA).write_text('{"steps_completed": 4, "trial_id": "t"}')
    assert find_fault(tmp_path) is None


def test_a_manifest_of_another_program_is_not_ours(folder: Path) -> None:
    (folder / "hub").mkdir()
    (folder / "hub/manifest.json").write_text('{"name": "model"}')
    (folder / "hub/weights.safetensors").write_bytes(b"theirs")
    assert "sha256" in add_checksums({}, folder)["files"]["hub/weights.safetensors"]
    assert manifests(folder) == [folder / "model0/manifest.json"]


def test_an_error_of_this_package_is_not_a_damaged_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a programming error would make a run pass over every checkpoint that it has."""

    def broken(*_: object) -> None:
        raise KeyError("a mistake in the code")

    monkeypatch.setattr(run_checkpoints, "_compare", broken)
    with pytest.raises(KeyError, match="a mistake in the code"):
        find_fault(folder)
