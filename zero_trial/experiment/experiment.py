"""Read an experiment's YAML into an ExperimentConfig; errors name file and line."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from zero_trial.ds_config.overlay import (
    TRAINER,
    named_ds_config,
    needs_no_base,
    preset_names,
    read_preset,
    with_hyperparameters,
)
from zero_trial.ds_config.table import TABLE, lookup
from zero_trial.errors import ConfigError
from zero_trial.experiment.entrypoint import starts_deepspeed_trial
from zero_trial.experiment.rules import ClusterDefaults, examine, known_keys
from zero_trial.experiment.sections import SEARCHER, Period, PeriodOf
from zero_trial.experiment.space import as_sent, find_ranges, located, read_hyperparameters
from zero_trial.schema.config_source import open_source, read_file, read_text, read_yaml
from zero_trial.schema.document import Document, Location, shown
from zero_trial.schema.types import (
    CHOICE,
    CLUSTER,
    REMOVED,
    RENAMED,
    TYPE,
    UNKNOWN,
    Bool,
    Int,
    Issue,
    Section,
    Text,
    Type,
    ValidationError,
)
from zero_trial.util.text import did_you_mean

KeyPath = tuple[str, ...]


@dataclass(frozen=True)
class SearcherConfig:
    """``searcher``: how trials are chosen, and the validation metric for that.

    ``rest`` contains the keys that only searchers other than single read.
    """

    name: str = "single"
    metric: str = "validation_loss"
    max_length: Period | None = None
    rest: Mapping[str, Any] = field(default_factory=dict)

    @property
    def searches(self) -> bool:
        """Return whether more than one set of hyperparameters is tried."""
        return self.name != "single"


@dataclass(frozen=True)
class ExperimentConfig:
    """A checked experiment.

    Const hyperparameters are plain values; ranges are unchanged (``search_space`` lists them).

    ``raw`` is the YAML as read; ``document`` also has its line numbers.
    """

    name: str
    entrypoint: str
    searcher: SearcherConfig
    hyperparameters: Mapping[str, Any]
    slots_per_trial: int = 1
    data: Mapping[str, Any] = field(default_factory=dict)
    max_restarts: int = 5
    experiment_seed: int | None = None
    raw: Mapping[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    document: Document = field(default_factory=lambda: Document({}), repr=False, compare=False)
    folder: Path | None = None

    @property
    def search_space(self) -> tuple[str, ...]:
        """Dotted names of the hyperparameters that are still ranges."""
        return tuple(".".join(path) for path, _ in find_ranges(self.hyperparameters))

    @property
    def hints(self) -> dict[str, Any]:
        """Return values that fill "auto": the run's length in steps, if it is given in steps."""
        length = self.searcher.max_length
        return {"total_num_steps": length.count} if length is not None and length.unit == "batches" else {}

    def plain(self) -> dict[str, Any]:
        """Return the experiment as plain data, with the full path of a ds_config file."""
        raw = dict(self.raw)
        named = self.data.get("ds_config")
        if isinstance(named, str) and self.folder is not None and (self.folder / named).is_file():
            raw["data"] = {**self.data, "ds_config": str((self.folder / named).resolve())}
        return raw

    def names_ds_config(self) -> bool:
        """Return whether the experiment names a ds_config; if not, the trial provides it."""
        named = named_ds_config(self.data, self.hyperparameters)[1]
        return named is not None or needs_no_base(self.hyperparameters)

    def ds_config(self, model_dir: str | Path, hyperparameters: Mapping[str, Any] | None = None) -> Document:
        """Return the source of this trial's ds_config, for ``read_ds_config``: ``data.ds_config``,
        overlaid with the preset of ``hyperparameters.trainer``, then with the hyperparameters
        ``overwrite_deepspeed_args`` and ``ds_config``.

        Searches for a file in ``model_dir``, which is uploaded to a cluster, then in the YAML's
        folder. ``hyperparameters``: the sampled ones of a search. Every leaf keeps its file and
        line. Raises ConfigError if there is no ds_config, if two cannot be overlaid, or if two
        different files have its name.
        """
        chosen = self.hyperparameters if hyperparameters is None else hyperparameters
        places = read_hyperparameters(self.document.below(("hyperparameters",)))
        own = starts_deepspeed_trial(self.entrypoint)
        return with_hyperparameters(self._base(Path(model_dir), chosen), chosen, own=own, places=places)

    def _base(self, model_dir: Path, chosen: Mapping[str, Any]) -> Document:
        path, value = named_ds_config(self.data, chosen)
        where = self.document.at(path).where(".".join(path))
        if isinstance(value, Mapping):
            return (
                self.document.below(path) if path[0] == "data" else Document.of(value, Location(prefix=".".join(path)))
            )
        if isinstance(value, str):
            return self._open(value, model_dir, where)
        if value is not None:
            raise ConfigError("not a ds_config", where=where, got=shown(value), expected="a file or an object")
        if needs_no_base(chosen):
            return Document({})
        raise ConfigError(
            "no ds_config is set",
            where=self.document.place.where("data.ds_config"),
            fix="Write data: {ds_config: ds_config.json}.",
        )

    def _open(self, name: str, model_dir: Path, where: str) -> Document:
        folders = [folder for folder in (model_dir, self.folder) if folder is not None]
        found = [folder / name for folder in folders if (folder / name).is_file()]
        if len(found) == 2 and found[0].read_bytes() != found[1].read_bytes():
            raise ConfigError(
                f"two different files are called {name}",
                where=where,
                got=f"{found[1]} next to the experiment, and {found[0]} in the model's folder",
                fix=f"A cluster receives only the model's folder and would use {found[0]}. Rename one of them, or remove it.",
            )
        if (model_dir / name).is_file():
            return read_file(model_dir / name, name)
        if found:
            stays = f"{where}: {name} is next to the experiment and is not sent to a cluster with the model's folder. "
            fix = f"Move it into {model_dir}, or upload it: det experiment create ... --include {found[0]}."
            document = read_file(found[0], name)
            return replace(document, warnings=(*document.warnings, stays + fix))
        if name in preset_names():
            return read_preset(name, where)
        if not name.endswith((".json", ".yaml", ".yml", ".hjson")):
            if not name.startswith("{") and (preset := did_you_mean(name, preset_names())):
                raise ConfigError("neither a file nor a preset", where=where, got=repr(name), fix=preset)
            return open_source(name)
        there = sorted({path.name for folder in folders if folder.is_dir() for path in folder.glob("*.json")})
        near = difflib.get_close_matches(name, there, 1)
        places = " nor in ".join(dict.fromkeys(str(folder.resolve().name or folder) + "/" for folder in folders))
        fix = (
            f'Did you mean "{near[0]}"?'
            if near
            else "Put the file into the model's folder, or write its keys here instead of its name."
        )
        raise ConfigError(f"{name} is not in {places}", where=where, fix=fix)


