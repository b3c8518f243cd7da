"""The lock file ``config.lock.yaml``: all that is needed to repeat a run, written into its folder before the first rank starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from zero_trial.experiment.experiment import ExperimentConfig
from collections.abc import Mapping
from typing import Any
import copy
import os
import yaml
from importlib import metadata
import json
from hashlib import sha256

CONFIG_LOCK = "config.lock.yaml"


SECTION = "zero_trial"
"""The lock's own facts stand under ``data.zero_trial``: an experiment may hold anything under ``data``."""


@dataclass(frozen=True)
class LockedFacts:
    """What a lock adds to the experiment: where the model is, on how many ranks, from which seed."""

    model_dir: Path
    slots: int
    seed: int


def write_lock(folder: Path, experiment: ExperimentConfig, locked: LockedFacts, ds_config: Mapping[str, Any] | None) -> Path:
    """Write the experiment with everything resolved: the ds_config inside it, the slots and the seed that this run uses.

    Hyperparameters stay as they are: the trial may read a ds_config out of them by itself, and laid over the resolved one it changes nothing.
    The model's folder is noted relative to the lock, so that a project can be moved as a whole.
    """
    content = copy.deepcopy(dict(experiment.raw))
    content["resources"] = {**(content.get("resources") or {}), "slots_per_trial": locked.slots}
    content["reproducibility"] = {**(content.get("reproducibility") or {}), "experiment_seed": locked.seed}
    content["data"] = dict(content.get("data") or {})
    if ds_config is not None:
        content["data"]["ds_config"] = _plain(ds_config)
    content["data"][SECTION] = {
        "model_dir": os.path.relpath(locked.model_dir.resolve(), folder.resolve()),
        "versions": {name: version for name in ("zero_trial", "torch") if (version := _version(name))},
    }
    path = folder / CONFIG_LOCK
    head = f"# All that is needed to repeat this run: zero-trial run {CONFIG_LOCK}\n"
    path.write_text(head + yaml.safe_dump(content, sort_keys=False, allow_unicode=True), encoding="utf-8")
    return path


def locked_model_dir(experiment: ExperimentConfig) -> Path | None:
    """The model's folder that a lock names, or None when the experiment is no lock."""
    section = experiment.data.get(SECTION)
    if not isinstance(section, Mapping) or not isinstance(section.get("model_dir"), str) or experiment.folder is None:
        return None
    return Path(os.path.normpath(experiment.folder / section["model_dir"]))


def _plain(value: Any) -> Any:
    """Nested mappings and sequences as the dicts and lists that YAML can write."""
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


# What a run was made with, noted each time it starts: the model's code, this package's code, versions and the machine's arithmetic.
#
# With config.lock.yaml, summary.json and the events it is what ``zero-trial diff`` compares. Two runs that agree in all of it have the same bits.


PROVENANCE = "certificate.json"


MOST_FOLDERS = 500


MOST_FILES = 2000


MOST_BYTES = 1 << 26
"""Of the model's code; beyond that it is no folder of code, and the certificate says that it is not complete."""


CODE_SUFFIXES = (".py", ".c", ".cpp", ".h", ".cu", ".cuh")


_NOT_CODE = {"__pycache__", "node_modules", "site-packages", "runs", "checkpoints"}


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
        for path in (Path(place) / name for name in sorted(names) if name.endswith(CODE_SUFFIXES)):
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
