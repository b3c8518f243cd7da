"""Which kernels a process runs, and the cache that keeps them: built once for all processes, and
loaded only where no other user could have put them."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import os
import platform
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from zero_trial.errors import ConfigError, KernelUnavailable
from zero_trial.ops import cpu_library, report
from zero_trial.ops.cpu_library import KernelCache, backend, cache_folder, choose, open_native


def without_compiler(folder: Path, **more: str) -> dict[str, str]:
    return {"XDG_CACHE_HOME": str(folder), "PATH": "", **more}


def test_what_is_chosen(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    chosen = choose(without_compiler(tmp_path, ZERO_TRIAL_OPS="reference"), "CPU", open_native)
    assert chosen.describe() == "plain torch (ZERO_TRIAL_OPS=reference)" and not list(tmp_path.iterdir())
    with caplog.at_level(logging.WARNING, logger="zero_trial"):
        chosen = choose(without_compiler(tmp_path), "CPU", open_native)
    assert chosen.native is None and "no C++ compiler" in chosen.describe() and "CPU kernels" in caplog.text
    with pytest.raises(KernelUnavailable, match=r"ZERO_TRIAL_OPS=native: .*got no C\+\+ compiler"):
        choose(without_compiler(tmp_path, ZERO_TRIAL_OPS="native"), "CPU", open_native)
    with pytest.raises(ConfigError, match="got 'fast', expected auto, reference, native"):
        choose({"ZERO_TRIAL_OPS": "fast"}, "CPU", open_native)
    assert report()["cpu"] == backend().describe() and report()["cuda"]


def script(folder: Path, text: str) -> Path:
    path = folder / "c++"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def environ(cache: Path, compiler: Path | str) -> dict[str, str]:
    return {"XDG_CACHE_HOME": str(cache), "CXX": str(compiler), "PATH": os.environ["PATH"]}


def test_the_compiler_is_asked_for_by_name_or_found() -> None:
    assert cpu_library.find_compiler({"CXX": f"{sys.executable} -m 'two words'"}) == (sys.executable, "-m", "two words")
    with pytest.raises(KernelUnavailable, match=r"no C\+\+ compiler: nowhere -O1 not found"):
        cpu_library.find_compiler({"CXX": "nowhere -O1"})
    with pytest.raises(KernelUnavailable, match="no C\\+\\+ compiler: c\\+\\+, g\\+\\+, clang\\+\\+ not found"):
        cpu_library.find_compiler({"PATH": ""})


def test_other_sources_are_another_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = cpu_library.library_name()
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "kernels.cpp").write_text("other")
    monkeypatch.setattr(cpu_library, "SOURCES", tmp_path)
    assert cpu_library.library_name() != before


def test_only_the_copies_of_one_instruction_set_need_it() -> None:
    assert set(cpu_library.objects("aarch64")) == {"dispatch", "baseline"}
    for name, (_, flags) in cpu_library.objects("x86_64").items():
        assert any(flag.startswith("-mavx") for flag in flags) == (name in ("avx2", "avx512"))
        assert "-march=native" not in flags


GARBAGE = 'for last; do [ "$out" = -o ] && echo nonsense > "$last"; out=$last; done; exit 0'


@pytest.mark.parametrize(
    ("makes", "why"),
    [
        ("echo 'kernels.cpp:1: error: no such flag' >&2; exit 1", r"failed: kernels\.cpp:1: error: no such flag"),
        ("exit 0", "No such file"),
        (GARBAGE, "cannot be loaded"),
    ],
)
def test_a_compiler_that_makes_nothing_of_use(tmp_path: Path, makes: str, why: str) -> None:
    with pytest.raises(KernelUnavailable, match=why):
        open_native(environ(tmp_path, script(tmp_path, makes)))


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A compiler that makes every output a copy of the library."""
    try:
        compiler = cpu_library.find_compiler(os.environ)
    except KernelUnavailable as trouble:
        pytest.skip(trouble.what)
    kept = KernelCache(cache_folder(os.environ))
    image = kept.get(cpu_library.library_name(), lambda: cpu_library.build(compiler))
    path = tmp_path_factory.mktemp("built") / "library.so"
    path.write_bytes(image)
    return f'for last; do [ "$out" = -o ] && cp {path} "$last"; out=$last; done; exit 0'


