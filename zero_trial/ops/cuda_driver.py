"""The CUDA driver by ctypes: machine code into a device's primary context, which is torch's too, and launches onto a stream."""

from __future__ import annotations

import ctypes
from typing import Any

from zero_trial.errors import KernelUnavailable

NAMES = ("libcuda.so.1", "libcuda.so")
THREADS = 256  # per block, in all kernels
OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
# CUDA_ERROR_INVALID_IMAGE, NO_BINARY_FOR_GPU, INVALID_SOURCE: the driver may still take the same kernel as PTX.
OTHER_IMAGE = (200, 209, 300)
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


class DriverError(KernelUnavailable):
    """What the driver refused; ``status`` is its error code."""

    def __init__(self, what: str, status: int) -> None:
        super().__init__(what)
        self.status = status


class Driver:
    """One process's view of libcuda. Contexts are retained once per device and never released: torch holds them as long."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._contexts: dict[int, int] = {}
        self._popped = ctypes.byref(ctypes.c_void_p())  # what is popped is of no interest
        try:
            _declare(library)
        except AttributeError as missing:
            raise KernelUnavailable(f"the CUDA driver is too old, or none: {missing}") from None
        self._check(library.cuInit(0), "cuInit")

    def function(self, image: bytes, entry: str, device: int) -> int:
        """Loads machine code or PTX and finds one kernel in it. Raises KernelUnavailable where the driver refuses it."""
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        # Loading allocates, which would spoil a CUDA graph that a stream is being captured into: not where this thread says so.
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
        """Starts ``blocks`` blocks on ``stream``; ``arguments`` is the kernel's one parameter, a struct. Does not wait."""
        parameters = ctypes.byref(
            ctypes.c_char_p(arguments)
        )  # an array of one pointer; the driver copies what it points to
        self._enter(device)
        try:
            status = self._library.cuLaunchKernel(function, blocks, 1, 1, THREADS, 1, 1, 0, stream, parameters, None)
        finally:
            self._leave()
        if status:
            self._check(status, "cuLaunchKernel")

    def capturing(self, stream: int, device: int) -> bool:
        """Whether what that stream is given now goes into a CUDA graph."""
        state = ctypes.c_int()
        self._enter(device)
        try:
            self._check(self._library.cuStreamIsCapturing(stream, ctypes.byref(state)), "cuStreamIsCapturing")
        finally:
            self._leave()
        return state.value != 0

    def _enter(self, device: int) -> None:
        """Whatever thread this is, and whatever device is current in it."""
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
    """The types of the functions that are used, as cuda.h of CUDA 11 to 13 declares them."""
    pointer, integer, number, text = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint, ctypes.c_char_p
    out, out_integer = ctypes.POINTER(pointer), ctypes.POINTER(integer)
    launch = [pointer, *[number] * 7, pointer, pointer, pointer]  # grid, block, shared; stream, parameters, extra
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
    """Raises KernelUnavailable where there is no driver."""
    for name in names:
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        return Driver(library)
    raise KernelUnavailable(f"no CUDA driver: {' and '.join(names)} do not open")
