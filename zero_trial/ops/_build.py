"""The CPU library: compiled from csrc/ by the machine's C++ compiler, once, into a cache folder that all processes share.

Every source is compiled without contraction; the kernels once per instruction set, with that set's flags on that one object, so
that the library runs on any processor of the architecture. Its name is a hash of sources and flags: another version is another file.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from zero_trial.errors import KernelUnavailable
from zero_trial.ops import _library_cache

SOURCES = Path(__file__).parents[1] / "csrc"
COMPILERS = ("c++", "g++", "clang++")
SECONDS = 120.0  # a compiler that has not ended by then is not going to

log = logging.getLogger("zero_trial")

_FLAGS = (
    *("-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti"),
    # The same bits everywhere: no fusing of a * b + c. The other two only drop errno and exception flags, which nobody reads.
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
)
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mprefer-vector-width=512")


def objects(machine: str) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Object name -> (source below cpu/, its own flags) on this architecture."""
    found: dict[str, tuple[str, tuple[str, ...]]] = {
        "dispatch": ("dispatch.cpp", ("-fopenmp",)),
        "lamb": ("lamb.cpp", ("-fopenmp",)),
        "baseline": ("kernels.cpp", ("-DZT_ISA=baseline",)),
    }
    if machine in ("x86_64", "AMD64"):
        found["avx2"] = ("kernels.cpp", ("-DZT_ISA=avx2", "-mavx2", "-mfma"))
        found["avx512"] = ("kernels.cpp", ("-DZT_ISA=avx512", *_AVX512))
    return found


def find_compiler(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The command in $CXX ("ccache g++"), or the first known C++ compiler on $PATH. Raises KernelUnavailable where there is none."""
    wanted = environ.get("CXX", "").strip()
    try:
        commands = [shlex.split(wanted)] if wanted else [[name] for name in COMPILERS]
    except ValueError as trouble:
        raise KernelUnavailable(f"$CXX is no command: {wanted}: {trouble}") from None
    for name, *arguments in commands:
        path = shutil.which(name, path=environ.get("PATH"))
        if path:
            return (path, *arguments)
    raise KernelUnavailable(f"no C++ compiler: {wanted or ', '.join(COMPILERS)} not found")


def library_file(folder: Path) -> Path:
    """Where the library of these sources lies, built or not."""
    digest = hashlib.sha256(repr((_FLAGS, objects(platform.machine()))).encode())
    for path in sorted(path for pattern in ("cpu/*", "include/*") for path in SOURCES.glob(pattern)):
        digest.update(path.name.encode() + path.read_bytes())
    return folder / f"cpu-{platform.machine()}-{digest.hexdigest()[:16]}.so"


def load(environ: Mapping[str, str]) -> ctypes.CDLL:
    """The library, built first where it is missing or cannot be loaded. Raises KernelUnavailable with the reason.

    Processes that come at the same time wait for the one that builds; a reader never sees half a file. Where nothing can be kept (a folder
    that cannot be written or that others can write, no home, noexec) each process builds its own, and says so.
    """
    try:
        try:
            path = library_file(_library_cache.cache_folder(environ))
        except RuntimeError as trouble:
            return _load_unkept(environ, str(trouble))
        if (library := _kept(path)) is not None:
            return library
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            if reason := _library_cache.why_not(path.parent):
                return _load_unkept(environ, reason)
            path.with_suffix(".lock").touch()
            with _library_cache.turn(path, 2 * SECONDS):
                if (library := _kept(path)) is not None:
                    return library  # another process was faster
                _library_cache.sweep(path)
                build(path, find_compiler(environ))
        except OSError as trouble:  # read-only, no locks on this file system
            return _load_unkept(environ, str(trouble))
        except KernelUnavailable as trouble:
            if not _library_cache.is_full(trouble.what):
                raise
            return _load_unkept(environ, f"{path.parent} is full")
        return _fresh(path)
    except OSError as trouble:
        raise KernelUnavailable(str(trouble)) from trouble


def _kept(path: Path) -> ctypes.CDLL | None:
    """The library that lies there, if it may be loaded and can be."""
    try:
        if _library_cache.why_not(path.parent) or not _library_cache.is_sound(path):
            return None
        return ctypes.CDLL(str(path))
    except OSError:  # not there, or built on a machine with a newer libc
        return None


def _fresh(path: Path) -> ctypes.CDLL:
    """The library that was built just now; one that cannot be loaded does not stay."""
    try:
        return ctypes.CDLL(str(path))
    except OSError:
        path.unlink(missing_ok=True)
        raise


def _load_unkept(environ: Mapping[str, str], reason: str) -> ctypes.CDLL:
    """The library built for this process alone; its file is gone once it is loaded."""
    compiler = find_compiler(environ)
    log.warning("CPU kernels are built anew in every process, as they cannot be kept: %s", reason)
    with tempfile.TemporaryDirectory(prefix="zero_trial-") as folder:
        path = library_file(Path(folder))
        build(path, compiler)
        return ctypes.CDLL(str(path))


def build(path: Path, compiler: Sequence[str]) -> None:
    """Compiles the library and moves it to ``path`` in one step. Raises KernelUnavailable with the compiler's first complaint."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=_library_cache.scratch_prefix(path)) as scratch:
        made = [Path(scratch) / f"{name}.o" for name in objects(platform.machine())]
        parts = objects(platform.machine()).values()
        _run_all(
            [
                [*compiler, *_FLAGS, *own, "-c", str(SOURCES / "cpu" / source), "-o", str(target)]
                for target, (source, own) in zip(made, parts, strict=True)
            ]
        )
        library = Path(scratch) / path.name
        _run_all([[*compiler, "-shared", "-fopenmp", *map(str, made), "-o", str(library)]])
        if not library.is_file():
            raise KernelUnavailable(f"{compiler[0]} made no library and gave no reason")
        _library_cache.seal(library)
        os.replace(library, path)


def _run_all(commands: Sequence[Sequence[str]]) -> None:
    """Runs the commands side by side; none outlives this."""
    compiler, end = commands[0][0], time.monotonic() + SECONDS
    running: list[subprocess.Popen[bytes]] = []
    try:
        for command in commands:
            # In a group of its own: a compiler is a driver with children, and all of them have to end.
            running.append(
                subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
        for process in running:
            said, _ = process.communicate(timeout=max(0.0, end - time.monotonic()))
            if process.returncode:
                raise KernelUnavailable(f"{compiler} failed: {_complaint(said) or f'exit code {process.returncode}'}")
    except subprocess.TimeoutExpired:
        raise KernelUnavailable(f"{compiler} did not end within {SECONDS:g} s") from None
    finally:
        for process in running:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            if process.stdout is not None:
                process.stdout.close()


def _complaint(said: bytes) -> str:
    """The line that a person would read first."""
    lines = said.decode(errors="replace").strip().splitlines()
    return next((line.strip() for line in lines if "error" in line), "\n".join(lines))[:200]