@dataclass(frozen=True)
class ExaminedExperiment:
    """An experiment as far as it could be read; in ``config``, defaults replace invalid values.

    Args:
        faults: errors in ``zero-trial run``, each with file and line.
        cluster_faults: errors for a master only; a run on this machine does not read these keys.
        cluster_warnings: old forms that a master rewrites or ignores.
    """

    config: ExperimentConfig
    faults: tuple[ConfigError, ...]
    cluster_faults: tuple[ConfigError, ...]
    cluster_warnings: tuple[str, ...]


def read_experiment(
    source: str | Path | Mapping[str, Any], name: str | None = None, changes: Mapping[KeyPath, Any] | None = None
) -> ExperimentConfig:
    """Read and check an experiment from a YAML file, a dict, or YAML text with a line break in it;
    ``changes`` (path of a key -> value) override its values.

    Raises ConfigError with all errors in keys that a run on this machine reads, with file and line.
    """
    examined = examine_experiment(source, name, changes)
    if examined.faults:
        raise ConfigError.many(examined.faults)
    return examined.config


def examine_experiment(
    source: str | Path | Mapping[str, Any], name: str | None = None, changes: Mapping[KeyPath, Any] | None = None
) -> ExaminedExperiment:
    """Read an experiment, with ``changes`` to its values, and collect all its errors.

    Raises ConfigError only for unreadable YAML, and for changes that do not fit into the YAML.
    """
    document, folder = _open_experiment(source, name)
    document = with_changes(document, as_sent(dict(changes or {})))
    if looks_like_ds_config(document.value):
        raise _not_an_experiment(document)
    stem = Path(document.place.file).stem if document.place.file else "experiment"
    examined = examine(document, ClusterDefaults(checkpoint_storage=_ANY_STORAGE, name=stem))
    values = _Values(document)
    config = ExperimentConfig(
        name=values.get("name", Text(), stem),
        entrypoint=_entrypoint(values),
        searcher=_searcher(values),
        hyperparameters=read_hyperparameters(document.below(("hyperparameters",))).value,
        slots_per_trial=values.get("resources.slots_per_trial", Int(0), 1),
        data=values.get("data", Section(), {}),
        max_restarts=values.get("max_restarts", Int(0), 5),
        experiment_seed=values.get("reproducibility.experiment_seed", Int(0, 2**32 - 1), None),
        raw=document.value,
        warnings=(*document.warnings, *_misspelled_hyperparameters(document)),
        document=document,
        folder=folder,
    )
    for key, type in _READ_BY_THE_TRIAL.items():
        values.get(key, type, None)
    known = [_keys(fault) for fault in values.faults]
    stopping: list[ConfigError] = []
    others: list[ConfigError] = []
    for issue in examined.issues:
        fault = located(issue, document)
        # skip errors that the reader has already reported, with a fix
        if not any(_around(_keys(fault), other) for other in known):
            (stopping if _stops_a_run(issue) else others).append(fault)
    return ExaminedExperiment(config, (*stopping, *values.faults), tuple(others), tuple(examined.warnings))


