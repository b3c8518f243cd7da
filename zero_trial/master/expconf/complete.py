"""An experiment's YAML made whole: old forms rewritten, the cluster's defaults laid under it, every key checked as a real master does."""

from __future__ import annotations

import datetime
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from zero_trial.config.yaml_text import read_yaml
from zero_trial.errors import ConfigError
from zero_trial.master.expconf.cluster import ClusterDefaults
from zero_trial.master.expconf.experiment_rules import ROOT, check_experiment, fill_experiment
from zero_trial.master.expconf.merge import merge
from zero_trial.master.expconf.shims import modern


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
