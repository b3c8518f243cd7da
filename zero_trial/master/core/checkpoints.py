"""Checkpoints: the service, the garbage collection policy, and the thread that deletes files.

A checkpoint of an ended experiment is kept if it is one of the ``save_experiment_best`` best of the
experiment, or one of the ``save_trial_best`` best or the ``save_trial_latest`` newest of its trial.
"Best" refers to the searcher's metric in the validation at the checkpoint's step. A checkpoint
without that metric is never one of the best.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from zero_trial.errors import ZeroTrialError
from zero_trial.master.agent import storage
from zero_trial.master.core.state import MasterState
from zero_trial.master.core.transaction import Transaction, transaction
from zero_trial.master.records import (
    Checkpoint,
    CheckpointState,
    Conflict,
    Experiment,
    ExperimentState,
    GcPolicy,
    Invalid,
    NotFound,
    Unsupported,
    existing,
)
from zero_trial.master.store import checkpoint_rows, experiment_rows, trial_rows

log = logging.getLogger(__name__)


class CheckpointService:
    """Reads, records and deletes checkpoints by their UUID."""

    def __init__(self, state: MasterState) -> None:
        self._state = state

    def get(self, uuid: str) -> Checkpoint:
        """Return a checkpoint. Raises NotFound."""
        return existing(self._state.read(checkpoint_rows.get, uuid), f"checkpoint {uuid}")

    def directory(self, uuid: str) -> Path:
        """Return its folder. Raises NotFound if it is gone, Unsupported if not on a local disk."""
        base = _required_base(self.get(uuid))
        with _reading_storage(uuid):
            folder = storage.folder_of(base, uuid)
        if folder is None:
            raise NotFound(f"the files of checkpoint {uuid} no longer exist")
        return folder

    def storage_number(self, section: Mapping[str, Any]) -> int:
        """Return the id by which trials report checkpoints saved in a ``checkpoint_storage``.
        Raises Invalid if the section's folder cannot be determined."""
        folder = {"shared_fs": "host_path", "directory": "container_path"}.get(str(section.get("type")))
        path = section.get(folder) if folder else "/"
        inner = section.get("storage_path") if folder == "host_path" else None
        if not isinstance(section.get("type"), str) or not isinstance(path, str) or not Path(path).is_absolute():
            raise Invalid(
                "not a checkpoint storage", where="checkpointStorage", expected="a type, and an absolute path"
            )
        if not isinstance(inner, str | None):
            raise Invalid("must be a string", where="checkpointStorage.storage_path")
        with transaction(self._state) as tx:
            return checkpoint_rows.storage_number(tx.connection, section)

    def report(self, checkpoint: Checkpoint) -> None:
        """Store the record of a checkpoint that a trial has saved.

        Reads these fields of ``checkpoint``: uuid, allocation_id ("" for an unmanaged trial),
        task_id, metadata, resources, reported, state and storage_id.
        """
        if not storage.is_uuid(checkpoint.uuid):
            raise Invalid("not a UUID", where="uuid", got=repr(checkpoint.uuid)[:60])
        with transaction(self._state) as tx:
            trial_id, experiment_id, task_id = _saved_by(tx.connection, checkpoint)
            if checkpoint_rows.trial_of(tx.connection, checkpoint.uuid) not in (None, trial_id):
                raise Conflict(f"checkpoint {checkpoint.uuid} belongs to another trial")
            steps = checkpoint.metadata.get("steps_completed")
            stored = replace(
                checkpoint,
                trial_id=trial_id,
                experiment_id=experiment_id,
                task_id=task_id,
                reported=checkpoint.reported or tx.now,
                size=_count(sum(checkpoint.resources.values()), "resources"),
                steps_completed=0 if steps is None else _count(steps, "metadata.steps_completed"),
            )
            checkpoint_rows.put(tx.connection, stored)
            if stored.state is CheckpointState.COMPLETED:
                trial_rows.change(tx.connection, trial_id, latest_checkpoint=stored.uuid)

    def record_files(self, uuid: str, resources: Mapping[str, int], *, unless_registered: str = "") -> None:
        """Record the files that exist now: no files means DELETED; a different set than before
        means PARTIALLY_DELETED. A deleted checkpoint keeps its last file list.
        ``unless_registered``: raise Invalid with this verb if the checkpoint is registered."""
        with transaction(self._state) as tx:
            if unless_registered:
                require_unregistered(tx.connection, [uuid], unless_registered)
            found = existing(checkpoint_rows.get(tx.connection, uuid, derived=False), f"checkpoint {uuid}")
            if not resources:
                checkpoint_rows.change(tx.connection, uuid, state=CheckpointState.DELETED)
                return
            # every folder contains metadata.json, but older harnesses did not report it, and some
            # clients do not report folders
            unreported = {name: size for name, size in resources.items() if name == "metadata.json"}
            before, now = (
                {name: size for name, size in each.items() if not name.endswith("/")}
                for each in ({**unreported, **found.resources}, resources)
            )
            changed = before != now
            state = CheckpointState.PARTIALLY_DELETED if changed else found.state
            size = _count(sum(resources.values()), "resources")
            checkpoint_rows.change(tx.connection, uuid, resources=dict(resources), size=size, state=state)

    def set_metadata(self, uuid: str, metadata: Mapping[str, Any]) -> None:
        """Replace the metadata that clients see; the recorded steps_completed does not change."""
        with transaction(self._state) as tx:
            existing(checkpoint_rows.get(tx.connection, uuid, derived=False), f"checkpoint {uuid}")
            checkpoint_rows.change(tx.connection, uuid, metadata=dict(metadata))

    def delete(self, uuids: Sequence[str]) -> None:
        """Mark checkpoints for deletion, all or none. Raises NotFound, Conflict or Invalid."""
        with transaction(self._state) as tx:
            for uuid in uuids:
                _require_deletable(tx.connection, uuid)
            checkpoint_rows.mark_deleted(tx.connection, uuids)
            tx.garbage = True

    def remove_files(self, uuids: Sequence[str], globs: Sequence[str]) -> None:
        """Delete the files and folders of these checkpoints that match a glob (`storage.matching`);
        without globs, only refresh the recorded file sizes.

        A checkpoint without a match is unchanged. After a deletion it is PARTIALLY_DELETED if files
        are left, else DELETED. Raises Invalid for a glob that is empty or contains ``..``.

        Nothing is changed unless all the checkpoints may be deleted. Then the checkpoints are
        marked and their files deleted one by one. If a file cannot be deleted, earlier checkpoints
        are recorded as done, later ones are unchanged, and the call can be repeated.
        """
        globs = [glob.strip() for glob in globs]
        for glob in globs:
            if not glob or ".." in glob:
                raise Invalid("not a glob of files in a checkpoint", where="checkpointGlobs", got=repr(glob)[:60])
        if "**/*" in globs:
            self.delete(uuids)
            return
        bases = {uuid: _required_base(self.get(uuid)) for uuid in uuids}
        with self._state.database.reading() as connection:
            for uuid in uuids if globs else ():
                _require_deletable(connection, uuid)
            require_unregistered(connection, uuids, "deleted")
        for uuid, base in bases.items():
            with _reading_storage(uuid):
                self._remove_matching(uuid, base, globs)

    def _remove_matching(self, uuid: str, base: Path, globs: Sequence[str]) -> None:
        try:
            if storage.matching(base, uuid, globs):
                with transaction(self._state) as tx:
                    # check again: a trial may have started from this checkpoint in the meantime
                    _require_deletable(tx.connection, uuid)
                    checkpoint_rows.change(tx.connection, uuid, state=CheckpointState.PARTIALLY_DELETED)
                storage.delete_matching(base, uuid, globs)
        finally:
            self.record_files(uuid, storage.remaining(base, uuid))


