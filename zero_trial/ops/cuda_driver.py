"""The CUDA driver by ctypes: machine code into a device's primary context, which is torch's too, and launches onto a stream."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

from zero_trial.errors import KernelUnavailable

NAMES = ("libcuda.so.1", "libcuda.so")
THREADS = 256  # per block, in all kernels


class Driver:
    """One process's view of libcuda. Contexts are retained once per device and never released: torch holds them as long."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._contexts: dict[int, int] = {}
        pointer, number, text = ctypes.c_void_p, ctypes.c_uint, ctypes.c_char_p
        library.cuGetErrorString.argtypes = [ctypes.c_int, ctypes.POINTER(text)]
        library.cuDeviceGet.argtypes = [ctypes.POINTER(ctypes.c_int), ctypes.c_int]
        library.cuDevicePrimaryCtxRetain.argtypes = [ctypes.POINTER(pointer), ctypes.c_int]
        library.cuCtxPushCurrent_v2.argtypes = [pointer]
        library.cuCtxPopCurrent_v2.argtypes = [ctypes.POINTER(pointer)]
        library.cuModuleLoadData.argtypes = [ctypes.POINTER(pointer), ctypes.c_char_p]
        library.cuModuleGetFunction.argtypes = [ctypes.POINTER(pointer), pointer, text]
        numbers = [number] * 7  # grid, block, dynamic shared memory
        # function, ..., stream, arguments, extra
        library.cuLaunchKernel.argtypes = [pointer, *numbers, pointer, ctypes.POINTER(pointer), ctypes.POINTER(pointer)]
        self._check(library.cuInit(0), "cuInit")

    def function(self, image: bytes, entry: str, device: int) -> int:
        """Loads machine code or PTX and finds one kernel in it. Raises KernelUnavailable where the driver refuses it."""
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        with self._context(device):
            self._check(self._library.cuModuleLoadData(ctypes.byref(module), image), f"{entry}: cuModuleLoadData")
            found = self._library.cuModuleGetFunction(ctypes.byref(function), module, entry.encode())
            self._check(found, f"{entry}: cuModuleGetFunction")
        return int(function.value or 0)

    def launch(self, function: int, device: int, blocks: int, stream: int, arguments: bytes) -> None:
        """Starts ``blocks`` blocks on ``stream``; ``arguments`` is the kernel's one parameter, a struct. Does not wait."""
        held = ctypes.create_string_buffer(arguments, len(arguments))
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(held))
        with self._context(device):
            self._check(
                self._library.cuLaunchKernel(function, blocks, 1, 1, THREADS, 1, 1, 0, stream, parameters, None),
                "cuLaunchKernel",
            )

    @contextmanager
    def _context(self, device: int) -> Iterator[None]:
        """Whatever thread this is, and whatever device is current in it."""
        if device not in self._contexts:
            handle, context = ctypes.c_int(), ctypes.c_void_p()
            self._check(self._library.cuDeviceGet(ctypes.byref(handle), device), "cuDeviceGet")
            self._check(
                self._library.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle), "cuDevicePrimaryCtxRetain"
            )
            self._contexts[device] = int(context.value or 0)
        self._check(self._library.cuCtxPushCurrent_v2(self._contexts[device]), "cuCtxPushCurrent")
        try:
            yield
        finally:
            self._library.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))

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
