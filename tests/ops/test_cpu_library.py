"""The CPU library: which kernels a process runs, and how they are built, once for all processes."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import platform
import pwd
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from zero_trial.errors import ConfigError, KernelUnavailable
from zero_trial.ops import cpu_library, kernel_cache


def without_compiler(folder: Path, **more: str) -> dict[str, str]:
    return {"XDG_CACHE_HOME": str(folder), "PATH": "", **more}


def test_the_reference_can_be_asked_for(tmp_path: Path) -> None:
    chosen = cpu_library.choose(without_compiler(tmp_path, ZERO_TRIAL_OPS="reference"))
    assert chosen.native is None
    assert chosen.describe() == "plain torch (ZERO_TRIAL_OPS=reference)"
    assert not list(tmp_path.iterdir())  # nothing was tried


def test_without_a_compiler_it_is_plain_torch_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="zero_trial"):
        chosen = cpu_library.choose(without_compiler(tmp_path))
    assert chosen.native is None
    assert "no C++ compiler" in chosen.describe()
    assert [record.message for record in caplog.records if "plain torch" in record.message]


def test_native_is_an_error_where_it_cannot_be_had(tmp_path: Path) -> None:
    with pytest.raises(KernelUnavailable, match=r"ZERO_TRIAL_OPS=native: .*got no C\+\+ compiler"):
        cpu_library.choose(without_compiler(tmp_path, ZERO_TRIAL_OPS="native"))


def test_an_unknown_choice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="got 'fast', expected auto, reference, native"):
        cpu_library.choose(without_compiler(tmp_path, ZERO_TRIAL_OPS="fast"))


GARBAGE = 'for last; do [ "$out" = -o ] && echo nonsense > "$last"; out=$last; done; exit 0'


def script(folder: Path, text: str) -> Path:
    path = folder / "c++"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def environ(cache: Path, compiler: Path | str) -> dict[str, str]:
    return {"XDG_CACHE_HOME": str(cache), "CXX": str(compiler), "PATH": os.environ["PATH"]}


def test_the_compiler_is_asked_for_by_name_or_found() -> None:
    assert cpu_library.find_compiler({"CXX": sys.executable}) == (sys.executable,)
    assert cpu_library.find_compiler({"CXX": f"{sys.executable} -m 'two words'"}) == (sys.executable, "-m", "two words")
    with pytest.raises(KernelUnavailable, match=r"no C\+\+ compiler: nowhere -O1 not found"):
        cpu_library.find_compiler({"CXX": "nowhere -O1"})
    with pytest.raises(KernelUnavailable, match="CXX is not a command"):
        cpu_library.find_compiler({"CXX": "g++ 'open"})
    with pytest.raises(KernelUnavailable, match="no C\\+\\+ compiler: c\\+\\+, g\\+\\+, clang\\+\\+ not found"):
        cpu_library.find_compiler({"PATH": ""})


def test_other_sources_are_another_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = cpu_library.library_file(tmp_path)
    assert before == cpu_library.library_file(tmp_path)
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "kernels.cpp").write_text("other")
    monkeypatch.setattr(cpu_library, "SOURCES", tmp_path)
    assert cpu_library.library_file(tmp_path) != before


def test_only_the_copies_of_one_instruction_set_need_it() -> None:
    assert set(cpu_library.objects("aarch64")) == {"dispatch", "lamb", "baseline"}
    for name, (_, flags) in cpu_library.objects("x86_64").items():
        assert any(flag.startswith("-mavx") for flag in flags) == (name in ("avx2", "avx512"))
        assert "-march=native" not in flags


def test_a_failing_compiler_is_quoted(tmp_path: Path) -> None:
    compiler = script(tmp_path, "echo 'kernels.cpp:1: error: no such flag' >&2; exit 1")
    with pytest.raises(KernelUnavailable, match=r"failed: kernels\.cpp:1: error: no such flag"):
        cpu_library.load(environ(tmp_path, compiler))
    assert [path.suffix for path in (tmp_path / "zero_trial").iterdir()] == [".lock"]


def test_a_compiler_that_hangs_is_ended_with_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_library, "SECONDS", 0.5)
    with pytest.raises(KernelUnavailable, match=r"within 0\.5 s"):
        cpu_library.load(
            environ(
                tmp_path, script(tmp_path, f"echo $$ >> {tmp_path}/pids\nsleep 60 & echo $! >> {tmp_path}/pids\nwait")
            )
        )
    pids = (tmp_path / "pids").read_text().split()
    assert len(pids) == 2 * len(cpu_library.objects(platform.machine()))
    assert not [pid for pid in pids if runs(int(pid))]


def runs(pid: int) -> bool:
    """A killed process may be a zombie until its parent collects it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(("makes", "output"), [("exit 0", "made no library"), (GARBAGE, "file too short|invalid ELF")])