def _misspelled_hyperparameters(document: Document) -> Iterator[str]:
    """Yield a warning for each hyperparameter whose name is a letter or two away from a missing
    name that the context reads (any name is allowed)."""
    named = document.value.get("hyperparameters")
    given = named if isinstance(named, Mapping) else {}
    names = (
        "global_batch_size",
        "data_parallel_world_size",
        "ds_config",
        "deepspeed_config",
        "overwrite_deepspeed_args",
    )
    missing = {*names, TRAINER} - {*given}
    for name in given:
        if near := did_you_mean(str(name), missing, 0.88):
            where = document.at(("hyperparameters", name)).where(f"hyperparameters.{name}")
            yield f"{where}: only the trial's own code reads this name. {near}"


_READ_BY_THE_TRIAL: Mapping[str, Type] = {
    "min_validation_period": PeriodOf(),
    "min_checkpoint_period": PeriodOf(),
    "scheduling_unit": Int(1, unit="batches"),
    "checkpoint_policy": Text(("best", "all", "none")),
    "records_per_epoch": Int(0),
    "perform_initial_validation": Bool(),
    "searcher.smaller_is_better": Bool(),
}

_ANY_STORAGE = {"type": "shared_fs", "host_path": "/"}
"""What a cluster adds where an experiment names no storage; reading one stores nothing."""

_READ = ("resources", "reproducibility", "searcher")
"""Sections that a run on this machine reads: an unknown key in them is a slip."""


def _stops_a_run(issue: Issue) -> bool:
    """Return True if ``issue`` is an error for a run on this machine, not only for a cluster."""
    path = issue.path
    if issue.code == RENAMED or (path[:1] == ("hyperparameters",) and len(path) > 1 and issue.code != CLUSTER):
        return True
    if issue.code == UNKNOWN:
        searcher = path[0] == "searcher" and len(path) == 2
        if searcher and path[1] in known_keys("searcher"):
            return False  # a key of another kind of searcher
        return len(path) == 1 or (len(path) == 2 and path[0] in _READ)
    if issue.code == REMOVED:
        return path == ("searcher", "name")
    return len(path) == 1 and path[0] in (*_READ, "hyperparameters", "data") and issue.code in (TYPE, CHOICE)


