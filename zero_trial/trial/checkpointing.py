"""A trial's checkpoint: the engines' files, and trial_state.json with everything else."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from zero_trial.errors import CheckpointError, TrialError
from zero_trial.trial.context import ZeroTrialContext
from zero_trial.trial.data import DataPosition
from zero_trial.trial.runtime.protocols import OpenCheckpoint, fault_text
from zero_trial.trial.settings import Keep
from zero_trial.trial.trial import TrialCallback, ZeroTrial
from zero_trial.util.files import TRIAL_STATE

FORMAT = 1


@dataclass
class TrialSnapshot:
    """All counters of a trial, equal on all ranks except for ``ranks``, each rank's own part."""

    step: int = 0
    trial_id: str = ""
    epoch_length: int = 1
    last_validation: int | None = None  # step
    initial_metrics: dict[str, Any] = field(default_factory=dict)
    latest_metrics: dict[str, Any] = field(default_factory=dict)
    # training metrics not reported yet: name -> [sum, count]
    window: dict[str, Any] = field(default_factory=dict)
    samples: int = 0  # data position over all replicas
    micro_batches: int = 0  # data position of one replica
    # training only; steps that a resume repeats count once
    train_seconds: float = 0.0
    train_samples: int = 0
    # [storage id, step, searcher metric] of checkpoints that exist
    history: list[list[Any]] = field(default_factory=list)
    ranks: list[dict[str, Any]] = field(default_factory=list)

    def of_rank(self, rank: int) -> dict[str, Any]:
        """Return a rank's own part, or rank 0's for a rank that did not exist."""
        if not self.ranks:
            return {}
        return self.ranks[rank] if rank < len(self.ranks) else self.ranks[0]

    def resume(self, rank: int) -> DataPosition:
        return DataPosition(self.samples, self.micro_batches, self.of_rank(rank).get("loader"))


def read_state(path: Path) -> TrialSnapshot:
    """Read the state in a checkpoint's folder. Raises CheckpointError."""
    try:
        content = json.loads((path / TRIAL_STATE).read_text())
        seal = content.pop("sha256", None)
        if seal is not None and seal != _sum(content):
            raise ValueError("checksum mismatch")
        if content.pop("format") != FORMAT:
            raise ValueError("unknown format")
        return TrialSnapshot(**content)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"the trial's state cannot be read ({error})", where=str(path / TRIAL_STATE)) from error