@contextlib.contextmanager
def _reading_storage(uuid: str) -> Iterator[None]:
    """Convert an OSError of the block to NotFound (storage is missing) or ZeroTrialError."""
    try:
        yield
    except FileNotFoundError as error:
        raise NotFound(f"the storage of checkpoint {uuid} is missing: {error.filename}") from error
    except OSError as error:
        raise ZeroTrialError(
            f"the files of checkpoint {uuid} cannot be read or deleted: {error}",
            fix="Fix the storage, then run the command again.",
        ) from error


def check_source(connection: sqlite3.Connection, config: Mapping[str, Any]) -> None:
    """Raise Invalid unless the checkpoint to start from exists and is complete."""
    searcher = config.get("searcher") or {}
    trial, saved = searcher.get("source_trial_id"), searcher.get("source_checkpoint_uuid")
    if saved:
        found = checkpoint_rows.get(connection, str(saved), derived=False)
        if found is None:
            raise Invalid("checkpoint not found", where="searcher.source_checkpoint_uuid", got=saved)
        if found.state is not CheckpointState.COMPLETED:
            raise Invalid(f"this checkpoint is {found.state.value}", where="searcher.source_checkpoint_uuid", got=saved)
    elif trial is not None:
        if trial_rows.get(connection, int(trial)) is None:
            raise Invalid("trial not found", where="searcher.source_trial_id", got=trial)
        if checkpoint_rows.latest(connection, int(trial)) is None:
            raise Invalid("this trial has no checkpoint to start from", where="searcher.source_trial_id", got=trial)


