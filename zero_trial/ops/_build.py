"""The CPU library: compiled from csrc/ by the machine's C++ compiler, once, into a cache folder that all processes share.

Every source is compiled without contraction; the kernels once per instruction set, with that set's flags on that one object, so
that the library runs on any processor of the architecture. Its name is a hash of sources and flags: another version is another file.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from zero_trial.errors import KernelUnavailable

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


def cache_folder(environ: Mapping[str, str]) -> Path:
    """``$XDG_CACHE_HOME/zero_trial``, or ``~/.cache/zero_trial``."""
    base = environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "zero_trial"


def find_compiler(environ: Mapping[str, str]) -> str:
    """$CXX, or the first known C++ compiler on $PATH. Raises KernelUnavailable where there is none."""
    wanted = environ.get("CXX")
    for name in (wanted,) if wanted else COMPILERS:
        path = shutil.which(name, path=environ.get("PATH"))
        if path:
            return path
    raise KernelUnavailable(f"no C++ compiler: {wanted or ', '.join(COMPILERS)} not found")


def library_file(folder: Path) -> Path:
    """Where the library of these sources lies, built or not."""
    digest = hashlib.sha256(repr((_FLAGS, objects(platform.machine()))).encode())
    for path in sorted(path for pattern in ("cpu/*", "include/*") for path in SOURCES.glob(pattern)):
        digest.update(path.name.encode() + path.read_bytes())
    return folder / f"cpu-{platform.machine()}-{digest.hexdigest()[:16]}.so"


def load(environ: Mapping[str, str]) -> ctypes.CDLL:
    """The library, built first where it is missing or cannot be loaded. Raises KernelUnavailable with the reason.

    Processes that come at the same time wait for the one that builds; a reader never sees half a file. Where the cache folder cannot be
    written each process builds its own, and says so.
    """
    try:
        path = library_file(cache_folder(environ))
        try:
            return ctypes.CDLL(str(path))
        except OSError:
            pass
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            path.with_suffix(".lock").touch()
        except OSError as trouble:
            return _load_unkept(path, find_compiler(environ), trouble)
        with open(path.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                return ctypes.CDLL(str(path))  # another process was faster
            except OSError:
                build(path, find_compiler(environ))
        return ctypes.CDLL(str(path))
    except (OSError, RuntimeError) as trouble:  # a folder that is full, no home
        raise KernelUnavailable(str(trouble)) from trouble


def _load_unkept(path: Path, compiler: str, trouble: OSError) -> ctypes.CDLL:
    """The library built for this process alone; its file is gone once it is loaded."""
    log.warning("CPU kernels are built anew in every process: their cache folder cannot be written: %s", trouble)
    with tempfile.TemporaryDirectory(prefix="zero_trial-") as folder:
        build(Path(folder) / path.name, compiler)
        return ctypes.CDLL(str(Path(folder) / path.name))


def build(path: Path, compiler: str) -> None:
    """Compiles the library and moves it to ``path`` in one step. Raises KernelUnavailable with the compiler's first complaint."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="build-") as scratch:
        made = [Path(scratch) / f"{name}.o" for name in objects(platform.machine())]
        parts = objects(platform.machine()).values()
        _run_all(
            [
                [compiler, *_FLAGS, *own, "-c", str(SOURCES / "cpu" / source), "-o", str(target)]
                for target, (source, own) in zip(made, parts, strict=True)
            ]
        )
        library = Path(scratch) / path.name
        _run_all([[compiler, "-shared", "-fopenmp", *map(str, made), "-o", str(library)]])
        os.replace(library, path)


def _run_all(commands: Sequence[Sequence[str]]) -> None:
    """Runs the commands side by side."""
    compiler = commands[0][0]
    running: list[subprocess.Popen[str]] = []
    try:
        for command in commands:
            running.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
        for process in running:
            said, _ = process.communicate(timeout=SECONDS)
            if process.returncode:
                complaint = next((line for line in said.splitlines() if "error" in line), said.strip()[:200])
                raise KernelUnavailable(f"{compiler} failed: {complaint or f'exit code {process.returncode}'}")
    except subprocess.TimeoutExpired:
        raise KernelUnavailable(f"{compiler} did not end within {SECONDS:g} s") from None
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()
