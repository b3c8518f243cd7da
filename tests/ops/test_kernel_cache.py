"""The cache of compiled kernels: what is loaded could only be written by this user and is complete;
CUDA kernels are kept once per folder."""

from __future__ import annotations

import os
import pwd
from collections.abc import Callable
from pathlib import Path

import pytest

from zero_trial.ops import kernel_cache as cache
from zero_trial.ops.kernel_cache import KernelCache, unsealed


def test_where_it_is() -> None:
    assert cache.cache_folder({"XDG_CACHE_HOME": "/a", "HOME": "/b"}) == Path("/a/zero_trial")
    assert cache.cache_folder({"HOME": "/b"}) == Path("/b/.cache/zero_trial")
    assert cache.cache_folder({"XDG_CACHE_HOME": "here", "HOME": "/b"}) == Path("/b/.cache/zero_trial")
    assert cache.cache_folder({"HOME": ""}) == Path(pwd.getpwuid(os.getuid()).pw_dir, ".cache", "zero_trial")


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pwd, "getpwuid", lambda _: {}["no one"])
    with pytest.raises(RuntimeError, match="has no home folder"):
        cache.cache_folder({})


@pytest.mark.parametrize(("mode", "error"), [(0o700, ""), (0o755, ""), (0o775, "mode 775"), (0o1777, "mode 1777")])
def test_a_folder_that_others_can_write_keeps_nothing(tmp_path: Path, mode: int, error: str) -> None:
    tmp_path.chmod(mode)
    found = cache.why_not(tmp_path)
    assert (error in found) if error else not found


def test_a_folder_of_another_user_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    if mine == 0:
        assert not cache.why_not(tmp_path)  # root can do as it likes anyway
        os.chown(tmp_path, 54321, 54321)
        mine = 54321
    assert f"belongs to another user ({mine})" in cache.why_not(tmp_path)


def test_a_file_is_whole_or_it_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "library.so"
    assert not cache.is_sound(path)
    path.write_bytes(b"code" * 100)
    assert not cache.is_sound(path)
    cache.seal(path)
    assert cache.is_sound(path)
    whole = path.read_bytes()
    assert whole.startswith(b"code" * 100)
    for broken in (whole[:-1], whole[1:], whole[:40], b"", whole + b"x", b"C" + whole[1:]):
        path.write_bytes(broken)
        assert not cache.is_sound(path)


def test_a_file_that_others_can_write_is_not_loaded(tmp_path: Path) -> None:
    path = tmp_path / "library.so"
    path.write_bytes(b"code")
    path.chmod(0o777)
    cache.seal(path)
    assert cache.is_sound(path)  # the right to write it was taken away
    path.chmod(0o766)
    assert not cache.is_sound(path)


def test_one_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "library.so"
    with (
        cache.turn(path, 1.0),
        pytest.raises(cache.BuildLockTimeout, match=r"held .*library\.lock for 0 s"),
        cache.turn(path, 0.0),
    ):
        pass
    with cache.turn(path, 0.0):
        pass


class Counting:
    """Makes an image and counts how often."""

    def __init__(self, image: bytes = b"image") -> None:
        self.image, self.times = image, 0

    def __call__(self) -> bytes:
        self.times += 1
        return self.image


def test_made_once_per_folder(tmp_path: Path) -> None:
    make = Counting()
    for _ in range(2):
        assert KernelCache(tmp_path).get("key", make) == b"image"
    assert make.times == 1
    assert [path.name for path in tmp_path.iterdir()] == ["cuda-key.bin"]
    KernelCache(tmp_path).get("other", make)
    assert make.times == 2


def test_what_others_could_have_put_there_is_not_run(tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    KernelCache(folder).get("key", Counting(b"theirs"))
    folder.chmod(0o777)
    cache, make = KernelCache(folder), Counting(b"ours")
    assert cache.get("key", make) == b"ours" and make.times == 1
    assert str(folder) in cache.trouble


def cut(content: bytes) -> bytes:
    return content[:-1]


def flipped(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


@pytest.mark.parametrize("spoil", [cut, flipped, lambda _: b"", lambda _: b"another program's file"])
def test_a_broken_file_is_made_again(tmp_path: Path, spoil: Callable[[bytes], bytes]) -> None:
    make = Counting()
    KernelCache(tmp_path).get("key", make)
    path = tmp_path / "cuda-key.bin"
    path.write_bytes(spoil(path.read_bytes()))
    assert KernelCache(tmp_path).get("key", make) == b"image"
    assert make.times == 2
    assert unsealed(path.read_bytes()) == b"image"


def test_without_a_folder_it_is_kept_in_memory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (None, tmp_path / "file" / "below"):
        make, kept = Counting(), KernelCache(folder)
        assert kept.get("key", make) == kept.get("key", make) == b"image"
        assert make.times == 1
        assert bool(kept.trouble) == (folder is not None)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    folder.mkdir(mode=0o500)
    kept = KernelCache(folder)
    assert kept.get("key", Counting()) == b"image"
    assert "Permission denied" in kept.trouble


def test_half_a_file_is_never_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is full while the file is written: the image is used, and neither the file nor
    its scratch stays."""

    def full(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "replace", full)
    kept = KernelCache(tmp_path)
    assert kept.get("key", Counting()) == b"image"
    assert not list(tmp_path.iterdir()) and "No space left" in kept.trouble
