"""The CPU library: which of its copies this process runs, and how it is built from csrc/ if it does
not exist yet.

``ZERO_TRIAL_OPS`` chooses: ``auto`` (native where possible, else plain torch, logged once),
``reference`` (plain torch) or ``native`` (an error if that is not possible).

The machine's C++ compiler builds the library once, into a cache folder that all processes share.
Every source is compiled without contraction; the kernels once per instruction set, with that set's
flags on that one object, so that the library runs on any processor of the architecture. Its name is
a hash of sources and flags: another version is another file.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from zero_trial.errors import ConfigError, KernelUnavailable
from zero_trial.ops.spec import OPTIMIZERS

log = logging.getLogger("zero_trial")

VARIABLE = "ZERO_TRIAL_OPS"
CHOICES = ("auto", "reference", "native")
ISAS = ("baseline", "avx2", "avx512")

SOURCES = Path(__file__).parents[1] / "csrc"
COMPILERS = ("c++", "g++", "clang++")

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

    def describe(self) -> str:
        return f"native ({ISAS[self.isa]}, {torch.get_num_threads()} threads)"


Native = TypeVar("Native")


@dataclass
class Backend(Generic[Native]):
    """What runs the ops on one kind of device: ``native``, or plain torch because of ``why``.
    ``strict``: native was requested, and nothing else is accepted."""

    native: Native | None
    why: str = ""
    strict: bool = False

    def withdraw(self, why: str) -> None:
        """Use plain torch from now on: another rank has no kernels, and bits must agree."""
        self.native, self.why = None, why

    def describe(self) -> str:
        native: Any = self.native
        return f"plain torch ({self.why})" if native is None else str(native.describe())


@cache
def backend() -> Backend[CPULibrary]:
    """Return what this process runs on CPU; the first call chooses, and builds if necessary."""
    return choose(os.environ, "CPU", open_native)


def choose(
    environ: Mapping[str, str], kind: str, open_kernels: Callable[[Mapping[str, str]], Native]
) -> Backend[Native]:
    """Choose as ``ZERO_TRIAL_OPS`` requests. Raises ConfigError for an unknown value,
    KernelUnavailable if ``native`` is not possible."""
    wanted = environ.get(VARIABLE) or "auto"
    if wanted not in CHOICES:
        raise ConfigError("no such choice of kernels", where=VARIABLE, got=repr(wanted), expected=", ".join(CHOICES))
    if wanted == "reference":
        return Backend(None, f"{VARIABLE}=reference")
    try:
        return Backend(open_kernels(environ), strict=wanted == "native")
    except KernelUnavailable as trouble:
        if wanted == "native":
            raise KernelUnavailable(
                f"the {kind} kernels are unavailable",
                where=f"{VARIABLE}=native",
                got=trouble.what,
                fix=trouble.fix or "Fix the cause, or set it to auto.",
            ) from trouble
        log.warning("%s kernels run as plain torch: %s", kind, trouble.what)
        return Backend(None, trouble.what)


def open_native(environ: Mapping[str, str]) -> CPULibrary:
    """Load the library, building it if it is not in the cache. Raises KernelUnavailable."""
    kept = KernelCache(cache_folder(environ))
    image = kept.get(library_name(), lambda: build(find_compiler(environ)))
    try:
        # An anonymous file: nothing changes it, and no noexec mount applies. It stays open, because
        # the loader assumes that a path it has seen is the library loaded from it.
        handle = os.memfd_create("zero_trial_kernels")
        with open(handle, "wb", closefd=False) as file:
            file.write(image)
        return typed(ctypes.CDLL(f"/proc/self/fd/{handle}"))
    except (OSError, AttributeError) as trouble:
        raise KernelUnavailable(f"the kernel library cannot be loaded: {trouble}") from trouble


def typed(library: ctypes.CDLL) -> CPULibrary:
    """Declare the types of the library's functions."""
    for op in OPTIMIZERS:
        function = getattr(library, f"zt_{op.name}")
        function.argtypes, function.restype = [ctypes.c_char_p], None
    library.zt_square_sum.argtypes = [_INT, _INT, _LONG, _POINTER, _INT, ctypes.POINTER(_DOUBLE)]
    library.zt_add.argtypes, library.zt_add.restype = [_INT, _INT, _LONG, _POINTER, _INT, _POINTER, _INT], None
    library.zt_sum.argtypes = [_INT, _INT, _LONG, _INT, ctypes.c_char_p, _INT, _POINTER]
    library.zt_sum.restype = None
    return CPULibrary(library, library.zt_best_isa())


def library_name() -> str:
    """Return the name of the library of these sources for this machine."""
    machine = platform.machine()
    digest = hashlib.sha256(repr((_FLAGS, objects(machine), platform.libc_ver())).encode())
    for path in sorted(path for pattern in ("cpu/*", "include/*") for path in SOURCES.glob(pattern)):
        digest.update(path.name.encode() + path.read_bytes())
    return f"cpu-{machine}-{digest.hexdigest()[:16]}.so"


