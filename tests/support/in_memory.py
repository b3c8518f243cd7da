"""A platform in memory, which records everything that a trial reports."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from zero_trial.errors import CheckpointError
from zero_trial.trial.runtime.local import LocalCheckpoints, best_reported
from zero_trial.trial.runtime.protocols import Distributed, OpenCheckpoint


@dataclass
class ReportedRecord:
    """Everything that a trial reported. Shared by the ranks of one trial."""

    training: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    validation: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    progress: list[float] = field(default_factory=list)
    early_exits: list[str] = field(default_factory=list)
    checkpoints: list[str] = field(default_factory=list)
    tensorboard_syncs: int = 0
    system_profiles: int = 0
    preempt_from_poll: int | None = None
    polls: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass(frozen=True)
class _InMemoryCheckpoints(LocalCheckpoints):
    """Checkpoints in a temporary folder; the record notes their storage ids."""

    record: ReportedRecord

    def begin(self, metadata: Mapping[str, Any]) -> OpenCheckpoint:
        opened = super().begin(metadata)

        def commit() -> None:
            opened.commit()
            self.record.checkpoints.append(opened.storage_id)

        return replace(opened, commit=commit)


@dataclass
class InMemoryPlatform:
    """One rank's view. All ranks, and the run that resumes, share ``record`` and ``storage``."""

    hparams: Mapping[str, Any] = field(default_factory=dict)
    experiment: Mapping[str, Any] = field(default_factory=dict)
    model_dir: Path = field(default_factory=Path)
    seed: int = 0
    trial_id: str = "1"
    experiment_id: str = "1"
    latest_checkpoint: str | None = None
    steps_completed: int = 0
    tensorboard_path: Path | None = None
    distributed: Distributed = field(default_factory=Distributed)
    record: ReportedRecord = field(default_factory=ReportedRecord)
    storage: Path | None = None

    def __post_init__(self) -> None:
        if self.storage is None:
            if self.distributed.size > 1:
                raise CheckpointError(
                    "ranks need one storage folder in common", fix="Pass storage=tmp_path to every rank."
                )
            self.storage = Path(tempfile.mkdtemp(prefix="zero-trial-"))
        self.checkpoints = _InMemoryCheckpoints(self.storage, self.distributed, self.record)

    def report_training_metrics(self, steps_completed: int, metrics: Mapping[str, Any]) -> None:
        self.record.training.append((steps_completed, dict(metrics)))

    def report_validation_metrics(self, steps_completed: int, metrics: Mapping[str, Any]) -> None:
        self.record.validation.append((steps_completed, dict(metrics)))

    def report_progress(self, fraction: float) -> None:
        self.record.progress.append(fraction)

    def emit(self, event: Mapping[str, Any]) -> None:
        self.record.events.append(dict(event))

    def should_preempt(self) -> bool:
        """Collective. Preempt from the n-th poll on, if the record says so."""
        answer = False
        if self.distributed.rank == 0:
            self.record.polls += 1
            first = self.record.preempt_from_poll
            answer = first is not None and self.record.polls >= first
        return bool(self.distributed.broadcast(answer))

    def best_validation(self) -> float | None:
        return best_reported((metrics for _, metrics in self.record.validation), self.experiment)

    def sync_tensorboard(self) -> None:
        with self.record.lock:
            self.record.tensorboard_syncs += 1

    def profile_system(self) -> bool:
        with self.record.lock:
            self.record.system_profiles += 1
        return True

    def report_early_exit(self, reason: str) -> None:
        with self.record.lock:
            if not self.record.early_exits:
                self.record.early_exits.append(reason)