def require_not_in_use(connection: sqlite3.Connection, uuids: Iterable[str]) -> None:
    """Raise Conflict if an unfinished experiment starts from one of these checkpoints."""
    users = checkpoint_rows.sources_in_use(connection)
    for uuid in uuids:
        if uuid in users:
            raise Conflict(
                f"experiment {users[uuid]} starts from checkpoint {uuid}",
                fix=f"Wait for experiment {users[uuid]}, or kill it.",
            )


def require_unregistered(connection: sqlite3.Connection, uuids: Iterable[str], verb: str) -> None:
    """Raise Invalid, with Determined's message, if one of these checkpoints is a model version.

    Args:
        verb: the rejected operation: "deleted" or "patched".
    """
    found = checkpoint_rows.registered(connection, uuids)
    if found:
        names = [
            f"{each.uuid}, registered to {each.model_name} (model #{each.model_id}), version {each.version}"
            for each in found
        ]
        raise Invalid(
            f"this subset of checkpoints provided are in the model registry and cannot be {verb}: {', '.join(names)}."
        )


def require_ended(tx: Transaction, experiment_id: int) -> None:
    """Raise Conflict for an experiment that has not ended, or that is being deleted."""
    state = tx.state_of(experiment_id)
    if not state.final or state is ExperimentState.DELETING:
        raise Conflict(
            f"experiment {experiment_id} is {state.value}",
            expected="COMPLETED, CANCELED or ERROR",
            fix="Wait for it, or kill it.",
        )


def begin_deletion(tx: Transaction, experiment_id: int) -> None:
    """Begin to delete an ended experiment with its checkpoints. Raises Conflict if it has not
    ended, and Invalid if one of its checkpoints is registered."""
    require_ended(tx, experiment_id)
    saved = checkpoint_rows.of_experiment(tx.connection, experiment_id)
    require_not_in_use(tx.connection, (item.uuid for item in saved))
    if checkpoint_rows.registered(tx.connection, (item.uuid for item in saved)):
        raise Invalid("checkpoints are registered as model versions", fix="Delete those versions of the models first.")
    experiment_rows.change(tx.connection, experiment_id, state=ExperimentState.DELETING)
    tx.garbage = True


def _saved_by(connection: sqlite3.Connection, checkpoint: Checkpoint) -> tuple[int, int, str]:
    """Return the trial id, experiment id and task id that saved a checkpoint: from its allocation
    if named, otherwise from its task, which must belong to an unmanaged trial."""
    if checkpoint.allocation_id:
        name = checkpoint.allocation_id
        run = existing(trial_rows.allocation(connection, name), f"allocation {name}")
        return run.trial_id, run.experiment_id, run.task_id
    trial = existing(trial_rows.of_task(connection, checkpoint.task_id), f"task {checkpoint.task_id}")
    experiment = experiment_rows.get(connection, trial.experiment_id, derived=False)
    if experiment is None or not experiment.unmanaged:
        raise Invalid("a checkpoint of a managed trial must name its allocation", where="allocationId")
    return trial.id, trial.experiment_id, checkpoint.task_id


def _base(checkpoint: Checkpoint) -> Path | None:
    """Return the folder that contains a checkpoint; None if it is not on this machine's disk."""
    own = {"checkpoint_storage": checkpoint.storage}
    return storage.base_of(checkpoint.experiment_config if checkpoint.storage is None else own)


