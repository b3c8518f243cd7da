"""Reads a folder of run folders as a sweep: whatever differs among their configurations is what was swept."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from zero_trial.config.yaml_text import read_yaml
from zero_trial.errors import ConfigError
from zero_trial.report.best import as_yaml
from zero_trial.report.data import BestConfig, RunReport, Series, Status, SweepReport, Tone, TrialReport
from zero_trial.report.leaves import differing_axes, leaves
from zero_trial.report.run_folder import LOCK, finite, from_run_folder, is_run

_IGNORED = ("data.zero_trial.",)  # the lock's own facts
_SECTIONS = ("hyperparameters", "data", "resources", "reproducibility", "searcher")


def from_runs(folder: Path) -> SweepReport:
    """The runs below ``folder``. Raises ConfigError if there are none."""
    paths = (
        sorted((path for path in folder.iterdir() if path.is_dir() and is_run(path)), key=lambda p: p.name)
        if folder.is_dir()
        else []
    )
    if not paths:
        raise ConfigError(
            "there are no runs here", where=str(folder), expected="a folder of run folders, or an experiment's id"
        )
    configs = {path.name: _config(path) for path in paths}
    metric, smaller = _goal(configs)
    points = {name: _point(config) for name, config in configs.items()}
    axes = differing_axes(list(points.values()))
    swept = [axis.name for axis in axes]
    reports = {path.name: from_run_folder(path) for path in paths}
    trials = tuple(
        _trial(name, report, {key: points[name][key] for key in swept if key in points[name]}, metric, smaller)
        for name, report in reports.items()
    )
    found = SweepReport(
        title=folder.resolve().name,
        status=_status(trials),
        searcher="runs of a folder",
        metric=metric,
        smaller_is_better=smaller,
        trials=trials,
        throughput_unit="samples/s",
        axes=axes,
        subtitle=f"{len(trials)} runs",
        created=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    )
    ranked = found.ranked()
    return replace(found, best=_best(ranked[0], configs[ranked[0].id], metric)) if ranked else found


def _config(folder: Path) -> dict[str, Any]:
    path = folder / LOCK
    if not path.is_file():
        return {}
    try:
        return dict(read_yaml(path.read_text(encoding="utf-8"), str(path)).value)
    except ConfigError:
        return {}


def _goal(configs: Mapping[str, Mapping[str, Any]]) -> tuple[str, bool]:
    """The metric that all runs go by. Raises ConfigError where they go by different ones: they cannot be compared."""
    goals = {
        (str(s.get("metric", "validation_loss")), bool(s.get("smaller_is_better", True)))
        for config in configs.values()
        if isinstance(s := config.get("searcher"), Mapping)
    }
    if len(goals) > 1:
        raise ConfigError(
            "the runs go by different metrics",
            where="searcher.metric",
            got=", ".join(sorted(name for name, _ in goals)),
            fix="Report on runs of one metric at a time.",
        )
    return goals.pop() if goals else ("validation_loss", True)


def _point(config: Mapping[str, Any]) -> dict[str, Any]:
    found = leaves({name: config[name] for name in _SECTIONS if isinstance(config.get(name), Mapping)})
    return {name: value for name, value in found.items() if not name.startswith(_IGNORED)}


def _trial(name: str, report: RunReport, point: Mapping[str, Any], metric: str, smaller: bool) -> TrialReport:
    curve = next((one for one in report.validation if one.name == metric), Series(metric, (), ()))
    best = (min if smaller else max)(curve.values) if len(curve) else None
    speed = next((one for one in report.progress if one.name.endswith("per second")), None)
    facts = dict(report.facts)
    return TrialReport(
        id=name,
        status=report.status,
        point=point,
        curve=curve,
        best=best,
        steps=_first_number(facts.get("steps", "0")),
        why=report.message.splitlines()[0] if report.message else "",
        memory=report.memory,
        throughput=sum(speed.values) / len(speed) if speed is not None and len(speed) else None,
    )


def _first_number(text: str) -> int:
    found = re.match(r"\d+", text)
    return int(found.group()) if found else 0


def _status(trials: tuple[TrialReport, ...]) -> Status:
    if any(trial.status.tone is Tone.BUSY for trial in trials):
        return Status("running", Tone.BUSY)
    return Status("completed", Tone.GOOD)


def _best(trial: TrialReport, config: Mapping[str, Any], metric: str) -> BestConfig:
    """Its lock, which repeats the run wherever the model's folder is."""
    data = {key: value for key, value in (config.get("data") or {}).items() if key != "zero_trial"}
    text = as_yaml({**config, "data": data}, f"run {trial.id}: zero-trial run best.yaml MODEL_DIR")
    value = trial.best if finite(trial.best) and trial.best is not None else float("nan")
    return BestConfig(trial.id, value, "best.yaml", text, "zero-trial run best.yaml MODEL_DIR")
