"""``zero-trial env``: what is available on this machine, and why something is not."""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import platform
import select
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from zero_trial.errors import ZeroTrialError

_OPTIONAL = {
    "determined": "needed to run on a Determined cluster: pip install 'zero_trial[determined]'",
    "tensorboard": "needed for TensorBoard files: pip install 'zero_trial[tensorboard]'",
    "deepspeed": "only measured against, never needed: pip install 'zero_trial[bench]'",
}
_SHARED, _GLOO = "shared memory", "CPU ranks exchange tensors through gloo"
_MOST_SECONDS = 180  # of one probe: kernels may be compiled in it
_REQUIRED = ("torch", "safetensors", "PyYAML", "tqdm", "psutil", "google-re2", "attrdict3")


@dataclass(frozen=True)
class Fact:
    """One line of the report.

    ``value`` is empty when the thing is not available, and ``why`` says why.
    """

    section: str
    name: str
    value: str
    why: str = ""


def add_parser(subparsers: Any) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "env",
        help="show what is available here, and why something is not",
        description="Show versions, devices, compilers, kernels and optional packages of this machine, and why one is missing.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(handler=_handle)


def _handle(options: argparse.Namespace) -> int:
    facts = collect(os.environ)
    print(json.dumps({"facts": [asdict(fact) for fact in facts]}, indent=1) if options.json else as_text(facts))
    return 0


def collect(env: Mapping[str, str]) -> list[Fact]:
    """Return all facts about this machine. What loads torch or the kernels is asked in another
    process: on a machine on which something is wrong, it may end by a signal."""
    probes = [
        Probe("backends", "torch", _backends),
        Probe("kernels", "ops", kernels),
    ]
    return [*versions(), *_machine(env), *ask(probes), *transport(), *_tools()]


class Probe(NamedTuple):
    """A question that native code answers; section and name are those of the fact that it could not
    be asked."""

    section: str
    name: str
    facts: Callable[[], list[Fact]]


def ask(probes: Sequence[Probe]) -> list[Fact]:
    """Return the facts of all probes, which a forked process asks in turn. Where a probe ends it,
    that is a fact, and another process asks the next ones."""
    found: list[Fact] = []
    while probes:
        answered, end = _asked_by_a_child(probes)
        found += [fact for facts in answered for fact in facts]
        probes = probes[len(answered) :]
        if probes:
            found.append(Fact(probes[0].section, probes[0].name, "", f"the process that looked for it {end}"))
            probes = probes[1:]
    return found


def _asked_by_a_child(probes: Sequence[Probe]) -> tuple[list[list[Fact]], str]:
    """Return the facts of each probe that was answered, and how the process ended.

    One that does not answer is killed: where the caller has threads, a lock of theirs may be held
    forever in the fork.
    """
    reading, writing = os.pipe()
    _flush()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            try:
                os.close(reading)
                gc.disable()  # this process ends soon; a tenth of the time that torch's import takes
                with open(writing, "w", encoding="utf-8") as answers:
                    for probe in probes:
                        print(json.dumps([asdict(fact) for fact in probe.facts()]), file=answers, flush=True)
                code = 0
            except Exception:
                traceback.print_exc()
            _flush()
        finally:
            os._exit(code)
    os.close(writing)
    written, late = _read_until_silent(reading)
    if late:
        os.kill(child, signal.SIGKILL)
    lines = written.decode().splitlines(keepends=True)
    answered = [[Fact(**fact) for fact in json.loads(line)] for line in lines if line.endswith("\n")]
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if late:
        return answered, f"did not answer in {_MOST_SECONDS} s"
    if code >= 0:
        return answered, f"ended with exit code {code}"
    return answered, f"died of {signal.Signals(-code).name} ({signal.strsignal(-code)})"


def _read_until_silent(pipe: int) -> tuple[bytes, bool]:
    """Return what comes out of the pipe, which is closed, and whether it ended because nothing came
    for too long."""
    found = b""
    waiting = select.poll()
    waiting.register(pipe, select.POLLIN)
    try:
        while waiting.poll(_MOST_SECONDS * 1000):
            more = os.read(pipe, 1 << 16)
            if not more:
                return found, False
            found += more
        return found, True
    finally:
        os.close(pipe)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # there is none, or it is closed
            stream.flush()


def versions() -> list[Fact]:
    """Return the packages that zero_trial needs or can use."""
    facts = [
        Fact("versions", "python", platform.python_version()),
        _package("zero_trial", "not installed: run from its sources"),
    ]
    facts += [_package(name, "missing, and zero_trial needs it: pip install zero_trial") for name in _REQUIRED]
    return facts + [_package(name, f"not installed; {why}") for name, why in _OPTIONAL.items()]


