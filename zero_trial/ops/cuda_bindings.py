"""The CUDA driver and NVRTC through ctypes: compile kernels, load them into a device's primary
context (torch's too), launch them.

NVRTC is the CUDA compiler as a library. It needs neither a GPU nor a driver.
"""

from __future__ import annotations

import ctypes
import glob
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero_trial.errors import KernelUnavailable

NAMES = ("libcuda.so.1", "libcuda.so")
THREADS = 256  # per block, in all kernels
OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
# CUDA_ERROR_INVALID_IMAGE, NO_BINARY_FOR_GPU, INVALID_SOURCE: the driver may still accept the same
# kernel as PTX.
OTHER_IMAGE = (200, 209, 300)
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED

MAJORS = (13, 12, 11)  # of NVRTC
# Where pip packages put NVRTC: CUDA 13's, CUDA 12's, and torch's own wheels with everything in one
# folder.
PACKAGE_FOLDERS = ("nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib", "torch/lib")
SYSTEM_FOLDERS = ("/usr/local/cuda/lib64", "/usr/local/cuda-*/lib64", "/usr/lib/x86_64-linux-gnu", "/usr/lib64")
LOG_LINES = 6


class DriverError(KernelUnavailable):
    """The driver refused a call; ``status`` is its error code."""

    def __init__(self, what: str, status: int) -> None:
        super().__init__(what)
        self.status = status


class Driver:
    """libcuda as this process uses it. Contexts are retained once per device and never released:
    torch holds them as long."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._contexts: dict[int, int] = {}
        self._popped = ctypes.byref(ctypes.c_void_p())  # receives a context that nothing reads
        try:
            _declare(library)
        except AttributeError as missing:
            raise KernelUnavailable(f"the CUDA driver is too old, or is not one: {missing}") from None
        self._check(library.cuInit(0), "cuInit")

    def function(self, image: bytes, entry: str, device: int) -> int:
        """Load machine code or PTX and find one kernel in it. Raises DriverError if the driver
        refuses it."""
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        # Loading allocates, which would break a capture into a CUDA graph, except in relaxed mode.
        mode = ctypes.c_int(_RELAXED)
        self._enter(device)
        self._library.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
        try:
            self._check(self._library.cuModuleLoadData(ctypes.byref(module), image), f"{entry}: cuModuleLoadData")
            found = self._library.cuModuleGetFunction(ctypes.byref(function), module, entry.encode())
            self._check(found, f"{entry}: cuModuleGetFunction")
        finally:
            self._library.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
            self._leave()
        return int(function.value or 0)

    def launch(self, function: int, device: int, blocks: int, stream: int, arguments: bytes) -> None:
        """Start ``blocks`` blocks on ``stream``; ``arguments`` is the kernel's one parameter, a
        struct. Does not wait."""
        # An array of one pointer; the driver copies what it points to.
        parameters = ctypes.byref(ctypes.c_char_p(arguments))
        self._enter(device)
        try:
            status = self._library.cuLaunchKernel(function, blocks, 1, 1, THREADS, 1, 1, 0, stream, parameters, None)
        finally:
            self._leave()
        if status:
            self._check(status, "cuLaunchKernel")

    def capturing(self, stream: int, device: int) -> bool:
        """Return whether the stream is being captured into a CUDA graph."""
        state = ctypes.c_int()
        self._enter(device)
        try:
            self._check(self._library.cuStreamIsCapturing(stream, ctypes.byref(state)), "cuStreamIsCapturing")
        finally:
            self._leave()
        return state.value != 0

    def _enter(self, device: int) -> None:
        """Make the device's context current in this thread, until :meth:`_leave`."""
        if device not in self._contexts:
            self._contexts[device] = self._primary(device)
        status = self._library.cuCtxPushCurrent_v2(self._contexts[device])
        if status:
            self._check(status, "cuCtxPushCurrent")

    def _leave(self) -> None:
        self._library.cuCtxPopCurrent_v2(self._popped)

    def _primary(self, device: int) -> int:
        handle, context = ctypes.c_int(), ctypes.c_void_p()
        self._check(self._library.cuDeviceGet(ctypes.byref(handle), device), "cuDeviceGet")
        retained = self._library.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle)
        self._check(retained, "cuDevicePrimaryCtxRetain")
        return int(context.value or 0)

    def _check(self, status: int, where: str) -> None:
        if status:
            said = ctypes.c_char_p()
            self._library.cuGetErrorString(status, ctypes.byref(said))
            reason = said.value.decode(errors="replace") if said.value else "unknown error"
            raise DriverError(f"{where}: {reason} ({status})", status)


