"""The CPU library: which of its copies this process runs, and how it is built from csrc/ where it
is not there yet.

``ZERO_TRIAL_OPS`` chooses: ``auto`` (native where possible, else plain torch, logged once),
``reference`` (plain torch) or ``native`` (an error where it is not possible).

The machine's C++ compiler builds the library once, into a cache folder that all processes share.
Every source is compiled without contraction; the kernels once per instruction set, with that set's
flags on that one object, so that the library runs on any processor of the architecture. Its name is
a hash of sources and flags: another version is another file.
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
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from zero_trial.errors import ConfigError, KernelUnavailable
from zero_trial.ops import kernel_cache
from zero_trial.ops.spec import OPTIMIZERS

log = logging.getLogger("zero_trial")

VARIABLE = "ZERO_TRIAL_OPS"
CHOICES = ("auto", "reference", "native")
ISAS = ("baseline", "avx2", "avx512")

SOURCES = Path(__file__).parents[1] / "csrc"
COMPILERS = ("c++", "g++", "clang++")
SECONDS = 120.0  # a compiler that has not finished by then is killed

_FLAGS = (
    *("-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti"),
    # The same bits everywhere: no fusing of a * b + c. The other two only drop errno and exception
    # flags, which nothing reads.
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
)
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mprefer-vector-width=512")

_INT, _LONG, _POINTER, _DOUBLE = ctypes.c_int, ctypes.c_long, ctypes.c_void_p, ctypes.c_double


@dataclass(frozen=True)
class CPULibrary:
    """The functions of the library, and the number of the copy to run (an index of ISAS)."""

    library: ctypes.CDLL
    isa: int


@dataclass
class Backend:
    """What runs the ops on CPU: ``native``, or plain torch because of ``why``. ``strict``: native
    was asked for, and nothing else is accepted."""

    native: CPULibrary | None
    why: str = ""
    strict: bool = False

    def withdraw(self, why: str) -> None:
        """Use plain torch from now on: another rank has no kernels, and ranks must compute the same
        bits."""
        self.native, self.why = None, why

    def describe(self) -> str:
        if self.native is None:
            return f"plain torch ({self.why})"
        return f"native ({ISAS[self.native.isa]}, {torch.get_num_threads()} threads)"


@cache
def backend() -> Backend:
    """Return what this process runs on CPU; the first call chooses, and builds where necessary."""
    return choose(os.environ)


def choose(environ: Mapping[str, str]) -> Backend:
    """Choose what ``ZERO_TRIAL_OPS`` asks for. Raises ConfigError for an unknown value,
    KernelUnavailable if ``native`` is not possible."""
    wanted = environ.get(VARIABLE) or "auto"
    if wanted not in CHOICES:
        raise ConfigError("no such choice of kernels", where=VARIABLE, got=repr(wanted), expected=", ".join(CHOICES))
    if wanted == "reference":
        return Backend(None, f"{VARIABLE}=reference")
    try:
        return Backend(open_native(environ), strict=wanted == "native")
    except KernelUnavailable as trouble:
        if wanted == "native":
            raise KernelUnavailable(
                "the native kernels cannot be used",
                where=f"{VARIABLE}=native",
                got=trouble.what,
                fix="Remove the cause, or set it to auto.",
            ) from trouble
        log.warning("CPU kernels run as plain torch, about as fast as torch's own foreach: %s", trouble.what)
        return Backend(None, trouble.what)


def open_native(environ: Mapping[str, str]) -> CPULibrary:
    """Load the library and declare the types of its functions. Raises KernelUnavailable."""
    return typed(load(environ))


def typed(library: ctypes.CDLL) -> CPULibrary:
    """Declare the types of the library's functions. Raises KernelUnavailable where one is
    missing."""
    try:
        for op in OPTIMIZERS:
            function = getattr(library, f"zt_{op.name}")
            function.argtypes, function.restype = [ctypes.c_char_p], None
            fields = getattr(library, f"zt_{op.name}_fields")()
            if fields != op.fields:  # a kernel would read numbers that were not written
                raise KernelUnavailable(f"{op.struct} has other fields", got=fields, expected=op.fields)
        library.zt_square_sum.argtypes = [_INT, _INT, _LONG, _POINTER, _INT, ctypes.POINTER(_DOUBLE)]
        library.zt_square_sum.restype = _INT
        library.zt_add.argtypes, library.zt_add.restype = [_INT, _INT, _LONG, _POINTER, _INT, _POINTER, _INT], None
        library.zt_sum.argtypes = [_INT, _INT, _LONG, _INT, ctypes.c_char_p, _INT, _POINTER]
        library.zt_sum.restype = None
        library.zt_lamb_moments.argtypes, library.zt_lamb_moments.restype = [ctypes.c_char_p, _LONG, _POINTER], _INT
        library.zt_lamb_apply.argtypes, library.zt_lamb_apply.restype = [ctypes.c_char_p, _LONG], None
        library.zt_best_isa.argtypes, library.zt_best_isa.restype = [], _INT
    except AttributeError as missing:
        raise KernelUnavailable(f"the library of kernels is incomplete: {missing}") from None
    return CPULibrary(library, library.zt_best_isa())


def load(environ: Mapping[str, str]) -> ctypes.CDLL:
    """Load the library; build it first if it is missing or cannot be loaded. Raises
    KernelUnavailable with the reason.

    Processes that start at the same time wait for the one that builds; a reader never sees half a
    file. Where nothing can be kept (a folder that cannot be written or that others can write, no
    home, noexec) each process builds its own, and logs that.
    """
    try:
        path = library_file(kernel_cache.cache_folder(environ))
        if (library := _kept(path)) is not None:
            return library
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if reason := kernel_cache.why_not(path.parent):
            return _built(environ, None, reason)
        with kernel_cache.turn(path, 2 * SECONDS):
            # another process may have been faster
            return _kept(path) or _built(environ, path)
    except (OSError, RuntimeError) as trouble:  # no home, read-only, no locks on this file system
        return _built(environ, None, str(trouble))


def _kept(path: Path) -> ctypes.CDLL | None:
    """Load the library at ``path``; None if it is missing, not sound or cannot be loaded."""
    try:
        if kernel_cache.why_not(path.parent) or not kernel_cache.is_sound(path):
            return None
        return ctypes.CDLL(str(path))
    except OSError:  # not there, or built on a machine with a newer libc
        return None


def _built(environ: Mapping[str, str], keep: Path | None, reason: str = "") -> ctypes.CDLL:
    """Build and load the library, and keep it at ``keep``; else its file is deleted once it is
    loaded."""
    compiler = find_compiler(environ)
    try:
        with tempfile.TemporaryDirectory(prefix="zero_trial-") as scratch:
            library = build(Path(scratch), compiler)
            if keep is not None:
                try:
                    os.replace(shutil.copy(library, keep.with_suffix(".new")), keep)
                    library = keep
                except OSError as trouble:
                    reason = f"{keep.parent}: {trouble}"
            if library is not keep:
                log.warning("CPU kernels are built again in every process, because they cannot be kept: %s", reason)
            return ctypes.CDLL(str(library))
    except OSError as trouble:
        if keep is not None:
            keep.unlink(missing_ok=True)  # it cannot be loaded
        raise KernelUnavailable(str(trouble)) from trouble


def library_file(folder: Path) -> Path:
    """Return the file of the library of these sources, built or not."""
    digest = hashlib.sha256(repr((_FLAGS, objects(platform.machine()))).encode())
    for path in sorted(path for pattern in ("cpu/*", "include/*") for path in SOURCES.glob(pattern)):
        digest.update(path.name.encode() + path.read_bytes())
    return folder / f"cpu-{platform.machine()}-{digest.hexdigest()[:16]}.so"


def objects(machine: str) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Return object name -> (source below cpu/, its own flags) for this architecture."""
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
    """Return the command in $CXX ("ccache g++"), or the first known C++ compiler on $PATH. Raises
    KernelUnavailable without one."""
    wanted = environ.get("CXX", "").strip()
    try:
        commands = [shlex.split(wanted)] if wanted else [[name] for name in COMPILERS]
    except ValueError as trouble:
        raise KernelUnavailable(f"$CXX is not a command: {wanted}: {trouble}") from None
    for name, *arguments in commands:
        path = shutil.which(name, path=environ.get("PATH"))
        if path:
            return (path, *arguments)
    raise KernelUnavailable(f"no C++ compiler: {wanted or ', '.join(COMPILERS)} not found")


