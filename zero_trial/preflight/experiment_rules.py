"""What a searcher needs to be told, by Determined 0.38.1: how many trials, how long, and how finely a grid is cut."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from zero_trial.experiment.defaults import ClusterDefaults
from zero_trial.experiment.experiment import ExperimentConfig
from zero_trial.experiment.rules import InvalidExperiment, complete
from zero_trial.preflight.ds_configs import find_ranges
from zero_trial.preflight.issues import Area, Issue, Severity, note, split_where

LIVE = ("single", "random", "grid", "adaptive_asha")


def check_searcher(experiment: ExperimentConfig) -> list[Issue]:
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


def _lengths(experiment: ExperimentConfig) -> list[Issue]:
    searcher = experiment.searcher
    if searcher.max_length is not None or searcher.rest.get("max_time") is not None:
        return []
    return [_fault(experiment, "max_length", "the run has no length", "Write searcher: {max_length: {batches: 200}}.")]


def _ranges(experiment: ExperimentConfig) -> list[Issue]:
    name, axes = experiment.searcher.name, list(find_ranges(experiment.hyperparameters))
    document = experiment.document
    where = document.at(("searcher", "name")).where("searcher.name")
    if name != "single" and not axes:
        what = f"there is nothing to search: all hyperparameters are constants, and {name} tries them again and again"
        return [note(Area.SPACE, Severity.WARNING, what, where=where, fix="Use searcher: {name: single}.")]
    if name == "single" and axes:
        listed = ", ".join(".".join(path) for path, _ in axes)
        what = f"single draws one point, and zero-trial run takes constants only: {listed}"
        fix = "Use constants, or another searcher."
        return [note(Area.SPACE, Severity.WARNING, what, where=where, fix=fix)]
    if name != "grid":
        return []
    return [
        note(
            Area.SPACE,
            Severity.FAULT,
            "a grid needs to know how many values to take",
            where=document.at(("hyperparameters", *path)).where(f"hyperparameters.{'.'.join(path)}.count"),
            fix="Add count: 5.",
        )
        for path, spec in axes
        if spec["type"] != "categorical" and spec.get("count") is None
    ]


def _fault(experiment: ExperimentConfig, key: str, what: str, fix: str) -> Issue:
    where = experiment.document.at(("searcher", key)).where(f"searcher.{key}")
    return note(Area.EXPERIMENT, Severity.FAULT, what, where=where, fix=fix)


# What a master says of an experiment when it is created there, beyond what reading it has found.


# What the cluster adds of its own where an experiment says nothing: nothing is stored by a check.
_STORAGE = {"type": "shared_fs", "host_path": "/"}


_ROOT = "<config>"


_MESSAGE = re.compile(rf"(?P<path>{_ROOT}[^:\s]*): (?P<what>.+)", re.DOTALL)


_STEP = re.compile(r"[^.\[\]]+|\[\d+\]")


Keys = tuple[str, ...]


def check_cluster_rules(experiment: ExperimentConfig, yaml_text: str, found: Sequence[Issue]) -> list[Issue]:
    """The faults for which ``det experiment create`` would refuse ``yaml_text``, without those that ``found`` has at the same keys. Pure."""
    known = [keys_of(key) for finding in found if (key := split_where(finding.error.where).key) is not None]
    try:
        completed = complete(yaml_text, ClusterDefaults(checkpoint_storage=_STORAGE, name=experiment.name))
    except InvalidExperiment as error:
        return [_fault_cluster_rules(experiment, line) for line in error.messages if not _is_known(_path(line), known)]
    news = completed.warnings[len(experiment.warnings) :]  # the same text was read: the first ones are the same
    return [note(Area.EXPERIMENT, Severity.WARNING, line) for line in news]


def keys_of(dotted: str) -> Keys:
    """``searcher.bracket_rungs[0]`` as its steps; a list's index is one."""
    return tuple(_STEP.findall(dotted))


def _path(line: str) -> Keys:
    found = _MESSAGE.fullmatch(line)
    return keys_of(found["path"].removeprefix(_ROOT)) if found is not None else ()


def _is_known(path: Keys, known: Iterable[Keys]) -> bool:
    """Whether the same key, or one around it or inside it, has been spoken of."""
    return bool(path) and any(path[: len(other)] == other or other[: len(path)] == path for other in known if other)


def _fault_cluster_rules(experiment: ExperimentConfig, line: str) -> Issue:
    path, found = _path(line), _MESSAGE.fullmatch(line)
    what = found["what"] if found is not None else line
    place = experiment.document.at(tuple(step for step in path if not step.startswith("[")))
    where = place.where(".".join(path).replace(".[", "[")) if path else place.spot() or None
    return note(Area.EXPERIMENT, Severity.FAULT, f"a master refuses this: {what}", where=where)
