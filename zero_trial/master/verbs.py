"""What can be asked of the master, as typed verbs; HTTP is one way to say them, tests are another.

A ``Cluster`` is six small groups of verbs. Every verb may be called from any thread. Errors are the five exceptions of this file; whoever may
ask for what is decided before a verb is called. ``offset`` and ``limit`` belong to whoever renders: lists are returned whole, oldest first.

Over HTTP: ``with api.Server(cluster, port=0) as server`` listens from then on at ``server.url``. ``auth.ensure_local_user(cluster.accounts, file)``
gives the local user's name, password and token, kept in a file of mode 0600.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from zero_trial.master.records import (
    AgentInfo,
    Allocation,
    Checkpoint,
    Created,
    Experiment,
    ExperimentPatch,
    GcPolicy,
    Job,
    Json,
    LogLine,
    LogQuery,
    MasterInfo,
    MetricReport,
    NewExperiment,
    RendezvousInfo,
    ResourcePool,
    SlotInfo,
    Task,
    TokenOwner,
    Trial,
    User,
    Workload,
)


class ExperimentVerbs(Protocol):
    """Experiments as a whole."""

    def create(self, new: NewExperiment) -> Created:
        """Validate, store and (if asked) activate. Invalid with every fault of the configuration, or when it needs more slots than exist."""

    def get(self, experiment_id: int) -> Experiment:
        """NotFound if there is none."""

    def all(self) -> list[Experiment]:
        """Every experiment, archived ones too."""

    def context(self, experiment_id: int) -> bytes:
        """The model definition as .tar.gz."""

    def pause(self, experiment_id: int) -> None:
        """Its trials are preempted and wait. Conflict if it has ended; no effect if it is paused."""

    def activate(self, experiment_id: int) -> None:
        """Its trials go on from their last checkpoints. Conflict if it has ended; no effect if it is active."""

    def cancel(self, experiment_id: int) -> None:
        """Trials stop at their next chance, with a checkpoint, and the experiment ends CANCELED. No effect on an ended one."""

    def kill(self, experiment_id: int) -> None:
        """Trials are ended at once; CANCELED. No effect on an ended one."""

    def archive(self, experiment_id: int) -> None:
        """Conflict unless it has ended."""

    def unarchive(self, experiment_id: int) -> None:
        """Conflict unless it has ended."""

    def delete(self, experiment_id: int) -> None:
        """Everything of it goes, its checkpoints on disk too; returns at once, NotFound once it is done. Conflict unless it has ended."""

    def patch(self, experiment_id: int, patch: ExperimentPatch) -> Experiment:
        """Change what the patch names; returns the experiment as it is now."""

    def resume_ended(self, experiment_id: int, override_config: str) -> Created:
        """``det experiment continue``: run an ended experiment of the single searcher again from its last checkpoint, with a changed config."""

    def preview_gc(self, experiment_id: int, policy: GcPolicy) -> list[Checkpoint]:
        """The checkpoints that would go if this were the policy; deletes nothing."""

    def best_searcher_metric(self, experiment_id: int) -> float | None:
        """The best value of the searcher's metric over all trials as it was reported; None if no trial has validated yet."""

    def trials(self, experiment_id: int) -> list[Trial]:
        """NotFound if there is no such experiment."""

    def checkpoints(self, experiment_id: int) -> list[Checkpoint]:
        """Of all its trials, deleted ones too."""


class TrialVerbs(Protocol):
    """Single trials: what is known of them, and what they report."""

    def get(self, trial_id: int) -> Trial:
        """NotFound if there is none."""

    def kill(self, trial_id: int) -> None:
        """End it now; the search goes on as if it had been canceled."""

    def workloads(self, trial_id: int, *, include_batch_metrics: bool = False) -> list[Workload]:
        """Training and validation reports and checkpoints, by steps completed; archived reports are left out."""

    def metrics(self, trial_id: int, group: str | None = None) -> list[MetricReport]:
        """Reports of a group (None: of all groups), archived ones left out."""

    def checkpoints(self, trial_id: int) -> list[Checkpoint]:
        """Of this trial, deleted ones too."""

    def logs(self, trial_id: int, query: LogQuery) -> Iterator[LogLine | None]:
        """Lines of all its runs. The iterator may be dropped at any time. With ``follow`` it yields a line within half a second of its being
        written, and None after a second or two without any, so that the caller can see whether its reader is still there."""

    def report_metrics(
        self,
        trial_id: int,
        *,
        run_id: int,
        group: str,
        steps_completed: int | None,
        metrics: Json,
        batch_metrics: Any = None,
        reported: float | None = None,
    ) -> None:
        """Invalid if the run id is stale. Cheap; a report is visible at once and on disk within a tenth of a second (validations: on return)."""

    def report_progress(self, trial_id: int, progress: float, *, is_raw: bool) -> None:
        """``is_raw``: a fraction of this trial's own work from 0 to 1."""

    def set_runner_state(self, trial_id: int, state: str) -> None:
        """What the harness says that it does."""

    def early_exit(self, trial_id: int, reason: str) -> None:
        """The trial ends itself; ``reason`` as on the wire (EXITED_REASON_INVALID_HP ...)."""

    def metadata(self, trial_id: int) -> Json:
        """What the trial said of itself with ``core_context.train.set_metadata``; empty if it said nothing."""

    def set_metadata(self, trial_id: int, metadata: Json) -> None:
        """Replace it."""

    def start_run(self, trial_id: int) -> None:
        """A rank has started and will report (``POST /runs/start``, whose runId is the trial's id). Conflict if the trial has ended."""


