"""What a master says of an experiment when it is created there, beyond what reading it has found."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from zero_trial.checking.finding import Area, Finding, Severity, remark, split_where
from zero_trial.config.experiment import ExperimentConfig
from zero_trial.master.expconf.cluster import ClusterDefaults
from zero_trial.master.expconf.complete import InvalidExperiment, complete

# What the cluster adds of its own where an experiment says nothing: nothing is stored by a check.
_STORAGE = {"type": "shared_fs", "host_path": "/"}
_ROOT = "<config>"
_MESSAGE = re.compile(rf"(?P<path>{_ROOT}[^:\s]*): (?P<what>.+)", re.DOTALL)
_STEP = re.compile(r"[^.\[\]]+|\[\d+\]")

Keys = tuple[str, ...]


def check_cluster_rules(experiment: ExperimentConfig, yaml_text: str, found: Sequence[Finding]) -> list[Finding]:
    """The faults for which ``det experiment create`` would refuse ``yaml_text``, without those that ``found`` has at the same keys. Pure."""
    known = [keys_of(key) for finding in found if (key := split_where(finding.error.where).key) is not None]
    try:
        completed = complete(yaml_text, ClusterDefaults(checkpoint_storage=_STORAGE, name=experiment.name))
    except InvalidExperiment as error:
        return [_fault(experiment, line) for line in error.messages if not _is_known(_path(line), known)]
    news = completed.warnings[len(experiment.warnings) :]  # the same text was read: the first ones are the same
    return [remark(Area.EXPERIMENT, Severity.WARNING, line) for line in news]


def keys_of(dotted: str) -> Keys:
    """``searcher.bracket_rungs[0]`` as its steps; a list's index is one."""
    return tuple(_STEP.findall(dotted))


def _path(line: str) -> Keys:
    found = _MESSAGE.fullmatch(line)
    return keys_of(found["path"].removeprefix(_ROOT)) if found is not None else ()


def _is_known(path: Keys, known: Iterable[Keys]) -> bool:
    """Whether the same key, or one around it or inside it, has been spoken of."""
    return bool(path) and any(path[: len(other)] == other or other[: len(path)] == path for other in known if other)


def _fault(experiment: ExperimentConfig, line: str) -> Finding:
    path, found = _path(line), _MESSAGE.fullmatch(line)
    what = found["what"] if found is not None else line
    place = experiment.document.at(tuple(step for step in path if not step.startswith("[")))
    where = place.where(".".join(path).replace(".[", "[")) if path else place.spot() or None
    return remark(Area.EXPERIMENT, Severity.FAULT, f"a master refuses this: {what}", where=where)
