"""A run starts from the newest checkpoint that is whole, says which ones it passed over, and never
afresh where all are damaged."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.test_folder import flip
from tests.support.thread_ranks import on_ranks, run_ranks
from zero_trial.checkpoint import range_reader
from zero_trial.checkpoint.format import FileRecord, Slice
from zero_trial.checkpoint.range_reader import read_digest
from zero_trial.checkpoint.writer import save_checkpoint
from zero_trial.engine.loading import find_checkpoint
from zero_trial.errors import CheckpointError, ConfigError
from zero_trial.trial.runs.run_checkpoints import add_checksums, manifests
from zero_trial.trial.runtime.local import agree_on_start, verify_checkpoint
from zero_trial.trial.runtime.protocols import Distributed


def write(run: Path, step: int) -> Path:
    """A checkpoint as a run leaves it."""
    folder = run / "checkpoints" / f"step-{step:06d}"
    save_checkpoint(folder, "model0", [Slice.whole("param/w", torch.arange(4.0))], step=step)
    (folder / "trial_state.json").write_text('{"step": 1}')
    (folder / "metadata.json").write_text(json.dumps(add_checksums({"steps_completed": step, "trial_id": "t"}, folder)))
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (4, 8, 12):
        write(tmp_path, step)
    return tmp_path


def start(run: Path, **named: Any) -> tuple[dict[str, Any], list[str]]:
    reported: list[str] = []
    return agree_on_start(Distributed(), run, **named, note=reported.append), reported


def test_the_newest_if_it_is_whole(run: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    newest = str(run / "checkpoints/step-000012")
    assert start(run) == ({"checkpoint": newest, "step": 12, "trial_id": "t"}, [])
    assert start(tmp_path_factory.mktemp("other"))[0]["checkpoint"] is None


@pytest.mark.parametrize(
    "name", ["metadata.json", "trial_state.json", "model0/manifest.json", "model0/rank-00000.safetensors"]
)
def test_a_damaged_one_is_passed_over_in_words(run: Path, name: str) -> None:
    flip(run / "checkpoints/step-000012" / name)
    found, reported = start(run)
    assert found["step"] == 8
    assert len(reported) == 1 and f"step-000012/{name}" in reported[0]
    flip(run / "checkpoints/step-000008" / name)
    found, reported = start(run)
    assert (found["step"], len(reported)) == (4, 2)


def test_a_checkpoint_that_lost_its_description_is_damaged(run: Path) -> None:
    (run / "checkpoints/step-000012/metadata.json").unlink()
    found, reported = start(run)
    assert found["step"] == 8
    assert reported == [
        f"skipping a damaged checkpoint: {run / 'checkpoints/step-000012/metadata.json'}: the file is missing"
    ]
    for step in (4, 8):
        (run / f"checkpoints/step-{step:06d}/metadata.json").unlink()
    with pytest.raises(CheckpointError, match=r"no checkpoint is intact.*step-000012/metadata\.json"):
        start(run)
    with pytest.raises(CheckpointError, match=r"step-000004/metadata\.json"):
        start(run.parent / "new", resume=run / "checkpoints/step-000004")


def test_all_ranks_agree_and_each_reads_its_share(run: Path) -> None:
    def work(ranks: Any) -> tuple[int, list[str]]:
        reported: list[str] = []
        return agree_on_start(ranks, run, note=reported.append)["step"], reported

    path = run / "checkpoints/step-000012/model0/rank-00000.safetensors"
    flip(path)
    first, second = run_ranks(2, work)
    assert first == (8, [f"skipping a damaged checkpoint: {verify_checkpoint(path.parents[1], 0, 1)}"])
    assert second == (8, [])
    assert verify_checkpoint(path.parents[1], 1, 2) is None, "the only file of tensors is rank 0's to read"


RANKS = 3


@pytest.fixture
def written_by_three(tmp_path: Path) -> Path:
    """A run whose one checkpoint has a file of tensors from each of three ranks."""
    folder = tmp_path / "checkpoints" / "step-000004"

    def save(rank: Any) -> None:
        part = Slice("param/w", (RANKS,), rank.index, rank.index + 1, torch.ones(1))
        save_checkpoint(folder, "model0", [part], step=4, ranks=rank)

    assert on_ranks(RANKS, save) == [None] * RANKS
    (folder / "metadata.json").write_text(json.dumps(add_checksums({"steps_completed": 4, "trial_id": "t"}, folder)))
    return tmp_path


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """(thread, file) of each file whose bytes were read for their sum."""
    found: list[tuple[str, str]] = []

    def watched(path: Path, *args: Any, **kwargs: Any) -> FileRecord:
        found.append((threading.current_thread().name, path.name))
        return read_digest(path, *args, **kwargs)

    monkeypatch.setattr(range_reader, "read_digest", watched)
    return found


def started_and_loaded(run: Path, load: Callable[[Any, Path], Any]) -> list[Any]:
    """What ``load`` gave each rank, as the trial's engine calls it after the ranks have agreed on a
    start."""
    found = run_ranks(RANKS, lambda ranks: agree_on_start(ranks, run, note=print)["checkpoint"])
    assert len(set(found)) == 1
    return on_ranks(RANKS, lambda rank: load(rank, Path(found[0])))


def test_a_resumed_trial_reads_each_file_once_for_its_sum(
    written_by_three: Path, hashed: list[tuple[str, str]]
) -> None:
    def load(rank: Any, folder: Path) -> str:
        return find_checkpoint(rank, folder, "model0").folder.name  # type: ignore[union-attr]

    assert started_and_loaded(written_by_three, load) == ["model0"] * RANKS
    files = [f"rank-{rank:05d}.safetensors" for rank in range(RANKS)]
    assert sorted(name for _, name in hashed) == files
    assert len({thread for thread, _ in hashed}) == RANKS, "each rank reads its share"
    hashed.clear()
    folder = written_by_three / "checkpoints/step-000004"
    assert on_ranks(RANKS, lambda rank: load(rank, folder)) == ["model0"] * RANKS
    assert sorted(name for _, name in hashed) == files, "a later load reads them again"


@pytest.mark.parametrize("tag", ["model0", None])
def test_what_is_written_between_start_and_load_is_read_again(written_by_three: Path, tag: str | None) -> None:
    def load(rank: Any, folder: Path) -> Any:
        if rank.index == 1:
            flip(folder / "model0" / "rank-00001.safetensors")
        rank.gather_json(None, "damaged")
        return find_checkpoint(rank, folder, tag)

    for error in started_and_loaded(written_by_three, load):
        assert isinstance(error, CheckpointError) and "rank-00001.safetensors" in str(error)


def test_a_checkpoint_by_name_is_that_one_or_none(run: Path, tmp_path: Path) -> None:
    new, other = tmp_path / "new", run / "checkpoints/step-000008"
    assert start(new, resume=other)[0]["step"] == 8
    flip(run / "checkpoints/step-000012/model0/rank-00000.safetensors")
    assert start(new, resume=run)[0]["step"] == 8
    warm, reported = start(new, warm_start=run)
    assert warm["step"] == 8 and warm["trial_id"] != "t" and len(reported) == 1
    flip(other / "trial_state.json")
    with pytest.raises(CheckpointError, match=r"no checkpoint is intact.*step-000008/trial_state"):
        start(new, resume=other)
    with pytest.raises(ConfigError, match="no finished checkpoint"):
        start(new, resume=tmp_path / "nowhere")


def test_a_rank_that_cannot_look_says_so_to_the_others(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    newest = run / "checkpoints/step-000012"

    def look(folder: Path) -> list[Path]:
        if folder == newest:
            raise PermissionError(13, "Permission denied")
        return manifests(folder)

    monkeypatch.setattr("zero_trial.trial.runtime.local.manifests", look)
    assert verify_checkpoint(newest, 1, 2) == f"rank 1 cannot read {newest} (Permission denied)"
    assert start(run)[0]["step"] == 8
