"""``zero-trial init`` and ``env``: create a folder that trains as is and serves as a template;
report what is available on this machine, and why something is not."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from zero_trial.errors import ConfigError, ZeroTrialError

# --- init -----------------------------------------------------------------------------------------

TEMPLATES = ("text", "image")
FILES = ("model_def.py", "const.yaml", "ds_config.json", "README.md")
IGNORED = {".detignore": "runs/\n__pycache__/\n"}
"""What ``det`` must not send: the runs of this folder."""


def add_init_parser(subparsers: Any) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "init",
        help="create a new trial: a model, an experiment, a ds_config",
        description="Write a complete example trial into a folder: model_def.py, const.yaml, ds_config.json and a README. Existing files are "
        "never changed.",
    )
    parser.add_argument(
        "folder",
        nargs="?",
        type=Path,
        default=Path(),
        metavar="FOLDER",
        help="where to write (default: the current folder)",
    )
    parser.add_argument(
        "--template",
        choices=TEMPLATES,
        default=TEMPLATES[0],
        help="text: a byte-level language model; image: a network that reads letters (default: text)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(handler=_init)


def _init(options: argparse.Namespace) -> int:
    folder: Path = options.folder
    files = template(options.template, experiment_name(folder, options.template))
    plant(folder, files)
    # the next commands, relative to the current directory
    go = [] if folder.resolve() == Path.cwd() else [shlex.join(["cd", str(folder)])]
    verbs = ("check const.yaml .", "run const.yaml .", "report runs/0001")
    commands = [*go, *(f"zero-trial {verb}" for verb in verbs)]
    if options.json:
        print(json.dumps({"folder": str(folder.resolve()), "files": sorted(files), "next": commands}))
        return 0
    print(f"made    {' · '.join(str(folder / name) for name in FILES)}")
    print("\n".join(f"{label:<8}{command}" for label, command in zip(("next", *[""] * 9), commands, strict=False)))
    return 0


def template(name: str, experiment: str) -> dict[str, str]:
    """Return the files of a template by name, for an experiment with the name ``experiment``."""
    source = Path(__file__).parent / "templates" / name
    files = {file: (source / file).read_text(encoding="utf-8") for file in FILES}
    files["const.yaml"] = re.sub(r"^name: .*$", f"name: {experiment}", files["const.yaml"], count=1, flags=re.MULTILINE)
    return {**files, **IGNORED}


def experiment_name(folder: Path, otherwise: str) -> str:
    """Return the folder's name if it needs no quotes in YAML, else ``otherwise``."""
    name = folder.resolve().name
    return name if re.fullmatch(r"[A-Za-z][\w.-]*", name, re.ASCII) and name.lower() not in _YAML_WORDS else otherwise


_YAML_WORDS = ("y", "n", "yes", "no", "true", "false", "on", "off", "null")
"""Words that YAML 1.1 does not read as text."""


