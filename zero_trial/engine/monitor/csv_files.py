"""Scalars as CSV files, one per name: ``<output_path>/<job_name>/Train_Samples_train_loss.csv`` with the columns step and train_loss."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from zero_trial.engine.monitor.writer import Event
from zero_trial.errors import ConfigError


class CsvFiles:
    """Appends to the files of ``folder``; a run that is resumed goes on in the same files."""

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
