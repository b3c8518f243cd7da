"""Building the CPU library: once for all processes, and a reason where it cannot be had."""

from __future__ import annotations

import logging
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from zero_trial.errors import KernelUnavailable
from zero_trial.ops import _build


def script(folder: Path, text: str) -> Path:
    path = folder / "c++"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def environ(cache: Path, compiler: Path | str) -> dict[str, str]:
    return {"XDG_CACHE_HOME": str(cache), "CXX": str(compiler), "PATH": os.environ["PATH"]}


def test_the_compiler_is_asked_for_by_name_or_found() -> None:
    assert _build.find_compiler({"CXX": sys.executable}) == sys.executable
    with pytest.raises(KernelUnavailable, match="no C\\+\\+ compiler: c\\+\\+, g\\+\\+, clang\\+\\+ not found"):
        _build.find_compiler({"PATH": ""})


def test_where_it_is_kept(tmp_path: Path) -> None:
    assert _build.cache_folder({"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / "zero_trial"
    assert _build.cache_folder({}) == Path.home() / ".cache" / "zero_trial"


def test_other_sources_are_another_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = _build.library_file(tmp_path)
    assert before == _build.library_file(tmp_path)
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "kernels.cpp").write_text("other")
    monkeypatch.setattr(_build, "SOURCES", tmp_path)
    assert _build.library_file(tmp_path) != before


def test_only_the_copies_of_one_instruction_set_need_it() -> None:
    assert set(_build.objects("aarch64")) == {"dispatch", "lamb", "baseline"}
    for name, (_, flags) in _build.objects("x86_64").items():
        assert any(flag.startswith("-mavx") for flag in flags) == (name in ("avx2", "avx512"))
        assert "-march=native" not in flags


def test_a_failing_compiler_is_quoted(tmp_path: Path) -> None:
    compiler = script(tmp_path, "echo 'kernels.cpp:1: error: no such flag' >&2; exit 1")
    with pytest.raises(KernelUnavailable, match=r"failed: kernels\.cpp:1: error: no such flag"):
        _build.load(environ(tmp_path, compiler))
    assert [path.suffix for path in (tmp_path / "zero_trial").iterdir()] == [".lock"]


def test_a_silent_failure_gives_its_exit_code(tmp_path: Path) -> None:
    with pytest.raises(KernelUnavailable, match="exit code 3"):
        _build.load(environ(tmp_path, script(tmp_path, "exit 3")))


def test_a_compiler_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_build, "SECONDS", 0.2)
    with pytest.raises(KernelUnavailable, match="did not end"):
        _build.load(environ(tmp_path, script(tmp_path, "exec sleep 60")))


def compiler_or_skip() -> str:
    try:
        return _build.find_compiler(os.environ)
    except KernelUnavailable as trouble:
        pytest.skip(trouble.what)


@pytest.fixture(scope="module")
def built() -> Path:
    """The library of these sources, as this machine has it."""
    compiler_or_skip()
    _build.load(os.environ)
    return _build.library_file(_build.cache_folder(os.environ))


def quick_compiler(folder: Path, built: Path) -> Path:
    """Makes every output a copy of ``built``."""
    return script(folder, f'for last; do [ "$out" = -o ] && cp {built} "$last"; out=$last; done; exit 0')


@pytest.mark.parametrize("way", ["not a folder", "read-only"])
def test_a_cache_that_cannot_be_written_is_done_without_and_said(
    tmp_path: Path, built: Path, caplog: pytest.LogCaptureFixture, way: str
) -> None:
    """Also where there is a library already, but a broken one."""
    if way == "read-only" and os.geteuid() == 0:
        pytest.skip("root may write anywhere")
    compiler, folder = quick_compiler(tmp_path, built), tmp_path / "zero_trial"
    if way == "read-only":
        folder.mkdir()
        _build.library_file(folder).write_bytes(b"half a file")
        folder.chmod(0o500)
    else:
        folder.write_text("")
    with caplog.at_level(logging.WARNING, logger="zero_trial"):
        library = _build.load(environ(tmp_path, compiler))
    assert library.zt_best_isa() in (0, 1, 2)
    (line,) = (record.message for record in caplog.records)
    assert "cache folder cannot be written" in line and str(folder) in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c++", "zero_trial"]


def test_nowhere_to_write_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "file"))
    with pytest.raises(KernelUnavailable, match="Not a directory"):
        _build.load(environ(tmp_path / "file", sys.executable))


def test_a_library_that_there_is_needs_no_compiler_and_no_right_to_write(tmp_path: Path, built: Path) -> None:
    kept = _build.library_file(tmp_path / "zero_trial")
    kept.parent.mkdir()
    shutil.copy(built, kept)
    kept.parent.chmod(0o500)
    try:
        assert _build.load({"XDG_CACHE_HOME": str(tmp_path), "PATH": ""}).zt_best_isa() in (0, 1, 2)
        assert [path.name for path in kept.parent.iterdir()] == [kept.name]
    finally:
        kept.parent.chmod(0o700)


def test_a_broken_library_without_a_compiler_says_what_is_missing(tmp_path: Path) -> None:
    kept = _build.library_file(tmp_path / "zero_trial")
    kept.parent.mkdir()
    kept.write_bytes(b"\x7fELF, but cut off")
    with pytest.raises(KernelUnavailable, match=r"no C\+\+ compiler"):
        _build.load({"XDG_CACHE_HOME": str(tmp_path), "PATH": ""})


def test_processes_that_come_together_build_once(tmp_path: Path) -> None:
    """A counting compiler stands in front of the real one; a broken file in the library's place is replaced."""
    real = compiler_or_skip()
    folder = tmp_path / "zero_trial"
    folder.mkdir()
    _build.library_file(folder).write_bytes(b"half a file")
    compiler = script(tmp_path, f'echo x >> {tmp_path}/count\nexec {real} "$@"')
    code = "import os; from zero_trial.ops import _build; print(_build.load(os.environ).zt_best_isa())"
    env = os.environ | environ(tmp_path, compiler)
    started = [
        subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    try:
        said = [process.communicate(timeout=120)[0].strip() for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert said[0] == said[1] and said[0] in ("0", "1", "2")
    assert len((tmp_path / "count").read_text().split()) == len(_build.objects(platform.machine())) + 1
    assert sorted(path.suffix for path in folder.iterdir()) == [".lock", ".so"]
