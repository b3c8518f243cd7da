"""A run on this machine: its platform (metrics, checkpoints, events as plain files in a folder),
and the checkpoint where it starts."""

from __future__ import annotations

import json
import math
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from zero_trial.checkpoint.range_reader import CheckpointReader
from zero_trial.errors import CheckpointError
from zero_trial.trial.runs.events import append_line, is_finite, keep_lines, read_lines, write_json
from zero_trial.trial.runs.run_checkpoints import (
    add_checksums,
    checkpoint_step,
    delete,
    find_fault,
    manifests,
    publish,
    starting_point,
    sweep,
)
from zero_trial.trial.runs.run_layout import RunFolder
from zero_trial.trial.runtime.protocols import Distributed, OpenCheckpoint, on_rank_0
from zero_trial.util.files import METADATA, remove_folder

Note = Callable[[str], None]


@dataclass(frozen=True)
class LocalCheckpoints:
    """Stores checkpoints as ``checkpoints/step-000200/``. Rank 0 renames each from a temporary name
    once it is complete. With several hosts, the folder must be shared."""

    folder: Path
    distributed: Distributed

    def begin(self, metadata: Mapping[str, Any]) -> OpenCheckpoint:
        """Collective. Make a new folder to write into."""
        name = f"step-{int(metadata['steps_completed']):06d}"
        temporary = self.folder / on_rank_0(self.distributed, lambda: self._make(f"{name}.tmp-{uuid.uuid4().hex[:8]}"))
        return OpenCheckpoint(
            self.distributed,
            temporary,
            name,
            commit=lambda: self._finish(temporary, name, metadata),
            remove=lambda: remove_folder(temporary),
        )

    def _make(self, name: str) -> str:
        (self.folder / name).mkdir(parents=True)
        return name

    def _finish(self, temporary: Path, name: str, metadata: Mapping[str, Any]) -> None:
        """Describe and rename it. If that fails, remove it, since it may have filled the disk."""
        try:
            write_json(temporary / METADATA, add_checksums(metadata, temporary))
            publish(temporary, self.folder / name)
        except BaseException:
            remove_folder(temporary)
            raise

    @contextmanager
    def restore_path(self, storage_id: str) -> Iterator[Path]:
        path = self.folder / storage_id  # an absolute storage id replaces the folder
        if checkpoint_step(path) is None:
            raise CheckpointError(
                "there is no finished checkpoint here", where=str(path), fix="Name a folder step-NNNNNN."
            )
        yield path

    def retain(self, storage_ids: Sequence[str]) -> None:
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            if path.name not in storage_ids and checkpoint_step(path) is not None:
                delete(path)


@dataclass(frozen=True)
class LocalPlatform:
    """One rank's view of a run in a folder. ``distributed`` is injected; a single rank by default.

    ``asked``: whether a signal asked this rank to stop. ``show``: receives every event as it is
        written (rank 0).
    """

    run_dir: Path
    experiment: Mapping[str, Any] = field(default_factory=dict)
    hparams: Mapping[str, Any] = field(default_factory=dict)
    model_dir: Path = field(default_factory=Path)
    seed: int = 0
    trial_id: str = "1"
    experiment_id: str = "1"
    latest_checkpoint: str | None = None
    steps_completed: int = 0
    distributed: Distributed = field(default_factory=Distributed)
    asked: Callable[[], bool] = lambda: False
    show: Callable[[Mapping[str, Any]], None] | None = None

    @property
    def folder(self) -> RunFolder:
        return RunFolder(self.run_dir)

    @property
    def tensorboard_path(self) -> Path:
        return self.folder.tensorboard

    @cached_property
    def checkpoints(self) -> LocalCheckpoints:
        return LocalCheckpoints(self.folder.checkpoints, self.distributed)

    def report_training_metrics(self, steps_completed: int, metrics: Mapping[str, Any]) -> None:
        self._report("training", steps_completed, metrics)

    def report_validation_metrics(self, steps_completed: int, metrics: Mapping[str, Any]) -> None:
        self._report("validation", steps_completed, metrics)

    def _report(self, group: str, step: int, metrics: Mapping[str, Any]) -> None:
        append_line(self.folder.metrics, {"group": group, "step": step, "time": time.time(), "metrics": dict(metrics)})

    def report_progress(self, fraction: float) -> None:
        """Do nothing: the events contain the steps."""

    def emit(self, event: Mapping[str, Any]) -> None:
        append_line(self.folder.events, {"time": time.time(), **event})
        if self.show is not None:
            self.show(event)

    def should_preempt(self) -> bool:
        """Collective. Return whether the file ``preempt`` exists or any rank got a stop signal."""
        mine = self.asked() or (self.distributed.rank == 0 and self.folder.preempt.exists())
        return any(self.distributed.allgather(mine))

    def tidy(self) -> None:
        """Remove what a run that was killed left after the step where this run continues; rank 0
        only, before training.

        Then no step is reported twice, and the summary of an earlier end is not taken for this
        run's.
        """
        self.folder.summary.unlink(missing_ok=True)
        sweep(self.folder.checkpoints)
        known = self.steps_completed
        keep_lines(self.folder.metrics, lambda line: is_finite(line.get("step")) and line["step"] <= known)

    def resumed_at(self, checkpoint: str, step: int) -> LocalPlatform:
        """Return the same run, continuing from one of its own checkpoints."""
        return replace(self, latest_checkpoint=checkpoint, steps_completed=step)

    def started_from(self, named: str | Path, note: Note) -> LocalPlatform:
        """Collective. Return the same run, starting from another checkpoint or run's folder."""
        start = agree_on_start(self.distributed, None, resume=Path(named), note=note)
        return replace(self.resumed_at(start["checkpoint"], start["step"]), trial_id=start["trial_id"])

    def best_validation(self) -> float | None:
        lines = read_lines(self.folder.metrics)
        reported = (line.get("metrics") for line in lines if line.get("group") == "validation")
        return best_reported(reported, self.experiment)

    def sync_tensorboard(self) -> None:
        """Do nothing: the files are already in their final place."""

    def profile_system(self) -> bool:
        return False

    def report_early_exit(self, reason: str) -> None:
        self.run_dir.mkdir(parents=True, exist_ok=True)
        # only the first rank writes it
        with suppress(FileExistsError), self.folder.early_exit.open("x") as file:
            file.write(json.dumps({"reason": reason, "rank": self.distributed.rank}) + "\n")


