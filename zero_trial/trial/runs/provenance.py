"""What a run was made from: ``config.lock.yaml``, which repeats it, and for each of its starts the
code, versions and machine.

Together with summary.json and the events, this is what ``zero-trial diff`` compares. Two runs that
agree in all of it are bit-identical.
"""

from __future__ import annotations

import copy
import json
import os
import platform
import sys
import time
from collections.abc import Mapping
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from typing import Any

import zero_trial
from zero_trial.experiment.experiment import LOCK_SECTION, ExperimentConfig
from zero_trial.schema.config_source import read_yaml, write_yaml
from zero_trial.trial.runs.events import read_json, write_json
from zero_trial.trial.runs.run_layout import RunFolder

MOST_FOLDERS = 500
MOST_FILES = 2000
MOST_BYTES = 1 << 26
"""Limits of the model's code. A larger folder is not considered code, and its entry is marked as
incomplete."""

_CODE_SUFFIXES = (".py", ".c", ".cpp", ".h", ".cu", ".cuh")
_NOT_CODE = {"__pycache__", "node_modules", "site-packages", "runs", "checkpoints"}


def write_lock(
    folder: Path,
    experiment: ExperimentConfig,
    ds_config: Mapping[str, Any] | None,
    *,
    model_dir: Path,
    slots: int,
    seed: int,
) -> Path:
    """Write ``config.lock.yaml``: the experiment with its resolved ds_config, the model's location,
    the number of ranks, and the seed.

    Hyperparameters stay unchanged: the trial may read a ds_config from them directly, and merging
    it over the resolved one changes nothing. The model's folder is stored relative to the lock, so
    that a project can be moved as a whole.
    """
    content = copy.deepcopy(dict(experiment.raw))
    content["resources"] = {**(content.get("resources") or {}), "slots_per_trial": slots}
    content["reproducibility"] = {**(content.get("reproducibility") or {}), "experiment_seed": seed}
    content["data"] = dict(content.get("data") or {})
    named = content["data"].get("ds_config")
    before = (content["data"].get(LOCK_SECTION) or {}).get("ds_config")
    if ds_config is not None:
        content["data"]["ds_config"] = _plain(ds_config)
    content["data"][LOCK_SECTION] = {
        "model_dir": os.path.relpath(model_dir.resolve(), folder.resolve()),
        "versions": {name: version for name in ("zero_trial", "torch") if (version := _version(name))},
    }
    if isinstance(named, str) or before is not None:  # the source of the values, for the trial's log
        content["data"][LOCK_SECTION]["ds_config"] = Path(named).name if isinstance(named, str) else before
    path = RunFolder(folder).config_lock
    head = f"# All that is needed to repeat this run: zero-trial run {path.name}\n"
    path.write_text(head + write_yaml(content), encoding="utf-8")
    return path


def read_lock(text: str, path: Path) -> dict[str, Any]:
    """Return the content of a lock; empty if ``text`` is empty. Raises ConfigError."""
    return dict(read_yaml(text, str(path)).value) if text else {}


def locked_model_dir(experiment: ExperimentConfig) -> Path | None:
    """Return the model's folder that a lock names, or None when the experiment is not a lock."""
    section = experiment.data.get(LOCK_SECTION)
    if not isinstance(section, Mapping) or not isinstance(section.get("model_dir"), str) or experiment.folder is None:
        return None
    real = experiment.folder.resolve()  # resolve links to a run, or to all runs: the path is relative to the target
    folder = experiment.folder if Path(os.path.abspath(experiment.folder)) == real else real
    return Path(os.path.normpath(folder / section["model_dir"]))


def _plain(value: Any) -> Any:
    """Convert nested mappings and sequences to dicts and lists that YAML can write."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def add_start(
    run_dir: Path, run: Mapping[str, Any], model_dir: Path, torch_version: str, machine: Mapping[str, Any]
) -> None:
    """Add one start to the run's provenance, on rank 0 and before training. A run that was
    continued has one entry per start.

    Args:
        run: step, seed, number of ranks and hyperparameters; values that JSON does not support are
            written as text.
        machine: the device and the numerics of the machine.
    """
    path = RunFolder(run_dir).provenance
    start = {
        "time": time.time(),
        **json.loads(json.dumps(run, default=str)),
        "code": code_of(model_dir),
        "package": code_of(Path(zero_trial.__file__).parent)["sha256"][:16],
        "versions": {
            "zero_trial": zero_trial.__version__,
            "torch": torch_version,
            "python": platform.python_version(),
        },
        "machine": {**machine, "system": f"{sys.platform} {platform.machine()}"},
    }
    earlier = read_json(path).get("starts")
    write_json(path, {"starts": [*(earlier if isinstance(earlier, list) else ()), start]})


def code_of(folder: Path) -> dict[str, Any]:
    """Hash the source files below ``folder``: name -> the first 16 digits of its SHA-256, and one
    hash over all of them.

    Hidden folders and folders without code (``runs``, unless it is a Python package) are skipped.
    The order is the same on every machine.
    """
    files: dict[str, str] = {}
    size, visited, complete = 0, 0, True
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".") and (name not in _NOT_CODE or Path(place, name, "__init__.py").is_file())
        )
        visited += 1
        for path in (Path(place) / name for name in sorted(names) if name.endswith(_CODE_SUFFIXES)):
            try:
                content = path.read_bytes()
            except OSError:  # removed while a run starts
                continue
            size += len(content)
            files[path.relative_to(folder).as_posix()] = sha256(content).hexdigest()[:16]
        if visited >= MOST_FOLDERS or len(files) >= MOST_FILES or size >= MOST_BYTES:
            complete = False
            break
    digest = sha256(json.dumps(sorted(files.items())).encode()).hexdigest()
    return {"sha256": digest, "files": files, "complete": complete}
