"""The proof of the CUDA half on one GPU, within eight minutes: `make gpu-check`.

    python benchmarks/gpu_check.py                    # needs a CUDA device, torch, safetensors, tqdm, pyyaml and pytest, and nothing installed
    python benchmarks/gpu_check.py --dry-run          # the same steps, tiny, on the CPU: that the script works

In this order, each in a process of its own, so that a crash costs one step:

    compile    every kernel by NVRTC for this device, cold and from the cache
    exact      every op against the CPU's kernels, bit for bit, and against float64
    memory     the same on small tensors under compute-sanitizer, where it is installed
    tests      the engine on this GPU: one rank over NCCL, two ranks over gloo (pytest -m gpu)
    speed      every op as a percentage of the copy bandwidth, beside torch's
    train      a GPT of about 1 B parameters in bf16 beside plain torch with fused AdamW: tokens per second, MFU, peak memory
    deepspeed  DeepSpeed's FusedAdam, where it is installed and can be built

One JSON in benchmarks/results/ holds machine, versions and all results, good or bad. The exit code is 1 where compile, exact, memory or
tests fail, and 2 where there is no CUDA device.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import record

ROOT = Path(__file__).resolve().parents[1]
MINUTES = 8.0
PROOFS = ("compile", "exact", "memory", "tests")
TRAINED = ("torch", "ours-0", "ours-2")


@dataclass
class Check:
    """What is known so far, and how much time is left. ``dry``: on the CPU, tiny."""

    dry: bool
    deadline: float
    results: dict[str, dict[str, Any]] = field(default_factory=dict)

    def left(self, most: float) -> float:
        """Seconds that a step may take: ``most``, or what remains."""
        return max(5.0, min(most, self.deadline - time.monotonic()))

    def python(
        self, *arguments: str, seconds: float, env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """A script of ours, in a process of its own. Raises subprocess.TimeoutExpired."""
        return run([sys.executable, *arguments], self.left(seconds), env)

    def dry_option(self) -> list[str]:
        return ["--dry-run"] if self.dry else []


def run(command: Sequence[str], seconds: float, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """In the repository's root, with its sources importable."""
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    given = {**os.environ, "PYTHONPATH": paths, **(env or {})}
    return subprocess.run(command, cwd=ROOT, env=given, capture_output=True, text=True, timeout=seconds, check=False)


def compile_(check: Check) -> dict[str, Any]:
    """Every kernel for this device; without one, for sm_90, and only some."""
    from benchmarks.ops import cubins
    from zero_trial.ops import _nvrtc, cuda_kernels

    nvrtc = _nvrtc.open_nvrtc()
    major, minor = (9, 0) if check.dry else torch.cuda.get_device_capability()
    kernels = cuda_kernels.every_kernel()[:: 20 if check.dry else 1]
    rows = [cubins.measure(nvrtc, None, kernel, 10 * major + minor) for kernel in kernels]
    return {
        "ok": True,
        "nvrtc": ".".join(map(str, nvrtc.version)),
        "kernels": len(rows),
        "cold_ms_most": max(row["cold"] for row in rows),
        "cold_ms_all": sum(row["cold"] for row in rows),
        "cached_ms_most": max(row["cached"] for row in rows),
    }


def exact(check: Check) -> dict[str, Any]:
    """A line per op."""
    env = {} if check.dry else {"ZERO_TRIAL_OPS": "native"}
    done = check.python("benchmarks/ops/gpu_exact.py", *check.dry_option(), seconds=120, env=env)
    return {"ok": done.returncode == 0, "said": tail(done)}


def memory(check: Check) -> dict[str, Any]:
    """compute-sanitizer's memcheck."""
    tool = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if tool is None or check.dry:
        return {"skipped": "compute-sanitizer is not installed" if tool is None else "rehearsal"}
    script = [sys.executable, "benchmarks/ops/gpu_exact.py", "--tiny"]
    done = run([tool, "--error-exitcode", "9", *script], check.left(75))
    return {"ok": done.returncode == 0, "said": tail(done)}


