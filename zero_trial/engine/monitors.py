"""Write scalars to TensorBoard, Weights & Biases, Comet or CSV files, as ds_config asks."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, TextIO

from zero_trial.ds_config.keys_running import CometSection, WandbSection
from zero_trial.ds_config.table import DsConfig
from zero_trial.errors import ConfigError

__all__ = ["Monitor", "build_monitor", "build_writers"]

# (name, value, step); the step of the engine's own events is the number of global samples.
Event = tuple[str, float, int]


class Writer(Protocol):
    """What a monitor writes through."""

    def write(self, events: Sequence[Event]) -> None:
        """Take ``events``; they can be read after :meth:`flush`."""

    def flush(self) -> None:
        """Make everything written so far readable."""

    def close(self) -> None:
        """Flush; nothing is written afterwards."""


def require(package: str, section: str, install: str) -> None:
    """Raise ConfigError where ``section`` of ds_config needs a ``package`` that is not
    installed."""
    try:
        found = find_spec(package) is not None
    except (ModuleNotFoundError, ValueError):
        # a parent is missing, or a stand-in without a spec is loaded
        found = False
    if not found:
        raise ConfigError(
            f"the package {package} is not installed",
            where=f"{section}.enabled",
            fix=f"Run: pip install {install}; or set {section}.enabled to false.",
        )


def load(package: str) -> Any:
    """Return the package, once :func:`require` has found it."""
    return import_module(package)


# --- writers --------------------------------------------------------------------------------------


class Comet:
    """Sends scalars to Comet. Of every name, an event is sent when at least
    ``samples_log_interval`` samples have gone by since the last one. Needs the package comet_ml."""

    def __init__(self, section: CometSection) -> None:
        comet = load("comet_ml")
        options = {
            "api_key": section.api_key,
            "project": section.project,
            "workspace": section.workspace,
            "experiment_key": section.experiment_key,
            "mode": section.mode,
            "online": section.online,
        }
        self._experiment: Any = comet.start(**{key: value for key, value in options.items() if value is not None})
        if section.experiment_name is not None:
            self._experiment.set_name(section.experiment_name)
        self._interval = section.samples_log_interval
        self._sent: dict[str, int] = {}

    def write(self, events: Sequence[Event]) -> None:
        for name, value, step in events:
            if name not in self._sent or step - self._sent[name] >= self._interval:
                self._sent[name] = step
                self._experiment.log_metric(name, float(value), step=step)

    def flush(self) -> None:
        self._experiment.flush()

    def close(self) -> None:
        self._experiment.end()


class CsvFiles:
    """Appends scalars to CSV files in ``folder``, one per name: ``Train_Samples_train_loss.csv``
    with the columns step and train_loss.

    A resumed run continues the same files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, TextIO] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"the folder cannot be made: {error.strerror}", where="csv_monitor.output_path", got=str(folder)
            ) from error

    def write(self, events: Sequence[Event]) -> None:
        for name, value, step in events:
            csv.writer(self._file(name)).writerow([step, float(value)])

    def flush(self) -> None:
        for file in self._files.values():
            file.flush()

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _file(self, name: str) -> TextIO:
        if name not in self._files:
            file = (self._folder / f"{name.replace('/', '_')}.csv").open("a", newline="", encoding="utf-8")
            self._files[name] = file
            if file.tell() == 0:
                csv.writer(file).writerow(["step", name.rpartition("/")[2]])
        return self._files[name]


class TensorBoard:
    """Writes scalars as TensorBoard events in ``folder``, by torch's SummaryWriter. Needs the
    package tensorboard."""

    def __init__(self, folder: Path) -> None:
        self._writer = load("torch.utils.tensorboard").SummaryWriter(log_dir=str(folder))

    def write(self, events: Sequence[Event]) -> None:
        for name, value, step in events:
            self._writer.add_scalar(name, float(value), step)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """Sends scalars to one run of the Weights & Biases project that the section names; ``team`` is
    the entity. Needs the package wandb."""

    def __init__(self, section: WandbSection) -> None:
        self._run = load("wandb").init(project=section.project, group=section.group, entity=section.team)

    def write(self, events: Sequence[Event]) -> None:
        for name, value, step in events:
            self._run.log({name: float(value)}, step=step)

    def flush(self) -> None:
        """Do nothing: the client sends by itself."""

    def close(self) -> None:
        self._run.finish()


# --- all writers that ds_config switches on -------------------------------------------------------


class Monitor:
    """Hands events to its writers; without any (another rank than 0, or nothing switched on) it
    does nothing."""

    def __init__(self, writers: Sequence[Writer] = ()) -> None:
        self._writers = tuple(writers)

    @property
    def enabled(self) -> bool:
        """Return whether there is a writer."""
        return bool(self._writers)

    def write_events(self, events: Sequence[Event], flush: bool = True) -> None:
        """Write ``events``: (name, value, step). A name like ``Train/Samples/lr`` is a path in the
        tools that show it."""
        for writer in self._writers:
            writer.write(events)
            if flush:
                writer.flush()

    def close(self) -> None:
        for writer in self._writers:
            writer.close()
        self._writers = ()


def build_writers(config: DsConfig, rank: int) -> list[Writer]:
    """Return the writers that ds_config switches on. Every rank checks that the packages are there;
    only rank 0 opens and writes.

    Raises ConfigError for a package that is not installed or a folder that cannot be made.
    """
    board, files = config.tensorboard, config.csv_monitor
    makers: list[Callable[[], Writer]] = []
    if board.enabled:
        require("tensorboard", "tensorboard", "tensorboard")
        makers.append(lambda: TensorBoard(folder_of(board.output_path, "tensorboard", board.job_name)))
    if files.enabled:
        makers.append(lambda: CsvFiles(folder_of(files.output_path, "csv_monitor", files.job_name)))
    if config.wandb.enabled:
        require("wandb", "wandb", "wandb")
        makers.append(lambda: Wandb(config.wandb))
    if config.comet.enabled:
        require("comet_ml", "comet", "comet_ml")
        makers.append(lambda: Comet(config.comet))
    return [make() for make in makers] if rank == 0 else []


def build_monitor(config: DsConfig, rank: int) -> Monitor:
    """Return the monitor of this rank; see :func:`build_writers`."""
    return Monitor(build_writers(config, rank))


def folder_of(output_path: str, default: str, job_name: str) -> Path:
    """Return ``output_path/job_name``; without an output path, ``default/job_name`` in the working
    directory."""
    return Path(output_path or default).expanduser() / job_name
