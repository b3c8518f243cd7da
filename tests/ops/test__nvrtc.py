"""NVRTC is found and compiles; without it, or with a source that it refuses, there is one clear line."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from zero_trial.errors import KernelUnavailable
from zero_trial.ops import cuda_bindings
from zero_trial.ops.cuda_bindings import CompileTarget, Nvrtc, first_lines, places

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
    """A library that the loader finds by its name says nothing of the folder that this process happens to stand in."""
    (tmp_path / "libnvrtc-builtins.so.12.4").write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    assert cuda_bindings.companions("libnvrtc.so.12") == []
    assert cuda_bindings.companions(str(tmp_path / "libnvrtc.so.12")) == [str(tmp_path / "libnvrtc-builtins.so.12.4")]
