"""The whole experiment: every key at the top, what it may be and what it is where nothing is written."""

from __future__ import annotations

import datetime
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from zero_trial.errors import ConfigError
from zero_trial.experiment.defaults import ClusterDefaults, merge, modern
from zero_trial.experiment.hyperparameters import Hyperparameters, check_counts
from zero_trial.experiment.sections import (
    BIND_MOUNTS,
    DATA_LAYER,
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
)
from zero_trial.experiment.space import Grid
from zero_trial.schema.rules import Field, Fields, Flag, Forbidden, ListOf, MapOf, OneOf, TextRule, Whole
from zero_trial.schema.yaml_source import read_yaml

ROOT = "<config>"


NO_ENTRYPOINT = "managed experiments require entrypoint"


_COMMAND = OneOf((TextRule(), ListOf(TextRule())), "is neither a string nor a list of strings")


_NEVER = {"batches": 0}


def _both_places(section: Mapping[str, Any]) -> str | None:
    given = [section.get(name) is not None for name in ("workspace", "project")]
    return "workspace and project must either both be set or neither" if given[0] != given[1] else None


_TOP = Fields(
    {
        "name": Field(TextRule(), required=True),
        "description": Field(TextRule()),
        "labels": Field(ListOf(TextRule()), []),
        "workspace": Field(TextRule()),
        "project": Field(TextRule()),
        "entrypoint": Field(_COMMAND),
        "data": Field(MapOf(), {}),
        "hyperparameters": Field(Hyperparameters(), {}),
        "searcher": Field(SEARCHER, required=True),
        "resources": Field(RESOURCES, {}),
        "environment": Field(ENVIRONMENT, {}),
        "bind_mounts": Field(BIND_MOUNTS, []),
        "checkpoint_storage": Field(STORAGE, required=True),
        "checkpoint_policy": Field(TextRule(("best", "all", "none")), "best"),
        "min_checkpoint_period": Field(PERIOD, _NEVER),
        "min_validation_period": Field(PERIOD, _NEVER),
        "perform_initial_validation": Field(Flag(), False),
        "scheduling_unit": Field(Whole(1), 100),
        "records_per_epoch": Field(Whole(), 0),
        "max_restarts": Field(Whole(0), 5),
        "preemption_timeout": Field(Whole(1), 3600),
        "reproducibility": Field(REPRODUCIBILITY, {}),
        "profiling": Field(PROFILING, {}),
        "optimizations": Field(OPTIMIZATIONS, {}),
        "log_policies": Field(LOG_POLICIES, []),
        "retention_policy": Field(RETENTION),
        "integrations": Field(INTEGRATIONS),
        "slurm": Field(SLURM, {}),
        "pbs": Field(PBS, {}),
        "debug": Field(Flag(), False),
        "data_layer": Field(DATA_LAYER, {"type": "shared_fs"}),
        "security": Field(SECURITY),
        "tensorboard_storage": Field(Forbidden("TensorBoard files go to checkpoint_storage. Remove it.")),
        "internal": Field(Forbidden("is for the master's own use. Remove it.")),
    },
    (_both_places,),
    hint="Settings of your own belong under data: or hyperparameters:.",
)


def check_experiment(config: Mapping[str, Any]) -> list[str]:
    """Every fault of a merged experiment, one line each. Pure."""
    faults = _TOP.check(config, ROOT)
    if not config.get("entrypoint"):
        faults.append(f"{ROOT}.entrypoint: {NO_ENTRYPOINT}")
    return faults + _check_grid(config, faults)


def _check_grid(config: Mapping[str, Any], faults: list[str]) -> list[str]:
    """What a grid needs of the hyperparameters: a count for every range, and an end."""
    searcher, space = config.get("searcher"), config.get("hyperparameters")
    if not isinstance(searcher, Mapping) or searcher.get("name") != "grid" or not isinstance(space, Mapping):
        return []
    path = f"{ROOT}.hyperparameters"
    found = [fault for name, value in space.items() for fault in check_counts(value, f"{path}.{name}")]
    if not found and not faults:
        try:
            Grid.of(space)
        except ConfigError as error:
            found.append(f"{path}: {error.describe()}")
    return found


def fill_experiment(config: Mapping[str, Any]) -> dict[str, Any]:
    """The experiment with every key that Determined knows. ``config`` has no faults."""
    filled: dict[str, Any] = _TOP.fill(config)
    return filled


# An experiment's YAML made whole: old forms rewritten, the cluster's defaults laid under it, every key checked as a real master does.


class InvalidExperiment(ConfigError):
    """An experiment that a real master would refuse; ``messages`` holds every fault as one line."""

    def __init__(self, messages: list[str]) -> None:
        self.messages = list(messages)
        super().__init__("\n".join(["invalid experiment configuration:", *(f"  {line}" for line in messages)]))


@dataclass(frozen=True)
class CompletedConfig:
    """``config``: every key of an experiment with its value, as JSON data. ``warnings``: one line each."""

    config: dict[str, Any]
    warnings: list[str] = field(default_factory=list)


def complete(
    yaml_text: str, defaults: ClusterDefaults, *, template: Mapping[str, Any] | None = None
) -> CompletedConfig:
    """The completed experiment, or InvalidExperiment with all its faults. ``template`` is a config that lies under the YAML. Pure.

    What cannot be decided from Determined's published behaviour is refused, so that an experiment that is taken here is taken there.
    """
    own, warnings = _parse(yaml_text)
    own, old_forms = modern(own)
    below, _ = modern(defaults.as_config())
    if template is not None:
        above, more = modern(template)
        below = merge(above, below)
        old_forms += more
    merged = merge(own, below)
    faults = check_experiment(merged)
    if faults:
        raise InvalidExperiment(faults)
    return CompletedConfig(fill_experiment(merged), [*warnings, *dict.fromkeys(old_forms)])


def _parse(yaml_text: str) -> tuple[dict[str, Any], list[str]]:
    try:
        document = read_yaml(yaml_text, "experiment")
    except ConfigError as error:
        raise InvalidExperiment([fault.describe() for fault in error.faults or (error,)]) from None
    faults: list[str] = []
    plain = _as_json(document.value, ROOT, faults)
    if faults:
        raise InvalidExperiment(faults)
    return plain, list(document.warnings)


def _as_json(value: Any, path: str, faults: list[str]) -> Any:
    """YAML knows more than JSON: dates become text, and what has no JSON at all is a fault."""
    if isinstance(value, dict):
        return {_text(key, path, faults): _as_json(inner, f"{path}.{key}", faults) for key, inner in value.items()}
    if isinstance(value, list):
        return [_as_json(inner, f"{path}[{index}]", faults) for index, inner in enumerate(value)]
    if isinstance(value, str):
        return _text(value, path, faults)
    if isinstance(value, datetime.date):
        return value.isoformat()
    if isinstance(value, float) and not math.isfinite(value):
        faults.append(f"{path}: {value} is not a number that JSON knows")
    elif value is not None and not isinstance(value, int | float):
        faults.append(f"{path}: a YAML value of type {type(value).__name__} has no JSON form")
    return value


def _text(text: str, path: str, faults: list[str]) -> str:
    """``text``; one with half a character in it, which YAML can write (``"\\ud800"``) and UTF-8 cannot, is a fault."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        faults.append(f"{path.encode('ascii', 'replace').decode()}: half a character (a lone surrogate) in a text")
    return text
