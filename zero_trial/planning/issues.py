"""Issues of a check: severity, area, place, and the points of the search that they hold for."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from zero_trial.errors import ConfigError, ZeroTrialError

_FILE = re.compile(r"(?P<file>\S+?\.(?:ya?ml|json|hjson|py|sh|txt|detignore))(?::(?P<line>\d+))?(?: (?P<key>.+))?$")


class Severity(Enum):
    """What an issue means for the run; the values are printed."""

    FAULT = "error"  # the run would not start, or end in an error
    WARNING = "warn"  # the run does something that is probably not meant
    NOTE = "note"  # what the check did not look at, and why


class Area(Enum):
    """The part of an experiment that an issue is about."""

    EXPERIMENT = "experiment"
    ENTRYPOINT = "entrypoint"
    SPACE = "space"
    DS_CONFIG = "ds_config"
    TRIAL = "trial"
    LOADERS = "loaders"
    METRIC = "metric"
    CONTEXT = "context"
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
        points: numbers of the points of the search at which it occurs; empty where it occurs at
            all.
        at: the same as a phrase for people.
    """

    area: Area
    severity: Severity
    error: ZeroTrialError
    points: tuple[int, ...] = ()
    at: str = ""

    @property
    def text(self) -> str:
        """Return the message for people."""
        return f"{self.error.describe()} ({self.at})" if self.at else self.error.describe()

    def as_json(self) -> dict[str, Any]:
        """Return the parts for programs."""
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
    """Return one issue per fault that ``error`` holds."""
    return [CheckIssue(area, severity, fault) for fault in flat([error])]


def flat(errors: Iterable[ZeroTrialError]) -> list[ZeroTrialError]:
    """Return the single faults of errors of which some hold several."""
    return [fault for error in errors for fault in (getattr(error, "faults", ()) or (error,))]


def note(area: Area, severity: Severity, what: str, **parts: Any) -> CheckIssue:
    """Return an issue without an exception; ``parts`` are those of an error: where, got, expected,
    fix.
    """
    return CheckIssue(area, severity, ConfigError(what, **parts))


def _shown(value: Any) -> str | None:
    return None if value is None else str(value)
