"""A core.Context in this process that records its calls, used as Determined's on-cluster one would
be."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from zero_trial.trial.runs.events import ENGINE_GROUP
from zero_trial.trial.runtime.protocols import Distributed


class FakeCore:
    """One rank's. ``folder``: the storage that all ranks share. Where ``direct`` is False a
    checkpoint is in another folder first."""

    def __init__(self, folder: Path, ranks: Distributed, *, direct: bool = True) -> None:
        self.folder = folder
        self.ranks = ranks
        self.direct = direct
        self.training: list[tuple[int, dict[str, Any]]] = []
        self.validation: list[tuple[int, dict[str, Any]]] = []
        self.engine: list[tuple[int, dict[str, Any]]] = []
        self.progress: list[float] = []
        self.early_exits: list[str] = []
        self.reported: list[dict[str, Any]] = []
        self.copied: list[list[str]] = []
        self.best: float | None = None
        self.metadata: dict[str, Any] | None = None
        self.wants_stop = False
        self.asked = 0
        self.profiling = False
        self.train = self
        self.checkpoint = self
        self.preempt = self
        self.profiler = self

    def report_training_metrics(self, steps_completed: int, metrics: dict[str, Any]) -> None:
        self.training.append((steps_completed, metrics))

    def report_validation_metrics(self, steps_completed: int, metrics: dict[str, Any]) -> None:
        self.validation.append((steps_completed, metrics))

    def report_metrics(self, group: str, steps_completed: int, metrics: dict[str, Any]) -> None:
        if group != ENGINE_GROUP:
            raise ValueError(group)
        self.engine.append((steps_completed, metrics))

    def report_progress(self, progress: float) -> None:
        if not 0 <= progress <= 1:
            raise ValueError(progress)
        self.progress.append(progress)

    def report_early_exit(self, reason: str) -> None:
        self.early_exits.append(reason)

    def get_metadata(self) -> dict[str, Any] | None:
        return self.metadata

    def set_metadata(self, metadata: dict[str, Any]) -> None:
        self.metadata = metadata

    def get_experiment_best_validation(self) -> float | None:
        return self.best

    def get_tensorboard_path(self) -> Path:
        return self.folder / "tensorboard"

    def upload_tensorboard_files(self, selector: Any, mangler: Any = None) -> None:
        files = (path for path in self.get_tensorboard_path().rglob("*") if path.is_file() and selector(path))
        self.copied.append(sorted(path.name for path in files))

    def should_preempt(self) -> bool:
        if self.ranks.rank != 0:
            raise RuntimeError("only the chief may ask")  # PreemptMode.ChiefOnly
        self.asked += 1
        return self.wants_stop

    def on(self) -> None:
        self.profiling = True

    @contextmanager
    def store_path(self, metadata: dict[str, Any], *, shard: bool) -> Iterator[tuple[Path, str]]:
        if shard or self.ranks.rank != 0:
            raise RuntimeError("only the chief may store a checkpoint of its own")
        storage_id = str(uuid.uuid4())
        own = self.folder / storage_id if self.direct else self.folder / f"{storage_id}-uploaded-later"
        own.mkdir(parents=True)
        yield own, storage_id
        if not self.direct:
            own.rename(self.folder / storage_id)
        self.reported.append({"uuid": storage_id, "metadata": metadata})

    @contextmanager
    def restore_path(self, storage_id: str) -> Iterator[Path]:
        if not (self.folder / storage_id).is_dir():
            raise FileNotFoundError(storage_id)
        yield self.folder / storage_id


class Claims:
    """First come, first served, among threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken: set[str] = set()

    def __call__(self, name: str) -> bool:
        with self._lock:
            first = name not in self._taken
            self._taken.add(name)
            return first