def objects(machine: str) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Return object name -> (source below cpu/, its own flags) for this architecture."""
    found: dict[str, tuple[str, tuple[str, ...]]] = {
        "dispatch": ("dispatch.cpp", ("-fopenmp",)),
        "baseline": ("kernels.cpp", ("-DZT_ISA=baseline",)),
    }
    if machine in ("x86_64", "AMD64"):
        found["avx2"] = ("kernels.cpp", ("-DZT_ISA=avx2", "-mavx2", "-mfma"))
        found["avx512"] = ("kernels.cpp", ("-DZT_ISA=avx512", *_AVX512))
    return found


def find_compiler(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return $CXX ("ccache g++"), or a C++ compiler on $PATH. Raises KernelUnavailable."""
    wanted = shlex.split(environ.get("CXX", ""))
    for name, *arguments in [wanted] if wanted else [[name] for name in COMPILERS]:
        path = shutil.which(name, path=environ.get("PATH"))
        if path:
            return (path, *arguments)
    raise KernelUnavailable(f"no C++ compiler: {' '.join(wanted) or ', '.join(COMPILERS)} not found")


def build(compiler: Sequence[str]) -> bytes:
    """Compile the library. Raises KernelUnavailable with the compiler's first error."""
    sources = objects(platform.machine())
    try:
        with tempfile.TemporaryDirectory(prefix="zero_trial-") as folder, ThreadPoolExecutor() as pool:
            made = [f"{folder}/{name}.o" for name in sources]
            commands = [
                [*compiler, *_FLAGS, *own, "-c", str(SOURCES / "cpu" / source), "-o", target]
                for target, (source, own) in zip(made, sources.values(), strict=True)
            ]
            list(pool.map(_run, commands))
            _run([*compiler, "-shared", *made, "-fopenmp", "-o", f"{folder}/library.so"])
            return Path(folder, "library.so").read_bytes()
    except OSError as trouble:
        raise KernelUnavailable(str(trouble)) from trouble


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    if done.returncode:
        lines = done.stdout.decode(errors="replace").strip().splitlines()
        why = next((line.strip() for line in lines if "error" in line), "\n".join(lines))[:200]
        raise KernelUnavailable(f"{command[0]} failed: {why or f'exit code {done.returncode}'}")


# --- the folder that keeps compiled kernels between processes ---
#
# A kernel is code that runs with all of its user's rights, so it is loaded only from a folder where
# no other user could have put it. Loading half a file can kill the process instead of failing, so
# each file ends with a checksum of its content.

_DIGEST = hashlib.sha256().digest_size


def cache_folder(environ: Mapping[str, str]) -> Path:
    """Return ``$XDG_CACHE_HOME/zero_trial``, ``~/.cache/zero_trial``, or a temporary folder."""
    base, home = environ.get("XDG_CACHE_HOME", ""), os.path.expanduser("~")
    # a relative one would depend on where a process was started
    if os.path.isabs(base):
        return Path(base, "zero_trial")
    return (
        Path(home, ".cache", "zero_trial") if home != "~" else Path(tempfile.gettempdir(), f"zero_trial-{os.getuid()}")
    )


def open_to_others(folder: Path) -> str:
    """Return which other users could have written into an existing folder; empty if none."""
    found = os.stat(folder)
    if found.st_uid not in (os.geteuid(), 0):
        return f"{folder} belongs to another user ({found.st_uid})"
    writers = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return f"{folder} can be written by other users (mode {stat.S_IMODE(found.st_mode):o})" if writers else ""


class KernelCache:
    """Compiled kernels, a file each: checked when it is read, replaced in one step when it is
    written.

    A ``folder`` that cannot be written, or that other users can write, stores nothing: each process
    then compiles for itself, and logs that.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.trouble = ""  # why nothing is cached

    def get(self, name: str, make: Callable[[], bytes]) -> bytes:
        """Return the image of that name, from the folder or built. A broken file counts as missing
        and is replaced. Of processes that start together, one builds it and the others wait."""
        found = self._read(name)
        if found is None:
            with self._turn():
                found = self._read(name)  # another process may have been faster
                if found is None:
                    found = make()
                    self._write(name, found)
        return found

    def _read(self, name: str) -> bytes | None:
        try:
            if open_to_others(self.folder):  # the checksum is not a signature
                return None
            content = (self.folder / name).read_bytes()
        except OSError:
            return None
        image, digest = content[:-_DIGEST], content[-_DIGEST:]
        return image if image and hashlib.sha256(image).digest() == digest else None

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Hold the lock of the folder, which is released when the process ends."""
        with ExitStack() as held:
            with suppress(OSError):  # if nothing can be cached, there is nothing to wait for
                self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                lock = held.enter_context(open(self.folder / "kernels.lock", "w"))
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _write(self, name: str, image: bytes) -> None:
        try:
            if fault := open_to_others(self.folder):
                raise OSError(fault)
            handle, scratch = tempfile.mkstemp(dir=self.folder, suffix=".part")
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(image + hashlib.sha256(image).digest())
                os.replace(scratch, self.folder / name)
            except OSError:
                os.unlink(scratch)
                raise
        except OSError as trouble:
            if not self.trouble:
                log.warning("kernels are recompiled in every process because the cache cannot be used: %s", trouble)
            self.trouble = str(trouble)
