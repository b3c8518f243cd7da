"""All writers that ds_config switches on, as one object: ``engine.monitor.write_events([(name, value, step)])``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from zero_trial.config.sections import DsConfig
from zero_trial.engine.monitor.comet import Comet
from zero_trial.engine.monitor.csv_files import CsvFiles
from zero_trial.engine.monitor.tensorboard import TensorBoard
from zero_trial.engine.monitor.wandb import Wandb
from zero_trial.engine.monitor.writer import Event, Writer, require


class Monitor:
    """Hands events to its writers; without any (another rank than 0, or nothing switched on) it does nothing."""

    def __init__(self, writers: Sequence[Writer] = ()) -> None:
        self._writers = tuple(writers)

    @property
    def enabled(self) -> bool:
        """Does anybody see what is written?"""
        return bool(self._writers)

    def write_events(self, events: Sequence[Event], flush: bool = True) -> None:
        """``events``: (name, value, step). A name like ``Train/Samples/lr`` is a path in the tools that show it."""
        for writer in self._writers:
            writer.write(events)
            if flush:
                writer.flush()

    def close(self) -> None:
        for writer in self._writers:
            writer.close()
        self._writers = ()


def build_monitor(config: DsConfig, rank: int) -> Monitor:
    """The monitor of this rank. Every rank checks that the packages are there; only rank 0 opens and writes.

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
    return Monitor([make() for make in makers] if rank == 0 else ())


def folder_of(output_path: str, default: str, job_name: str) -> Path:
    """``output_path/job_name``; without an output path, ``default/job_name`` in the working directory."""
    return Path(output_path or default).expanduser() / job_name
