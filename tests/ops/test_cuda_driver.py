"""The driver is asked for the right things in the right order, and its refusals are quoted. On the emulator's driver."""

from __future__ import annotations

import ctypes
import re
import struct
from pathlib import Path

import pytest

from tests.support import emulated_cuda
from tests.support.emulated_cuda import Emulator
from zero_trial.errors import KernelUnavailable
from zero_trial.ops import cuda_runtime
from zero_trial.ops.cuda_bindings import Driver, open_driver


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Emulator:
    made = emulated_cuda.make(tmp_path_factory.mktemp("driver"))
    made.build([cuda_runtime.sums()])
    return made


def test_load_and_launch(emulator: Emulator) -> None:
    driver = Driver(emulator.library)
    image = str(emulator.built[cuda_runtime.sums()]).encode()
    function = driver.function(image, "zt_sum", 0)
    emulator.library.forget()
    driver.launch(function, 0, 3, 0, struct.pack("2Pq", 0, 0, 0))  # three blocks with nothing to do
    assert emulator.library.launch_count() == 1 and emulator.library.blocks_of_last() == 3
    assert emulator.library.contexts_pushed() == 0  # every push has its pop
    assert emulator.library.mode_of_captures() == 0  # relaxed while loading, and as it was again
    assert emulator.library.fault() == b""


def test_refusals_are_quoted_and_leave_no_context(emulator: Emulator) -> None:
    driver = Driver(emulator.library)
    image = str(emulator.built[cuda_runtime.sums()]).encode()
    with pytest.raises(KernelUnavailable, match=r"zt_x: cuModuleLoadData: device kernel image is invalid \(200\)"):
        driver.function(b"no image", "zt_x", 0)
    with pytest.raises(KernelUnavailable, match=r"nothing: cuModuleGetFunction: named symbol not found \(500\)"):
        driver.function(image, "nothing", 0)
    with pytest.raises(KernelUnavailable, match=r"cuLaunchKernel: unknown error \(1\)"):
        driver.launch(driver.function(image, "zt_sum", 0), 0, 0, 0, b"")
    with pytest.raises(KernelUnavailable, match="cuDeviceGet"):
        driver.function(image, "zt_sum", 5)
    assert emulator.library.contexts_pushed() == 0 and emulator.library.mode_of_captures() == 0


def test_no_driver() -> None:
    with pytest.raises(KernelUnavailable, match=r"no CUDA driver: libnone\.so and libnil\.so do not open"):
        open_driver(("libnone.so", "libnil.so"))


def test_what_is_no_driver_is_said(tmp_path: Path, emulator: Emulator) -> None:
    """A library of that name without the functions, as a stub may be."""
    source = tmp_path / "stub.c"
    source.write_text("int cuInit(unsigned flags) { return 0; }")
    emulated_cuda.run(emulator.compiler, "-x", "c", "-shared", "-fPIC", str(source), "-o", str(tmp_path / "stub.so"))
    with pytest.raises(KernelUnavailable, match="too old, or none: "):
        open_driver(("libnone.so", str(tmp_path / "stub.so")))


C_TYPES = {"int": ctypes.c_int, "unsigned int": ctypes.c_uint, "CUdevice": ctypes.c_int, "CUresult": ctypes.c_int}
C_TYPES |= {"CUstreamCaptureMode": ctypes.c_int, "CUstreamCaptureStatus": ctypes.c_int}
HANDLES = ("CUcontext", "CUmodule", "CUfunction", "CUstream")


def ctype_of(declared: str) -> object:
    kind = declared.replace("const ", "").strip().rpartition(" ")[0] or declared.strip()
    if kind in ("char*", "void*"):
        return ctypes.c_char_p  # text, or an image
    if kind == "char**":
        return ctypes.POINTER(ctypes.c_char_p)
    if kind == "void**" or kind in HANDLES:
        return ctypes.c_void_p
    if kind.endswith("*"):
        inner = ctypes.c_void_p if kind[:-1] in HANDLES else C_TYPES[kind[:-1]]
        return ctypes.POINTER(inner)
    return C_TYPES[kind]


def test_functions_are_called_as_they_are_declared(emulator: Emulator) -> None:
    """The emulator's declarations, which its header explains how to hold against CUDA's own."""
    Driver(emulator.library)
    text = (emulated_cuda.HERE / "driver.cpp").read_text()
    declared = dict(re.findall(r"^CUresult (cu\w+)\(([^)]*)\) \{", text, re.MULTILINE))
    assert len(declared) == 13
    for name in ("cuFuncGetAttribute", "cuOccupancyMaxActiveBlocksPerMultiprocessor"):
        del declared[name]  # of a benchmark
    for name, arguments in declared.items():
        function = getattr(emulator.library, name + ("_v2" if name.startswith("cuCtxP") else ""))
        assert list(function.argtypes) == [ctype_of(each) for each in arguments.replace("\n", " ").split(",")], name
        assert function.restype is ctypes.c_int


def test_whether_a_stream_is_captured(emulator: Emulator) -> None:
    emulator.library.reset(2, (ctypes.c_int * 2)(90, 90))
    driver, streams = Driver(emulator.library), [emulator.library.new_stream(device) for device in (0, 1)]
    emulator.library.capture(streams[1], 1)
    assert [driver.capturing(stream, device) for stream, device in ((0, 0), (streams[0], 0), (streams[1], 1))] == [
        *(False, False, True)
    ]
    with pytest.raises(KernelUnavailable, match=r"cuStreamIsCapturing: unknown error \(400\)"):
        driver.capturing(12345, 0)
    assert emulator.library.contexts_pushed() == 0
