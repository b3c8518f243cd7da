"""The CUDA kernels of this process: their names, how they are compiled, cached, loaded and
launched, and if they are unavailable, why.

``ZERO_TRIAL_OPS`` chooses as it does on CPU: ``auto``, ``reference`` or ``native``. A kernel that
cannot be compiled or loaded is logged once and stays plain torch for the rest of the process; with
``native`` it is an error.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from zero_trial.errors import KernelUnavailable
from zero_trial.ops.cpu_library import SOURCES, VARIABLE, Backend, KernelCache, backend, cache_folder, choose
from zero_trial.ops.spec import BF16, FP16, FP32, NONE, OPTIMIZERS

# --- driver and NVRTC by NVIDIA's bindings --------------------------------------------------------


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
    per device and never released: torch also holds them until the process ends."""

    def __init__(self, api: Any) -> None:
        self._api = api
        self._contexts: dict[int, Any] = {}
        self.call("cuInit", 0)

    def function(self, image: bytes, entry: str, device: int) -> Any:
        """Load machine code or PTX and find one kernel in it. Raises DriverError."""
        self._enter(device)
        try:
            return self.call("cuModuleGetFunction", self.call("cuModuleLoadData", image), entry.encode())
        finally:
            self._api.cuCtxPopCurrent()

    def launch(self, function: Any, device: int, blocks: int, stream: int, arguments: bytes) -> None:
        """Start ``blocks`` blocks on ``stream`` with the struct ``arguments``. Does not wait."""
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
    """The compiler's target: an architecture's machine code, or PTX. ``arch`` 90 is sm_90."""

    arch: int
    ptx: bool = False

    @property
    def option(self) -> str:
        return f"--gpu-architecture={'compute' if self.ptx else 'sm'}_{self.arch}"


@dataclass(frozen=True)
class Nvrtc:
    """The opened compiler. ``api``: cuda.bindings.nvrtc; ``archs``: what it compiles for."""

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
                f"NVRTC {self.version[0]}.{self.version[1]} cannot compile for this device",
                got=f"compute capability {arch // 10}.{arch % 10}",
                expected=f"{min(self.archs) // 10}.{min(self.archs) % 10} or newer",
            )
        return CompileTarget(max(below), ptx=True)

    def compile(
        self, name: str, source: str, headers: Mapping[str, str], options: Sequence[str], target: CompileTarget
    ) -> bytes:
        """Compile one source to machine code or PTX. Raises KernelUnavailable."""
        texts, names = ([text.encode() for text in each] for each in (headers.values(), headers))
        program = self._call("CreateProgram", source.encode(), name.encode(), len(texts), texts, names)
        try:
            given = [option.encode() for option in (*options, target.option)]
            (status,) = self.api.nvrtcCompileProgram(program, len(given), given)
            if int(status):
                log = self._output("ProgramLog", program).rstrip(b"\0").decode(errors="replace")
                raise KernelUnavailable(f"{name} failed to compile: {first_lines(log)}")
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
    """Return the first errors of a compiler's log, on one line."""
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


log = logging.getLogger("zero_trial")

# The same bits as on CPU: nothing contracted, IEEE division and root, subnormal numbers kept.
OPTIONS = ("--std=c++17", "--fmad=false", "--prec-div=true", "--prec-sqrt=true", "--ftz=false")
ARCHS = (80, 90, 100)  # A100, H100 and H200, B200: compiled in the tests
STORED = (FP32, BF16, FP16)

# Blocks of a kernel per multiprocessor: as many as registers allow without spilling; two already
# keep enough loads in flight.
_BLOCKS = {op.struct: op.blocks for op in OPTIMIZERS}
_NARROW_BLOCKS = 3


