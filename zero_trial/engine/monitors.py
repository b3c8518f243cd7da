"""Write scalars to TensorBoard, Weights & Biases, Comet or CSV files, as ds_config asks."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from zero_trial.ds_config.keys_running import CometSection, WandbSection
from zero_trial.ds_config.table import DsConfig
from zero_trial.errors import ConfigError

__all__ = ["Monitor", "build_writers"]

# (name, value, step); the step of the engine's own events is the number of global samples.
Event = tuple[str, float, int]


@dataclass(frozen=True)
class Writer:
    """Writes one event; written events can be read after ``flush``, and none follows ``close``."""

    write: Callable[[str, float, int], object]
    flush: Callable[[], object] = lambda: None
    close: Callable[[], object] = lambda: None


def require(package: str, section: str) -> None:
    """Raise ConfigError if ``section`` of ds_config needs a ``package`` that is not installed."""
    try:
        found = find_spec(package) is not None
    except (ModuleNotFoundError, ValueError):
        # a parent is missing, or a stand-in without a spec is loaded
        found = False
    if not found:
        raise ConfigError(
            f"the package {package} is not installed",
            where=f"{section}.enabled",
            fix=f"Run: pip install {package}; or set {section}.enabled to false.",
        )


# --- writers --------------------------------------------------------------------------------------


def comet_writer(section: CometSection) -> Writer:
    """Return a writer to Comet. It sends an event of a name if at least ``samples_log_interval``
    samples have passed since the last event of that name."""
    options = {
        "api_key": section.api_key,
        "project": section.project,
        "workspace": section.workspace,
        "experiment_key": section.experiment_key,
        "mode": section.mode,
        "online": section.online,
    }
    comet = import_module("comet_ml")
    experiment = comet.start(**{key: value for key, value in options.items() if value is not None})
    if section.experiment_name is not None:
        experiment.set_name(section.experiment_name)
    sent: dict[str, int] = {}

    def write(name: str, value: float, step: int) -> None:
        if name not in sent or step - sent[name] >= section.samples_log_interval:
            sent[name] = step
            experiment.log_metric(name, value, step=step)

    return Writer(write, experiment.flush, experiment.end)


def csv_writer(folder: Path) -> Writer:
    """Return a writer that appends to CSV files in ``folder``, one per name:
    ``Train_Samples_train_loss.csv`` with the columns step and train_loss. A resumed run continues
    the same files."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"the folder could not be created: {error.strerror}", where="csv_monitor.output_path", got=str(folder)
        ) from error

    def write(name: str, value: float, step: int) -> None:
        with (folder / f"{name.replace('/', '_')}.csv").open("a", newline="", encoding="utf-8") as file:
            rows = csv.writer(file)
            if file.tell() == 0:
                rows.writerow(["step", name.rpartition("/")[2]])
            rows.writerow([step, value])

    return Writer(write)


def tensorboard_writer(folder: Path) -> Writer:
    """Return a writer of TensorBoard events in ``folder``: torch's SummaryWriter."""
    board = import_module("torch.utils.tensorboard").SummaryWriter(log_dir=str(folder))
    return Writer(board.add_scalar, board.flush, board.close)


def wandb_writer(section: WandbSection) -> Writer:
    """Return a writer to one run of the Weights & Biases project that the section names; ``team``
    is the entity."""
    run = import_module("wandb").init(project=section.project, group=section.group, entity=section.team)
    return Writer(lambda name, value, step: run.log({name: value}, step=step), close=run.finish)


# --- all writers that ds_config switches on -------------------------------------------------------


class Monitor:
    """Passes events to its writers. Without any (another rank than 0, or nothing switched on) it
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
            for name, value, step in events:
                writer.write(name, float(value), step)
            if flush:
                writer.flush()

    def close(self) -> None:
        for writer in self._writers:
            writer.close()
        self._writers = ()


def build_writers(config: DsConfig, rank: int) -> list[Writer]:
    """Return the writers that ds_config switches on. Every rank checks that the packages are
    installed; only rank 0 opens and writes.

    Raises ConfigError for a package that is not installed or a folder that cannot be created.
    """
    board, files = config.tensorboard, config.csv_monitor
    makers: list[Callable[[], Writer]] = []
    if board.enabled:
        require("tensorboard", "tensorboard")
        makers.append(lambda: tensorboard_writer(folder_of(board.output_path, "tensorboard", board.job_name)))
    if files.enabled:
        makers.append(lambda: csv_writer(folder_of(files.output_path, "csv_monitor", files.job_name)))
    if config.wandb.enabled:
        require("wandb", "wandb")
        makers.append(lambda: wandb_writer(config.wandb))
    if config.comet.enabled:
        require("comet_ml", "comet")
        makers.append(lambda: comet_writer(config.comet))
    return [make() for make in makers] if rank == 0 else []


def folder_of(output_path: str, default: str, job_name: str) -> Path:
    """Return ``output_path/job_name``; without an output path, ``default/job_name`` in the working
    directory."""
    return Path(output_path or default).expanduser() / job_name
