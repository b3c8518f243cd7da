"""The whole experiment: the type and default of every top-level key, and its completion as a master
does it.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from zero_trial.ds_config.table import TABLE
from zero_trial.errors import ConfigError
from zero_trial.experiment.defaults import ClusterDefaults, merge, modern
from zero_trial.experiment.hyperparameters import Hyperparameters, check_counts
from zero_trial.experiment.sections import (
    BIND_MOUNTS,
    ENVIRONMENT,
    INTEGRATIONS,
    LOG_POLICIES,
    OPTIMIZATIONS,
    PBS,
    PERIOD,
    PROFILING,
    REPRODUCIBILITY,
    RESOURCES,
    RETENTION,
    SEARCHER,
    SECURITY,
    SLURM,
    STORAGE,
    STORAGE_KEPT,
    TENSORBOARD,
    Arranged,
)
from zero_trial.experiment.space import Grid, as_sent
from zero_trial.schema.document import Document
from zero_trial.schema.types import (
    CHOICE,
    MISSING,
    REMOVED,
    RENAMED,
    RULE,
    TYPE,
    AnyOf,
    Bool,
    Field,
    Fields,
    Forbidden,
    Issue,
    ListOf,
    MapOf,
    Path,
    Tagged,
    exact_int,
    exact_text,
)
from zero_trial.schema.yaml_source import read_yaml

ROOT = "<config>"

_NO_ENTRYPOINT = "managed experiments require entrypoint"

_COMMAND = AnyOf((exact_text(), ListOf(exact_text())), "is neither a string nor a list of strings")

_NEVER = {"batches": 0}


def _both_places(section: Mapping[str, Any]) -> str | None:
    given = [bool(section.get(name)) for name in ("workspace", "project")]
    return "workspace and project must either both be set or neither" if given[0] != given[1] else None


def _each_once(labels: list[Any]) -> list[Any]:
    return list(dict.fromkeys(labels))


_TOP = Fields(
    {
        "name": Field(exact_text(), required=True),
        "description": Field(exact_text()),
        "labels": Field(Arranged(exact_text(), _each_once), []),
        "workspace": Field(exact_text(), ""),
        "project": Field(exact_text(), ""),
        "entrypoint": Field(_COMMAND),
        "data": Field(MapOf(), {}),
        "hyperparameters": Field(Hyperparameters(), {}),
        "searcher": Field(SEARCHER, required=True),
        "resources": Field(RESOURCES, {}),
        "environment": Field(ENVIRONMENT, {}),
        "bind_mounts": Field(BIND_MOUNTS, []),
        "checkpoint_storage": Field(STORAGE, required=True),
        "checkpoint_policy": Field(exact_text(("best", "all", "none")), "best"),
        "min_checkpoint_period": Field(PERIOD, _NEVER),
        "min_validation_period": Field(PERIOD, _NEVER),
        "perform_initial_validation": Field(Bool(), False),
        "scheduling_unit": Field(exact_int(1), 100),
        "records_per_epoch": Field(exact_int(), 0),
        "max_restarts": Field(exact_int(0), 5),
        "preemption_timeout": Field(exact_int(1), 3600),
        "reproducibility": Field(REPRODUCIBILITY, {}),
        "profiling": Field(PROFILING, {}),
        "optimizations": Field(OPTIMIZATIONS, {}),
        "log_policies": Field(LOG_POLICIES, []),
        "retention_policy": Field(RETENTION, shown=False),
        "integrations": Field(INTEGRATIONS),
        "slurm": Field(SLURM, {}),
        "pbs": Field(PBS, {}),
        "debug": Field(Bool(), False),
        "data_layer": Field(MapOf(), shown=False),
        "security": Field(SECURITY, shown=False),
        "tensorboard_storage": Field(TENSORBOARD, shown=False),
        "internal": Field(Forbidden("is for the master's own use. Remove it."), shown=False),
    },
    (_both_places,),
    hint="Settings of your own belong under data: or hyperparameters:.",
    # the words of zero-trial run, given to det experiment create --config
    instead={
        "trainer": "hyperparameters.trainer",
        "dataset": "data.dataset",
        "task": "a file and a folder: zero-trial init my_task --template translation makes those of nlp/translation",
        **{key: f"hyperparameters.ds_config.{key}" for key in TABLE if "." not in key},
    },
)


def known_keys(section: str = "") -> frozenset[str]:
    """Return the keys that may be written at the top, or in ``section`` whatever its kind."""
    if not section:
        return frozenset(_TOP.keys)
    inner = _TOP.keys[section].type
    if isinstance(inner, Tagged):
        return frozenset(key for kind in inner.kinds.values() for key in kind.keys)
    return frozenset(inner.keys) if isinstance(inner, Fields) else frozenset()


def _experiment_issues(config: Mapping[str, Any]) -> list[Issue]:
    """Return every issue of a merged experiment. Pure."""
    issues = _TOP.check(config, ())
    if not config.get("entrypoint"):
        issues.append(Issue(("entrypoint",), MISSING, _NO_ENTRYPOINT))
    return issues + _check_grid(config, issues)


def _check_grid(config: Mapping[str, Any], issues: list[Issue]) -> list[Issue]:
    """Check what a grid needs of the hyperparameters: a count for every range, and an end."""
    searcher, space = config.get("searcher"), config.get("hyperparameters")
    if not isinstance(searcher, Mapping) or searcher.get("name") != "grid" or not isinstance(space, Mapping):
        return []
    path = ("hyperparameters",)
    found = [issue for name, value in space.items() for issue in check_counts(value, (*path, name))]
    if not found and not issues:
        try:
            Grid.of(space)
        except ConfigError as error:
            found.append(Issue(path, RULE, error.describe()))
    return found


class InvalidExperiment(ConfigError):
    """An experiment that a real master would refuse; ``messages`` holds every fault as one line."""

    def __init__(self, messages: list[str]) -> None:
        self.messages = list(messages)
        super().__init__("\n".join(["invalid experiment configuration:", *(f"  {line}" for line in messages)]))


@dataclass(frozen=True)
class Examined:
    """An experiment with its defaults laid under it: ``merged`` as JSON data, its issues, and one
    line per old form.
    """

    merged: dict[str, Any]
    issues: list[Issue]
    warnings: list[str]


@dataclass(frozen=True)
class CompletedConfig:
    """``config``: every key of an experiment with its value, as JSON data.

    ``warnings``: one line each.
    """

    config: dict[str, Any]
    warnings: list[str] = field(default_factory=list)


def complete(
    source: str | Mapping[str, Any], defaults: ClusterDefaults, *, template: Mapping[str, Any] | None = None
) -> CompletedConfig:
    """Return the completed experiment of YAML text or a dict. ``template`` is laid under it. Pure.

    Raises InvalidExperiment with all faults. An experiment that is accepted here is accepted by a
    cluster, too, and completed to the same configuration; docs/guide/master.md names what is
    refused only here.
    """
    try:
        document = read_yaml(source, "experiment") if isinstance(source, str) else Document.of(source)
    except ConfigError as error:
        raise InvalidExperiment([fault.describe() for fault in error.faults or (error,)]) from None
    examined = examine(document, defaults, template)
    if examined.issues:
        raise InvalidExperiment([issue.line(ROOT) for issue in examined.issues])
    return CompletedConfig(_TOP.fill(examined.merged), [*document.warnings, *examined.warnings])


def examine(document: Document, defaults: ClusterDefaults, template: Mapping[str, Any] | None = None) -> Examined:
    """Rewrite old forms, lay ``template`` and ``defaults`` under the experiment, and check every
    key. Pure.
    """
    issues: list[Issue] = []
    plain = _as_json(document.value, (), issues)
    if issues:
        return Examined({}, issues, [])
    issues, old_forms = _check_keys(document)
    issues += _check_storage_kind(plain.get("checkpoint_storage"))
    issues += _check_slots(plain.get("resources"))
    own, more = modern(plain)
    old_forms += more
    below, _ = modern(defaults.as_config())
    if template is not None:
        above, more = modern(template)
        below = merge(above, below)
        old_forms += more
    merged = merge(own, below)
    return Examined(merged, issues + _experiment_issues(merged), list(dict.fromkeys(old_forms)))


def _check_keys(document: Document) -> tuple[list[Issue], list[str]]:
    """Return issues and warnings of keys that arrive under another name than they are written."""
    issues, warnings = [], []
    for path, spelling in document.respelled.items():
        text = f"{spelling} is {path[-1]} in YAML 1.1, and arrives under that name. Write '{spelling}' in quotes, or another name"
        if path[0] == "hyperparameters" and path[-1] in ("true", "false"):
            issues.append(Issue(path, RENAMED, text))
        else:
            warnings.append(f"{'.'.join(path)}: {text}")
    return issues, warnings


def _check_storage_kind(written: Any) -> list[Issue]:
    """Return the issue of a storage whose type is left to the cluster, but whose keys are not."""
    if not isinstance(written, Mapping):
        return []
    path = ("checkpoint_storage", "type")
    if "type" in written:
        return [Issue(path, CHOICE, "null is not a type of storage")] if written["type"] is None else []
    own = [str(key) for key in written if key not in STORAGE_KEPT]
    return [Issue(path, MISSING, f"is a required property, because {own[0]} is given")] if own else []


def _check_slots(written: Any) -> list[Issue]:
    """Return the issue of a key of commands. Templates may have it: they are for commands, too."""
    if not isinstance(written, Mapping) or written.get("slots") is None:
        return []
    return [Issue(("resources", "slots"), REMOVED, "is for commands. Write slots_per_trial.")]


def _as_json(value: Any, path: Path, issues: list[Issue]) -> Any:
    """Return ``value`` as JSON data, as a master written in Go has it: 1.0 is 1.

    YAML knows more: dates become text, and what has no JSON form is an issue.
    """
    if isinstance(value, dict):
        return {_text(key, path, issues): _as_json(inner, (*path, key), issues) for key, inner in value.items()}
    if isinstance(value, list):
        return [_as_json(inner, (*path, index), issues) for index, inner in enumerate(value)]
    if isinstance(value, str):
        return _text(value, path, issues)
    if isinstance(value, datetime.date):
        return value.isoformat()
    if isinstance(value, float) and not math.isfinite(value):
        issues.append(Issue(path, TYPE, f"{value} is not a number that JSON knows"))
    elif isinstance(value, float):
        return as_sent(value)
    elif value is not None and not isinstance(value, int | float):
        issues.append(Issue(path, TYPE, f"a YAML value of type {type(value).__name__} has no JSON form"))
    return value


def _text(text: str, path: Path, issues: list[Issue]) -> str:
    """Return ``text``. Half a character, which YAML can write (``"\\ud800"``) and UTF-8 cannot, is
    an issue."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        ascii_path = tuple(step.encode("ascii", "replace").decode() if isinstance(step, str) else step for step in path)
        issues.append(Issue(ascii_path, TYPE, "half a character (a lone surrogate) in a text"))
    return text