def _keys(fault: ConfigError) -> tuple[str, ...]:
    """Return the parts of the dotted key that an error is about."""
    return tuple((fault.where or "").rpartition(" ")[2].replace("[", ".[").split("."))


def _around(path: tuple[str, ...], other: tuple[str, ...]) -> bool:
    """Return True if the keys are equal or one is a section that contains the other."""
    return path[: len(other)] == other or other[: len(path)] == path


def looks_like_ds_config(value: Mapping[str, Any]) -> bool:
    """Return whether ``value`` has keys of a ds_config and none of an experiment."""
    return bool(value) and not known_keys() & set(value) and any(key in TABLE for key in value)


def _not_an_experiment(document: Document) -> ConfigError:
    file = document.place.file or "ds_config.json"
    keys = [key for key in document.value if key in TABLE]
    return ConfigError(
        "this is a ds_config, not an experiment",
        where=document.place.file or None,
        got=", ".join(keys[:3]) + (" ..." if len(keys) > 3 else ""),
        expected="entrypoint, searcher, hyperparameters ...",
        fix=f"An experiment refers to it with data: {{ds_config: {file}}}; zero-trial init creates an experiment to start with. zero-trial "
        f"config {file} shows how each key is handled.",
    )


LOCK_SECTION = "zero_trial"
"""A lock's own facts are under ``data.zero_trial``: an experiment may hold anything under
``data``."""


def _open_experiment(source: str | Path | Mapping[str, Any], name: str | None) -> tuple[Document, Path | None]:
    if isinstance(source, Mapping):
        return Document.of(source), None
    if isinstance(source, str) and "\n" in source:
        document = read_yaml(source, name or "experiment")
        return replace(document, value=as_sent(document.value)), None
    path = Path(source)
    try:
        text = read_text(path)
    except ConfigError as problem:
        there = sorted(each.name for each in path.parent.glob("*.y*ml")) if path.parent.is_dir() else []
        near = difflib.get_close_matches(path.name, there, 1)
        if not near or path.exists():
            raise
        raise ConfigError(problem.what, where=str(path), fix=f"Did you mean {path.with_name(near[0])}?") from None
    document = read_yaml(text, name or path.name)
    return replace(document, value=as_sent(document.value)), path.parent


class _Values:
    """Reads single values of the document by dotted path and collects errors."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.faults: list[ConfigError] = []

    def get(self, dotted: str, type: Type, default: Any) -> Any:
        """Return the value in its internal form; the default if it is missing or invalid."""
        path = tuple(dotted.split("."))
        value = self.document.get(path)
        if value is None:
            return default
        try:
            return type.read(value).value
        except ValidationError as problem:
            self.faults.append(problem.fault(self.document.at(path).where(dotted), value))
            return default


def _entrypoint(values: _Values) -> str:
    """Return the entrypoint as one command line; join a list of words. The key is required."""
    value = values.document.get(("entrypoint",))
    if isinstance(value, list) and all(isinstance(word, str) for word in value):
        return " ".join(value)
    if isinstance(value, str) and value.strip():
        return value
    where = values.document.where("entrypoint")
    values.faults.append(
        ConfigError(
            "the entrypoint is missing",
            where=where,
            expected="module:Class",
            fix="Write entrypoint: model_def:MyTrial.",
        )
    )
    return ""


def _searcher(values: _Values) -> SearcherConfig:
    document = values.document
    section = document.get(("searcher",))
    if not isinstance(section, Mapping):
        where = document.where("searcher")
        fix = "Write searcher: {name: single, metric: validation_loss, smaller_is_better: true}."
        values.faults.append(ConfigError("the searcher is missing", where=where, fix=fix))
        return SearcherConfig()
    if section.get("metric") is None:
        where = document.at(("searcher",)).where("searcher.metric")
        fix = "Name a metric that evaluation returns, for example validation_loss."
        values.faults.append(ConfigError("the metric is missing", where=where, fix=fix))
    own = ("name", "metric", "smaller_is_better", "max_length")
    return SearcherConfig(
        name=values.get("searcher.name", Text((*SEARCHER.kinds, *SEARCHER.removed)), "single"),
        metric=values.get("searcher.metric", Text(), "validation_loss"),
        max_length=values.get("searcher.max_length", PeriodOf(1), None),
        rest={key: value for key, value in section.items() if key not in own},
    )


# Settings on a command line: ``trainer=deepspeed`` and dotted keys.

_SETTING = re.compile(r"([A-Za-z_][\w.-]*)=(.*)", re.DOTALL)
_COMMAND_LINE = Location(file="command line")


@dataclass(frozen=True)
class CommandWords:
    """A command line's experiment, model folder, and values that override those of the file."""

    experiment_path: Path | None = None
    model_dir: Path | None = None
    changes: Mapping[KeyPath, Any] = field(default_factory=dict)


