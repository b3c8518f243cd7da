"""Where a trial's ds_config comes from, and how its batch sizes agree with the hyperparameters."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero_trial.ds_config.batch import reconcile
from zero_trial.ds_config.config_report import resolved_ds_config
from zero_trial.ds_config.overlay import (
    named_ds_config,
    needs_no_base,
    preset_names,
    read_preset,
    with_hyperparameters,
)
from zero_trial.ds_config.reader import read_ds_config
from zero_trial.ds_config.table import DsConfig
from zero_trial.errors import ConfigError, InvalidHP
from zero_trial.schema.config_source import open_source
from zero_trial.schema.document import Document, Location, Provenance
from zero_trial.trial.runtime.protocols import Platform
from zero_trial.trial.settings import Batch, run_length

FILE_KINDS = (".json", ".hjson", ".yaml", ".yml")

Given = Mapping[str, Any] | str | Path


@dataclass(frozen=True)
class Reconciled:
    """Batch sizes (``train_batch_size = micro * accumulation * data_parallel``) and sources."""

    train_batch_size: int
    micro_batch_size: int
    accumulation: int
    data_parallel: int
    table: str = ""

    def line(self) -> str:
        """Return the equation with its values filled in."""
        return (
            f"global batch {self.train_batch_size} = micro {self.micro_batch_size} x accumulation {self.accumulation} "
            f"x data-parallel ranks {self.data_parallel}"
        )

    def __str__(self) -> str:
        return f"{self.line()}\n{self.table}" if self.table else self.line()


def trial_ds_config(given: Given | None, platform: Platform) -> Document:
    """Merge the hyperparameters over the base ds_config; return the result with each value's
    source. Checks only the format.

    Base: ``given``, else ``data.ds_config`` of the experiment, else the hyperparameter
    ``deepspeed_config`` (or ``ds_config``, if it names a file or preset). Merged over it: the
    preset of hyperparameter ``trainer``, then ``hyperparameters.overwrite_deepspeed_args`` (not if
    ``given``) and ``hyperparameters.ds_config``, if dicts. Relative paths start at the model's
    folder. Raises ConfigError if there is no base.
    """
    hparams = platform.hparams
    base = given if given is not None else named_ds_config(platform.experiment.get("data"), hparams)[1]
    if base is None and not needs_no_base(hparams):
        raise ConfigError(
            "no ds_config is given",
            where="context.initialize",
            expected="config=..., data.ds_config or hyperparameters.ds_config",
            fix="Write data: {ds_config: ds_config.json} into the experiment's YAML.",
        )
    # a trial that passes its own ds_config has already applied its overrides
    return with_hyperparameters(_opened(base, platform.model_dir), hparams, own=given is not None)


def source_line(source: Document, config: DsConfig, data: Mapping[str, Any] | None = None) -> str:
    """Return ``ds_config ds_configs/zero3.json 5d41402a: ZeRO-3, bf16``, read from ``source``.

    ``data`` is the experiment's section that names its ds_config: `zero-trial run` replaces the
    file name with the values, and records the name.

    The number is the start of the SHA-256 of all values: runs with the same number trained with the
    same ds_config.
    """
    values = json.dumps(resolved_ds_config(config), sort_keys=True, default=str)
    noted = (data or {}).get("zero_trial")
    file = source.place.file or (noted.get("ds_config") if isinstance(noted, Mapping) else None)
    name = f" {file}" if file else ""
    digest = hashlib.sha256(values.encode()).hexdigest()[:8]
    return f"ds_config{name} {digest}: ZeRO-{config.zero_optimization.stage}, {config.precision}"


def with_stages(config: Document, model: Any) -> Document:
    """Return ``config`` with the number of pipeline stages of ``model`` if ds_config does not set
    it.

    Raises ConfigError if ds_config sets a different number, which would change the number of
    data-parallel ranks.
    """
    stages = getattr(model, "num_stages", None)
    if not isinstance(stages, int):
        return config
    names = (("mesh", "pipe"), ("pipeline", "stages"))
    said = next((path for path in names if isinstance(config.get(path), int)), None)
    if said is None:
        place = Location(note=f"PipelineModule(num_stages={stages})", provenance=Provenance.MODEL)
        return config if stages == 1 else config.with_value(("mesh", "pipe"), stages, place)
    if config.get(said) != stages:
        raise ConfigError(
            "the model has a different number of pipeline stages",
            where=config.at(said).where(".".join(said)),
            got=config.get(said),
            expected=f"{stages}, as in PipelineModule(num_stages={stages})",
            fix="Omit num_stages: then ds_config decides.",
        )
    return config


def _opened(base: Given | None, model_dir: Path) -> Document:
    """Load a ds_config from a dict, a file in the model's folder (or an absolute path), a preset,
    or base64. Raises ConfigError for a missing file."""
    if base is None or isinstance(base, Mapping):
        return open_source(base or {})
    name = base
    if (model_dir / name).is_file():
        return open_source(model_dir / name)
    if name in preset_names():
        return read_preset(name, "data.ds_config")
    if Path(name).suffix in FILE_KINDS and not Path(name).is_file():
        raise ConfigError(
            f"{name} does not exist in {model_dir}",
            where="data.ds_config",
            fix=f"Put it next to the model, or upload it: det experiment create ... --include path/to/{Path(name).name}.",
        )
    return open_source(name)


def reconcile_config(config: Document, platform: Platform) -> tuple[DsConfig, Reconciled]:
    """Read ``config``, fill in "auto" and all three batch sizes, and return it with the table that
    shows how they agree.

    An engine uses the result unchanged, so a ds_config is read only once.

    The hyperparameter ``global_batch_size`` means ``train_batch_size``;
    ``data_parallel_world_size`` must match the ranks. A contradiction raises InvalidHP in a search
    (which then skips this point), otherwise ConfigError.
    """
    search, world = is_search(platform), platform.distributed.size
    checked = read_ds_config(config, hints=_hints(platform), hyperparameters=platform.hparams, search=search)
    found = reconcile(checked, world, platform.hparams, search=search)
    batch = found.batch
    given: dict[str, Any] = {
        "train_batch_size": batch.train_batch_size,
        "train_micro_batch_size_per_gpu": batch.micro_batch_size,
        "gradient_accumulation_steps": batch.accumulation,
    }
    filled = dataclasses.replace(checked, raw={**checked.raw, **given}, **given)
    sizes = (batch.train_batch_size, batch.micro_batch_size, batch.accumulation, found.axes.data_parallel)
    return filled, Reconciled(*sizes, table=str(found))


def reconcile_engine(engine: Any, platform: Platform) -> Reconciled:
    """Compare an engine's batch sizes with the hyperparameters; see ``reconcile_config``."""

    def number(name: str) -> int:
        value = getattr(engine, name)  # a method of an engine, a field of its config
        return int(value() if callable(value) else value)

    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    batch, micro, accumulation = map(number, names)
    table = Reconciled(batch, micro, accumulation, batch // (micro * accumulation))
    pairs = {"global_batch_size": table.train_batch_size, "data_parallel_world_size": table.data_parallel}
    for name, value in pairs.items():
        wanted = platform.hparams.get(name)
        if wanted is not None and wanted != value:
            raise (InvalidHP if is_search(platform) else ConfigError)(
                "differs from the engine's value",
                where=f"hyperparameters.{name}",
                got=wanted,
                expected=value,
                fix=f"Set {name}: {value}, or remove it.",
            )
    return table


def is_search(platform: Platform) -> bool:
    """Return whether other hyperparameters will be tried."""
    searcher = platform.experiment.get("searcher") or {}
    return bool(searcher.get("name", "single") != "single")


def _hints(platform: Platform) -> dict[str, Any]:
    """Return the other values for "auto": the run's length in steps, if it is known."""
    try:
        unit = run_length(platform.experiment, platform.hparams.get("global_batch_size"))
    except ConfigError:  # it is read again with the engine's batch size
        return {}
    return {"total_num_steps": unit.value} if isinstance(unit, Batch) and isinstance(unit.value, int) else {}