@dataclass(frozen=True, eq=False)
class Kernel:
    """One ``extern "C"`` function of a source below csrc/cuda. ``definitions`` are its macros: what
    it is compiled for.

    ``blocks``: how many of them a multiprocessor holds at once, which bounds registers and sets the
    size of a grid. The functions below make each kernel once, so a kernel is compared by identity
    and a look-up is cheap.
    """

    source: str
    entry: str
    definitions: tuple[tuple[str, str | int], ...] = ()
    blocks: int = 4

    @property
    def options(self) -> tuple[str, ...]:
        return (*OPTIONS, f"-DZT_BLOCKS={self.blocks}", *(f"-D{name}={value}" for name, value in self.definitions))

    @property
    def name(self) -> str:
        given = ",".join(f"{name.removeprefix('ZT_').lower()}={value}" for name, value in self.definitions)
        return f"{self.entry}({given})"


@cache
def update(op: str, gradient: int, out: int, state: int) -> Kernel:
    """Return the kernel of an optimizer step; ``op`` is a struct of zt_optimizers.h."""
    given = (("ZT_OP", op), ("ZT_STATE", state), ("ZT_GRADIENT", gradient), ("ZT_OUT", out))
    return Kernel("update.cu", "zt_update", given, _BLOCKS[op] if state == FP32 else _NARROW_BLOCKS)


@cache
def square_sum(stored: int) -> Kernel:
    """Return the kernel that sums the squares of chunks."""
    return Kernel("square_sum.cu", "zt_square_sum", (("ZT_TYPE", stored),))


@cache
def sums() -> Kernel:
    """Return the kernel that adds up the chunks' sums."""
    return Kernel("square_sum.cu", "zt_sum", (("ZT_TYPE", FP32),))


def every_kernel() -> list[Kernel]:
    """List all kernels that the ops can request."""
    outs = (NONE, *STORED)
    return [
        *(
            update(op.struct, gradient, out, state)
            for state in (FP32, BF16)
            for op in OPTIMIZERS
            for gradient in STORED
            for out in outs
        ),
        *(square_sum(stored) for stored in STORED),
        sums(),
    ]


def source_of(kernel: Kernel) -> str:
    """Return the text of the kernel's file."""
    return _read(SOURCES / "cuda" / kernel.source)


def headers() -> dict[str, str]:
    """Return all headers, by the name in the sources' #include."""
    return {path.name: _read(path) for path in sorted((SOURCES / "include").glob("*.h"))}


def kernel_key(kernel: Kernel, compiler: str, target: str) -> str:
    """Return the name of the machine code: a hash of sources, options, compiler and target."""
    digest = hashlib.sha256(repr((kernel.options, compiler, target, source_of(kernel))).encode())
    for name, text in headers().items():
        digest.update(name.encode() + text.encode())
    return digest.hexdigest()[:24]


@cache
def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@dataclass(frozen=True)
class DeviceInfo:
    """What a launch needs to know about a device; ``arch`` is 90 for compute capability 9.0."""

    index: int
    arch: int
    multiprocessors: int


@dataclass(frozen=True)
class LoadedKernel:
    """A kernel on a device: the driver's handle, the device's number, blocks at once."""

    function: Any
    index: int
    most: int