def test_processes_that_come_together_build_once(tmp_path: Path, quick: str) -> None:
    """The compiler counts; a broken file in the library's place is replaced."""
    (tmp_path / "zero_trial").mkdir()
    (tmp_path / "zero_trial" / cpu_library.library_name()).write_bytes(b"half a file")
    compiler = script(tmp_path, f"echo x >> {tmp_path}/count\n{quick}")
    code = "import os; from zero_trial.ops import cpu_library; print(cpu_library.open_native(os.environ).isa)"
    command, env = [sys.executable, "-c", code], os.environ | environ(tmp_path, compiler)
    started = [subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    output = [process.communicate(timeout=120)[0].strip() for process in started]
    assert output[0] == output[1] and output[0] in ("0", "1", "2")
    assert len((tmp_path / "count").read_text().split()) == len(cpu_library.objects(platform.machine())) + 1
    needs_none = open_native(without_compiler(tmp_path))
    assert needs_none.isa in (0, 1, 2)


def test_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/b")
    assert cache_folder({"XDG_CACHE_HOME": "/a"}) == Path("/a/zero_trial")
    assert cache_folder({"XDG_CACHE_HOME": "here"}) == cache_folder({}) == Path("/b/.cache/zero_trial")


class Counting:
    """Makes an image and counts how often."""

    def __init__(self, image: bytes = b"image") -> None:
        self.image, self.times = image, 0

    def __call__(self) -> bytes:
        self.times += 1
        return self.image


def made_twice(folder: Path) -> tuple[int, str]:
    """How often two processes make an image, and why nothing was kept."""
    kept, make = KernelCache(folder), Counting()
    assert kept.get("key", make) == b"image" == KernelCache(folder).get("key", make)
    return make.times, kept.trouble


def test_made_once_per_folder_and_name(tmp_path: Path) -> None:
    assert made_twice(tmp_path) == (1, "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kernels.lock", "key"]
    other = Counting()
    KernelCache(tmp_path).get("other", other)
    assert other.times == 1


@pytest.mark.parametrize("spoil", [lambda x: x[:-1], lambda x: x[:-1] + bytes([x[-1] ^ 1]), lambda _: b""])
def test_a_broken_file_is_made_again(tmp_path: Path, spoil: Callable[[bytes], bytes]) -> None:
    made_twice(tmp_path)
    (tmp_path / "key").write_bytes(spoil((tmp_path / "key").read_bytes()))
    assert made_twice(tmp_path) == (1, "")


@pytest.mark.parametrize("way", ["a file", "others may write", "others may write a link", "of another user", "full"])
def test_what_cannot_be_kept_safely_is_made_by_each_process(
    tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What others could have put there is not run; half a file is never seen."""
    folder = tmp_path / "kept"
    KernelCache(folder).get("key", Counting(b"theirs"))
    if way == "a file":
        folder = folder / "key"
    elif way.startswith("others"):
        folder.chmod(0o777 if way == "others may write" else 0o1777)
    elif way == "of another user":
        mine = os.stat(folder).st_uid
        if mine == 0:
            os.chown(folder, 54321, 54321)
        monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    else:
        (folder / "key").unlink()
        monkeypatch.setattr(os, "replace", full)
    times, trouble = made_twice(folder)
    assert times == 2 and trouble in caplog.text
    assert way != "full" or [path.name for path in folder.iterdir()] == ["kernels.lock"]


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", full)
    assert made_twice(tmp_path) == (1, "")


def test_a_library_is_loaded_without_a_place() -> None:
    """Two in one process are two, whatever their file descriptors."""
    if backend().native is None:
        pytest.skip(backend().why)
    first, second = (open_native(os.environ).library for _ in range(2))
    assert ctypes.cast(first.zt_add, ctypes.c_void_p).value != ctypes.cast(second.zt_add, ctypes.c_void_p).value
