"""The GPU check ends with one line where there is no GPU; its steps are bounded in time, and a broken one is a result."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from benchmarks import gpu_check, gpu_train
from benchmarks.gpu_check import Check, carry_out, describe
from benchmarks.ops import gpu, gpu_exact
from zero_trial.errors import KernelUnavailable
from zero_trial.ops import _nvrtc

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


@without_gpu
def test_without_a_gpu_it_says_so_in_one_line() -> None:
    done = subprocess.run(
        [sys.executable, gpu_check.__file__], capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 2 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1 and "no CUDA device" in done.stderr


@without_gpu
@pytest.mark.parametrize("script", [gpu, gpu_exact, gpu_train])
def test_its_parts_say_so_too(monkeypatch: pytest.MonkeyPatch, script: ModuleType) -> None:
    monkeypatch.setattr(sys, "argv", ["script", "torch"] if script is gpu_train else ["script"])
    with pytest.raises(SystemExit, match="no CUDA device; --dry-run"):
        script.main()


def check(seconds: float = 60.0) -> Check:
    return Check(dry=True, deadline=time.monotonic() + seconds)


def test_a_broken_step_is_a_result_and_the_others_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(_: Check) -> dict[str, Any]:
        raise RuntimeError("illegal address")

    def hangs(_: Check) -> dict[str, Any]:
        raise subprocess.TimeoutExpired("python", 30)

    monkeypatch.setattr(gpu_check, "STEPS", {"exact": breaks, "tests": hangs, "speed": lambda _: {"ok": True}})
    made, said = check(), list[str]()
    carry_out(made, ["exact", "tests", "speed"], said.append)
    assert [made.results[name]["ok"] for name in ("exact", "tests", "speed")] == [False, False, True]
    assert "RuntimeError: illegal address" in said[0] and "FAILED" in said[0]
    assert "not done within 30 s" in said[1]
    assert said[2].startswith("speed: ok")


def test_after_the_deadline_nothing_starts() -> None:
    made, said = check(-1.0), list[str]()
    carry_out(made, ["speed"], said.append)
    assert made.results["speed"]["skipped"] == "no time left" and "skipped, no time left" in said[0]
    assert made.left(100.0) == 5.0


def test_steps_may_take_what_is_left() -> None:
    assert 0 < check(20.0).left(100.0) <= 20.0
    assert check(1000.0).left(100.0) == 100.0


def test_tables_for_people() -> None:
    rows = [{"name": "torch", "ms": 12.0, "tokens_per_second": 5.0, "mfu": 0.5, "losses": [2.0, 1.0]}]
    said = describe("train", {"rows": rows, "seconds": 1.0})
    assert "| torch | 12.0 | 5 | 50.0 |" in said
    said = describe("tests", {"ok": False, "passed": 3, "failed": 1, "skipped": 2, "seconds": 1.0, "said": ["E boom"]})
    assert (
        said.splitlines()[0] == "tests: FAILED (1.0 s)" and "E boom" in said and "3 passed, 1 failed, 2 skipped" in said
    )


def test_the_exit_code_and_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    steps = {"exact": lambda _: {"ok": False, "said": ["adam_ differs"]}, "speed": lambda _: {"rows": []}}
    monkeypatch.setattr(gpu_check, "STEPS", steps)
    output = tmp_path / "below" / "check.json"
    assert gpu_check.main(["--dry-run", "--only", "exact", "speed", "--output", str(output)]) == 1
    written = json.loads(output.read_text())
    assert written["results"]["exact"]["said"] == ["adam_ differs"] and written["versions"]["torch"]
    assert gpu_check.main(["--dry-run", "--only", "speed"]) == 0


def test_paths_of_the_machine_stay_out() -> None:
    said = f'  File "{gpu_check.ROOT}/zero_trial/x.py"\n{Path.home()}/.cache/zero_trial\n'
    done = subprocess.CompletedProcess([], 1, said, "")
    assert gpu_check.tail(done) == ['  File "zero_trial/x.py"', "~/.cache/zero_trial"]


def test_compiling_is_rehearsed() -> None:
    try:
        _nvrtc.open_nvrtc()
    except KernelUnavailable as trouble:
        pytest.skip(trouble.what)
    result = gpu_check.compile_(check())
    assert result["ok"] and result["kernels"] >= 4 and result["cached_ms_most"] < result["cold_ms_most"]


@pytest.mark.parametrize("name", ["torch", "ours-1"])
def test_training_is_rehearsed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_train, "STEPS", 3)
    row = gpu_train.measure(name, torch.device("cpu"))
    assert row["losses"][1] < row["losses"][0] and row["tokens_per_second"] > 0 and row["mfu"] > 0


def test_a_gpt_of_a_billion_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    for free, layers in ((139, 20), (28, 13), (14, 1)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, free=free: (free * 2**30, 0))
        assert gpu_train.size_for(torch.device("cuda", 0)).layers == layers
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (8 * 2**30, 0))
    with pytest.raises(SystemExit, match="too few for one layer"):
        gpu_train.size_for(torch.device("cuda", 0))
