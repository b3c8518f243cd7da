"""The CUDA driver and NVRTC by NVIDIA's bindings, which torch's CUDA wheels require: compile
kernels, load them into a device's primary context (torch's too), launch them.

NVRTC is the CUDA compiler as a library. It needs neither a GPU nor a driver.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zero_trial.errors import KernelUnavailable

THREADS = 256  # per block, in all kernels
OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
LOG_LINES = 6
_FIX = "pip install cuda-bindings nvidia-cuda-nvrtc, of the major version of torch's CUDA."


class DriverError(KernelUnavailable):
    """The driver refused a call; ``status`` is its error code."""

    def __init__(self, what: str, status: int) -> None:
        super().__init__(what)
        self.status = status


class Driver:
    """The driver as this process uses it. ``api``: cuda.bindings.driver. Contexts are retained once
    per device and never released: torch holds them as long."""

    def __init__(self, api: Any) -> None:
        self._api = api
        self._contexts: dict[int, Any] = {}
        self.call("cuInit", 0)

    def function(self, image: bytes, entry: str, device: int) -> Any:
        """Load machine code or PTX and find one kernel in it. Raises DriverError if the driver
        refuses it."""
        self._enter(device)
        try:
            return self.call("cuModuleGetFunction", self.call("cuModuleLoadData", image), entry.encode())
        finally:
            self._api.cuCtxPopCurrent()

    def launch(self, function: Any, device: int, blocks: int, stream: int, arguments: bytes) -> None:
        """Start ``blocks`` blocks on ``stream``; ``arguments`` is the kernel's one parameter, a
        struct. Does not wait."""
        # An array of one pointer; the driver copies what it points to.
        parameters = ctypes.c_char_p(arguments)
        self._enter(device)
        try:
            grid, block = (blocks, 1, 1), (THREADS, 1, 1)
            self.call("cuLaunchKernel", function, *grid, *block, 0, stream, ctypes.addressof(parameters), 0)
        finally:
            self._api.cuCtxPopCurrent()

    def _enter(self, device: int) -> None:
        """Make the device's context current in this thread, until cuCtxPopCurrent."""
        if device not in self._contexts:
            self._contexts[device] = self.call("cuDevicePrimaryCtxRetain", self.call("cuDeviceGet", device))
        self.call("cuCtxPushCurrent", self._contexts[device])

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a function of the driver; return its one result. Raises DriverError."""
        status, *result = getattr(self._api, name)(*arguments)
        if int(status):
            _, reason = self._api.cuGetErrorString(status)
            text = reason.decode(errors="replace") if reason else "unknown error"
            raise DriverError(f"{name}: {text} ({int(status)})", int(status))
        return result[0] if result else None


def open_driver() -> Driver:
    """Open the driver. Raises KernelUnavailable without one."""
    try:
        from cuda.bindings import driver

        return Driver(driver)
    except ImportError as missing:
        raise KernelUnavailable(f"no cuda.bindings: {missing}", fix=_FIX) from None
    except RuntimeError as trouble:  # the bindings find no libcuda, or an old one
        raise KernelUnavailable(f"no CUDA driver: {trouble}") from None


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
    """The opened compiler. ``api``: cuda.bindings.nvrtc; ``archs``: the architectures that it makes
    machine code for."""

    api: Any
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
        texts, names = ([text.encode() for text in each] for each in (headers.values(), headers))
        program = self._call("CreateProgram", source.encode(), name.encode(), len(texts), texts, names)
        try:
            given = [option.encode() for option in (*options, target.option)]
            (status,) = self.api.nvrtcCompileProgram(program, len(given), given)
            if int(status):
                log = self._output("ProgramLog", program).rstrip(b"\0").decode(errors="replace")
                raise KernelUnavailable(f"{name} does not compile: {first_lines(log)}")
            return self._output("PTX" if target.ptx else "CUBIN", program)
        finally:
            self.api.nvrtcDestroyProgram(program)

    def _output(self, what: str, program: Any) -> bytes:
        buffer = bytearray(self._call(f"Get{what}Size", program))
        self._call(f"Get{what}", program, buffer)
        return bytes(buffer)

    def _call(self, name: str, *arguments: Any) -> Any:
        status, *result = getattr(self.api, f"nvrtc{name}")(*arguments)
        if int(status):
            raise KernelUnavailable(f"nvrtc{name}: {status!r}")
        return result[0] if result else None


def first_lines(log: str) -> str:
    """Return the first errors of a compiler's log, in one line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return "; ".join((errors or lines)[:LOG_LINES]) or "no reason given"


def open_nvrtc() -> Nvrtc:
    """Open the compiler. Raises KernelUnavailable if there is none."""
    try:
        from cuda.bindings import nvrtc

        _, *version = nvrtc.nvrtcVersion()
        _, archs = nvrtc.nvrtcGetSupportedArchs()
    except ImportError as missing:
        raise KernelUnavailable(f"no cuda.bindings: {missing}", fix=_FIX) from None
    except RuntimeError as trouble:  # the bindings find no libnvrtc
        raise KernelUnavailable(f"no NVRTC: {trouble}", fix=_FIX) from None
    return Nvrtc(nvrtc, (version[0], version[1]), tuple(archs))
