"""Checkpoint storage, and the temporary directory of an allocation."""

from __future__ import annotations

import errno
import os
import random
import shutil
import stat
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from determined.common import storage as original

from zero_trial.errors import ConfigError
from zero_trial.master.agent import storage

NAME = str(uuid.uuid4())


def shared(host: Path | str, **more: str) -> dict[str, dict[str, str]]:
    return {"checkpoint_storage": {"type": "shared_fs", "host_path": str(host), **more}}


def checkpoint(base: Path, name: str = NAME) -> Path:
    folder = base / name
    (folder / "deep").mkdir(parents=True)
    (folder / "weights").write_text("12345")
    (folder / "deep" / "state.bin").write_text("123")
    return folder


@pytest.mark.parametrize("more", [{}, {"storage_path": "sub/dir"}])
def test_the_base_is_where_the_genuine_client_looks(tmp_path: Path, more: dict[str, str]) -> None:
    config = shared(tmp_path, **more)
    manager = original.build(dict(config["checkpoint_storage"]), None)
    assert storage.base_of(config) == Path(manager._base_path)
    assert storage.base_of({"checkpoint_storage": {"type": "directory", "container_path": "/c"}}) == Path("/c")
    assert storage.base_of({"checkpoint_storage": {"type": "s3", "bucket": "b"}}) is None


def test_a_trial_sees_host_path_through_a_link(tmp_path: Path) -> None:
    run_root = tmp_path / "run"
    run_root.mkdir()
    for _ in range(2):
        storage.link(shared(tmp_path / "new" / "host"), run_root)
    (run_root / storage.SHARED_FS / "x").write_text("y")
    assert (tmp_path / "new" / "host" / "x").read_text() == "y"
    with pytest.raises(ConfigError, match="host_path"):
        storage.link(shared(tmp_path / "new" / "host" / "x" / "sub"), tmp_path)


def test_the_name_of_a_storage_is_never_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = storage.kept_in(shared(tmp_path))
    (file,) = tmp_path.iterdir()
    assert first is not None and file.read_text() == first["name"] and stat.S_IMODE(file.stat().st_mode) == 0o644
    plain = Path.read_text
    for number in (errno.ESTALE, errno.EIO, errno.EACCES):  # another user's file, or a fault of the disk

        def read_text(path: Path, *_: object, number: int = number, **__: object) -> str:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(Path, "read_text", read_text)
        assert storage.kept_in(shared(tmp_path)) is None
        monkeypatch.setattr(Path, "read_text", plain)
        assert storage.kept_in(shared(tmp_path)) == first and list(tmp_path.iterdir()) == [file]


def test_only_folders_named_by_a_uuid_are_deleted(tmp_path: Path) -> None:
    base = tmp_path / "base"
    checkpoint(base)
    outside = checkpoint(tmp_path, "outside")
    (base / "plain").mkdir()
    for name in ("plain", "..", "../outside", "", ".", "/", str(outside), NAME.replace("-", "")):
        assert not storage.delete(base, name)
    assert storage.delete(base, NAME) and not storage.delete(base, NAME)
    assert outside.exists() and (base / "plain").exists()


def test_links_are_never_followed(tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    target = checkpoint(tmp_path, "target")
    (base / NAME).symlink_to(target)
    assert not storage.delete(base, NAME) and target.exists()
    (base / NAME).unlink()
    (checkpoint(base) / "link").symlink_to(target)
    assert storage.delete(base, NAME) and (target / "weights").exists()


LISTED = [
    *(["*.json"], ["*"], ["**/*.json"], ["metrics.json", "**/*"], ["model0/*"], ["model0"], ["model0/"], ["a/**/b"]),
    *(["a"], ["a/"], ["/a"], [".*"], ["**/.*"], ["?"], ["[ab]"], ["a/[!c]*"], ["*/"], ["nothing"], ["a/*", "model0"]),
    *(["link"], ["link/*"], ["file-link"], ["**/x"], ["***"], ["a//b"], ["./model0/*"], ["*/*/*"], ["[x"]),
]


def generated(count: int) -> list[list[str]]:
    numbers = random.Random(7)
    pieces = ["*", "**", "a", "b", "?", "*.json", "model0", "*0", "[a-m]*", ".hidden", "link", "x", ".", ""]

    def one() -> str:
        return "/".join(numbers.choice(pieces) for _ in range(numbers.randint(1, 4)))

    return [[one() or "*" for _ in range(numbers.randint(1, 2))] for _ in range(count)]


def nested(base: Path) -> Path:
    """Return the folder of a checkpoint with files, folders, hidden names and links."""
    folder = base / NAME
    names = ("x", "metrics.json", ".hidden", "a/x", "a/b/x", "a/b/c.json", "a/.b/x", "model0/state.bin", "model0/[x")
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    (folder / "empty").mkdir()
    (folder / "link").symlink_to("a/b", target_is_directory=True)
    (folder / "file-link").symlink_to("model0/state.bin")
    return folder


def there(base: Path) -> list[str]:
    return sorted(str(path.relative_to(base)) for path in base.rglob("*"))


def test_globs_delete_what_determined_deletes(tmp_path: Path) -> None:
    compared = 0
    for number, globs in enumerate([*LISTED, *generated(20)]):
        ours, theirs = tmp_path / f"ours[{number}]", tmp_path / f"theirs{number}"
        nested(ours), nested(theirs)
        try:
            original.SharedFSStorageManager(str(theirs)).delete(NAME, globs)
        except OSError:  # it fails half-way at folders within folders that it has deleted, and at link/
            continue
        storage.delete_matching(ours, NAME, globs)
        assert there(ours) == there(theirs), globs
        compared += 1
    assert compared > 20


def test_what_is_there_is_listed_as_the_harness_lists_it(tmp_path: Path) -> None:
    folder = nested(tmp_path)
    assert storage.remaining(tmp_path, NAME) == original.StorageManager._list_directory(folder)


def test_globs_do_not_leave_the_checkpoint(tmp_path: Path) -> None:
    outside, folder = checkpoint(tmp_path, "outside"), checkpoint(tmp_path / "base")
    (folder / "link").symlink_to(outside, target_is_directory=True)
    (folder / "dangling").symlink_to("nowhere")
    for globs in (["link/*"], ["**/weights"], ["link/"], ["**"]):
        storage.delete_matching(tmp_path / "base", NAME, globs)
    assert not folder.exists() and there(outside) == ["deep", "deep/state.bin", "weights"]


def test_storage_that_cannot_be_read_is_not_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OSError, match="gone"):
        storage.remaining(tmp_path / "gone", NAME)
    folder, scandir = checkpoint(tmp_path), os.scandir

    def refuse(path: Any) -> Any:
        if str(path) == str(folder / "deep"):
            raise OSError(errno.ESTALE, "Stale file handle", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(OSError, match="Stale"):
        storage.remaining(tmp_path, NAME)


def test_tensorboard_files(tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / "cl" / "tensorboard" / "experiment" / str(number)).mkdir(parents=True)
    storage.delete_tensorboard(tmp_path, "cl", 1)
    assert [path.name for path in (tmp_path / "cl" / "tensorboard" / "experiment").iterdir()] == ["2"]


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