def build(folder: Path, compiler: Sequence[str]) -> Path:
    """Compile the library in an empty folder. Raises KernelUnavailable with the compiler's first
    error."""
    sources, library = objects(platform.machine()), folder / "library.so"
    made = [folder / f"{name}.o" for name in sources]
    _run_all(
        [
            [*compiler, *_FLAGS, *own, "-c", str(SOURCES / "cpu" / source), "-o", str(target)]
            for target, (source, own) in zip(made, sources.values(), strict=True)
        ]
    )
    _run_all([[*compiler, "-shared", *map(str, made), "-fopenmp", "-o", str(library)]])
    if not library.is_file():
        raise KernelUnavailable(f"{compiler[0]} made no library and gave no reason")
    kernel_cache.seal(library)
    return library


def _run_all(commands: Sequence[Sequence[str]]) -> None:
    """Run the commands side by side; none of them is left running."""
    compiler, end = commands[0][0], time.monotonic() + SECONDS
    running: list[subprocess.Popen[bytes]] = []
    try:
        for command in commands:
            # In a group of its own: a compiler is a driver with children, and all of them have to
            # end.
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
        raise KernelUnavailable(f"{compiler} did not finish within {SECONDS:g} s") from None
    finally:
        for process in running:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            if process.stdout is not None:
                process.stdout.close()


def _complaint(said: bytes) -> str:
    """Return the first error line of a compiler's output."""
    lines = said.decode(errors="replace").strip().splitlines()
    return next((line.strip() for line in lines if "error" in line), "\n".join(lines))[:200]
