"""The interface between a trial and its platform: metrics, checkpoints, preemption, progress, the
ranks.

Each protocol contains only what the controller needs and what Determined's ``core.Context``
supports, so that a cluster, a folder on a laptop and an in-memory test all implement it.
"Collective" means: every rank must call it, in the same order.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from zero_trial.errors import CheckpointError, ZeroTrialError

AllGather = Callable[[Any], list[Any]]


def alone(value: Any) -> list[Any]:
    """Return the values in a world of one rank, after a JSON round trip as with several ranks."""
    return [json.loads(json.dumps(value))]


@dataclass(frozen=True)
class Distributed:
    """The ranks of one trial, which exchange small JSON-able values, never tensors, with
    ``exchange``, which returns all ranks' values in order. Methods that exchange are collective."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    exchange: AllGather = alone

    def get_rank(self) -> int:
        """Return ``rank``. Trials written for Determined use this method and the next two."""
        return self.rank

    def get_size(self) -> int:
        return self.size

    def get_local_rank(self) -> int:
        return self.local_rank

    def allgather(self, value: Any) -> list[Any]:
        """Return all ranks' values in rank order, on every rank."""
        return self.exchange(value)

    def gather(self, value: Any) -> list[Any] | None:
        """Return all ranks' values in rank order on rank 0, None elsewhere."""
        values = self.exchange(value)
        return values if self.rank == 0 else None

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value on every rank; the others' values are ignored."""
        # All ranks send a value: a second primitive would save a few bytes but add another
        # contract.
        return self.exchange(value if self.rank == 0 else None)[0]

    def barrier(self) -> None:
        """Return once every rank has arrived."""
        self.exchange(None)


TURN_SECONDS = 1.0
"""How long rank 0 waits for a commit between two exchanges; no exchange waits for an upload."""


