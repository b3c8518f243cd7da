"""The experiment's YAML: what is run, on how many slots, how long, how often it is measured and saved, and with which values."""

from __future__ import annotations

import copy
import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zero_trial.config.canonical import shown
from zero_trial.config.document import Document, Place
from zero_trial.config.experiment_keys import OPEN, SECTIONS, TOP
from zero_trial.config.hyperparameters import ranges, read_hyperparameters
from zero_trial.config.kinds import Kind, Mismatch
from zero_trial.config.overlay import overlay
from zero_trial.config.period import NEVER, Period, read_period
from zero_trial.config.source import open_source, read_file
from zero_trial.config.yaml_text import read_yaml
from zero_trial.errors import ConfigError


@dataclass(frozen=True)
class SearcherConfig:
    """``searcher``: how trials are chosen, by which validation metric. ``rest`` holds what only other searchers than single read."""

    name: str = "single"
    metric: str = "validation_loss"
    smaller_is_better: bool = True
    max_length: Period | None = None
    rest: Mapping[str, Any] = field(default_factory=dict)

    @property
    def searches(self) -> bool:
        """Whether more than one set of hyperparameters is tried."""
        return self.name != "single"


@dataclass(frozen=True)
class ExperimentConfig:
    """A checked experiment. Hyperparameters that are const are plain values; ranges stay as they are written (``search_space`` names them).

    ``raw`` is the YAML as it was read; ``document`` knows its lines.
    """

    name: str
    entrypoint: str
    searcher: SearcherConfig
    hyperparameters: Mapping[str, Any]
    slots_per_trial: int = 1
    data: Mapping[str, Any] = field(default_factory=dict)
    min_validation_period: Period = NEVER
    min_checkpoint_period: Period = NEVER
    scheduling_unit: int = 100
    max_restarts: int = 5
    experiment_seed: int | None = None
    checkpoint_policy: str = "best"
    records_per_epoch: int = 0
    perform_initial_validation: bool = False
    raw: Mapping[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    document: Document = field(default_factory=lambda: Document({}), repr=False, compare=False)
    folder: Path | None = None

    @property
    def search_space(self) -> tuple[str, ...]:
        """Dotted names of the hyperparameters that are still ranges."""
        return tuple(ranges(self.hyperparameters))

    def ds_config(self, model_dir: str | Path, hyperparameters: Mapping[str, Any] | None = None) -> Document:
        """The source of this trial's ds_config, for ``read_ds_config``: ``data.ds_config``, under it ``hyperparameters.ds_config``.

        A file is looked for beside the YAML and then in ``model_dir``. ``hyperparameters`` are the sampled ones of a search. Every leaf
        keeps its file and line. Raises ConfigError where there is no ds_config, or two that cannot be laid over each other.
        """
        chosen = self.hyperparameters if hyperparameters is None else hyperparameters
        base = self._base(Path(model_dir), chosen)
        over = chosen.get("ds_config")
        if not isinstance(over, Mapping):
            return base
        places = self._hyperparameter_places().below(("ds_config",), "hyperparameters.ds_config")
        return overlay(base, Document(copy.deepcopy(dict(over)), places.places, places.place))

    def _base(self, model_dir: Path, chosen: Mapping[str, Any]) -> Document:
        over = chosen.get("ds_config")
        candidates = (
            (("data", "ds_config"), self.data.get("ds_config")),
            (("hyperparameters", "deepspeed_config"), chosen.get("deepspeed_config")),
            (("hyperparameters", "ds_config"), over if isinstance(over, str) else None),
        )
        for path, value in candidates:
            if isinstance(value, Mapping):
                return (
                    self.document.below(path) if path[0] == "data" else Document.of(value, Place(prefix=".".join(path)))
                )
            if isinstance(value, str):
                return self._open(value, model_dir, self.document.at(path).where(".".join(path)))
            if value is not None:
                raise ConfigError(
                    "not a ds_config",
                    where=self.document.at(path).where(".".join(path)),
                    got=shown(value),
                    expected="a file or an object",
                )
        if isinstance(over, Mapping):
            return Document({})
        raise ConfigError(
            "there is no ds_config",
            where=self.document.place.where("data.ds_config"),
            fix="Write data: {ds_config: ds_config.json}.",
        )

    def _open(self, name: str, model_dir: Path, where: str) -> Document:
        folders = [folder for folder in (self.folder, model_dir) if folder is not None]
        for folder in folders:
            if (folder / name).is_file():
                return read_file(folder / name, name)
        if not name.endswith((".json", ".yaml", ".yml", ".hjson")):
            return open_source(name)
        there = sorted({path.name for folder in folders if folder.is_dir() for path in folder.glob("*.json")})
        near = difflib.get_close_matches(name, there, 1)
        places = " nor in ".join(str(folder) for folder in folders)
        raise ConfigError(f"{name} is not in {places}", where=where, fix=f'Did you mean "{near[0]}"?' if near else None)

    def _hyperparameter_places(self) -> Document:
        return read_hyperparameters(self.document.below(("hyperparameters",)), [])


def read_experiment(source: str | Path | Mapping[str, Any], name: str | None = None) -> ExperimentConfig:
    """A checked experiment from a YAML file, a dict, or YAML text with a line break in it.

    Raises ConfigError with all faults, each with file and line.
    """
    document, folder = _open_experiment(source, name)
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
    if faults:
        raise ConfigError.many(faults)
    return config


def _open_experiment(source: str | Path | Mapping[str, Any], name: str | None) -> tuple[Document, Path | None]:
    if isinstance(source, Mapping):
        return Document.of(source), None
    if isinstance(source, str) and "\n" in source:
        return read_yaml(source, name or "experiment"), None
    path = Path(source)
    try:
        text = path.read_text("utf-8")
    except (OSError, ValueError) as problem:
        raise ConfigError(f"cannot be read: {getattr(problem, 'strerror', None) or problem}", where=str(path)) from None
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


def _unknown(document: Document, path: tuple[str, ...], known: Any) -> ConfigError:
    near = difflib.get_close_matches(path[-1], sorted(known), 1)
    hint = f'Did you mean "{near[0]}"?' if near else None
    if hint is None and len(path) == 1:
        hint = "Settings of your own belong under data: or hyperparameters:."
    return ConfigError("unknown key", where=document.at(path).where(".".join(path)), fix=hint)