def _machine(env: Mapping[str, str]) -> list[Fact]:
    """Return processor, memory and GPUs."""
    from zero_trial.launch.this_host import count_devices

    devices = count_devices(env)
    facts = [
        Fact("machine", "system", f"{platform.system()} {platform.machine()}"),
        Fact("machine", "cores", str(devices.cores)),
        Fact("machine", "memory", _memory()),
        Fact("machine", "GPU files", str(devices.gpus)),
    ]
    return facts + [
        Fact("machine", name, env[name]) for name in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES") if name in env
    ]


def _backends() -> list[Fact]:
    """Return what torch can compute on and communicate by."""
    try:
        import torch
        import torch.distributed as dist
    except (ImportError, OSError) as error:  # OSError: one of its libraries cannot be loaded
        return [Fact("backends", "torch", "", f"does not import: {error}")]
    facts = [Fact("backends", "cpu", f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}")]
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        facts.append(Fact("backends", "cuda", f"{torch.version.cuda}: {', '.join(names)}"))
    else:
        facts.append(Fact("backends", "cuda", "", _why_no_cuda(torch.version.cuda)))
    for name, available in (("gloo", dist.is_gloo_available), ("nccl", dist.is_nccl_available)):
        there = dist.is_available() and available()
        facts.append(
            Fact(
                "backends", name, "available" if there else "", "" if there else f"this torch was built without {name}"
            )
        )
    return facts


def kernels() -> list[Fact]:
    """Return what the optimizer's kernels run as."""
    try:
        from zero_trial.ops.dispatch import report

        return kernel_facts(report())
    except Exception as trouble:  # any: this command is for machines on which something is wrong
        return [Fact("kernels", "ops", "", _could_not(trouble))]


def _could_not(trouble: Exception) -> str:
    if isinstance(trouble, ZeroTrialError):  # ZERO_TRIAL_OPS
        return str(trouble)
    return f"the report could not be made: {type(trouble).__name__}: {trouble}"


def kernel_facts(rows: Mapping[str, str]) -> list[Fact]:
    """Return one line per row of the report; plain torch is a reason, not a thing that is there."""
    facts = []
    for name, runs in rows.items():
        plain = runs.startswith("plain torch")
        facts.append(Fact("kernels", name, "" if plain else runs, runs if plain else ""))
    return facts


def transport() -> list[Fact]:
    """Return whether processes of this host can map each other's memory, as CPU ranks do to
    exchange tensors: tried with one."""
    try:
        descriptor = os.memfd_create("zero_trial")
        try:
            os.write(descriptor, b"shared")
            path = Path(f"/proc/{os.getpid()}/fd/{descriptor}")
            return ask([Probe("transport", _SHARED, lambda: [_shared_memory(path)])])
        finally:
            os.close(descriptor)
    except (AttributeError, OSError) as trouble:
        return [Fact("transport", _SHARED, "", f"{_GLOO}: {trouble}")]


def _shared_memory(path: Path) -> Fact:
    """Return whether this process may read the memory of another, a file there."""
    try:
        path.read_bytes()
    except OSError as trouble:
        return Fact("transport", _SHARED, "", f"{_GLOO}: a process may not read another's memory files: {trouble}")
    return Fact("transport", _SHARED, "between CPU ranks of one host")


def _tools() -> list[Fact]:
    """Return programs outside of Python that some parts use."""
    wanted = {
        "g++": "the CPU kernels need it, clang++ or $CXX once, unless they have been built",
        "ssh": "launch --launcher ssh cannot start other hosts",
    }
    return [
        Fact("tools", name, shutil.which(name) or "", "" if shutil.which(name) else f"not found: {why}")
        for name, why in wanted.items()
    ]


def as_text(facts: list[Fact]) -> str:
    """Return the report for people: a block per section."""
    width = max(len(fact.name) for fact in facts)
    lines: list[str] = []
    for section in dict.fromkeys(fact.section for fact in facts):
        lines.append(section)
        lines += [f"  {f.name:<{width}}  {f.value or 'no: ' + f.why}" for f in facts if f.section == section]
    return "\n".join(lines)


def _package(name: str, why: str) -> Fact:
    try:
        return Fact("versions", name, metadata.version(name))
    except metadata.PackageNotFoundError:
        return Fact("versions", name, "", why)


def _memory() -> str:
    from zero_trial.util.memory import machine_memory
    from zero_trial.util.text import format_bytes

    return format_bytes(machine_memory())


def _why_no_cuda(built_with: str | None) -> str:
    if built_with is None:
        return "this torch was built without CUDA"
    return f"torch was built with CUDA {built_with}, but sees no usable NVIDIA driver or GPU"
