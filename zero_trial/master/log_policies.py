"""An experiment's ``log_policies``: patterns that are searched in the lines of its trials' logs,
and what a match means.

``cancel_retries``: a trial that fails is not started again. ``exclude_node``: no run of the task is
placed again on the machine that printed the line. A policy's name becomes the trial's
``logPolicyMatched``. The supervisor of a run matches what it prints, and records the first match of
each policy in a file of the allocation, which the master reads while the run goes on and after it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from zero_trial.experiment.sections import compile_pattern
from zero_trial.master import logs

CANCEL_RETRIES, EXCLUDE_NODE = "cancel_retries", "exclude_node"
_MATCHES_FILE = "log_matches.jsonl"
# a line that prints the configuration, also as text in JSON, holds every pattern
_PRINTED_CONFIG = re.compile(r"""["']log_policies\\*["']:""")
_LONGEST = 1000  # characters of a line that are kept


@dataclass(frozen=True)
class LogPolicy:
    """A pattern in RE2's syntax, as Go's; ``action`` and ``name`` are empty where there is none."""

    pattern: str
    action: str = ""
    name: str = ""


@dataclass(frozen=True)
class LogMatch:
    """The first line that a policy has matched in a run."""

    policy: LogPolicy
    line: str

    def __str__(self) -> str:
        return f'(log {json.dumps(self.line, ensure_ascii=False)} matched regex "{self.policy.pattern}")'


def policies_of(config: Mapping[str, Any]) -> list[LogPolicy]:
    """Return the policies of a completed config that have a pattern; an action may also be written
    ``{type: cancel_retries}``.
    """
    found = []
    for item in config.get("log_policies") or ():
        action = item.get("action")
        word = action.get("type") if isinstance(action, Mapping) else action
        if item.get("pattern") is not None:
            found.append(LogPolicy(str(item["pattern"]), str(word or ""), str(item.get("name") or "")))
    return found


def why_no_retry(matches: Iterable[LogMatch]) -> str:
    """Return why a trial that fails is not started again; "" if it is."""
    found = " ".join(str(match) for match in matches if match.policy.action == CANCEL_RETRIES)
    return f"trial failed and matched logs to a don't retry policy {found}" if found else ""


def why_excluded(matches: Iterable[LogMatch], node: str) -> str:
    """Return why a task is not placed on the machine ``node`` again; "" if it is."""
    found = " ".join(str(match) for match in matches if match.policy.action == EXCLUDE_NODE)
    return f"{found} therefore will not schedule on {node}" if found else ""


class LogMatcher:
    """Searches lines for the patterns that have not matched yet.

    Attributes:
        unknown: what is wrong with patterns that cannot be searched; only experiments of older
            masters have some.
    """

    def __init__(self, policies: Iterable[LogPolicy]) -> None:
        self.unknown: list[str] = []
        self._open: list[tuple[LogPolicy, Any]] = []
        for policy in policies:
            pattern, why = compile_pattern(policy.pattern)
            if why:
                self.unknown.append(f"the log policy with the pattern {policy.pattern!r} is not obeyed: {why}")
            else:
                self._open.append((policy, pattern))

    def match(self, lines: Sequence[str]) -> list[LogMatch]:
        """Return the new matches, each policy's first, in the order of the lines."""
        found = []
        for line in lines if self._open else ():
            if _PRINTED_CONFIG.search(line):
                continue
            hits = [item for item in self._open if item[1].search(line) is not None]
            for item in hits:
                self._open.remove(item)
                found.append(LogMatch(item[0], line[:_LONGEST]))
        return found


def record(folder: Path, matches: Iterable[LogMatch]) -> None:
    """Add matches to the file of an allocation, in one write."""
    logs.append(
        folder / _MATCHES_FILE,
        [json.dumps({**asdict(match.policy), "line": match.line}).encode() + b"\n" for match in matches],
    )


def recorded(folder: Path, start: int) -> tuple[list[LogMatch], int]:
    """Read the matches of an allocation from byte ``start`` on, and return where they end."""
    path = folder / _MATCHES_FILE
    if not path.exists() or path.stat().st_size <= start:
        return [], start
    data = path.read_bytes()[start:]
    whole = data[: data.rfind(b"\n") + 1]
    items = [json.loads(line) for line in whole.splitlines()]
    return [LogMatch(LogPolicy(**item), line) for item in items for line in [item.pop("line")]], start + len(whole)
