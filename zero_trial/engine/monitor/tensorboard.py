"""Scalars as TensorBoard events in ``<output_path>/<job_name>``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from zero_trial.engine.monitor.writer import Event, load


class TensorBoard:
    """torch's SummaryWriter on ``folder``. Needs the package tensorboard."""

    def __init__(self, folder: Path) -> None:
        self._writer = load("torch.utils.tensorboard").SummaryWriter(log_dir=str(folder))

    def write(self, events: Sequence[Event]) -> None:
        for name, value, step in events:
            self._writer.add_scalar(name, float(value), step)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