def plant(folder: Path, files: dict[str, str]) -> None:
    """Write ``files`` into ``folder``; create the folder if needed.

    Raises ConfigError before writing anything if one of the files exists.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError("this is a file", where="FOLDER", got=str(folder), expected="a folder, or a new name")
    there = [name for name in files if os.path.lexists(folder / name)]
    if there:
        raise ConfigError(
            "existing files are not overwritten",
            where="FOLDER",
            got=f"{', '.join(there)} in {folder.resolve().name}/",
            expected="a folder without them",
            fix="Use a new folder: zero-trial init my_trial.",
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            with (folder / name).open("x", encoding="utf-8") as file:
                file.write(text)
    except OSError as error:
        raise ConfigError(
            f"cannot be written ({error.strerror})", where=str(error.filename or folder), fix="Use another folder."
        ) from error


# --- env ------------------------------------------------------------------------------------------

_OPTIONAL = {
    "determined": "needed to run on a Determined cluster: pip install 'zero_trial[determined]'",
    "tensorboard": "needed for TensorBoard files: pip install 'zero_trial[tensorboard]'",
    "deepspeed": "only measured against, never needed: pip install 'zero_trial[bench]'",
}
_MOST_SECONDS = 180  # for native_facts, which may compile kernels
_REQUIRED = ("torch", "safetensors", "PyYAML", "tqdm", "psutil", "google-re2", "attrdict3")


@dataclass(frozen=True)
class Fact:
    """One line of the report.

    If the item is not available, ``value`` is empty and ``why`` is the reason.
    """

    section: str
    name: str
    value: str
    why: str = ""


def add_env_parser(subparsers: Any) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "env",
        help="show what is available here, and why something is not",
        description="Show versions, devices, compilers, kernels and optional packages of this machine, and why something is missing.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(handler=_env)


def _env(options: argparse.Namespace) -> int:
    facts = collect(os.environ)
    print(json.dumps({"facts": [asdict(fact) for fact in facts]}, indent=1) if options.json else as_text(facts))
    return 0


def collect(env: Mapping[str, str]) -> list[Fact]:
    """Return all facts about this machine."""
    return [*versions(), *_machine(env), *native_facts(), *_tools()]


def native_facts() -> list[Fact]:
    """Return facts from torch and the kernels, collected in another process, which a broken
    installation may crash."""
    from zero_trial.launch.first_cause import how_it_ended

    found: list[Fact] = []
    try:
        command = [sys.executable, "-m", "zero_trial.cli.cmd_start"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=_MOST_SECONDS, check=False)
        found = [Fact(**json.loads(line)) for line in done.stdout.splitlines()]
        end = how_it_ended(done.returncode)
    except subprocess.TimeoutExpired:
        end = f"the probe did not finish within {_MOST_SECONDS} s"
    there = {fact.section for fact in found}
    missing = {"backends": "torch", "kernels": "ops"}.items()
    return found + [Fact(section, name, "", end) for section, name in missing if section not in there]


def versions() -> list[Fact]:
    """Return the packages that zero_trial needs or can use."""
    facts = [
        Fact("versions", "python", platform.python_version()),
        _package("zero_trial", "not installed: running from source"),
    ]
    facts += [_package(name, "missing, but required: pip install zero_trial") for name in _REQUIRED]
    return facts + [_package(name, f"not installed; {why}") for name, why in _OPTIONAL.items()]


def _machine(env: Mapping[str, str]) -> list[Fact]:
    """Return CPU, memory and GPUs."""
    from zero_trial.launch.hosts import count_devices
    from zero_trial.util.memory import machine_memory
    from zero_trial.util.text import format_bytes

    devices = count_devices(env)
    facts = [
        Fact("machine", "system", f"{platform.system()} {platform.machine()}"),
        Fact("machine", "cores", str(devices.cores)),
        Fact("machine", "memory", format_bytes(machine_memory())),
        Fact("machine", "GPU files", str(devices.gpus)),
    ]
    return facts + [
        Fact("machine", name, env[name]) for name in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES") if name in env
    ]


def _backends() -> list[Fact]:
    """Return torch's compute devices and communication backends."""
    try:
        import torch
        import torch.distributed as dist
    except (ImportError, OSError) as error:  # OSError: a shared library cannot be loaded
        return [Fact("backends", "torch", "", f"import failed: {error}")]
    facts = [Fact("backends", "cpu", f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}")]
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        facts.append(Fact("backends", "cuda", f"{torch.version.cuda}: {', '.join(names)}"))
    else:
        why = f"torch was built with CUDA {torch.version.cuda}, but sees no usable NVIDIA driver or GPU"
        why = why if torch.version.cuda is not None else "this torch was built without CUDA"
        facts.append(Fact("backends", "cuda", "", why))
    for name, available in (("gloo", dist.is_gloo_available), ("nccl", dist.is_nccl_available)):
        there = dist.is_available() and available()
        said = ("available", "") if there else ("", f"this torch was built without {name}")
        facts.append(Fact("backends", name, *said))
    return facts


def _kernels() -> list[Fact]:
    """Return the implementation of each optimizer kernel; for plain torch, with the reason."""
    from zero_trial.ops.dispatch import report

    try:
        rows = report()
    except ZeroTrialError as trouble:  # ZERO_TRIAL_OPS
        return [Fact("kernels", "ops", "", str(trouble))]
    plain = {name: runs.startswith("plain torch") for name, runs in rows.items()}
    return [
        Fact("kernels", name, "" if plain[name] else runs, runs if plain[name] else "") for name, runs in rows.items()
    ]


def _tools() -> list[Fact]:
    """Return external programs that some components use."""
    wanted = {
        "g++": "the CPU kernels need g++, clang++ or $CXX once, unless they are already built",
        "ssh": "launch --launcher ssh cannot start other hosts",
    }
    return [
        Fact("tools", name, shutil.which(name) or "", "" if shutil.which(name) else f"not found: {why}")
        for name, why in wanted.items()
    ]


def as_text(facts: list[Fact]) -> str:
    """Return the report as text: a block per section."""
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


if __name__ == "__main__":  # started by native_facts
    for probe in (_backends, _kernels):
        for fact in probe():
            print(json.dumps(asdict(fact)), flush=True)
