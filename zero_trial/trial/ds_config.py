"""Where a trial's ds_config comes from, and how its batch sizes are made to agree with the hyperparameters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero_trial.config import BatchTriple, overwrite_ds_config, solve_batch
from zero_trial.errors import ConfigError, InvalidHP
from zero_trial.platform.protocols import Platform

BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


@dataclass(frozen=True)
class Reconciled:
    """Batch sizes that agree: ``train_batch_size = micro * accumulation * data_parallel``."""

    train_batch_size: int
    micro_batch_size: int
    accumulation: int
    data_parallel: int

    def line(self) -> str:
        return (
            f"global batch {self.train_batch_size} = micro {self.micro_batch_size} x accumulation {self.accumulation} "
            f"x data-parallel ranks {self.data_parallel}"
        )


def trial_ds_config(given: Mapping[str, Any] | str | Path | None, platform: Platform) -> dict[str, Any]:
    """The base ds_config with the hyperparameters' leaves laid over it.

    Base: ``given``, else ``data.ds_config`` of the experiment, else the hyperparameter ``deepspeed_config`` (or
    ``ds_config``, if it names a file). Over it: ``hyperparameters.ds_config``, if it is a dict. Relative paths start
    at the model's folder. Raises ConfigError if there is no base.
    """
    hparams = platform.hparams
    overlay = hparams.get("ds_config")
    leaves = overlay if isinstance(overlay, Mapping) else {}
    data = platform.experiment.get("data") or {}
    candidates = (
        given,
        data.get("ds_config"),
        hparams.get("deepspeed_config"),
        overlay if isinstance(overlay, str) else None,
    )
    base = next((candidate for candidate in candidates if candidate is not None), None)
    if base is None and not leaves:
        raise ConfigError(
            "no ds_config is given",
            where="context.initialize",
            expected="config=..., data.ds_config or hyperparameters.ds_config",
            fix="Write data: {ds_config: ds_config.json} into the experiment's YAML.",
        )
    if isinstance(base, (str, Path)):
        base = platform.model_dir / base  # an absolute path stays as it is
    merged: dict[str, Any] = overwrite_ds_config(base if base is not None else {}, leaves)
    return merged


def _world_over_axes(config: Mapping[str, Any], world: int) -> int:
    mesh = config.get("mesh") or {}
    return world // (int(mesh.get("pipe") or 1) * int(mesh.get("model") or 1))


def reconcile_config(config: Mapping[str, Any], platform: Platform) -> tuple[dict[str, Any], Reconciled]:
    """``config`` with all three batch keys filled, and their table.

    The hyperparameter ``global_batch_size`` is ``train_batch_size``; ``data_parallel_world_size`` must be what the
    ranks give. A contradiction is InvalidHP in a search (it goes on without this point), ConfigError otherwise.
    """
    hparams = platform.hparams
    replicas = _world_over_axes(config, platform.distributed.size)
    _same(platform, "data_parallel_world_size", hparams.get("data_parallel_world_size"), "the ranks", replicas)
    given = [None if config.get(key) in (None, "auto") else int(config[key]) for key in BATCH_KEYS]
    wanted = hparams.get("global_batch_size")
    if wanted is not None and given[0] is not None:
        _same(platform, "global_batch_size", wanted, "train_batch_size", given[0])
    places = {"train_batch_size": "hyperparameters.global_batch_size"} if given[0] is None else {}
    triple = _typed(
        platform,
        lambda: solve_batch(wanted if given[0] is None else given[0], given[1], given[2], replicas, given_by=places),
    )
    filled = copy.deepcopy(dict(config))
    filled.update(zip(BATCH_KEYS, (triple.train_batch_size, triple.micro_batch_size, triple.accumulation), strict=True))
    return filled, Reconciled(triple.train_batch_size, triple.micro_batch_size, triple.accumulation, replicas)


def reconcile_engine(engine: Any, platform: Platform) -> Reconciled:
    """An engine's own numbers, compared with the hyperparameters. Errors as in ``reconcile_config``."""
    hparams = platform.hparams
    table = Reconciled(
        int(engine.train_batch_size()),
        int(engine.train_micro_batch_size_per_gpu()),
        int(engine.gradient_accumulation_steps()),
        int(engine.dp_world_size),
    )
    _same(
        platform,
        "global_batch_size",
        hparams.get("global_batch_size"),
        "the engine's train_batch_size",
        table.train_batch_size,
    )
    _same(
        platform, "data_parallel_world_size", hparams.get("data_parallel_world_size"), "the engine", table.data_parallel
    )
    if table.train_batch_size != table.micro_batch_size * table.accumulation * table.data_parallel:
        raise _error(platform)("the engine's batch sizes do not agree", where="reconcile_ds_config", got=table.line())
    return table


def _error(platform: Platform) -> type[ConfigError]:
    searcher = platform.experiment.get("searcher") or {}
    return ConfigError if searcher.get("name", "single") == "single" else InvalidHP


def _same(platform: Platform, name: str, wanted: Any, other: str, value: int) -> None:
    if wanted is not None and wanted != value:
        raise _error(platform)(
            f"contradicts {other}",
            where=f"hyperparameters.{name}",
            got=wanted,
            expected=value,
            fix=f"Set {name}: {value}, or remove it.",
        )


def _typed(platform: Platform, solve: Callable[[], BatchTriple]) -> BatchTriple:
    try:
        return solve()
    except ConfigError as error:
        kind = _error(platform)
        if kind is ConfigError:
            raise
        raise kind(error.what, where=error.where, got=error.got, expected=error.expected, fix=error.fix) from None
