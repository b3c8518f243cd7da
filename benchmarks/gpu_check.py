"""Check the CUDA half on one GPU, within eight minutes: `make gpu-check`.

    python benchmarks/gpu_check.py
    python benchmarks/gpu_check.py --dry-run  # quick: the same steps, tiny, on the CPU

It needs a CUDA device, torch, safetensors, tqdm, pyyaml and pytest. It runs without installation.

In this order, each in a process of its own that is ended when its time is up, so that a crash or a
hang costs one row:

    compile    every kernel by NVRTC for this device, cold and from the cache, and loaded by the
               driver
    exact      every op against the CPU's kernels, bit for bit, and against float64
    tests      the engine on this GPU: one rank over NCCL, two ranks over gloo (pytest -m gpu)
    speed      every op as a percentage of the copy bandwidth, next to torch's
    train      a GPT of about 1 B parameters in bf16, and plain torch with fused AdamW: tokens per
               second, MFU, peak memory
    memory     every op on small tensors under compute-sanitizer, if it is installed: accesses,
               then races in shared memory
    deepspeed  DeepSpeed's FusedAdam, if it is installed and can be built

One JSON in benchmarks/results/ holds machine, versions and all results, good or bad; it is written
again after each step. The exit code is 1 unless compile, exact and tests pass and memory finds
nothing, and 2 if there is no CUDA device.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import processes, record
from benchmarks.ops import gpu, gpu_exact, gpu_load
from benchmarks.processes import ROOT, Row

MINUTES = 8.0
MARGIN = 5.0  # seconds before the end in which no step runs
# steps that must pass; memory must not fail
PROOFS = ("compile", "exact", "tests")
TRAINED = ("torch", "ours-0", "ours-2")
SANITIZED = {"memcheck": list(gpu_exact.SECTIONS)[:-1], "racecheck": ["sums"]}
NO_SANITIZER = ("Device not supported", "device is not supported", "not supported on this")


@dataclass
class Check:
    """The results so far, and how much time is left. ``dry``: on the CPU, tiny. ``cache``: of
    kernels, empty at first."""

    dry: bool
    deadline: float
    cache: str = ""
    results: dict[str, dict[str, Any]] = field(default_factory=dict)

    def until(self, most: float) -> float:
        """Return when a step must have ended (time.monotonic): after ``most`` seconds, or shortly
        before the end."""
        return min(time.monotonic() + most, self.deadline - MARGIN)

    def command(self, script: str, *options: str) -> list[str]:
        """Return the command of a script of ours."""
        return [sys.executable, f"benchmarks/{script}", *options, *(["--dry-run"] if self.dry else [])]

    def env(self, **more: str) -> dict[str, str]:
        """Return the environment of all steps: native kernels or an error, compiled in this run.
        Without NumPy torch warns; nothing here needs it."""
        given = {"PYTHONWARNINGS": "ignore:Failed to initialize NumPy", **more}
        return given if self.dry else {"ZERO_TRIAL_OPS": "native", "XDG_CACHE_HOME": self.cache, **given}


def compile_(check: Check) -> dict[str, Any]:
    """Return a row per source."""
    found = processes.rows(check.command("ops/gpu_load.py"), list(gpu_load.sources()), check.until(75), check.env(), 30)
    wrong = [f"{row['name']}: {said}" for row in found for said in row.get("wrong", [row.get("why", "")])]
    done = [row for row in found if "kernels" in row]
    return {
        "ok": not wrong,
        "said": wrong,
        "kernels": sum(row["kernels"] for row in done),
        "cold_ms_most": max((row["cold_ms"] for row in done), default=0.0),
        "cached_ms_most": max((row["cached_ms"] for row in done), default=0.0),
        "sources": found,
    }


def exact(check: Check) -> dict[str, Any]:
    """Return a row per section."""
    sections = list(gpu_exact.SECTIONS)
    found = processes.rows(check.command("ops/gpu_exact.py"), sections, check.until(120), check.env(), 60)
    wrong = [f"{row['name']}: {told}" for row in found if (told := difference(row))]
    return {"ok": not wrong, "said": wrong, "cases": sum(row.get("cases", 0) for row in found), "sections": found}


def difference(row: Row) -> str:
    """Return the differences that one section of exact found."""
    if "why" in row:
        return str(row["why"])
    return f"{row['different']} of {row['cases']} differ, first {row['first']}" if row["different"] else ""


def memory(check: Check) -> dict[str, Any]:
    """Run compute-sanitizer's memcheck and racecheck; each tensor is an allocation of its own, so
    that an access outside of it is an error."""
    tool = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if tool is None or check.dry:
        return {"skipped": "compute-sanitizer is not installed" if tool is None else "rehearsal"}
    found: dict[str, Any] = {}
    for name, sections in SANITIZED.items():
        # torch asks for symbols that may be missing
        quiet = ["--report-api-errors", "no"] if name == "memcheck" else []
        command = [tool, "--tool", name, *quiet, *check.command("ops/gpu_exact.py", "--tiny"), *sections]
        seconds = check.until(60) - time.monotonic()
        if seconds < MARGIN:
            found[name] = {"ok": None, "said": ["no time left"]}
            continue
        found[name] = sanitized(processes.run(command, seconds, check.env(PYTORCH_NO_CUDA_MEMORY_CACHING="1")))
    verdicts = [each["ok"] for each in found.values()]
    said = [f"{name}: {line}" for name, each in found.items() for line in each["said"]]
    return {"ok": False if False in verdicts else None if None in verdicts else True, "said": said, "tools": found}


def sanitized(ended: processes.Ended) -> dict[str, Any]:
    """Return a verdict only if the tool gave one: an unsupported GPU or too little time is not a
    fault of the kernels."""
    counts = [int(number) for number in re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", ended.said)]
    if not counts or any(said in ended.said for said in NO_SANITIZER):
        return {"ok": None, "said": [ended.why(), *ended.tail(4)]}
    return {"ok": counts[-1] == 0, "said": ended.tail(12) if counts[-1] else [], "seconds": round(ended.seconds, 1)}


def tests(check: Check) -> dict[str, Any]:
    """Run the files that have tests marked gpu; a dry run skips them."""
    have_hypothesis = importlib.util.find_spec("hypothesis") is not None
    texts = {path: path.read_text(encoding="utf-8") for path in sorted((ROOT / "tests").rglob("test_*.py"))}
    marked = [
        path for path, text in texts.items() if "mark.gpu" in text and (have_hypothesis or "hypothesis" not in text)
    ]
    chosen = [str(path.relative_to(ROOT)) for path in marked if not check.dry or path.name == "test_behaviour_gpu.py"]
    arguments = ["-m", "gpu", "-p", "no:cacheprovider", "--no-header", "-rsf", "--tb=short", *chosen]
    options = ["-o", "addopts=--import-mode=importlib --strict-markers"]
    seconds = check.until(130) - time.monotonic()
    env = {
        key: value for key, value in check.env().items() if key != "ZERO_TRIAL_OPS"
    }  # the tests choose for themselves
    ended = processes.run([sys.executable, "-m", "pytest", *arguments, *options], seconds, env)
    counts = {
        word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|skipped|error)", ended.tail(1)[-1])
    }
    proven = ended.code == 0 and (check.dry or counts.get("passed", 0) > 0)
    why = [] if proven else [ended.why()]
    return {"ok": proven, "files": chosen, "counts": counts, "said": why + ended.tail(40)}


def speed(check: Check) -> dict[str, Any]:
    """Return the rows of ops/gpu.py; nothing else uses the GPU meanwhile."""
    names = [contender.name for contender in gpu.CONTENDERS]
    found = processes.rows(check.command("ops/gpu.py", "--rows"), names, check.until(90), check.env(), 40)
    return {"rows": gpu.with_percentages(found)}


def train(check: Check) -> dict[str, Any]:
    """Return a row per contender, each measured in a process of its own."""
    command = check.command("gpu_train.py")
    return {"rows": [processes.rows(command, [name], check.until(60), check.env())[0] for name in TRAINED]}


def deepspeed(check: Check) -> dict[str, Any]:
    """Measure DeepSpeed, last because its build may take minutes."""
    if importlib.util.find_spec("deepspeed") is None:
        return {"skipped": "deepspeed is not installed"}
    names = [gpu.CONTENDERS[0].name, gpu.LAST.name]
    return {
        "rows": gpu.with_percentages(processes.rows(check.command("ops/gpu.py", "--rows"), names, check.until(200)))
    }


STEPS: dict[str, Callable[[Check], dict[str, Any]]] = {
    "compile": compile_,
    "exact": exact,
    "tests": tests,
    "speed": speed,
    "train": train,
    "memory": memory,
    "deepspeed": deepspeed,
}


def carry_out(check: Check, names: Sequence[str], done: Callable[[str], None]) -> None:
    """Run the steps in order; a failed step is a result and does not end the check."""
    for name in names:
        begin = time.monotonic()
        if check.until(60) - begin < MARGIN:
            check.results[name] = {"skipped": "no time left"}
        else:
            try:
                check.results[name] = STEPS[name](check)
            except Exception as trouble:
                check.results[name] = {"ok": False, "said": [f"{type(trouble).__name__}: {trouble}"]}
        check.results[name]["seconds"] = round(time.monotonic() - begin, 1)
        done(name)


def unproven(check: Check, names: Sequence[str]) -> list[str]:
    """Return the requested steps that did not pass."""
    missing = [name for name in PROOFS if name in names and check.results.get(name, {}).get("ok") is not True]
    return missing + [name for name in ("memory",) if check.results.get(name, {}).get("ok") is False]


def describe(name: str, result: dict[str, Any]) -> str:
    """Return one step as text: a line, and a table if it has rows."""
    verdict = {True: "ok", False: "FAILED", None: "done"}[result.get("ok")]
    said = f"{name}: {'skipped, ' + result['skipped'] if 'skipped' in result else verdict} ({result['seconds']} s)"
    said += "".join(f", {count} {word}" for word, count in result.get("counts", {}).items())
    if "cases" in result:
        said += f", {result['cases']} cases"
    if "kernels" in result:
        said += (
            f", {result['kernels']} kernels, at most {result['cold_ms_most']:.0f} ms cold, "
            f"{result['cached_ms_most']:.1f} ms cached"
        )
    if result.get("ok") is not True:
        said += "".join(f"\n    {line}" for line in result.get("said", []))
    if "rows" in result:
        said += "\n" + record.markdown(result["rows"], columns_of(name))
    return said


def columns_of(name: str) -> list[record.Column]:
    """Return the columns of a step's table."""
    if name != "train":
        return gpu.COLUMNS
    return [
        ("contender", lambda row: row["name"]),
        ("ms per step", record.number("ms", 1)),
        ("tokens/s", record.number("tokens_per_second", 0)),
        ("MFU %", lambda row: f"{100 * row['mfu']:.1f}" if "mfu" in row else ""),
        ("% of products", lambda row: f"{100 * row['of_products']:.1f}" if "of_products" in row else ""),
        ("peak GiB", record.number("peak_gib", 1)),
        ("last loss", lambda row: f"{row['losses'][-1]:.4f}" if "losses" in row else ""),
        ("", lambda row: row.get("why", "")),
    ]


