"""``zero-trial env``: what is available on this machine, and why something is not."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

from zero_trial.errors import ZeroTrialError

_OPTIONAL = {
    "determined": "needed to run on a Determined cluster: pip install 'zero_trial[determined]'",
    "tensorboard": "needed for TensorBoard files: pip install 'zero_trial[tensorboard]'",
    "deepspeed": "only measured against, never needed: pip install 'zero_trial[bench]'",
}
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
    """Run the verb."""
    facts = collect(os.environ)
    print(_as_json(facts) if options.json else as_text(facts))
    return 0


def collect(env: Mapping[str, str]) -> list[Fact]:
    """Return all facts about this machine; imports torch."""
    return [*versions(), *_machine(env), *_backends(), *kernels(), *transport(), *_tools()]


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
    from zero_trial.launch.environment import count_devices

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
    """Return what the optimizer's kernels run as, and how offload reads and writes files."""
    try:
        from zero_trial.ops.dispatch import as_dict, report

        said = as_dict(report())
    except ZeroTrialError as error:  # ZERO_TRIAL_OPS
        return [Fact("kernels", "ops", "", str(error))]
    except Exception as trouble:  # any: this command is for machines on which something is wrong
        return [Fact("kernels", "ops", "", f"the report could not be made: {type(trouble).__name__}: {trouble}")]
    disk = said["disk"]
    passed_over = "".join(f"; not {name}: {why}" for name, why in disk["passed_over"].items())
    return [
        *kernel_facts(said["ops"], said["refused"]),
        Fact("disk", "offload", f"{disk['engine']}{passed_over}"),
    ]


def kernel_facts(ops: Sequence[Mapping[str, str]], refused: Mapping[str, str]) -> list[Fact]:
    """Return one line per device and backend, with the ops that use it; plain torch is a reason,
    not a thing that is there.
    """
    facts = []
    for device in ("cpu", "cuda"):
        for backend in dict.fromkeys(op[device] for op in ops):
            names = ", ".join(op["name"] for op in ops if op[device] == backend)
            which = "all ops" if names.count(",") == len(ops) - 1 else names
            plain = backend.startswith("plain torch")
            facts.append(
                Fact("kernels", device, "" if plain else f"{backend}: {which}", f"{backend}: {which}" if plain else "")
            )
    return facts + [Fact("kernels", name, "", f"plain torch: {why}") for name, why in refused.items()]


def transport() -> list[Fact]:
    """Return whether processes of this host can map each other's memory, as CPU ranks do to
    exchange tensors: tried with one.
    """
    name, without = "shared memory", "CPU ranks exchange tensors through gloo"
    try:
        descriptor = os.memfd_create("zero_trial")
        try:
            os.write(descriptor, b"shared")
            done = _ask("-c", f"print(open('/proc/{os.getpid()}/fd/{descriptor}', 'rb').read().decode())")
        finally:
            os.close(descriptor)
    except (AttributeError, OSError, subprocess.SubprocessError) as trouble:
        return [Fact("transport", name, "", f"{without}: {trouble}")]
    if done.stdout.strip() != "shared":
        return [Fact("transport", name, "", f"{without}: a process may not read another's memory files")]
    return [Fact("transport", name, "between CPU ranks of one host")]


def _ask(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=180, check=False)


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


def _as_json(facts: list[Fact]) -> str:
    """Return the report for programs."""
    return json.dumps({"facts": [asdict(fact) for fact in facts]}, indent=1)


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