def write_state(path: Path, state: TrialSnapshot) -> None:
    """Write and flush ``state`` into a checkpoint's folder."""
    content = {"format": FORMAT, **asdict(state)}
    with (path / TRIAL_STATE).open("w") as file:
        json.dump({**content, "sha256": _sum(content)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def _sum(content: Mapping[str, Any]) -> str:
    return sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def retained(history: Sequence[Sequence[Any]], keep: Keep, smaller_is_better: bool) -> list[list[Any]]:
    """Return the entries of ``history`` to keep, in the same order."""
    if keep.latest is None:
        return [list(entry) for entry in history]
    sign = 1 if smaller_is_better else -1
    ranked = sorted((entry for entry in history if entry[2] is not None), key=lambda entry: sign * entry[2])
    stay = [*ranked[: keep.best], *(list(history)[-keep.latest :] if keep.latest else [])]
    return [list(entry) for entry in history if entry in stay]


@dataclass
class _Save:
    """A checkpoint whose engines may still be writing, or which may still be uploading.
    ``in_background``: training continues during the upload."""

    opened: OpenCheckpoint
    step: int
    keep: list[str] = field(default_factory=list)
    in_background: bool = False


class Checkpointer:
    """Saves and restores one trial on one rank.

    If an engine writes in the background (ds_config's ``checkpoint.writer.decoupled``), the upload
    runs in the background, too. A checkpoint is reported only when it is complete.
    """

    def __init__(self, trial: ZeroTrial, context: ZeroTrialContext, callbacks: Mapping[str, TrialCallback]) -> None:
        self._trial = trial
        self._context = context
        self._callbacks = callbacks
        self._under_way: _Save | None = None

    def save(
        self, state: TrialSnapshot, loader_state: Any, value: float | None, keep: Keep, smaller_is_better: bool
    ) -> None:
        """Collective. Begin a checkpoint of ``state``; :meth:`poll` and :meth:`wait` report its
        completion. No other may be in progress. After an error, call :meth:`abandon`.

        ``value``: the searcher's metric at this step, if it was validated.
        """
        context = self._context
        state.ranks = context.distributed.allgather(self._own_part(loader_state))
        for callback in self._callbacks.values():
            callback.on_checkpoint_save_start(asdict(state))
        metadata = {
            "steps_completed": state.step,
            "trial_id": state.trial_id,
            "framework": "zero_trial",
            "format": FORMAT,
        }
        opened = context.platform.checkpoints.begin(metadata)
        self._under_way = save = _Save(opened, state.step)
        try:
            self._trial.save(context, opened.path)
        except OSError as error:
            where = f"rank {context.distributed.rank}, {opened.path}"
            raise CheckpointError(fault_text(error, where)) from error
        history = [entry for entry in state.history if entry[0] != opened.storage_id]
        state.history = retained([*history, [opened.storage_id, state.step, value]], keep, smaller_is_better)
        self._write_state(opened.path, state)
        save.keep = [entry[0] for entry in state.history]
        save.in_background = opened.uploads and self._engines_write()
        state.ranks = []

    def poll(self) -> str | None:
        """Collective. Return the storage id of a checkpoint completed since the last call, else
        None. Only now are checkpoints deleted that need not be kept."""
        save = self._under_way
        if save is None or self._engines_write():
            return None
        context, opened = self._context, save.opened
        if not opened.committing:
            for callback in self._callbacks.values():
                callback.on_checkpoint_write_end(opened.path)
                # the older name, which Determined calls as well
                if hasattr(callback, "on_checkpoint_end"):
                    callback.on_checkpoint_end(str(opened.path))
            opened.begin_commit()
        if not opened.committed(wait=not save.in_background):
            return None
        self._under_way = None
        if context.distributed.rank == 0:
            context.platform.checkpoints.retain(save.keep)
            event = {"kind": "checkpoint", "step": save.step, "storage_id": opened.storage_id}
            context.platform.emit({**event, **_size(opened.path.parent / opened.storage_id)})
        for callback in self._callbacks.values():
            callback.on_checkpoint_upload_end(opened.storage_id)
        return opened.storage_id

    def wait(self) -> str | None:
        """Collective. Wait for the checkpoint in progress and return its storage id, once; None
        without one. Raises CheckpointError if it could not be written."""
        if self._under_way is not None:
            self._under_way.in_background = False
            for engine in self._context.engines:
                if engine.checkpoint_under_way:
                    engine.wait_for_checkpoint()
        return self.poll()

    def keep_at_end(self, state: TrialSnapshot, keep: Keep, smaller_is_better: bool) -> None:
        """Delete the checkpoints that a complete trial need not keep, as a cluster does at the end
        of an experiment, but never the last remaining one. Local; rank 0 acts."""
        if self._context.distributed.rank == 0 and keep.at_end is not None:
            kept = retained(state.history, replace(keep, latest=keep.at_end), smaller_is_better) or state.history[-1:]
            self._context.platform.checkpoints.retain([entry[0] for entry in kept])

    def abandon(self) -> None:
        """Abandon a checkpoint in progress after an error that ends the run. Local."""
        save, self._under_way = self._under_way, None
        if save is not None:
            for engine in self._context.engines:  # before the folder that they write into is removed
                if engine.checkpoint_under_way:
                    engine.abandon_checkpoint()
            save.opened.abandon()

    def _engines_write(self) -> bool:
        return any(engine.checkpoint_under_way for engine in self._context.engines)

    def _write_state(self, path: Path, state: TrialSnapshot) -> None:
        """Collective. Rank 0 writes; every rank raises CheckpointError if the write fails."""
        fault = None
        if self._context.distributed.rank == 0:
            try:
                write_state(path, state)
            except OSError as error:
                fault = str(error.strerror or error)
        fault = self._context.distributed.broadcast(fault)
        if fault is not None:
            raise CheckpointError(
                f"the checkpoint cannot be written ({fault})",
                where=str(path / TRIAL_STATE),
                fix="Free some space; earlier checkpoints are unaffected.",
            )

    def _own_part(self, loader_state: Any) -> dict[str, Any]:
        """Return the state that belongs only to this rank.

        Raises TrialError for a part that is not JSON-able, before any rank waits for another.
        """
        parts: dict[str, Any] = {
            f"callback {name}": callback.state_dict() for name, callback in self._callbacks.items()
        }
        parts |= {"reducers": self._context.reducers.state(), "the data loader": loader_state}
        for name, part in parts.items():
            try:
                json.dumps(part)
            except (TypeError, ValueError) as error:
                fix = "Use numbers, strings, lists and dicts; tensors as .tolist()."
                raise TrialError(f"the state of {name} cannot be saved: {error}", where="state_dict", fix=fix) from None
        callbacks = {name: parts[f"callback {name}"] for name in self._callbacks}
        return {"callbacks": callbacks, "reducers": parts["reducers"], "loader": loader_state}

    @contextmanager
    def open(self, storage_id: str | None) -> Iterator[tuple[Path, TrialSnapshot] | None]:
        """Collective. Yield the checkpoint's folder and state; None without a checkpoint."""
        if storage_id is None:
            yield None
            return
        with self._context.platform.checkpoints.restore_path(storage_id) as path:
            yield path, read_state(path)

    def load(self, path: Path, state: TrialSnapshot) -> None:
        """Collective. Load callbacks, reducers, then the engines, which restore the random state:
        nothing may draw random numbers after that.

        From another trial's checkpoint, only the weights are loaded.
        """
        for callback in self._callbacks.values():
            callback.on_checkpoint_load_start(asdict(state))
        if not self._context.weights_only:
            own = state.of_rank(self._context.distributed.rank)
            for name, kept in (own.get("callbacks") or {}).items():
                if name in self._callbacks:
                    self._callbacks[name].load_state_dict(kept)
            self._context.reducers.load_state(own.get("reducers") or [])
        self._trial.load(self._context, path)


def _size(folder: Path) -> dict[str, Any]:
    """Return path, bytes and number of files of a checkpoint stored on this machine."""
    files = [path for path in folder.rglob("*") if path.is_file()] if folder.is_dir() else []
    if not files:
        return {}
    return {"path": str(folder), "bytes": sum(path.stat().st_size for path in files), "files": len(files)}
