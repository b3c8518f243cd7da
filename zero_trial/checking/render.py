"""A check's report as lines for people and as one object for programs."""

from __future__ import annotations

from typing import Any

from zero_trial.checking.check import CheckReport
from zero_trial.checking.finding import Area, Severity


def render_check(report: CheckReport) -> list[str]:
    """A line with what was looked at, then one block per finding, faults first; each begins with the word for its severity."""
    bad = {finding.area for finding in report.faults}
    answer = dict.fromkeys((Area.EXPERIMENT, Area.ENTRYPOINT, Area.DS_CONFIG), " ok") | dict.fromkeys(bad, " wrong")
    done = [f"{says}{answer.get(area, '')}" for area, says in report.looked.items() if area is not Area.SPACE]
    lines = [f"check   {' · '.join(done) or 'nothing could be read'}  {report.seconds:.1f} s"]
    if Area.SPACE in report.looked:
        lines.append(f"search  {report.looked[Area.SPACE]}")
    for severity in Severity:
        for finding in report.findings:
            if finding.severity is severity:
                first, *rest = finding.text.splitlines()
                lines += [f"{severity.value:<8}{first}", *(f"        {line}" for line in rest)]
    return lines


def check_as_json(report: CheckReport) -> dict[str, Any]:
    """``findings`` with every part by itself, ``looked`` by area, and the points of a search that were looked at."""
    found: dict[str, Any] = {
        "ok": not report.faults,
        "exit_code": report.exit_code,
        "seconds": round(report.seconds, 3),
        "looked": {area.value: says for area, says in report.looked.items()},
        "findings": [finding.as_json() for finding in report.findings],
    }
    if report.space is not None:
        checks = report.configs
        found["points"] = {
            "total": report.space.total,
            "looked_at": [{"number": point.number, "values": dict(point.values)} for point in report.space.points],
            "legal": [resolved.point.number for resolved in checks.legal] if checks is not None else None,
            "pruned": list(checks.pruned) if checks is not None else None,
        }
    return found