def best_reported(reported: Iterable[Any], experiment: Mapping[str, Any]) -> float | None:
    """Return the best value of the searcher's metric among validations; None without one."""
    searcher = experiment.get("searcher") or {}
    name = str(searcher.get("metric"))
    found = [metrics.get(name) for metrics in reported if isinstance(metrics, Mapping)]
    values = [float(value) for value in found if isinstance(value, (int, float)) and not math.isnan(value)]
    if not values:
        return None
    return min(values) if searcher.get("smaller_is_better", True) else max(values)


def agree_on_start(
    ranks: Distributed, run_dir: Path | None, resume: Path | None = None, warm_start: Path | None = None, *, note: Note
) -> dict[str, Any]:
    """Collective. Return the newest intact checkpoint where a run starts, its step and its trial's
    id (see ``starting_point``).

    If a checkpoint was damaged after it was written, the one before it is used, and rank 0 logs a
    note. All files are read for this check, each by one rank; the engine verifies again what it
    loads.

    Raises CheckpointError on every rank if there are checkpoints but all are damaged: the user did
    not intend to start from scratch.
    """
    damaged: dict[str, str] = {}
    while True:
        start = ranks.broadcast(_propose(damaged, run_dir, resume, warm_start) if ranks.rank == 0 else None)
        if "fault" in start:
            raise CheckpointError(
                "no checkpoint is intact",
                where=str(run_dir or resume),
                got=start["fault"],
                fix="Start in another folder, or move the damaged checkpoints away to start from scratch.",
            )
        if start["checkpoint"] is None:
            return dict(start)
        found = ranks.allgather(verify_checkpoint(Path(start["checkpoint"]), ranks.rank, ranks.size))
        faults = [fault for fault in found if fault is not None]
        if not faults:
            return dict(start)
        damaged[start["checkpoint"]] = faults[0]
        if ranks.rank == 0:
            note(f"skipping a damaged checkpoint: {faults[0]}")


def _propose(
    damaged: Mapping[str, str], run_dir: Path | None, resume: Path | None, warm_start: Path | None
) -> dict[str, Any]:
    """Return the next candidate, or the first fault if all are damaged; on rank 0."""
    try:
        start = starting_point(run_dir, resume, warm_start, apart_from=damaged)
    except CheckpointError:
        start = {"checkpoint": None}
    return {"fault": next(iter(damaged.values()))} if damaged and start["checkpoint"] is None else start


def verify_checkpoint(folder: Path, index: int, count: int) -> str | None:
    """Return what is wrong with a finished checkpoint; None if nothing. Each of ``count`` ranks
    reads its share of the tensor files; rank 0 also checks all other files."""
    if index == 0 and (fault := find_fault(folder)) is not None:
        return fault
    try:
        for manifest in manifests(folder):
            CheckpointReader(manifest.parent).verify(index, count, load_follows=True)
    except CheckpointError as error:
        return str(error)
    except OSError as error:  # maybe only on this rank: the others wait for its result
        return f"rank {index} cannot read {folder} ({error.strerror or error})"
    return None
