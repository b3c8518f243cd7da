"""The CUDA kernels on a processor: csrc/cuda compiled by g++ behind a driver that runs blocks and
threads in turn and checks every access.

Python packing, dispatch, launch geometry, barriers and kernels are those that a GPU runs; only
compiler and driver are others.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import subprocess
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from zero_trial.errors import KernelUnavailable
from zero_trial.ops import cpu_library, cuda, cuda_runtime
from zero_trial.ops.cuda_runtime import Driver, Kernel

HERE = Path(__file__).parent / "cuda_emulator"
FLAGS = (
    *("-std=c++17", "-O1", "-fPIC", "-shared", "-ffp-contract=off", "-fno-math-errno"),
    *("-Wall", "-Wno-unknown-pragmas", "-Wno-unused", "-Werror"),
)


@dataclass
class Emulator:
    """``multiprocessors`` of the pretended device: few, so that blocks walk over many tiles."""

    folder: Path
    compiler: str
    library: ctypes.CDLL
    multiprocessors: int = 2
    built: dict[Kernel, Path] = field(default_factory=dict)

    def build(self, kernels: Sequence[Kernel]) -> None:
        """Compiles those that are not yet, two at a time."""
        missing = [kernel for kernel in kernels if kernel not in self.built]
        with ThreadPoolExecutor(2) as pool:
            for kernel, path in zip(missing, pool.map(self._compile, missing), strict=True):
                self.built[kernel] = path

    def _compile(self, kernel: Kernel) -> Path:
        path = self.folder / f"{hashlib.sha256(repr(kernel).encode()).hexdigest()[:16]}.so"
        named = [f"-DZT_SOURCE={(cpu_library.SOURCES / 'cuda' / kernel.source)!s}".replace("=", '="', 1) + '"']
        named += [f"-DZT_ENTRY={kernel.entry}", *(option for option in kernel.options if option.startswith("-D"))]
        command = [self.compiler, *FLAGS, *named, "-I", str(cpu_library.SOURCES / "include"), str(HERE / "kernel.cpp")]
        compile_once(command, path)
        return path

    def cuda(self) -> cuda_runtime.CudaRuntime:
        """The backend that a process with a GPU has, on this one. Images are paths of what g++
        made; streams are the null stream."""

        def image(kernel: Kernel, arch: int) -> bytes:
            self.build([kernel])
            return str(self.built[kernel]).encode()

        device = cuda_runtime.DeviceInfo(0, 90, self.multiprocessors)
        given = (MeasuredDriver(Bindings(self.library)), image, lambda _: device, lambda _: 0)
        return cuda_runtime.CudaRuntime(*given, strict=True, kind="cpu")

    @contextmanager
    def watching(self, *tensors: Tensor | None, read_only: Sequence[Tensor] = ()) -> Iterator[None]:
        """Kernels may touch these tensors (and tables and scratch made meanwhile), and nothing
        else."""
        self.library.forget()
        for tensor in tensors:
            self.allow(tensor, writable=True)
        for tensor in read_only:
            self.allow(tensor, writable=False)
        yield
        said = self.library.fault().decode()
        if said:
            raise AssertionError(said)

    def allow(self, tensor: Tensor | None, *, writable: bool = True) -> None:
        if tensor is not None and tensor.numel():
            begin = tensor.data_ptr()
            self.library.allow(begin, begin + tensor.numel() * tensor.element_size(), int(writable))


RESULTS: dict[str, type[Any]] = {
    "cuGetErrorString": ctypes.c_char_p,
    "cuDeviceGet": ctypes.c_int,
    "cuDevicePrimaryCtxRetain": ctypes.c_void_p,
    "cuCtxPopCurrent": ctypes.c_void_p,
    "cuModuleLoadData": ctypes.c_void_p,
    "cuModuleGetFunction": ctypes.c_void_p,
    "cuFuncGetAttribute": ctypes.c_int,
    "cuOccupancyMaxActiveBlocksPerMultiprocessor": ctypes.c_int,
}


class Bindings:
    """The emulated driver as cuda.bindings.driver: functions return their status, and their result
    if they have one."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library

    def __getattr__(self, name: str) -> Callable[..., tuple[Any, ...]]:
        function = getattr(self.library, name + "_v2" * name.startswith("cuCtxP"))
        kind = RESULTS.get(name)

        def call(*given: Any) -> tuple[Any, ...]:
            rest = [x if isinstance(x, bytes) else ctypes.c_void_p(int(x)) for x in given]
            if kind is None:
                return (function(*rest),)
            result = kind()
            place = [ctypes.byref(result)]
            status = function(*rest, *place) if name == "cuGetErrorString" else function(*place, *rest)
            return status, result.value

        return call


class MeasuredDriver(Driver):
    """Tells the emulator how long the arguments are, which a real driver cannot know."""

    def launch(self, function: Any, device: int, blocks: int, stream: int, arguments: bytes) -> None:
        self._api.library.expect_arguments(len(arguments))
        super().launch(function, device, blocks, stream, arguments)
        self._api.library.expect_arguments(-1)


def compile_once(command: Sequence[str], path: Path) -> None:
    """Compile to ``path``, unless another process of this run has done so or does so now."""
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            made = path.with_suffix(".new")
            run(*command, "-o", str(made))
            made.rename(path)


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        raise AssertionError(done.stderr[:2000])


def make(folder: Path) -> Emulator:
    """Make the emulator; skip without a compiler."""
    try:
        (compiler,) = cpu_library.find_compiler({"PATH": __import__("os").environ["PATH"]})
    except KernelUnavailable as trouble:
        pytest.skip(trouble.what)
    path = folder / "driver.so"
    compile_once([compiler, "-std=c++17", "-O1", "-fPIC", "-shared", str(HERE / "driver.cpp"), "-ldl"], path)
    library = ctypes.CDLL(str(path))
    address, text = ctypes.c_ulong, ctypes.c_char_p
    library.allow.argtypes = [address, address, ctypes.c_long]
    library.allow_on.argtypes = [address, address, ctypes.c_long, ctypes.c_long]
    library.compiled.argtypes, library.compiled.restype = [text, ctypes.c_long, text, ctypes.c_int, ctypes.c_int], None
    library.new_stream.restype = library.stream_of_last.restype = ctypes.c_void_p
    library.expect_arguments.argtypes, library.expect_arguments.restype = [ctypes.c_long], None
    library.fault.restype = text
    return Emulator(folder, compiler, library)


def install(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> cuda_runtime.CudaRuntime:
    """The ops of zero_trial.ops.cuda run on the emulator; memory that they make for themselves may
    be touched."""
    backend, upload, doubles = emulator.cuda(), cuda.upload, cuda.doubles
    monkeypatch.setattr(cuda_runtime, "cuda_backend", lambda: cpu_library.Backend(backend))

    def uploaded(content: bytes, device: torch.device) -> Tensor:
        held = upload(content, device)
        emulator.allow(held, writable=False)
        return held

    def made(*shape: int, where: torch.device) -> Tensor:
        held = doubles(*shape, where=where)
        emulator.allow(held)
        return held

    monkeypatch.setattr(cuda, "upload", uploaded)
    monkeypatch.setattr(cuda, "doubles", made)
    return backend