@dataclass
class OpenCheckpoint:
    """A checkpoint in progress: a folder that all ranks write into.

    Attributes:
        commit: completes the checkpoint, or raises; called once, on rank 0, in a thread.
        remove: removes it; called on rank 0 instead of ``commit``.
        interrupt: makes a running ``commit`` end early; called on rank 0.
        uploads: ``commit`` may take long.
    """

    distributed: Distributed
    path: Path
    storage_id: str
    commit: Callable[[], None]
    remove: Callable[[], None]
    interrupt: Callable[[], None] = lambda: None
    uploads: bool = False
    committing: bool = False
    _thread: threading.Thread | None = None  # on rank 0
    _ended: threading.Event = field(default_factory=threading.Event)
    _error: BaseException | None = None

    def begin_commit(self) -> None:
        """Collective. Start the commit, now that every rank has written its part."""
        self.distributed.barrier()
        self.committing = True
        if self.distributed.rank == 0:
            self._thread = threading.Thread(target=self._run, name="zero_trial-commit", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        try:
            self.commit()
        except BaseException as error:  # raised on all ranks by their next poll
            self._error = error
        finally:
            self._ended.set()

    def committed(self, *, wait: bool) -> bool:
        """Collective. Return whether the checkpoint is complete; ``wait``: block until it is.
        Raises CheckpointError on every rank if it failed."""
        while True:
            state = None
            if self.distributed.rank == 0 and self._ended.wait(TURN_SECONDS if wait else 0):
                state = {} if self._error is None else {"fault": fault_text(self._error, str(self.path))}
            state = self.distributed.broadcast(state)
            if state is not None and "fault" in state:
                raise CheckpointError(state["fault"]) from self._error
            if state is not None or not wait:
                return state is not None

    def abandon(self) -> None:
        """Abandon the checkpoint; local. Waits for a commit that can no longer be interrupted."""
        if self._thread is not None:
            self.interrupt()
            self._thread.join()
        elif self.distributed.rank == 0:
            self.remove()  # other ranks may still write into it


def on_rank_0(distributed: Distributed, act: Callable[[], Any]) -> Any:
    """Collective. Run ``act`` on rank 0; return its result, or raise its error, on every rank."""
    outcome, cause = None, None
    if distributed.rank == 0:
        try:
            outcome = {"value": act()}
        except Exception as error:  # the other ranks wait for the result
            outcome, cause = {"fault": fault_text(error)}, error
    outcome = distributed.broadcast(outcome)
    if "fault" in outcome:
        raise CheckpointError(outcome["fault"]) from cause
    return outcome["value"]


def fault_text(error: BaseException, where: str | None = None) -> str:
    """Format an error of rank 0, or of ``where``, so that every rank can raise the same message."""
    if isinstance(error, ZeroTrialError):
        return str(error)
    fix, words = "Earlier checkpoints are unaffected.", f"{type(error).__name__}: {error}"
    if isinstance(error, OSError) and error.strerror:
        fix, words = f"Free some space or choose another folder. {fix}", error.strerror
        where = where or error.filename
    return str(CheckpointError(f"the checkpoint cannot be written ({words})", where=where or "rank 0", fix=fix))


class CheckpointStore(Protocol):
    """Stores checkpoints: folders with a storage id, each either complete or absent."""

    def begin(self, metadata: Mapping[str, Any]) -> OpenCheckpoint:
        """Collective. Open a folder to write into; committing it makes it a checkpoint. If rank 0
        cannot create it, every rank raises CheckpointError.

        ``metadata`` contains ``steps_completed`` and whatever else describes the checkpoint
        (JSON-able).
        """

    def restore_path(self, storage_id: str) -> AbstractContextManager[Path]:
        """Collective. Yield the folder of a checkpoint. Raises CheckpointError without one."""

    def retain(self, storage_ids: Sequence[str]) -> None:
        """Delete every checkpoint of this trial that is not named, if this platform is responsible
        for deletion; rank 0 only.

        Does nothing if the cluster deletes checkpoints.
        """


class Platform(Protocol):
    """Everything around a trial, as seen by one rank."""

    @property
    def distributed(self) -> Distributed: ...

    @property
    def checkpoints(self) -> CheckpointStore: ...

    @property
    def hparams(self) -> Mapping[str, Any]: ...

    @property
    def experiment(self) -> Mapping[str, Any]:
        """The experiment config as plain data (the YAML's content)."""

    @property
    def model_dir(self) -> Path:
        """Return the base folder of relative paths in the experiment config."""

    @property
    def seed(self) -> int: ...

    @property
    def trial_id(self) -> str:
        """Return the trial's name. Only the weights of another trial's checkpoint are used."""

    @property
    def experiment_id(self) -> str: ...

    @property
    def latest_checkpoint(self) -> str | None:
        """The storage id to start from, if any."""

    @property
    def steps_completed(self) -> int:
        """The step of ``latest_checkpoint``, if the platform knows it; 0 without one."""

    @property
    def tensorboard_path(self) -> Path | None: ...

    def report_training_metrics(self, steps_completed: int, metrics: Mapping[str, Any]) -> None:
        """Report training metrics; rank 0 only."""

    def report_validation_metrics(self, steps_completed: int, metrics: Mapping[str, Any]) -> None:
        """Report validation metrics; rank 0 only."""

    def report_progress(self, fraction: float) -> None:
        """Report the ``fraction`` of the run that is done, 0 to 1, to a searcher; rank 0 only."""

    def emit(self, event: Mapping[str, Any]) -> None:
        """Emit one live event (``kind``, ``step``, ``loss`` ...); rank 0 only."""

    def should_preempt(self) -> bool:
        """Collective. Ask on rank 0 whether this trial must stop, save, and be resumed later;
        return the same answer on every rank."""

    def best_validation(self) -> float | None:
        """Return the best value of the searcher's metric reported so far; rank 0 only."""

    def sync_tensorboard(self) -> None:
        """Copy TensorBoard files that are stored elsewhere too; called on each rank."""

    def profile_system(self) -> bool:
        """Start measuring this host's load, on each rank; return False if this is not supported."""

    def report_early_exit(self, reason: str) -> None:
        """Report why the trial ends early (``INVALID_HP``); from any rank, but only once."""
