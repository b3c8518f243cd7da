"""The CUDA driver by ctypes: machine code into a device's primary context, which is torch's too, and launches onto a stream."""

from __future__ import annotations

import ctypes

from zero_trial.errors import KernelUnavailable

NAMES = ("libcuda.so.1", "libcuda.so")
THREADS = 256  # per block, in all kernels
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


class Driver:
    """One process's view of libcuda. Contexts are retained once per device and never released: torch holds them as long."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._contexts: dict[int, int] = {}
        self._popped = ctypes.byref(ctypes.c_void_p())  # what is popped is of no interest
        pointer, number, text = ctypes.c_void_p, ctypes.c_uint, ctypes.c_char_p
        library.cuGetErrorString.argtypes = [ctypes.c_int, ctypes.POINTER(text)]
        library.cuDeviceGet.argtypes = [ctypes.POINTER(ctypes.c_int), ctypes.c_int]
        library.cuDevicePrimaryCtxRetain.argtypes = [ctypes.POINTER(pointer), ctypes.c_int]
        library.cuCtxPushCurrent_v2.argtypes = [pointer]
        library.cuCtxPopCurrent_v2.argtypes = [ctypes.POINTER(pointer)]
        library.cuModuleLoadData.argtypes = [ctypes.POINTER(pointer), ctypes.c_char_p]
        library.cuModuleGetFunction.argtypes = [ctypes.POINTER(pointer), pointer, text]
        library.cuThreadExchangeStreamCaptureMode.argtypes = [ctypes.POINTER(ctypes.c_int)]
        numbers = [number] * 7  # grid, block, dynamic shared memory
        # function, ..., stream, arguments, extra
        library.cuLaunchKernel.argtypes = [pointer, *numbers, pointer, ctypes.c_void_p, ctypes.c_void_p]
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
            raise KernelUnavailable(f"{where}: {reason} ({status})")


def open_driver(names: tuple[str, ...] = NAMES) -> Driver:
    """Raises KernelUnavailable where there is no driver."""
    for name in names:
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        return Driver(library)
    raise KernelUnavailable(f"no CUDA driver: {' and '.join(names)} do not open")
