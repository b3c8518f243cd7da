"""Reading an experiment's YAML into an ExperimentConfig: every key known, all faults reported together with file and line."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from zero_trial.config.canonical import shown
from zero_trial.config.document import Document
from zero_trial.config.experiment import ExperimentConfig, SearcherConfig
from zero_trial.config.experiment_keys import OPEN, SECTIONS, TOP
from zero_trial.config.hyperparameters import read_hyperparameters
from zero_trial.config.kinds import Kind
from zero_trial.config.numerals import Mismatch
from zero_trial.config.period import NEVER, Period, read_period
from zero_trial.config.table import TABLE
from zero_trial.config.yaml_text import read_yaml
from zero_trial.errors import ConfigError


def read_experiment(source: str | Path | Mapping[str, Any], name: str | None = None) -> ExperimentConfig:
    """A checked experiment from a YAML file, a dict, or YAML text with a line break in it.

    Raises ConfigError with all faults, each with file and line.
    """
    config, faults = examine_experiment(source, name)
    if faults:
        raise ConfigError.many(faults)
    return config


def examine_experiment(
    source: str | Path | Mapping[str, Any], name: str | None = None
) -> tuple[ExperimentConfig, list[ConfigError]]:
    """The experiment as far as it can be understood, and all its faults: a faulty value stands at its default.

    Raises ConfigError only for what is no readable YAML at all.
    """
    document, folder = _open_experiment(source, name)
    if looks_like_ds_config(document.value):
        raise _not_an_experiment(document)
    faults: list[ConfigError] = []
    _unknown_keys(document, faults)
    values = _Values(document, faults)
    hyperparameters = read_hyperparameters(document.below(("hyperparameters",)), faults)
    searcher = _searcher(values)
    stem = Path(document.place.file).stem if document.place.file else "experiment"
    config = ExperimentConfig(
        name=values.get("name", stem),
        entrypoint=_entrypoint(values),
        searcher=searcher,
        hyperparameters=hyperparameters.value,
        slots_per_trial=values.get("resources.slots_per_trial", 1),
        data=values.get("data", {}),
        min_validation_period=values.period("min_validation_period", 0) or NEVER,
        min_checkpoint_period=values.period("min_checkpoint_period", 0) or NEVER,
        scheduling_unit=values.get("scheduling_unit", 100),
        max_restarts=values.get("max_restarts", 5),
        experiment_seed=values.get("reproducibility.experiment_seed", None),
        checkpoint_policy=values.get("checkpoint_policy", "best"),
        records_per_epoch=values.get("records_per_epoch", 0),
        perform_initial_validation=values.get("perform_initial_validation", False),
        raw=document.value,
        warnings=document.warnings,
        document=document,
        folder=folder,
    )
    return config, faults


def looks_like_ds_config(value: Mapping[str, Any]) -> bool:
    """Whether this is a ds_config given in the place of an experiment: it has keys of one, and none of the other."""
    return (
        bool(value) and not any(key in TOP or key in SECTIONS for key in value) and any(key in TABLE for key in value)
    )


def _not_an_experiment(document: Document) -> ConfigError:
    file = document.place.file or "ds_config.json"
    keys = [key for key in document.value if key in TABLE]
    return ConfigError(
        "this is a ds_config, not an experiment",
        where=document.place.file or None,
        got=", ".join(keys[:3]) + (" ..." if len(keys) > 3 else ""),
        expected="entrypoint, searcher, hyperparameters ...",
        fix=f"An experiment names it: data: {{ds_config: {file}}}; zero-trial init makes one to begin with. "
        f"zero-trial config {file} says what is done with each of its keys.",
    )


def _open_experiment(source: str | Path | Mapping[str, Any], name: str | None) -> tuple[Document, Path | None]:
    if isinstance(source, Mapping):
        return Document.of(source), None
    if isinstance(source, str) and "\n" in source:
        return read_yaml(source, name or "experiment"), None
    path = Path(source)
    try:
        text = path.read_text("utf-8")
    except (OSError, ValueError) as problem:
        there = sorted(each.name for each in path.parent.glob("*.y*ml")) if path.parent.is_dir() else []
        near = difflib.get_close_matches(path.name, there, 1)
        fix = f"Did you mean {path.with_name(near[0])}?" if near else None
        raise ConfigError(
            f"cannot be read: {getattr(problem, 'strerror', None) or problem}", where=str(path), fix=fix
        ) from None
    return read_yaml(text, name or path.name), path.parent


class _Values:
    """Reads single values of the document by dotted path and collects their faults."""

    def __init__(self, document: Document, faults: list[ConfigError]) -> None:
        self.document = document
        self.faults = faults

    def get(self, dotted: str, default: Any) -> Any:
        path = tuple(dotted.split("."))
        value = self.document.get(path)
        kind: Kind | None = TOP.get(dotted) or SECTIONS.get(path[0], {}).get(path[-1])
        if value is None or kind is None:
            return default
        try:
            return kind.read(value).value
        except Mismatch as problem:
            self.fault(dotted, value, problem)
            return default

    def period(self, dotted: str, low: int) -> Period | None:
        value = self.document.get(tuple(dotted.split(".")))
        if value is None:
            return None
        try:
            return read_period(value, low)
        except Mismatch as problem:
            self.fault(dotted, value, problem)
            return None

    def fault(self, dotted: str, value: Any, problem: Mismatch) -> None:
        where = self.document.at(tuple(dotted.split("."))).where(dotted)
        self.faults.append(
            ConfigError("wrong value", where=where, got=shown(value), expected=problem.expected, fix=problem.fix)
        )


def _entrypoint(values: _Values) -> str:
    """One command line; a list of words is joined. Required."""
    value = values.document.get(("entrypoint",))
    if isinstance(value, list) and all(isinstance(word, str) for word in value):
        return " ".join(value)
    if isinstance(value, str) and value.strip():
        return value
    where = values.document.at(("entrypoint",)).where("entrypoint")
    values.faults.append(
        ConfigError(
            "there is no entrypoint", where=where, expected="module:Class", fix="Write entrypoint: model_def:MyTrial."
        )
    )
    return ""


def _searcher(values: _Values) -> SearcherConfig:
    document = values.document
    section = document.get(("searcher",))
    if not isinstance(section, Mapping):
        where = document.at(("searcher",)).where("searcher")
        fix = "Write searcher: {name: single, metric: validation_loss, smaller_is_better: true}."
        values.faults.append(ConfigError("there is no searcher", where=where, fix=fix))
        return SearcherConfig()
    if section.get("metric") is None:
        where = document.at(("searcher",)).where("searcher.metric")
        fix = "Name a metric that evaluation returns, for example validation_loss."
        values.faults.append(ConfigError("there is no metric", where=where, fix=fix))
    own = {item.name for item in dataclasses.fields(SearcherConfig)}
    return SearcherConfig(
        name=values.get("searcher.name", "single"),
        metric=values.get("searcher.metric", "validation_loss"),
        smaller_is_better=values.get("searcher.smaller_is_better", True),
        max_length=values.period("searcher.max_length", 1),
        rest={key: value for key, value in section.items() if key not in own},
    )


def _unknown_keys(document: Document, faults: list[ConfigError]) -> None:
    known = {*TOP, *SECTIONS, *OPEN}
    for key, value in document.value.items():
        if key not in known:
            faults.append(_unknown(document, (key,), known))
        elif key in SECTIONS and isinstance(value, Mapping):
            faults += [_unknown(document, (key, inner), SECTIONS[key]) for inner in value if inner not in SECTIONS[key]]
        elif key in SECTIONS and value is not None:
            where = document.at((key,)).where(key)
            faults.append(ConfigError("not a section", where=where, got=shown(value), expected="keys with values"))
        elif key == "hyperparameters" and value is not None and not isinstance(value, Mapping):
            where = document.at((key,)).where(key)
            faults.append(ConfigError("not a section", where=where, got=shown(value), expected="names with values"))


def _unknown(document: Document, path: tuple[str, ...], known: Iterable[str]) -> ConfigError:
    near = difflib.get_close_matches(path[-1], sorted(known), 1)
    hint = f'Did you mean "{near[0]}"?' if near else None
    if hint is None and len(path) == 1:
        hint = "Settings of your own belong under data: or hyperparameters:."
    return ConfigError("unknown key", where=document.at(path).where(".".join(path)), fix=hint)
