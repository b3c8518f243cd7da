"""The GPU check ends with one line where there is no GPU; its steps are bounded in time, and a
broken one is a result. What needs no device in the tests that only a GPU runs is tried here too."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu_check, gpu_train
from benchmarks.gpu_check import Check, describe
from benchmarks.ops import gpu, gpu_exact, gpu_load
from benchmarks.processes import ROOT, Ended
from tests.engine import test_behaviour_gpu as on_gpu
from zero_trial.engine.profile import Peak


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_and_its_parts_say_so_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu_check.main([]) == 2
    said = capsys.readouterr()
    assert said.out == "" and "no CUDA device" in said.err and said.err.count("\n") == 1
    for script in (gpu, gpu_exact, gpu_load, gpu_train):
        monkeypatch.setattr(sys, "argv", ["script", "torch"] if script is gpu_train else ["script"])
        with pytest.raises(SystemExit, match="no CUDA device; --dry-run"):
            script.main()


def check(seconds: float = 60.0) -> Check:
    return Check(dry=True, deadline=time.monotonic() + seconds)


def test_a_broken_step_is_a_result_and_the_exit_code_and_the_others_follow(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    output = tmp_path / "below" / "check.json"

    def breaks(_: Check) -> dict[str, Any]:
        raise RuntimeError("illegal address")

    def looks(_: Check) -> dict[str, Any]:
        # already written
        assert json.loads(output.read_text())["results"]["exact"]["said"] == ["RuntimeError: illegal address"]
        return {"rows": []}

    monkeypatch.setattr(gpu_check, "STEPS", {"exact": breaks, "speed": looks})
    assert gpu_check.main(["--dry-run", "--only", "exact", "speed", "--output", str(output)]) == 1
    written = json.loads(output.read_text())
    assert written["results"]["speed"]["rows"] == [] and written["versions"]["torch"] and written["seconds"] >= 0
    assert describe("exact", written["results"]["exact"]).startswith("exact: FAILED (")
    monkeypatch.setattr(gpu_check, "STEPS", {"speed": lambda _: {"rows": []}})
    assert gpu_check.main(["--dry-run", "--only", "speed"]) == 0


def test_a_stop_ends_the_step_under_way() -> None:
    """A step is a process group of its own: it would go on."""
    code = (
        "import runpy, sys; sys.argv = ['gpu_check.py', '--dry-run', '--only', 'exact'];"
        "from benchmarks import processes;"
        "processes._watch = lambda process, *_: (print(process.pid, flush=True), process.wait())[1];"
        f"runpy.run_path({gpu_check.__file__!r}, run_name='__main__')"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as started:
        try:
            assert started.stdout is not None
            step = int(started.stdout.readline())
            os.kill(step, signal.SIGSTOP)  # it does not end by itself
            started.terminate()
            assert started.wait(120) == 143
        finally:
            started.kill()
    with pytest.raises(ProcessLookupError):
        os.kill(step, 0)


def test_what_the_steps_find_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = {"name": "a.cu", "kernels": 3, "cold_ms": 9.0, "cached_ms": 1.0, "wrong": ["zt_a: stack"]}
    adam = {"name": "Adam", "cases": 4, "different": 1, "first": "n=1"}
    sums = {"name": "sums", "cases": 5, "different": 0, "first": ""}
    rows = {"gpu_load": [kernels], "gpu_exact": [adam, {"name": "many", "why": "ended with -11"}, sums]}
    monkeypatch.setattr(gpu_check.processes, "rows", lambda command, *_: rows[Path(command[1]).stem])
    compiled, compared = gpu_check.compile_(check()), gpu_check.exact(check())
    assert not compiled["ok"] and compiled["said"] == ["a.cu: zt_a: stack"] and compiled["kernels"] == 3
    assert compared["said"] == ["Adam: 1 of 4 differ, first n=1", "many: ended with -11"] and compared["cases"] == 9


def test_a_memory_checker_without_a_verdict_is_no_failure() -> None:
    for code, said, verdict in (
        (0, "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)", True),
        (0, "Invalid __global__ read of size 4\n========= ERROR SUMMARY: 2 errors", False),
        (None, "{}", None),
    ):
        made = check()
        made.results["memory"] = gpu_check.sanitized(Ended(code, said, 5.0))
        assert made.results["memory"]["ok"] is verdict
        assert gpu_check.unproven(made, ["memory"]) == (["memory"] if verdict is False else [])


@pytest.mark.parametrize("name", ["torch", "ours-1"])
def test_training_is_rehearsed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_train, "ROUNDS", 2)
    row = gpu_train.measure(name, torch.device("cpu"))
    assert row["losses"][1] < row["losses"][0] and row["tokens_per_second"] > 0
    assert "mfu" not in row and row["of_products"] > 0  # a processor has no data sheet here


def test_sizes_and_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPT of a billion parameters or as many layers as there is room for; MFU is a part of the
    data sheet's peak."""
    for free, layers in ((139, 20), (28, 13), (14, 1), (8, None)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, free=free: (free * 2**30, 0))
        with nullcontext() if layers else pytest.raises(SystemExit, match="too few for one layer"):
            assert gpu_train.size_for(torch.device("cuda", 0)).layers == layers
    monkeypatch.setattr(gpu_train.profile, "measure", lambda *_, **__: Peak(2e14, "measured"))
    for name, mfu in (("NVIDIA H200", 0.1), ("NVIDIA Unknown", None)):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _, name=name: name)
        found = gpu_train.rates(98.95e12, torch.device("cuda", 0))
        assert found.get("mfu") == (mfu and pytest.approx(mfu)) and found["of_products"] == pytest.approx(0.49475)


def test_a_rank_trains_and_answers() -> None:
    """The process that a GPU's rank is, on the CPU: what it returns, and that an error in one case
    does not hide the others."""
    cases = [(2, "bf16"), (7, "fp32")]
    (found,) = on_gpu.on_ranks(1, cases, "gloo", True, "auto")
    losses, optimizer, device = found[cases[0]]
    assert len(losses) == on_gpu.STEPS and optimizer == "FusedAdam" and device == "cpu"
    assert "ConfigError" in found[cases[1]] and "stage" in found[cases[1]]
    assert on_gpu.close(losses, losses, "bf16") and not on_gpu.close(losses, [x + 1 for x in losses], "bf16")