FACTS = """
import json, torch
at = torch.cuda.current_device()
p, (free, total) = torch.cuda.get_device_properties(at), torch.cuda.mem_get_info(at)
print(json.dumps({"name": p.name, "memory_gib": round(total / 2**30, 1), "free_gib": round(free / 2**30, 1),
    "compute_capability": f"{p.major}.{p.minor}", "multiprocessors": p.multi_processor_count,
    "cuda": torch.version.cuda, "nccl": ".".join(map(str, torch.cuda.nccl.version())), "cudnn": torch.backends.cudnn.version()}))
"""


def facts(dry: bool) -> dict[str, Any]:
    """Return GPU and versions. A process of its own asks: this one never opens the device, which
    would keep memory there."""
    about: dict[str, Any] = {}
    if not dry:
        ended = processes.run([sys.executable, "-c", FACTS], 60)
        about = (ended.rows or [{"why": ended.why()}])[0] | {"driver": driver()}
    where = {"machine": record.machine(), "gpu": about, "versions": record.versions()}
    return {"command": record.command(), "commit": record.AT_START, **where}


def driver() -> str:
    """Return the driver's version, if nvidia-smi reports it."""
    try:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.split()[0]
    except (OSError, IndexError, subprocess.SubprocessError):
        return "unknown"


def write(output: Path | None, report: dict[str, Any]) -> None:
    """Write the JSON in one step."""
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        part = output.with_suffix(".part")
        part.write_text(json.dumps(report, indent=1) + "\n")
        os.replace(part, output)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the steps, print them, and write the JSON."""
    begin = time.monotonic()
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
    report = facts(given.dry_run)
    slug = re.sub(r"[^a-z0-9]+", "-", str(report["gpu"].get("name", "rehearsal")).lower()).strip("-")
    output = given.output or (None if given.dry_run else record.FOLDER / f"gpu-check-{slug}.json")
    with tempfile.TemporaryDirectory(prefix="zero_trial-gpu-check-") as cache:
        check = Check(given.dry_run, begin + 60 * given.minutes, cache)

        def done(name: str) -> None:
            print(describe(name, check.results[name]), flush=True)
            write(output, report | {"seconds": round(time.monotonic() - begin, 1), "results": check.results})

        carry_out(check, given.only, done)
    if output is not None:
        print(f"{output.name}: written, {time.monotonic() - begin:.0f} s")
    failed = unproven(check, given.only)
    if failed:
        print(f"gpu-check: {', '.join(failed)}: not proven", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    # so that the running step is ended, too
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    raise SystemExit(main())