def _required_base(checkpoint: Checkpoint) -> Path:
    if (base := _base(checkpoint)) is None:
        raise Unsupported(
            "the storage of this checkpoint is not on this machine's disk",
            where=checkpoint.uuid,
            expected="checkpoint_storage of type shared_fs or directory",
        )
    return base


def needed(connection: sqlite3.Connection) -> set[str]:
    """Return registered checkpoints and the source checkpoints of unfinished experiments."""
    kept = {each.uuid for each in checkpoint_rows.registered(connection)}
    return kept | checkpoint_rows.sources_in_use(connection).keys()


def _require_deletable(connection: sqlite3.Connection, uuid: str) -> None:
    """Raise NotFound, Conflict if a trial or experiment needs it, Invalid if registered."""
    found = existing(checkpoint_rows.get(connection, uuid, derived=False), f"checkpoint {uuid}")
    trial = None if found.trial_id is None else trial_rows.get(connection, found.trial_id)
    if trial is not None and not trial.state.final and trial.latest_checkpoint == uuid:
        raise Conflict(f"trial {trial.id} will resume from checkpoint {uuid}", fix="Kill its experiment first.")
    require_not_in_use(connection, [uuid])
    require_unregistered(connection, [uuid], "deleted")


def _count(value: object, where: str) -> int:
    """Return ``value`` as an integer that fits the store. Raises Invalid."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 63:
        raise Invalid("not a whole number from 0 to 2**63 - 1", where=where, got=repr(value)[:60])
    return value


# -- garbage collection

_RETRY_SECONDS = 600.0


def policy_of(config: Mapping[str, Any]) -> GcPolicy:
    """Return the garbage collection policy of a completed config."""
    section = config.get("checkpoint_storage") or {}
    return GcPolicy(
        int(section.get("save_experiment_best", 0)),
        int(section.get("save_trial_best", 1)),
        int(section.get("save_trial_latest", 1)),
    )


def superfluous(
    saved: Sequence[Checkpoint], policy: GcPolicy, *, smaller_is_better: bool, keep: Iterable[str] = ()
) -> list[Checkpoint]:
    """Return the checkpoints that the policy does not keep.

    Args:
        saved: all checkpoints of one experiment.
        keep: UUIDs to keep anyway: registered, or another experiment starts from them.
    """
    there = [item for item in saved if item.state is CheckpointState.COMPLETED]
    kept = set(keep) | _best(there, policy.save_experiment_best, smaller_is_better)
    for trial_id in {item.trial_id for item in there}:
        of_trial = [item for item in there if item.trial_id == trial_id]
        kept |= _best(of_trial, policy.save_trial_best, smaller_is_better)
        newest = sorted(of_trial, key=lambda item: (item.steps_completed, item.reported), reverse=True)
        kept |= {item.uuid for item in newest[: policy.save_trial_latest]}
    return [item for item in there if item.uuid not in kept]


def _best(saved: Iterable[Checkpoint], count: int, smaller_is_better: bool) -> set[str]:
    sign = 1 if smaller_is_better else -1
    scored = [
        (sign * item.searcher_metric, item.steps_completed, item.uuid)
        for item in saved
        if item.searcher_metric is not None
    ]
    return {uuid for _, _, uuid in sorted(scored)[:count]}


class GarbageCollector:
    """Deletes superfluous checkpoints and deleted experiments in its own thread, whenever
    ``has_garbage`` is set.

    Every deletion can be repeated: the next master redoes deletions that a crash interrupted, and
    checkpoints whose files could not be deleted are retried every ten minutes.
    """

    def __init__(self, state: MasterState) -> None:
        self._state = state
        self._thread: threading.Thread | None = None
        self._closed = False

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._run, name="garbage-collector", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Finish the current deletion and end the thread."""
        self._closed = True
        self._state.has_garbage.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._closed:
            self._state.has_garbage.wait(_RETRY_SECONDS)
            self._state.has_garbage.clear()
            if not self._closed:
                try:
                    self.collect()
                except Exception:
                    log.exception("garbage collection failed")

    def collect(self) -> None:
        """Delete everything that is due for deletion."""
        for number in self._state.read(experiment_rows.to_collect):
            with self._guarded(number):
                self._apply_policy(number)
        for checkpoint in self._state.read(checkpoint_rows.marked_deleted):
            with self._guarded(checkpoint.experiment_id or 0):
                self._delete_checkpoint(checkpoint)
        for experiment in self._state.read(experiment_rows.in_states, ExperimentState.DELETING):
            with self._guarded(experiment.id):
                self._delete_experiment(experiment)

    @contextlib.contextmanager
    def _guarded(self, number: int) -> Iterator[None]:
        """Log an exception of one deletion: it is retried later, and must not block the others."""
        try:
            yield
        except Exception:
            log.exception("garbage collection of experiment %d failed and will be retried", number)

    def _apply_policy(self, number: int) -> None:
        """Mark the checkpoints that an ended experiment's policy does not keep."""
        with transaction(self._state) as tx:
            experiment = experiment_rows.get(tx.connection, number, derived=False)
            experiment_rows.change(tx.connection, number, collect=0)
            if experiment is None or experiment.state not in (
                ExperimentState.COMPLETED,
                ExperimentState.CANCELED,
                ExperimentState.ERROR,
            ):
                return
            going = superfluous(
                checkpoint_rows.of_experiment(tx.connection, number),
                policy_of(experiment.config),
                smaller_is_better=experiment_rows.smaller_is_better(experiment.config),
                keep=needed(tx.connection),
            )
            checkpoint_rows.mark_deleted(tx.connection, [checkpoint.uuid for checkpoint in going])

    def _delete_checkpoint(self, checkpoint: Checkpoint) -> None:
        base = _base(checkpoint)
        if base is None:
            log.warning("checkpoint %s is kept: its storage is not on this machine's disk", checkpoint.uuid)
            with transaction(self._state) as tx:
                checkpoint_rows.change(tx.connection, checkpoint.uuid, doomed=0)
            return
        left = checkpoint.resources
        try:
            storage.delete(base, checkpoint.uuid)
        except OSError as error:  # the checkpoint stays marked: the next collection retries
            if checkpoint.state is not CheckpointState.PARTIALLY_DELETED:
                log.warning("checkpoint %s could not be deleted and will be retried: %s", checkpoint.uuid, error)
            state, doomed = CheckpointState.PARTIALLY_DELETED, 1
            with contextlib.suppress(OSError):  # the storage may not even be readable
                left = storage.remaining(base, checkpoint.uuid)
        else:
            state, doomed = CheckpointState.DELETED, 0
        with transaction(self._state) as tx:
            size = sum(left.values())
            checkpoint_rows.change(
                tx.connection, checkpoint.uuid, doomed=doomed, state=state, resources=dict(left), size=size
            )

    def _delete_experiment(self, experiment: Experiment) -> None:
        number = experiment.id
        with self._state.database.reading() as connection:
            saved = checkpoint_rows.of_experiment(connection, number)
            known = trial_rows.of_experiment(connection, number)
            tasks = {trial.id: trial_rows.task_ids(connection, trial) for trial in known}
        try:
            self._delete_files(experiment, saved)
        except OSError as error:
            log.warning("experiment %d could not be deleted: %s", number, error)
            with transaction(self._state) as tx:
                experiment_rows.change(tx.connection, number, state=ExperimentState.DELETE_FAILED, error=str(error))
            return
        directory = self._state.directory
        for trial_id, names in tasks.items():
            runs = [folder for name in names for folder in directory.allocations.glob(f"{name}.*")]
            for folder in (directory.trial_logs(trial_id), *runs):
                shutil.rmtree(folder, ignore_errors=True)
        with transaction(self._state) as tx:
            experiment_rows.erase(tx.connection, number)
        self._state.forget(number)

    def _delete_files(self, experiment: Experiment, saved: list[Checkpoint]) -> None:
        for checkpoint in saved:
            folder = _base(checkpoint)
            if folder is not None:
                storage.delete(folder, checkpoint.uuid)
        base = storage.base_of(experiment.config)
        if base is None:
            return
        storage.delete_tensorboard(base, self._state.info.cluster_id, experiment.id)
        with contextlib.suppress(OSError):
            base.joinpath(self._state.info.cluster_id).rmdir()  # only succeeds if empty
