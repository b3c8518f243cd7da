"""Settings on a command line: ``trainer=deepspeed`` and dotted keys."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zero_trial.ds_config.overlay import TRAINER
from zero_trial.ds_config.table import TABLE, lookup
from zero_trial.errors import ConfigError
from zero_trial.experiment.rules import known_keys
from zero_trial.schema.document import Document, Location, shown
from zero_trial.schema.yaml_source import read_yaml
from zero_trial.util.text import did_you_mean

KeyPath = tuple[str, ...]

_SETTING = re.compile(r"([A-Za-z_][\w.-]*)=(.*)", re.DOTALL)
_COMMAND_LINE = Location(file="command line")


@dataclass(frozen=True)
class CommandWords:
    """The words of a command line: the experiment's file, the model's folder, and values that stand
    over those of the file."""

    experiment_path: Path | None = None
    model_dir: Path | None = None
    changes: Mapping[KeyPath, Any] = field(default_factory=dict)


def read_words(words: Iterable[str]) -> CommandWords:
    """Return what ``words`` mean: ``trainer=PRESET``, a dotted key of the experiment or of the
    ds_config with ``=VALUE`` (read as YAML), and at most two paths.

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
    """Return the place of a dotted key in the experiment."""
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
    """Return the experiment ``document`` with the changed values in their places.

    Raises ConfigError where a key would go into a plain value or a range.
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