def _declare(library: ctypes.CDLL) -> None:
    """Declare the types of the functions that are used, as in cuda.h of CUDA 11 to 13."""
    pointer, integer, number, text = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint, ctypes.c_char_p
    out, out_integer = ctypes.POINTER(pointer), ctypes.POINTER(integer)
    # grid, block, shared; stream, parameters, extra
    launch = [pointer, *[number] * 7, pointer, pointer, pointer]
    types: dict[str, list[Any]] = {
        "cuInit": [number],
        "cuGetErrorString": [integer, ctypes.POINTER(text)],
        "cuDeviceGet": [out_integer, integer],
        "cuDevicePrimaryCtxRetain": [out, integer],
        "cuCtxPushCurrent_v2": [pointer],
        "cuCtxPopCurrent_v2": [out],
        "cuModuleLoadData": [out, text],  # takes bytes as they are, zeros and all
        "cuModuleGetFunction": [out, pointer, text],
        "cuThreadExchangeStreamCaptureMode": [out_integer],
        "cuStreamIsCapturing": [pointer, out_integer],
        "cuLaunchKernel": launch,
    }
    for name, arguments in types.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, integer


def open_driver(names: tuple[str, ...] = NAMES) -> Driver:
    """Open the driver. Raises KernelUnavailable without one."""
    for name in names:
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        return Driver(library)
    raise KernelUnavailable(f"no CUDA driver: {' and '.join(names)} cannot be opened")


@dataclass(frozen=True)
class CompileTarget:
    """What to compile for: the machine code of an architecture, or PTX that the driver compiles.
    ``arch`` 90 is sm_90."""

    arch: int
    ptx: bool = False

    @property
    def option(self) -> str:
        return f"--gpu-architecture={'compute' if self.ptx else 'sm'}_{self.arch}"


@dataclass(frozen=True)
class Nvrtc:
    """The opened compiler. ``archs``: the architectures that it makes machine code for."""

    library: ctypes.CDLL
    path: str
    version: tuple[int, int]
    archs: tuple[int, ...]

    def target(self, arch: int) -> CompileTarget:
        """Return the device's own architecture, or PTX for the highest known one below. Raises
        KernelUnavailable if there is none."""
        if arch in self.archs:
            return CompileTarget(arch)
        below = [known for known in self.archs if known < arch]
        if not below:
            raise KernelUnavailable(
                f"NVRTC {self.version[0]}.{self.version[1]} does not compile for this device",
                got=f"compute capability {arch // 10}.{arch % 10}",
                expected=f"{min(self.archs) // 10}.{min(self.archs) % 10} or newer",
            )
        return CompileTarget(max(below), ptx=True)

    def compile(
        self, name: str, source: str, headers: Mapping[str, str], options: Sequence[str], target: CompileTarget
    ) -> bytes:
        """Compile one source to machine code or PTX. Raises KernelUnavailable with the compiler's
        first errors."""
        program = ctypes.c_void_p()
        texts = [text.encode() for text in headers.values()]
        names = [header.encode() for header in headers]
        create = self.library.nvrtcCreateProgram(
            *(ctypes.byref(program), source.encode(), name.encode(), len(headers)),
            *((ctypes.c_char_p * len(texts))(*texts), (ctypes.c_char_p * len(names))(*names)),
        )
        self._check(create, f"{name}: no program")
        try:
            given = [option.encode() for option in (*options, target.option)]
            status = self.library.nvrtcCompileProgram(program, len(given), (ctypes.c_char_p * len(given))(*given))
            if status:
                raise KernelUnavailable(f"{name} does not compile: {first_lines(self._text('ProgramLog', program))}")
            return self._bytes("PTX" if target.ptx else "CUBIN", program)
        finally:
            self.library.nvrtcDestroyProgram(ctypes.byref(program))

    def _text(self, what: str, program: ctypes.c_void_p) -> str:
        return self._bytes(what, program).rstrip(b"\0").decode(errors="replace")

    def _bytes(self, what: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        self._check(getattr(self.library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)), f"no {what}")
        buffer = ctypes.create_string_buffer(size.value)
        self._check(getattr(self.library, f"nvrtcGet{what}")(program, buffer), f"no {what}")
        return buffer.raw

    def _check(self, status: int, where: str) -> None:
        if status:
            said = self.library.nvrtcGetErrorString(status).decode(errors="replace")
            raise KernelUnavailable(f"NVRTC {self.path}: {where}: {said}")


