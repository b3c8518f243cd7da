"""The CUDA driver and compiler: what is opened, what they answer, and which errors they report."""

from __future__ import annotations

import ctypes
import dataclasses
import re
import struct
from pathlib import Path

import pytest

from tests.support import emulated_cuda
from tests.support.emulated_cuda import Emulator
from zero_trial.errors import KernelUnavailable
from zero_trial.ops import cuda_bindings, cuda_runtime
from zero_trial.ops.cuda_bindings import CompileTarget, Driver, Nvrtc, first_lines, open_driver, places


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
    with pytest.raises(KernelUnavailable, match=r"no CUDA driver: libnone\.so and libnil\.so"):
        open_driver(("libnone.so", "libnil.so"))


def test_what_is_not_a_driver_is_refused(tmp_path: Path, emulator: Emulator) -> None:
    """A library of that name without the functions, as a stub may be."""
    source = tmp_path / "stub.c"
    source.write_text("int cuInit(unsigned flags) { return 0; }")
    emulated_cuda.run(emulator.compiler, "-x", "c", "-shared", "-fPIC", str(source), "-o", str(tmp_path / "stub.so"))
    with pytest.raises(KernelUnavailable, match="too old, or is not one: "):
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


SOURCE = '#include "one.h"\nextern "C" __global__ void zt_one(float* x) { *x = ONE; }'


@pytest.fixture(scope="module")
def nvrtc() -> Nvrtc:
    try:
        return cuda_bindings.open_nvrtc()
    except KernelUnavailable as trouble:
        pytest.skip(f"{trouble.what}. pip install 'zero_trial[cuda-check]'")


def test_machine_code_without_a_gpu(nvrtc: Nvrtc) -> None:
    image = nvrtc.compile("one.cu", SOURCE, {"one.h": "#define ONE 1.0f"}, ["--std=c++17"], CompileTarget(80))
    assert image.startswith(b"\x7fELF") and b"zt_one" in image


def test_ptx_for_a_device_that_it_does_not_know(nvrtc: Nvrtc) -> None:
    known = max(nvrtc.archs)
    assert nvrtc.target(known) == CompileTarget(known)
    target = nvrtc.target(known + 7)
    assert target == CompileTarget(known, ptx=True) and target.option == f"--gpu-architecture=compute_{known}"
    image = nvrtc.compile("one.cu", SOURCE, {"one.h": "#define ONE 1.0f"}, [], target)
    assert b".entry zt_one" in image and f".target sm_{known}".encode() in image


def test_a_device_older_than_all_it_knows(nvrtc: Nvrtc) -> None:
    with pytest.raises(KernelUnavailable, match=r"compute capability 5\.2, expected 8\.0 or newer"):
        dataclasses.replace(nvrtc, archs=(80, 90)).target(52)


def test_the_compilers_complaint_is_quoted(nvrtc: Nvrtc) -> None:
    with pytest.raises(KernelUnavailable, match=r"one\.cu does not compile: one\.cu\(2\): error: .*ONE.* is undefined"):
        nvrtc.compile("one.cu", SOURCE, {"one.h": ""}, [], CompileTarget(80))
    with pytest.raises(KernelUnavailable, match="does not compile"):
        nvrtc.compile("one.cu", "", {}, ["--no-such-option"], CompileTarget(80))


def test_the_log_in_one_line() -> None:
    log = "a.cu(1): warning: odd\n\na.cu(2): error: bad\n  y\n1 error detected"
    assert first_lines(log) == "a.cu(2): error: bad; 1 error detected"
    assert first_lines("only this\n") == "only this"
    assert first_lines("\n") == "no reason given"


def test_where_it_is_looked_for(tmp_path: Path) -> None:
    for name in (
        "nvidia/cuda_nvrtc/lib/libnvrtc.so.12",
        "nvidia/cu13/lib/libnvrtc.so.13",
        "nvidia/cu13/lib/libnvrtc.alt.so.13",
        "nvidia/cu13/lib/libnvrtc-builtins.so.13.0",
        "torch/lib/libnvrtc-6c5693e9.so.12",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    found = {major: list(places([str(tmp_path)], major)) for major in (13, 12)}
    below = {
        major: [Path(place).relative_to(tmp_path).as_posix() for place in found[major] if str(tmp_path) in place]
        for major in found
    }
    assert below == {
        13: ["nvidia/cu13/lib/libnvrtc.so.13"],
        12: ["nvidia/cuda_nvrtc/lib/libnvrtc.so.12", "torch/lib/libnvrtc-6c5693e9.so.12"],
    }
    assert found[12][2] == "libnvrtc.so.12"


def test_torchs_own_major_version_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def nowhere(folders: object, major: int) -> list[str]:
        asked.append(major)
        return []

    monkeypatch.setattr(cuda_bindings, "places", nowhere)
    with pytest.raises(KernelUnavailable, match="no NVRTC"):
        cuda_bindings.open_nvrtc(majors=(12, 13))
    assert asked == [12, 13]


def test_without_it_the_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "torch" / "lib"
    broken.mkdir(parents=True)
    (broken / "libnvrtc.so.12").write_bytes(b"not a library")
    monkeypatch.setattr(
        cuda_bindings, "places", lambda folders, major: [str(broken / "libnvrtc.so.12"), "libnvrtc-none.so.12"]
    )
    with pytest.raises(KernelUnavailable, match=r"no NVRTC.*pip install nvidia-cuda-nvrtc"):
        cuda_bindings.open_nvrtc([str(tmp_path)])


def test_companions_come_from_beside_the_library_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that the loader finds by its name says nothing of the folder that this process
    happens to stand in."""
    (tmp_path / "libnvrtc-builtins.so.12.4").write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    assert cuda_bindings.companions("libnvrtc.so.12") == []
    assert cuda_bindings.companions(str(tmp_path / "libnvrtc.so.12")) == [str(tmp_path / "libnvrtc-builtins.so.12.4")]
