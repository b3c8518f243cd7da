"""Issues of a check: severity, area, location, and affected points of the search; and checks of
this machine: its GPUs, cores and disks."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from zero_trial.ds_config.table import DsConfig
from zero_trial.errors import ConfigError, ZeroTrialError
from zero_trial.launch.hosts import HostDevices, check_slots
from zero_trial.schema.document import GIVEN
from zero_trial.util.files import IN_MEMORY, file_system_of

_FILE = re.compile(r"(?P<file>\S+?\.(?:ya?ml|json|hjson|py|sh|txt))(?::(?P<line>\d+))?(?: (?P<key>.+))?$")


class Severity(Enum):
    """The effect of an issue on the run; the values are printed."""

    FAULT = "error"  # the run would not start, or would fail
    WARNING = "warn"  # the run does something that is probably not intended
    NOTE = "note"  # what was not checked, and why


class Area(Enum):
    """The part of an experiment that an issue is about."""

    EXPERIMENT = "experiment"
    ENTRYPOINT = "entrypoint"
    SPACE = "space"
    DS_CONFIG = "ds_config"
    TRIAL = "trial"
    LOADERS = "loaders"
    METRIC = "metric"
    SLOTS = "slots"


def split_where(where: str | None) -> tuple[str | None, int | None, str | None]:
    """Split ``const.yaml:14 searcher.metric`` into file, line and key; each may be missing."""
    found = _FILE.match(where or "")
    if found is None:
        return None, None, where
    return found["file"], int(found["line"]) if found["line"] else None, found["key"]


@dataclass(frozen=True)
class CheckIssue:
    """One issue.

    Args:
        points: numbers of the affected points of the search; empty if all are affected.
        at: the same as readable text.
    """

    area: Area
    severity: Severity
    error: ZeroTrialError
    points: tuple[int, ...] = ()
    at: str = ""

    @property
    def text(self) -> str:
        """Return the message as text."""
        return f"{self.error.describe()} ({self.at})" if self.at else self.error.describe()

    def as_json(self) -> dict[str, Any]:
        """Return the fields as JSON data."""
        (file, line, key), error = split_where(self.error.where), self.error
        return {
            "severity": self.severity.value,
            "area": self.area.value,
            "file": file,
            "line": line,
            "key": key,
            "what": error.what,
            "got": _shown(error.got),
            "expected": _shown(error.expected),
            "fix": error.fix,
            "points": list(self.points),
            "text": self.text,
        }


def issues_of(area: Area, error: ZeroTrialError, severity: Severity = Severity.FAULT) -> list[CheckIssue]:
    """Return one issue per fault in ``error``."""
    return [CheckIssue(area, severity, fault) for fault in flat([error])]


def flat(errors: Iterable[ZeroTrialError]) -> list[ZeroTrialError]:
    """Return the individual faults of ``errors``, some of which contain several."""
    return [fault for error in errors for fault in (getattr(error, "faults", ()) or (error,))]


def note(area: Area, severity: Severity, what: str, **parts: Any) -> CheckIssue:
    """Return an issue without an exception; ``parts``: where, got, expected, fix of an error."""
    return CheckIssue(area, severity, ConfigError(what, **parts))


def _shown(value: Any) -> str | None:
    return None if value is None else str(value)


# --- this machine's GPUs, cores and disks ---


def check_machine(slots: int, where: str, devices: HostDevices, config: DsConfig | None) -> list[CheckIssue]:
    """Return issues of ``slots`` ranks (set at ``where``) of ``config`` on ``devices``. Pure.

    More ranks than GPUs is a fault, because ``zero-trial run`` raises an error; more ranks than
    cores works, but slowly.
    """
    found: list[CheckIssue] = []
    try:
        check_slots(slots, devices, where)
    except ConfigError as error:
        found += issues_of(Area.SLOTS, error)
    if not devices.gpus and slots > devices.cores:
        what = f"{slots} ranks would share the {devices.cores} cores of this machine, which has no GPU"
        fix = f"Use --slots {devices.cores} to try it here."
        found.append(note(Area.SLOTS, Severity.WARNING, what, where=where, fix=fix))
    if config is not None and config.fp16.enabled and not devices.gpus:
        what = "fp16 on a machine without a GPU: fp16 is slow on CPUs, and its gradients need a loss scale"
        fix = 'Use "bf16": {"enabled": true} instead; the processor supports it.'
        found.append(note(Area.DS_CONFIG, Severity.WARNING, what, where=_where(config, "fp16.enabled"), fix=fix))
    return found


_MISSING, _READ_ONLY = "missing", "read-only"


def look_at(folder: Path) -> str:
    """Return the type of the file system of ``folder``, or ``missing`` or ``read-only``."""
    if not os.path.isdir(folder):  # an unreadable path counts as missing; Path.is_dir would raise
        return _MISSING
    return file_system_of(folder) if os.access(folder, os.W_OK | os.X_OK) else _READ_ONLY


def check_nvme(config: DsConfig, look: Callable[[Path], str] = look_at, base: Path = Path()) -> list[CheckIssue]:
    """Return issues of the folders that ``config`` offloads to. The required space is known only
    when an engine allocates its files, which fails before the first step.

    Args:
        look: returns the state of a folder, see :func:`look_at`.
        base: folder of relative paths.
    """
    found: dict[Path, CheckIssue] = {}
    zero = config.zero_optimization
    for key, section in (("offload_optimizer", zero.offload_optimizer), ("offload_param", zero.offload_param)):
        folders = section.nvme_path or () if section is not None and section.device == "nvme" else ()
        where = _where(config, f"zero_optimization.{key}.nvme_path")
        for number, folder in enumerate(folders):
            own = where if len(folders) == 1 else f"{where}[{number}]"
            path = (base / folder).absolute()
            issue = _of_folder(str(path), own, look(path))
            if issue is not None:
                found.setdefault(path, issue)
    return list(found.values())


def _of_folder(folder: str, where: str, seen: str) -> CheckIssue | None:
    severity, fix = Severity.FAULT, "Use another folder."
    if seen == _MISSING:
        what, fix = "the folder does not exist on this machine", "Create it, or use another folder."
    elif seen == _READ_ONLY:
        what = "the folder is not writable"
    elif seen in IN_MEMORY:
        severity, fix = Severity.WARNING, "Use a folder on a disk."
        what = f"this folder is in memory ({seen}), so offloading to it saves no memory"
    else:
        return None
    return note(Area.DS_CONFIG, severity, what, where=where, got=folder, fix=fix)


def _where(config: DsConfig, key: str) -> str:
    """Return the file and line of a value, if known, followed by its dotted key."""
    source = config.source(key)
    return key if source.is_default or source == GIVEN else f"{source} {key}"
