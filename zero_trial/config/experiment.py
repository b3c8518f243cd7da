"""The experiment's YAML: what is run, on how many slots, how long, how often it is measured and saved, and with which values."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zero_trial.config.canonical import shown
from zero_trial.config.document import Document, Place
from zero_trial.config.hyperparameters import ranges, read_hyperparameters
from zero_trial.config.overlay import overlay
from zero_trial.config.period import NEVER, Period
from zero_trial.config.source import open_source, read_file
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

    @property
    def hints(self) -> dict[str, Any]:
        """What the experiment knows that fills "auto": the run's length in steps, where it is counted in them."""
        length = self.searcher.max_length
        return {"total_num_steps": length.count} if length is not None and length.unit == "batches" else {}

    def plain(self) -> dict[str, Any]:
        """The experiment as plain data; a ds_config file that lies beside the YAML is named by its full path."""
        raw = dict(self.raw)
        named = self.data.get("ds_config")
        if isinstance(named, str) and self.folder is not None and (self.folder / named).is_file():
            raw["data"] = {**self.data, "ds_config": str((self.folder / named).resolve())}
        return raw

    def names_ds_config(self) -> bool:
        """Whether a ds_config is named here; if not, the trial itself gives one."""
        own = self.hyperparameters
        return any(
            value is not None
            for value in (self.data.get("ds_config"), own.get("ds_config"), own.get("deepspeed_config"))
        )

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
        places = " nor in ".join(dict.fromkeys(str(folder.resolve().name or folder) + "/" for folder in folders))
        fix = (
            f'Did you mean "{near[0]}"?'
            if near
            else "Write the file beside the experiment, or its keys here instead of its name."
        )
        raise ConfigError(f"{name} is not in {places}", where=where, fix=fix)

    def _hyperparameter_places(self) -> Document:
        return read_hyperparameters(self.document.below(("hyperparameters",)), [])
