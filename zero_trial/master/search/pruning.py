"""Pruning: check before a trial is launched whether its ds_config can be reconciled."""

from __future__ import annotations

import json
import posixpath
from collections.abc import Mapping
from typing import Any

from zero_trial.ds_config import reader as ds_config_reader
from zero_trial.ds_config.batch import Reconciliation, reconcile
from zero_trial.ds_config.config_report import report_json
from zero_trial.ds_config.overlay import (
    named_ds_config,
    needs_no_base,
    preset_names,
    read_preset,
    with_hyperparameters,
)
from zero_trial.ds_config.reader import read_ds_config
from zero_trial.ds_config.table import DsConfig
from zero_trial.errors import ConfigError
from zero_trial.experiment.entrypoint import DEEPSPEED_LAUNCHER, starts_deepspeed_trial
from zero_trial.schema.config_source import read_json, read_yaml
from zero_trial.schema.document import Document, Location

_FOREIGN = (DEEPSPEED_LAUNCHER, "zero_trial.as_deepspeed")


def reason(config: Mapping[str, Any], hparams: Mapping[str, Any], files: Mapping[str, bytes]) -> str | None:
    """Return why ``hparams`` cannot be trained, in one line; None if they can be trained, or if
    this is unknown. Pure.

    The answer is unknown if no ds_config is named, its file is not in the context directory, or
    DeepSpeed itself or a script for DeepSpeed reads the ds_config: such a script may complete the
    config first, as the Trainer of transformers does with "auto".

    Args:
        config: a completed experiment config.
        hparams: one point of the search.
        files: the context directory (path -> content), for a file named by ``data.ds_config``.
    """
    try:
        _resolve(config, hparams, files)
    except ConfigError as error:
        return "; ".join(" ".join(fault.describe().split()) for fault in error.faults or (error,))
    return None


def resolved(config: Mapping[str, Any], hparams: Mapping[str, Any], files: Mapping[str, bytes]) -> dict[str, Any]:
    """Return the complete ds_config of a trial in the format of resolved_config.json; empty if it
    is unknown. Pure; arguments as for :func:`reason`."""
    try:
        found = _resolve(config, hparams, files)
    except ConfigError:
        return {}
    return dict(json.loads(report_json(found[0], found[1].rows))) if found is not None else {}


def _resolve(
    config: Mapping[str, Any], hparams: Mapping[str, Any], files: Mapping[str, bytes]
) -> tuple[DsConfig, Reconciliation] | None:
    """Return a trial's ds_config and batch sizes; None if unknown. Raises ConfigError."""
    if any(program in str(config.get("entrypoint")) for program in _FOREIGN):
        return None
    source = _source(config, hparams, files)
    if source is None:
        return None
    settings = read_ds_config(source, hints=_hints(config), hyperparameters=hparams, search=True)
    slots = (config.get("resources") or {}).get("slots_per_trial")
    return settings, reconcile(settings, slots or 1, hparams, search=True)  # no slots: one process on the CPU


def replaced_rates(
    config: Mapping[str, Any], hparams: Mapping[str, Any], files: Mapping[str, bytes]
) -> tuple[str, ...]:
    """Return one line for each learning rate of a trial that its scheduler overrides. Pure;
    arguments as for :func:`reason`."""
    try:
        source = _source(config, hparams, files)
        if source is None:
            return ()
        return ds_config_reader.replaced_rates(source, hints=_hints(config), hyperparameters=hparams)
    except ConfigError:
        return ()


def ds_config_file(config: Mapping[str, Any], hparams: Mapping[str, Any]) -> str | None:
    """Return the file name of the base ds_config; None if it is inline, a preset, or missing."""
    named = named_ds_config(config.get("data"), hparams)[1]
    return named if isinstance(named, str) and named not in preset_names() else None


def _source(config: Mapping[str, Any], hparams: Mapping[str, Any], files: Mapping[str, bytes]) -> Document | None:
    path, named = named_ds_config(config.get("data"), hparams)
    if named is None:
        if not needs_no_base(hparams):
            return None
        base = Document({})
    elif isinstance(named, Mapping):
        base = Document.of(named, Location(prefix=".".join(path)))
    elif named in preset_names():
        base = read_preset(named, ".".join(path))
    else:
        content = files.get(posixpath.normpath(str(named)))
        if content is None:
            return None
        base = parse_file(str(named), content)
    return with_hyperparameters(base, hparams, own=starts_deepspeed_trial(config.get("entrypoint") or ()))


def parse_file(name: str, content: bytes) -> Document:
    """Return the content of a ds_config file. Raises ConfigError."""
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as problem:
        raise ConfigError(f"cannot be read: {problem.reason}", where=name) from None
    return read_yaml(text, name) if name.endswith((".yaml", ".yml")) else read_json(text, name)


def _hints(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the training length in optimizer steps, to fill "auto", if the searcher sets it."""
    searcher = config.get("searcher") or {}
    length = searcher.get("max_length")
    if isinstance(length, Mapping) and length.get("batches"):
        return {"total_num_steps": length["batches"]}
    if searcher.get("time_metric") == "batches" and searcher.get("max_time"):
        return {"total_num_steps": searcher["max_time"]}
    return {}
