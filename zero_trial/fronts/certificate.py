"""What a run was made with, noted each time it starts: the model's code, this package's code, versions and the machine's arithmetic.

With config.lock.yaml, summary.json and the events it is what ``zero-trial diff`` compares. Two runs that agree in all of it have the same bits.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

import zero_trial
from zero_trial.platform.local import LocalPlatform
from zero_trial.platform.run_folder import write_json

NAME = "certificate.json"
MOST_FOLDERS = 500
MOST_FILES = 2000
MOST_BYTES = 1 << 26
"""Of the model's code; beyond that it is no folder of code, and the certificate says that it is not complete."""

CODE = (".py", ".c", ".cpp", ".h", ".cu", ".cuh")
_NOT_CODE = {"__pycache__", "node_modules", "site-packages", "runs", "checkpoints"}


def certify(run: LocalPlatform, device: torch.device) -> None:
    """Rank 0, before training: adds this start to the run's certificate. A run that goes on has one entry for each start."""
    path = run.run_dir / NAME
    starts = [*_earlier(path), _start(run, device)]
    write_json(path, {"starts": starts})


def _start(run: LocalPlatform, device: torch.device) -> dict[str, Any]:
    return {
        "time": time.time(),
        "step": run.steps_completed,
        "seed": run.seed,
        "ranks": run.distributed.size,
        "hyperparameters": json.loads(json.dumps(run.hparams, default=str)),
        "code": code_of(run.model_dir),
        "package": code_of(Path(zero_trial.__file__).parent)["sha256"][:16],
        "versions": {
            "zero_trial": zero_trial.__version__,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        },
        "machine": {
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "vectors": torch.backends.cpu.get_cpu_capability(),
            "threads": torch.get_num_threads(),
            "system": f"{sys.platform} {platform.machine()}",
        },
    }


def _earlier(path: Path) -> list[Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["starts"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return found if isinstance(found, list) else []


def code_of(folder: Path) -> dict[str, Any]:
    """The source files below ``folder``: name -> the first 16 digits of its SHA-256, and one sum over all of it.

    Hidden folders and those that hold no code of the model's are passed over. In one order on every machine.
    """
    files: dict[str, str] = {}
    size = visited = 0
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in _NOT_CODE and not name.startswith("."))
        visited += 1
        for path in (Path(place) / name for name in sorted(names) if name.endswith(CODE)):
            try:
                content = path.read_bytes()
            except OSError:  # it goes away while a run starts
                continue
            size += len(content)
            files[path.relative_to(folder).as_posix()] = sha256(content).hexdigest()[:16]
        if visited >= MOST_FOLDERS or len(files) >= MOST_FILES or size >= MOST_BYTES:
            break
    else:
        return {"sha256": _sum(files), "files": files, "complete": True}
    return {"sha256": _sum(files), "files": files, "complete": False}


def _sum(files: Mapping[str, str]) -> str:
    return sha256(json.dumps(sorted(files.items())).encode()).hexdigest()