def tests(check: Check) -> dict[str, Any]:
    """The files that have tests marked gpu; a rehearsal sees them skipped."""
    have_hypothesis = importlib.util.find_spec("hypothesis") is not None
    texts = {path: path.read_text(encoding="utf-8") for path in sorted((ROOT / "tests").rglob("test_*.py"))}
    marked = [
        path for path, text in texts.items() if "mark.gpu" in text and (have_hypothesis or "hypothesis" not in text)
    ]
    chosen = [str(path.relative_to(ROOT)) for path in marked if not check.dry or path.name == "test_behaviour_gpu.py"]
    arguments = ["-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", "--no-header", "-rsf", "--tb=short", *chosen]
    options = ["-o", "addopts=--import-mode=importlib --strict-markers"]
    done = check.python(*arguments, *options, seconds=150)
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|skipped|error)", done.stdout)}
    return {"ok": done.returncode == 0, "files": chosen, **counts, "said": tail(done, 30)}


def speed(check: Check) -> dict[str, Any]:
    """Rows of ops/gpu.py, measured in this process: nothing else uses the GPU meanwhile."""
    from benchmarks.ops import gpu

    device = torch.device("cpu") if check.dry else torch.device("cuda", torch.cuda.current_device())
    rows = gpu.run(device, 2 if check.dry else 20, deepspeed=False, deadline=time.monotonic() + check.left(90))
    return {"elements": gpu.elements(device), "rows": rows}


def train(check: Check) -> dict[str, Any]:
    """A row per contender."""
    rows = []
    for name in TRAINED:
        done = check.python("benchmarks/gpu_train.py", name, *check.dry_option(), seconds=60)
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        rows.append(json.loads(lines[-1]) if done.returncode == 0 and lines else {"name": name, "why": tail(done, 3)})
    return {"rows": rows}


def deepspeed(check: Check) -> dict[str, Any]:
    """Last, for it may build for minutes."""
    if importlib.util.find_spec("deepspeed") is None:
        return {"skipped": "deepspeed is not installed"}
    code = (
        "import json, torch; from benchmarks.ops import gpu; d = torch.device('cuda', torch.cuda.current_device());"
        "print(json.dumps([gpu.measure(c, gpu.elements(d), d, 20) for c in (gpu.CONTENDERS[0], gpu.LAST)]))"
    )
    done = check.python("-c", code, seconds=150)
    return {"rows": json.loads(done.stdout.splitlines()[-1])} if done.returncode == 0 else {"said": tail(done)}


STEPS: dict[str, Callable[[Check], dict[str, Any]]] = {
    "compile": compile_,
    "exact": exact,
    "memory": memory,
    "tests": tests,
    "speed": speed,
    "train": train,
    "deepspeed": deepspeed,
}


def tail(done: subprocess.CompletedProcess[str], lines: int = 16) -> list[str]:
    """The end of what a process said, without paths of this machine."""
    said = (done.stdout.splitlines() or []) + (done.stderr.splitlines() if done.returncode else [])
    clean = [line.replace(f"{ROOT}/", "").replace(str(Path.home()), "~") for line in said if line.strip()]
    return clean[-lines:]


def carry_out(check: Check, names: Sequence[str], show: Callable[[str], None]) -> None:
    """The steps in order; one that breaks is a result, not the end."""
    for name in names:
        begin = time.monotonic()
        if begin > check.deadline:
            check.results[name] = {"skipped": "no time left"}
        else:
            try:
                check.results[name] = STEPS[name](check)
            except subprocess.TimeoutExpired as slow:
                check.results[name] = {"ok": False, "said": [f"not done within {slow.timeout:.0f} s"]}
            except Exception as trouble:
                check.results[name] = {"ok": False, "said": [f"{type(trouble).__name__}: {trouble}"]}
        check.results[name]["seconds"] = round(time.monotonic() - begin, 1)
        show(describe(name, check.results[name]))


