"""The verbs of checkpoints."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from zero_trial.master.agent import storage
from zero_trial.master.core.sources import require_unneeded
from zero_trial.master.core.state import MasterState
from zero_trial.master.core.transaction import transaction
from zero_trial.master.errors import Conflict, Invalid, NotFound, Unsupported
from zero_trial.master.records import Checkpoint, CheckpointState
from zero_trial.master.store import checkpoints, experiments, trials


class CheckpointService:
    """Checkpoints by their UUID."""

    def __init__(self, state: MasterState) -> None:
        self._state = state

    def get(self, uuid: str) -> Checkpoint:
        """NotFound if there is none."""
        with self._state.database.reading() as connection:
            found = checkpoints.get(connection, uuid)
        if found is None:
            raise NotFound(f"checkpoint {uuid} not found")
        return found

    def directory(self, uuid: str) -> Path:
        """Where its files lie. NotFound if they are gone, Unsupported if its storage is not on this machine's disk."""
        base = self._base(self.get(uuid))
        folder = storage.folder_of(base, uuid)
        if folder is None:
            raise NotFound(f"the files of checkpoint {uuid} are gone")
        return folder

    def report(self, checkpoint: Checkpoint) -> None:
        """Store what a trial has saved (COMPLETED). Only uuid, allocation_id, task_id, metadata, resources, reported and state are read."""
        if not storage.is_uuid(checkpoint.uuid):
            raise Invalid("not a UUID", where="uuid", got=repr(checkpoint.uuid)[:60])
        with transaction(self._state) as tx:
            run = trials.allocation(tx.connection, checkpoint.allocation_id)
            if run is None:
                raise NotFound(f"allocation {checkpoint.allocation_id} not found")
            known = checkpoints.get(tx.connection, checkpoint.uuid, derived=False)
            if known is not None and known.trial_id != run.trial_id:
                raise Conflict(f"checkpoint {checkpoint.uuid} is another trial's")
            steps = _count(checkpoint.metadata.get("steps_completed") or 0, "metadata.steps_completed")
            stored = replace(
                checkpoint,
                trial_id=run.trial_id,
                experiment_id=run.experiment_id,
                task_id=run.task_id,
                reported=checkpoint.reported or tx.now,
                size=_count(sum(checkpoint.resources.values()), "resources"),
                steps_completed=steps,
            )
            checkpoints.put(tx.connection, stored)
            if stored.state is CheckpointState.COMPLETED:
                trials.change(tx.connection, run.trial_id, latest_checkpoint=stored.uuid)

    def patch_resources(self, uuid: str, resources: Mapping[str, int]) -> None:
        """``PATCH /checkpoints``: what is left after the harness deleted files of it; nothing left means DELETED."""
        with transaction(self._state) as tx:
            if checkpoints.get(tx.connection, uuid, derived=False) is None:
                raise NotFound(f"checkpoint {uuid} not found")
            state = CheckpointState.PARTIALLY_DELETED if resources else CheckpointState.DELETED
            size = _count(sum(resources.values()), "resources")
            checkpoints.change(tx.connection, uuid, resources=dict(resources), size=size, state=state)

    def delete(self, uuids: Sequence[str]) -> None:
        """Delete on disk, later; Conflict for one that a registered or running trial needs. NotFound before anything is deleted."""
        with transaction(self._state) as tx:
            _require_deletable(tx.connection, uuids)
            checkpoints.mark_deleted(tx.connection, uuids)
            tx.garbage = True

    def remove_files(self, uuids: Sequence[str], globs: Sequence[str]) -> None:
        """Delete the files of those checkpoints that match a glob (all if there are no globs)."""
        if not globs or list(globs) == ["**/*"]:
            self.delete(uuids)
            return
        bases = {uuid: self._base(self.get(uuid)) for uuid in uuids}  # all are looked up before any is touched
        with transaction(self._state) as tx:
            _require_deletable(tx.connection, uuids)
            for uuid in uuids:  # before a file goes: no trial starts from it from here on
                checkpoints.change(tx.connection, uuid, state=CheckpointState.PARTIALLY_DELETED)
        for uuid, base in bases.items():
            self.patch_resources(uuid, storage.delete_matching(base, uuid, globs))

    def _base(self, checkpoint: Checkpoint) -> Path:
        with self._state.database.reading() as connection:
            number = checkpoint.experiment_id
            experiment = None if number is None else experiments.get(connection, number, derived=False)
        base = None if experiment is None else storage.base_of(experiment.config)
        if base is None:
            raise Unsupported(
                "the storage of this checkpoint is not on this machine's disk",
                where=checkpoint.uuid,
                expected="checkpoint_storage of type shared_fs or directory",
            )
        return base


def _require_deletable(connection: sqlite3.Connection, uuids: Sequence[str]) -> None:
    """NotFound for one that is not known, Conflict for one that a registered or running trial needs."""
    for uuid in uuids:
        found = checkpoints.get(connection, uuid, derived=False)
        if found is None:
            raise NotFound(f"checkpoint {uuid} not found")
        trial = None if found.trial_id is None else trials.get(connection, found.trial_id)
        if trial is not None and not trial.state.final and trial.latest_checkpoint == uuid:
            raise Conflict(f"trial {trial.id} goes on from checkpoint {uuid}", fix="Kill its experiment first.")
    require_unneeded(connection, uuids)


def _count(value: object, where: str) -> int:
    """A whole number that the store can hold. Invalid otherwise."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or not 0 <= value < 1 << 63:
        raise Invalid("not a whole number from 0 to 2**63 - 1", where=where, got=repr(value)[:60])
    return value