class TaskVerbs(Protocol):
    """What a running allocation asks for."""

    def task(self, task_id: str) -> Task:
        """NotFound if there is none."""

    def tasks(self) -> list[Task]:
        """Those with an allocation that has not ended."""

    def allocation(self, allocation_id: str) -> Allocation:
        """NotFound if there is none."""

    def context(self, task_id: str) -> bytes:
        """The context directory of the task's experiment as .tar.gz."""

    def preemption_signal(self, allocation_id: str, timeout: float) -> bool:
        """Wait until the allocation should stop, at most ``timeout`` seconds (0: do not wait); True if it should."""

    def ack_preemption(self, allocation_id: str) -> None:
        """It will end now because it was asked to."""

    def rendezvous(self, allocation_id: str, resources_id: str) -> RendezvousInfo:
        """Where the ranks meet. NotFound for other resources than its own."""

    def accelerator_data(self, allocation_id: str, data: Json) -> None:
        """What the harness saw of the accelerators."""

    def set_ready(self, allocation_id: str) -> None:
        """The harness says that its processes run."""

    def append_logs(self, task_id: str, lines: Sequence[Json]) -> None:
        """Lines sent over HTTP (``POST /task/logs``) instead of written to the pipe: dicts with log, and maybe timestamp, level, rankId, stdtype."""

    def logs(self, task_id: str, query: LogQuery) -> Iterator[LogLine | None]:
        """As the trial's logs."""


class CheckpointVerbs(Protocol):
    """Checkpoints by their UUID."""

    def get(self, uuid: str) -> Checkpoint:
        """NotFound if there is none."""

    def report(self, checkpoint: Checkpoint) -> None:
        """Store what a trial has saved (COMPLETED). Only uuid, allocation_id, task_id, metadata, resources, reported and state are read."""

    def patch_resources(self, uuid: str, resources: Mapping[str, int]) -> None:
        """``PATCH /checkpoints``: what is left after the harness deleted files of it; nothing left means DELETED."""

    def delete(self, uuids: Sequence[str]) -> None:
        """Delete on disk, later; Conflict for one that a registered or running trial needs. NotFound before anything is deleted."""

    def remove_files(self, uuids: Sequence[str], globs: Sequence[str]) -> None:
        """Delete the files of those checkpoints that match a glob (all if there are no globs)."""

    def directory(self, uuid: str) -> Path:
        """Where its files lie. NotFound if they are gone, Unsupported if its storage is not on this machine's disk."""


class MachineVerbs(Protocol):
    """The machine and its queue."""

    def info(self) -> MasterInfo:
        """Version and identity."""

    def log_file(self) -> Path:
        """The master's own log: one ``2026-01-31T12:00:00.000Z LEVEL message`` a line (other lines go on with the one before)."""

    def agents(self) -> list[AgentInfo]:
        """This machine."""

    def slots(self) -> list[SlotInfo]:
        """All its slots."""

    def set_slot_enabled(self, number: int, enabled: bool) -> SlotInfo:
        """A disabled slot is not given out any more; who holds it keeps it. NotFound."""

    def jobs(self) -> list[Job]:
        """Experiments that have not ended, in the order of the queue."""

    def resource_pools(self) -> list[ResourcePool]:
        """The one pool."""


class AccountVerbs(Protocol):
    """Users and tokens as the store keeps them; hashing and checking are auth.py's."""

    def user(self, name: str) -> User | None: ...

    def users(self) -> list[User]: ...

    def put_user(self, user: User) -> User:
        """Insert (id 0) or replace; returns it with its id."""

    def add_token(self, token_digest: str, user_id: int, expires: float | None = None) -> None:
        """``token_digest``: see tokens.digest. Tokens of allocations are made where allocations are."""

    def drop_token(self, token_digest: str) -> None: ...

    def token_owner(self, token_digest: str) -> TokenOwner | None:
        """Whom a token speaks for; None if it is unknown, expired, or its allocation has ended. Fast: asked on every request."""


class Cluster(Protocol):
    """The master without its HTTP."""

    @property
    def experiments(self) -> ExperimentVerbs: ...

    @property
    def trials(self) -> TrialVerbs: ...

    @property
    def tasks(self) -> TaskVerbs: ...

    @property
    def checkpoints(self) -> CheckpointVerbs: ...

    @property
    def machine(self) -> MachineVerbs: ...

    @property
    def accounts(self) -> AccountVerbs: ...
