"""What a searcher needs to be told, by Determined 0.38.1: how many trials, how long, and how finely a grid is cut."""

from __future__ import annotations

from zero_trial.checking.finding import Area, Finding, Severity, remark
from zero_trial.checking.points import find_ranges
from zero_trial.config.experiment import ExperimentConfig

LIVE = ("single", "random", "grid", "adaptive_asha")


def check_searcher(experiment: ExperimentConfig) -> list[Finding]:
    """Findings about ``searcher`` and the ranges of ``hyperparameters`` together. Pure."""
    searcher, rest = experiment.searcher, experiment.searcher.rest
    found = [*_lengths(experiment), *_ranges(experiment)]
    if searcher.name not in LIVE:
        fix = "Use adaptive_asha, or random." if searcher.name != "custom" else f"Use one of {', '.join(LIVE)}."
        found.append(_fault(experiment, "name", f"the searcher {searcher.name} exists no more", fix))
    elif searcher.name in ("random", "adaptive_asha") and rest.get("max_trials") is None:
        fix = "Write searcher: {max_trials: 16, ...}."
        found.append(_fault(experiment, "max_trials", f"the searcher {searcher.name} needs it", fix))
    return found


def _lengths(experiment: ExperimentConfig) -> list[Finding]:
    searcher = experiment.searcher
    if searcher.max_length is not None or searcher.rest.get("max_time") is not None:
        return []
    return [_fault(experiment, "max_length", "the run has no length", "Write searcher: {max_length: {batches: 200}}.")]


def _ranges(experiment: ExperimentConfig) -> list[Finding]:
    name, axes = experiment.searcher.name, list(find_ranges(experiment.hyperparameters))
    document = experiment.document
    where = document.at(("searcher", "name")).where("searcher.name")
    if name != "single" and not axes:
        what = f"there is nothing to search: all hyperparameters are constants, and {name} tries them again and again"
        return [remark(Area.SPACE, Severity.WARNING, what, where=where, fix="Use searcher: {name: single}.")]
    if name == "single" and axes:
        listed = ", ".join(".".join(path) for path, _ in axes)
        what = f"single draws one point, and zero-trial run takes constants only: {listed}"
        fix = "Use constants, or another searcher."
        return [remark(Area.SPACE, Severity.WARNING, what, where=where, fix=fix)]
    if name != "grid":
        return []
    return [
        remark(
            Area.SPACE,
            Severity.FAULT,
            "a grid needs to know how many values to take",
            where=document.at(("hyperparameters", *path)).where(f"hyperparameters.{'.'.join(path)}.count"),
            fix="Add count: 5.",
        )
        for path, spec in axes
        if spec["type"] != "categorical" and spec.get("count") is None
    ]


def _fault(experiment: ExperimentConfig, key: str, what: str, fix: str) -> Finding:
    where = experiment.document.at(("searcher", key)).where(f"searcher.{key}")
    return remark(Area.EXPERIMENT, Severity.FAULT, what, where=where, fix=fix)