@dataclass
class CudaRuntime:
    """An opened driver and a compiler.

    Args:
        image: (kernel, architecture) -> its machine code, or PTX for a newer device.
        kind: of devices whose memory kernels can reach.
        make_room: frees memory that torch's allocator caches, because the driver needs some for a
            kernel.
        refused: kernels that could not be compiled or loaded, and why.
    """

    driver: Driver
    image: Callable[[Kernel, int], bytes]
    device: Callable[[torch.device], DeviceInfo]
    stream: Callable[[torch.device], int]
    strict: bool = False
    description: str = "native"
    kind: str = "cuda"
    make_room: Callable[[], None] = torch.cuda.empty_cache
    refused: dict[Kernel, str] = field(default_factory=dict)
    _loaded: dict[tuple[Kernel, torch.device], LoadedKernel] = field(default_factory=dict)
    _loading: AbstractContextManager[bool] = field(default_factory=threading.RLock)

    def has(self, kernel: Kernel, where: torch.device) -> bool:
        """Return whether the kernel can be launched there; the first call compiles and loads it.
        Raises KernelUnavailable if ``strict``."""
        if (kernel, where) in self._loaded:
            return True
        with self._loading:  # two threads that need the same kernel: the second waits for it
            if (kernel, where) in self._loaded:
                return True
            if kernel in self.refused:
                return False
            try:
                self._loaded[kernel, where] = self._load(kernel, where)
            except KernelUnavailable as trouble:
                if self.strict:
                    raise
                self.refused[kernel] = trouble.what
                log.warning("CUDA kernel %s runs as plain torch: %s", kernel.name, trouble.what)
                return False
            return True

    def describe(self) -> str:
        return self.description + (f"; plain torch for {len(self.refused)} kernels" if self.refused else "")

    def launch(self, kernel: Kernel, where: torch.device, blocks: int, arguments: bytes) -> None:
        """Launch on torch's current stream of the device. :meth:`has` must have returned True."""
        loaded = self._loaded[kernel, where]
        self.driver.launch(loaded.function, loaded.index, blocks, self.stream(where), arguments)

    def fill(self, kernel: Kernel, where: torch.device, tiles: int, arguments: bytes) -> None:
        """Launch as many blocks as the device holds at once, but not more than there are tiles."""
        loaded = self._loaded[kernel, where]
        self.driver.launch(loaded.function, loaded.index, min(tiles, loaded.most), self.stream(where), arguments)

    def _load(self, kernel: Kernel, where: torch.device) -> LoadedKernel:
        device = self.device(where)
        image = self.image(kernel, device.arch)
        try:
            function = self.driver.function(image, kernel.entry, device.index)
        except DriverError as trouble:
            if trouble.status != OUT_OF_MEMORY:
                raise
            self.make_room()  # the first step runs after activations have filled the device once
            function = self.driver.function(image, kernel.entry, device.index)
        return LoadedKernel(function, device.index, kernel.blocks * device.multiprocessors)


@cache
def cuda_backend() -> Backend[CudaRuntime]:
    """Return what this process runs on CUDA; kernels are compiled when first needed."""
    if torch.version.cuda is None or not torch.cuda.is_available():
        return Backend(None, "no CUDA device")
    return choose(os.environ, "CUDA", open_cuda)


def native_on(device: torch.device) -> bool:
    """Return whether our kernels run on this kind of device in this process. On a device that
    another package has registered, they do if torch finds them for that device. Tensors without
    values (meta) count as supported."""
    if device.type == "cpu":
        return backend().native is not None
    if device.type == torch._C._get_privateuse1_backend_name():
        return bool(torch._C._dispatch_has_computed_kernel_for_dispatch_key("zero_trial::square_sum", "PrivateUse1"))
    return device.type == "meta" or (device.type == "cuda" and cuda_backend().native is not None)


def open_cuda(environ: Mapping[str, str]) -> CudaRuntime:
    """Open the driver and NVRTC of this machine. Raises KernelUnavailable."""
    driver, nvrtc, kept = open_driver(), open_nvrtc(), KernelCache(cache_folder(environ))
    return CudaRuntime(
        driver,
        partial(compiled, nvrtc, kept),
        device_of,
        stream_of,
        environ.get(VARIABLE) == "native",
        f"native (NVRTC {nvrtc.version[0]}.{nvrtc.version[1]}, kept in {kept.folder})",
    )


def compiled(nvrtc: Nvrtc, kept: KernelCache, kernel: Kernel, arch: int) -> bytes:
    """Return a kernel for that architecture, cached or compiled. Raises KernelUnavailable."""
    target = nvrtc.target(arch)
    key = kernel_key(kernel, f"NVRTC {nvrtc.version}", target.option)
    return kept.get(
        f"cuda-{key}.bin",
        lambda: nvrtc.compile(kernel.source, source_of(kernel), headers(), kernel.options, target),
    )


@cache
def device_of(where: torch.device) -> DeviceInfo:
    """Look up a CUDA device. Raises KernelUnavailable for one without a number."""
    if where.index is None:
        raise KernelUnavailable("a CUDA device without an index", got=str(where), expected="cuda:0, cuda:1 ...")
    properties = torch.cuda.get_device_properties(where)
    return DeviceInfo(where.index, 10 * properties.major + properties.minor, properties.multi_processor_count)


def stream_of(where: torch.device) -> int:
    """Return the handle of the device's current stream."""
    return int(torch.cuda.current_stream(where).cuda_stream)