def test_a_compiler_that_makes_nothing_of_use(tmp_path: Path, makes: str, output: str) -> None:
    """What cannot be loaded does not stay, and the next process builds it again."""
    with pytest.raises(KernelUnavailable, match=output):
        cpu_library.load(environ(tmp_path, script(tmp_path, makes)))
    assert [path.suffix for path in (tmp_path / "zero_trial").iterdir()] == [".lock"]


def compiler_or_skip() -> tuple[str, ...]:
    try:
        return cpu_library.find_compiler(os.environ)
    except KernelUnavailable as trouble:
        pytest.skip(trouble.what)


@pytest.fixture(scope="module")
def built() -> Path:
    """The library of these sources, as this machine has it."""
    compiler_or_skip()
    cpu_library.load(os.environ)
    return cpu_library.library_file(kernel_cache.cache_folder(os.environ))


def quick_compiler(folder: Path, built: Path) -> Path:
    """Makes every output a copy of ``built``."""
    return script(folder, f'for last; do [ "$out" = -o ] && cp {built} "$last"; out=$last; done; exit 0')


@pytest.mark.parametrize("way", ["not a folder", "read-only", "writable by others", "full", "noexec", "no locks"])
def test_without_a_writable_cache_the_library_is_built_in_every_process(
    tmp_path: Path, built: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Also where there is a library already, but a broken one."""
    if way == "read-only" and os.geteuid() == 0:
        pytest.skip("root may write anywhere")
    compiler, folder = quick_compiler(tmp_path, built), tmp_path / "zero_trial"
    if way == "read-only":
        folder.mkdir()
        cpu_library.library_file(folder).write_bytes(b"half a file")
        folder.chmod(0o500)
    elif way == "not a folder":
        folder.write_text("")
    else:
        folder.mkdir()
    if way == "writable by others":
        folder.chmod(0o777)
        shutil.copy(built, cpu_library.library_file(folder))  # whole, and not to be trusted
    elif way == "full":
        monkeypatch.setattr(os, "replace", full)
    elif way == "noexec":
        monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_flag=os.ST_NOEXEC))
    elif way == "no locks":
        monkeypatch.setattr(fcntl, "flock", no_locks)
    with caplog.at_level(logging.WARNING, logger="zero_trial"):
        library = cpu_library.load(environ(tmp_path, compiler))
    assert library.zt_best_isa() in (0, 1, 2)
    (line,) = (record.message for record in caplog.records)
    assert "built again in every process" in line and (str(folder) in line or way == "no locks")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c++", "zero_trial"]
    assert way in ("not a folder", "writable by others") or not [
        x for x in folder.iterdir() if x.suffix == ".so" and way != "read-only"
    ]


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def no_locks(*_: object) -> None:
    raise OSError(errno.ENOLCK, "No locks available")


def test_without_a_home_it_is_built_for_the_process(
    built: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pwd, "getpwuid", lambda _: {}["no one"])
    given = {"CXX": str(quick_compiler(tmp_path, built)), "PATH": os.environ["PATH"]}
    assert cpu_library.load(given).zt_best_isa() in (0, 1, 2)
    assert "has no home folder" in caplog.text


def test_a_builder_that_was_stopped_is_not_waited_for_for_ever(
    built: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_library, "SECONDS", 0.05)
    monkeypatch.setattr(cpu_library, "_built", lambda environ, keep, reason="": reason)
    path = cpu_library.library_file(tmp_path / "zero_trial")
    path.parent.mkdir()
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "another process has held" in str(cpu_library.load(environ(tmp_path, quick_compiler(tmp_path, built))))


def test_a_builder_that_was_killed_holds_up_no_other(tmp_path: Path, built: Path) -> None:
    """Its lock went with it; the next one builds."""
    real = quick_compiler(tmp_path, built)
    (tmp_path / "slow").mkdir()
    slow = script(tmp_path / "slow", f"echo x >> {tmp_path}/count; exec sleep 60")
    code = "import os; from zero_trial.ops import cpu_library; cpu_library.load(os.environ)"
    builder = subprocess.Popen([sys.executable, "-c", code], env=os.environ | environ(tmp_path, slow))
    folder = tmp_path / "zero_trial"
    try:
        while not (tmp_path / "count").exists() and builder.poll() is None:
            time.sleep(0.01)
    finally:
        builder.kill()
        builder.wait()
    assert cpu_library.load(environ(tmp_path, real)).zt_best_isa() in (0, 1, 2)
    assert sorted(path.suffix for path in folder.iterdir()) == [".lock", ".so"]


@pytest.mark.parametrize("keep", [0, 100, 60_000, -1])
def test_a_library_that_was_cut_short_is_built_again(tmp_path: Path, built: Path, keep: int) -> None:
    """Loading it could kill the process: what is missing of a mapped file is a bus error."""
    kept = cpu_library.library_file(tmp_path / "zero_trial")
    kept.parent.mkdir()
    kept.write_bytes(built.read_bytes()[:keep])
    assert cpu_library.load(environ(tmp_path, quick_compiler(tmp_path, built))).zt_best_isa() in (0, 1, 2)
    assert kernel_cache.is_sound(kept)


def test_nowhere_to_write_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "file"))
    with pytest.raises(KernelUnavailable, match="Not a directory"):
        cpu_library.load(environ(tmp_path / "file", sys.executable))


def test_a_library_that_there_is_needs_no_compiler_and_no_right_to_write(tmp_path: Path, built: Path) -> None:
    kept = cpu_library.library_file(tmp_path / "zero_trial")
    kept.parent.mkdir()
    shutil.copy(built, kept)
    kept.parent.chmod(0o500)
    try:
        assert cpu_library.load({"XDG_CACHE_HOME": str(tmp_path), "PATH": ""}).zt_best_isa() in (0, 1, 2)
        assert [path.name for path in kept.parent.iterdir()] == [kept.name]
    finally:
        kept.parent.chmod(0o700)


def test_a_broken_library_without_a_compiler_says_what_is_missing(tmp_path: Path) -> None:
    kept = cpu_library.library_file(tmp_path / "zero_trial")
    kept.parent.mkdir()
    kept.write_bytes(b"\x7fELF, but cut off")
    with pytest.raises(KernelUnavailable, match=r"no C\+\+ compiler"):
        cpu_library.load({"XDG_CACHE_HOME": str(tmp_path), "PATH": ""})


def test_processes_that_come_together_build_once(tmp_path: Path, built: Path) -> None:
    """The compiler counts; a broken file in the library's place is replaced."""
    quick = quick_compiler(tmp_path, built).read_text().split("\n", 1)[1]
    folder = tmp_path / "zero_trial"
    folder.mkdir()
    cpu_library.library_file(folder).write_bytes(b"half a file")
    compiler = script(tmp_path, f"echo x >> {tmp_path}/count\n{quick}")
    code = "import os; from zero_trial.ops import cpu_library; print(cpu_library.load(os.environ).zt_best_isa())"
    env = os.environ | environ(tmp_path, compiler)
    started = [
        subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    try:
        output = [process.communicate(timeout=120)[0].strip() for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert output[0] == output[1] and output[0] in ("0", "1", "2")
    assert len((tmp_path / "count").read_text().split()) == len(cpu_library.objects(platform.machine())) + 1
    assert sorted(path.suffix for path in folder.iterdir()) == [".lock", ".so"]
