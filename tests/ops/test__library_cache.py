"""What lies in the cache folder is loaded only if nobody else could have put it there, and if all of it is there."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest

from zero_trial.ops import kernel_cache as cache


def test_where_it_is() -> None:
    assert cache.cache_folder({"XDG_CACHE_HOME": "/a", "HOME": "/b"}) == Path("/a/zero_trial")
    assert cache.cache_folder({"HOME": "/b"}) == Path("/b/.cache/zero_trial")
    assert cache.cache_folder({"XDG_CACHE_HOME": "here", "HOME": "/b"}) == Path("/b/.cache/zero_trial")
    assert cache.cache_folder({"HOME": ""}) == Path(pwd.getpwuid(os.getuid()).pw_dir, ".cache", "zero_trial")


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pwd, "getpwuid", lambda _: {}["nobody"])
    with pytest.raises(RuntimeError, match="has no home folder"):
        cache.cache_folder({})


@pytest.mark.parametrize(("mode", "said"), [(0o700, ""), (0o755, ""), (0o775, "mode 775"), (0o1777, "mode 1777")])
def test_a_folder_that_others_can_write_keeps_nothing(tmp_path: Path, mode: int, said: str) -> None:
    tmp_path.chmod(mode)
    found = cache.why_not(tmp_path)
    assert (said in found) if said else not found


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


def test_only_dead_builds_are_swept(tmp_path: Path) -> None:
    path = tmp_path / "mine.so"
    for name in ("build-mine-1", "build-other-1", "build-other-2", "kept"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "part.o").write_text("")
    os.utime(tmp_path / "build-other-2", (0, 0))
    cache.sweep(path)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["build-other-1", "kept"]


def test_what_compilers_say_of_a_full_disk() -> None:
    assert cache.is_full("error: unable to write to file: No space left on device")
    assert not cache.is_full("error: no such flag")