def read_words(words: Iterable[str]) -> CommandWords:
    """Parse ``words``: ``trainer=PRESET``, a dotted key of the experiment or of the ds_config with
    ``=VALUE`` (read as YAML), and at most two paths.

    Raises ConfigError for an unknown key and for a key that is given twice.
    """
    paths: list[Path] = []
    changes: dict[KeyPath, Any] = {}
    for word in words:
        setting = None if Path(word).is_file() else _SETTING.fullmatch(word)
        if setting is None:
            paths.append(Path(word))
            continue
        key, value = setting[1], setting[2]
        path = _path(key)
        if path in changes:
            raise ConfigError("given twice", where=f"command line {key}", got=value, fix="Keep one of them.")
        changes[path] = read_yaml(f"value: {value}", "command line").value["value"]
    if len(paths) > 2:
        raise ConfigError(
            "too many paths", where="command line", got=str(paths[2]), expected="CONST.yaml MODEL_DIR KEY=VALUE ..."
        )
    experiment_path, model_dir = (*paths, None, None)[:2]
    return CommandWords(experiment_path, model_dir, changes)


def _path(key: str) -> KeyPath:
    """Return the path of a dotted key in the experiment."""
    parts = tuple(key.split("."))
    if key == TRAINER:
        return ("hyperparameters", TRAINER)
    if parts[0] in known_keys():
        return parts
    if lookup("", parts[0]) is not None:
        # a nested key "type" means a range inside hyperparameters
        named = (*parts[:-1], "type_") if parts in (("optimizer", "type"), ("scheduler", "type")) else parts
        return ("hyperparameters", "ds_config", *named)
    raise ConfigError(
        "a key of neither an experiment nor a ds_config",
        where="command line",
        got=key,
        expected="trainer, or a dotted key such as hyperparameters.global_batch_size or zero_optimization.stage",
        fix=did_you_mean(parts[0], (TRAINER, *known_keys(), *TABLE)),
    )


def with_changes(document: Document, changes: Mapping[KeyPath, Any]) -> Document:
    """Return the experiment ``document`` with the changed values.

    Raises ConfigError if a key would be inside a plain value or a range.
    """
    for path, value in changes.items():
        for end in range(1, len(path)):
            around = document.get(path[:end])
            if around is not None and (not isinstance(around, Mapping) or (end > 1 and "type" in around)):
                raise ConfigError(
                    f"{'.'.join(path[:end])} is not a section in the experiment",
                    where=f"command line {'.'.join(path)}",
                    got=shown(around),
                    fix=f"Write {'.'.join(path[:end])} as an object there (a ds_config's name under data.ds_config).",
                )
        document = document.with_value(path, value, _COMMAND_LINE)
    return document
