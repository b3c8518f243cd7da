"""Which checkpoints of an ended experiment go, as a pure function of the policy.

A checkpoint stays if it is among the ``save_experiment_best`` best of the experiment, the ``save_trial_best`` best or the ``save_trial_latest``
newest of its trial. Best goes by the searcher's metric of the validation at the checkpoint's step; one without that metric is never among the best.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from zero_trial.master.agent import storage
from zero_trial.master.core.sources import needed
from zero_trial.master.core.state import MasterState
from zero_trial.master.core.transaction import transaction
from zero_trial.master.records import Checkpoint, CheckpointState, Experiment, ExperimentState, GcPolicy
from zero_trial.master.store import checkpoints, experiments, trials


def policy_of(config: Mapping[str, Any]) -> GcPolicy:
    """The policy of a completed config."""
    section = config.get("checkpoint_storage") or {}
    return GcPolicy(
        int(section.get("save_experiment_best", 0)),
        int(section.get("save_trial_best", 1)),
        int(section.get("save_trial_latest", 1)),
    )


def superfluous(
    checkpoints: Sequence[Checkpoint], policy: GcPolicy, *, smaller_is_better: bool, keep: Iterable[str] = ()
) -> list[Checkpoint]:
    """Checkpoints that the policy does not save; ``keep`` are UUIDs that stay anyway, because another experiment starts from them."""
    there = [item for item in checkpoints if item.state is CheckpointState.COMPLETED]
    saved = set(keep) | _best(there, policy.save_experiment_best, smaller_is_better)
    for trial_id in {item.trial_id for item in there}:
        of_trial = [item for item in there if item.trial_id == trial_id]
        saved |= _best(of_trial, policy.save_trial_best, smaller_is_better)
        newest = sorted(of_trial, key=lambda item: (item.steps_completed, item.reported), reverse=True)
        saved |= {item.uuid for item in newest[: policy.save_trial_latest]}
    return [item for item in there if item.uuid not in saved]


def _best(checkpoints: Iterable[Checkpoint], count: int, smaller_is_better: bool) -> set[str]:
    sign = 1 if smaller_is_better else -1
    scored = [
        (sign * item.searcher_metric, item.steps_completed, item.uuid)
        for item in checkpoints
        if item.searcher_metric is not None
    ]
    return {uuid for _, _, uuid in sorted(scored)[:count]}


# Deletes what is to go: superfluous checkpoints, deleted experiments. What was begun is done again after a crash; nothing is lost by that.


log = logging.getLogger(__name__)


class GarbageCollector:
    """Works when the hub says that there are chores."""

    def __init__(self, state: MasterState) -> None:
        self._state = state
        self._thread: threading.Thread | None = None
        self._closed = False

    def start(self) -> None:
        """Work in a thread of its own."""
        self._thread = threading.Thread(target=self._work_on, name="janitor", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Finish what is being done."""
        self._closed = True
        self._state.has_garbage.set()
        if self._thread is not None:
            self._thread.join()

    def _work_on(self) -> None:
        while not self._closed:
            self._state.has_garbage.wait()
            self._state.has_garbage.clear()
            if not self._closed:
                try:
                    self.work()
                except Exception:
                    log.exception("the janitor stumbled")

    def work(self) -> None:
        """Do all that there is to do."""
        with self._state.database.reading() as connection:
            to_collect = experiments.to_collect(connection)
        for number in to_collect:
            self._collect(number)
        with self._state.database.reading() as connection:
            doomed = checkpoints.marked_deleted(connection)
        for checkpoint in doomed:
            self._delete_checkpoint(checkpoint)
        with self._state.database.reading() as connection:
            deleting = experiments.ids(connection, ExperimentState.DELETING)
        for number in deleting:
            self._delete_experiment(number)

    def _collect(self, number: int) -> None:
        """Mark the checkpoints of an ended experiment that its policy does not save."""
        with transaction(self._state) as tx:
            experiment = experiments.get(tx.connection, number, derived=False)
            experiments.change(tx.connection, number, collect=0)
            if experiment is None or experiment.state not in (
                ExperimentState.COMPLETED,
                ExperimentState.CANCELED,
                ExperimentState.ERROR,
            ):
                return
            going = superfluous(
                checkpoints.of_experiment(tx.connection, number),
                policy_of(experiment.config),
                smaller_is_better=experiments.smaller_is_better(experiment.config),
                keep=needed(tx.connection),
            )
            checkpoints.mark_deleted(tx.connection, [checkpoint.uuid for checkpoint in going])

    def _delete_checkpoint(self, checkpoint: Checkpoint) -> None:
        base = storage.base_of(checkpoint.experiment_config)
        if base is None:
            log.warning("checkpoint %s is kept: its storage is not on this machine's disk", checkpoint.uuid)
            with transaction(self._state) as tx:
                checkpoints.change(tx.connection, checkpoint.uuid, doomed=0)
            return
        try:
            storage.delete(base, checkpoint.uuid)
        except OSError as error:
            log.warning("checkpoint %s cannot be deleted: %s", checkpoint.uuid, error)
            state = CheckpointState.PARTIALLY_DELETED
        else:
            state = CheckpointState.DELETED
        with transaction(self._state) as tx:
            checkpoints.change(tx.connection, checkpoint.uuid, doomed=0, state=state, resources={}, size=0)

    def _delete_experiment(self, number: int) -> None:
        with self._state.database.reading() as connection:
            experiment = experiments.get(connection, number, derived=False)
            saved = checkpoints.of_experiment(connection, number)
            known = trials.of_experiment(connection, number)
        if experiment is None:
            return
        try:
            self._delete_files(experiment, saved)
        except OSError as error:
            log.warning("experiment %d cannot be deleted: %s", number, error)
            with transaction(self._state) as tx:
                experiments.change(tx.connection, number, state=ExperimentState.DELETE_FAILED, error=str(error))
            return
        for trial in known:
            shutil.rmtree(self._state.directory.trial_logs(trial.id), ignore_errors=True)
            for folder in self._state.directory.allocations.glob(f"{trial.task_id}.*"):
                shutil.rmtree(folder, ignore_errors=True)
        with transaction(self._state) as tx:
            experiments.erase(tx.connection, number)
        self._state.forget(number)

    def _delete_files(self, experiment: Experiment, saved: list[Checkpoint]) -> None:
        base = storage.base_of(experiment.config)
        if base is None:
            return
        for checkpoint in saved:
            storage.delete(base, checkpoint.uuid)
        storage.delete_tensorboard(base, self._state.info.cluster_id, experiment.id)
        with contextlib.suppress(OSError):
            base.joinpath(self._state.info.cluster_id).rmdir()  # only if nothing else is in it