def describe(name: str, result: dict[str, Any]) -> str:
    """One step for people: a line, and a table where it has rows."""
    verdict = {True: "ok", False: "FAILED", None: "done"}[result.get("ok")]
    said = f"{name}: {verdict if 'skipped' not in result or 'ok' in result else 'skipped, ' + result['skipped']} ({result['seconds']} s)"
    if result.get("ok") is False:
        said += "".join(f"\n    {line}" for line in result.get("said", []))
    if "passed" in result or ("skipped" in result and "ok" in result):
        said += "".join(f", {result[word]} {word}" for word in ("passed", "failed", "skipped") if word in result)
    if name == "compile" and result.get("ok"):
        said += f": {result['kernels']} kernels, at most {result['cold_ms_most']:.0f} ms cold, {result['cached_ms_most']:.1f} ms cached"
    if "rows" in result:
        said += "\n" + record.markdown(result["rows"], columns_of(name))
    return said


def columns_of(name: str) -> list[record.Column]:
    """What a step's table shows."""
    if name != "train":
        from benchmarks.ops import gpu

        return gpu.COLUMNS
    return [
        ("contender", lambda row: row["name"]),
        ("ms per step", record.number("ms", 1)),
        ("tokens/s", record.number("tokens_per_second", 0)),
        ("MFU %", lambda row: f"{100 * row['mfu']:.1f}" if "mfu" in row else ""),
        ("peak GiB", record.number("peak_gib", 1)),
        ("last loss", lambda row: f"{row['losses'][-1]:.4f}" if "losses" in row else ""),
        ("", lambda row: " ".join(row.get("why", []))),
    ]


def facts(dry: bool) -> dict[str, Any]:
    """Where this was measured."""
    gpu: dict[str, Any] = {}
    if not dry:
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        gpu = {
            "name": properties.name,
            "memory_gib": round(properties.total_memory / 2**30),
            "compute_capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "cuda": torch.version.cuda,
            "driver": driver(),
        }
    return {"command": record.command(), "machine": record.machine(), "gpu": gpu, "versions": record.versions()}


def driver() -> str:
    """The driver's version, where nvidia-smi tells it."""
    try:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.split()[0]
    except (OSError, IndexError, subprocess.SubprocessError):
        return "unknown"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the steps, prints them, and writes the JSON."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--dry-run", action="store_true", help="on the CPU, tiny")
    options.add_argument("--only", nargs="+", choices=list(STEPS), default=list(STEPS), help="these steps")
    options.add_argument("--minutes", type=float, default=MINUTES)
    options.add_argument("--output", type=Path, help="another place for the JSON; a rehearsal writes none without it")
    given = options.parse_args(arguments)
    if not given.dry_run and not torch.cuda.is_available():
        built = torch.version.cuda
        reason = (
            "this torch was built without CUDA"
            if built is None
            else f"torch is built for CUDA {built}, but sees no GPU"
        )
        print(f"gpu-check: no CUDA device ({reason}); nothing was checked", file=sys.stderr)
        return 2
    check = Check(given.dry_run, time.monotonic() + 60 * given.minutes)
    begin = time.monotonic()
    carry_out(check, given.only, lambda text: print(text, flush=True))
    report = {**facts(check.dry), "seconds": round(time.monotonic() - begin, 1), "results": check.results}
    slug = re.sub(r"[^a-z0-9]+", "-", str(report["gpu"].get("name", "rehearsal")).lower()).strip("-")
    output = given.output or (None if check.dry else record.FOLDER / f"gpu-check-{slug}.json")
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(report, indent=1) + "\n")
        print(f"{output.name}: written after {report['seconds']} s")
    failed = [name for name in PROOFS if check.results.get(name, {}).get("ok") is False]
    if failed:
        print(f"gpu-check: {', '.join(failed)} failed", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
