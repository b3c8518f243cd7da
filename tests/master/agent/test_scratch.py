"""Temporary directories of allocations."""

from __future__ import annotations

import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from zero_trial.master.agent import storage


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    made = tmp_path / "allocation"
    made.mkdir()
    yield made
    storage.remove_scratch(made)


def test_it_is_the_owners_and_goes_with_all_that_is_in_it(folder: Path) -> None:
    made = storage.make_scratch(folder, {})
    assert made.parent == Path("/tmp") and stat.S_IMODE(made.stat().st_mode) == 0o700
    (made / "torchelastic_x").mkdir()
    (made / "torchelastic_x" / "attempt").write_text("1")
    storage.remove_scratch(folder)
    assert not made.exists() and not any(folder.iterdir())
    storage.remove_scratch(folder)


def test_an_allocation_that_is_started_again_keeps_it(folder: Path) -> None:
    made = storage.make_scratch(folder, {})
    assert storage.make_scratch(folder, {}) == made
    shutil.rmtree(made)
    again = storage.make_scratch(folder, {})
    assert again != made and again.is_dir()


def test_it_lies_where_the_host_says_if_sockets_can_be_made_there(folder: Path, tmp_path: Path) -> None:
    short = Path(storage.make_scratch(folder, {})).parent / f"h-{tmp_path.parent.name[-6:]}"
    storage.remove_scratch(folder)
    short.mkdir(exist_ok=True)
    try:
        assert storage.make_scratch(folder, {"TMPDIR": str(short)}).parent == short
        storage.remove_scratch(folder)
    finally:
        shutil.rmtree(short)
    deep = tmp_path / ("x" * storage.LONGEST_SCRATCH)
    deep.mkdir()
    made = storage.make_scratch(folder, {"TMPDIR": str(deep)})
    assert made.parent == Path("/tmp") and len(str(made)) <= 16


def test_what_the_harness_leaves_under_its_name_goes_too(folder: Path) -> None:
    named = folder.with_name(f"scratch-{folder.parent.name}-{id(folder)}")
    files = [Path(f"/tmp/pid_server-{named.name}"), Path(f"/tmp/tensorboard-{named.name}-0")]
    others = Path(f"/tmp/pid_server-{named.name}0")
    files[1].mkdir()
    files[0].touch()
    others.touch()
    try:
        storage.remove_scratch(named)
        assert not any(path.exists() for path in files) and others.exists()
    finally:
        others.unlink()