def first_lines(log: str) -> str:
    """Return the first errors of a compiler's log, in one line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return "; ".join((errors or lines)[:LOG_LINES]) or "no reason given"


def places(folders: Sequence[str], major: int) -> Iterator[str]:
    """Yield where that major version may be, best first: with the packages in ``folders``, on the
    loader's own paths, in CUDA's folders."""
    for folder in folders:
        for below in PACKAGE_FOLDERS:
            found = sorted(glob.glob(str(Path(folder) / below / f"libnvrtc*.so.{major}*")))
            yield from (path for path in found if "builtins" not in path and ".alt." not in path)
    yield f"libnvrtc.so.{major}"
    for system in SYSTEM_FOLDERS:
        yield from sorted(glob.glob(f"{system}/libnvrtc.so.{major}"), reverse=True)


def companions(place: str) -> list[str]:
    """List what NVRTC loads by name only, which the loader does not find in a package. It does for
    a library that it found itself."""
    return glob.glob(str(Path(place).parent / "libnvrtc-builtins.so*")) if "/" in place else []


def open_nvrtc(folders: Sequence[str] | None = None, majors: Sequence[int] = MAJORS) -> Nvrtc:
    """Open the first NVRTC of the first of ``majors`` that has one. Raises KernelUnavailable if
    there is none.

    A driver refuses code of a newer compiler, so torch's own major version, which runs here, should
    come first.
    """
    chosen = sys.path if folders is None else folders
    for place in (place for major in majors for place in places(chosen, major)):
        try:
            for companion in companions(place):
                ctypes.CDLL(companion)
            return _typed(ctypes.CDLL(place), place)
        except (OSError, AttributeError):
            continue
    raise KernelUnavailable(
        "no NVRTC: libnvrtc is neither among the Python packages nor on the system's paths",
        fix="pip install nvidia-cuda-nvrtc (CUDA 13) or nvidia-cuda-nvrtc-cu12.",
    )


def _typed(library: ctypes.CDLL, path: str) -> Nvrtc:
    pointer, size, text = ctypes.c_void_p, ctypes.POINTER(ctypes.c_size_t), ctypes.c_char_p
    library.nvrtcGetErrorString.restype = text
    library.nvrtcCreateProgram.argtypes = [
        *(ctypes.POINTER(pointer), text, text, ctypes.c_int),
        *(ctypes.POINTER(text), ctypes.POINTER(text)),
    ]
    library.nvrtcCompileProgram.argtypes = [pointer, ctypes.c_int, ctypes.POINTER(text)]
    library.nvrtcDestroyProgram.argtypes = [ctypes.POINTER(pointer)]
    for what in ("ProgramLog", "PTX", "CUBIN"):
        getattr(library, f"nvrtcGet{what}Size").argtypes = [pointer, size]
        getattr(library, f"nvrtcGet{what}").argtypes = [pointer, text]
    major, minor, count = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    library.nvrtcGetNumSupportedArchs(ctypes.byref(count))
    archs = (ctypes.c_int * count.value)()
    library.nvrtcGetSupportedArchs(archs)
    return Nvrtc(library, path, (major.value, minor.value), tuple(archs))
