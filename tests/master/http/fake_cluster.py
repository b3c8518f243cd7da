"""A cluster that remembers in plain lists: what the routes are tested against without processes and disks."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from zero_trial.master import auth
from zero_trial.master.errors import Conflict, Invalid, NotFound
from zero_trial.master.records import (
    AgentInfo,
    Allocation,
    AllocationState,
    Checkpoint,
    CheckpointState,
    Created,
    Experiment,
    ExperimentPatch,
    ExperimentState,
    Job,
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
    TrialState,
    User,
    Workload,
)

CONFIG = {
    "name": "example",
    "entrypoint": "python3 train.py",
    "hyperparameters": {"global_batch_size": 8, "lr": {"type": "const", "val": 0.1}},
    "searcher": {"name": "single", "metric": "validation_loss", "smaller_is_better": True},
    "resources": {"slots_per_trial": 1},
    "checkpoint_storage": {"type": "shared_fs", "host_path": "/nowhere", "storage_path": "ck"},
}
UUID = "6f1c8d2e-0000-4000-8000-0123456789ab"
USER_TOKEN = "user-token"
TASK_TOKEN = "task-token"
OTHER_TASK_TOKEN = "other-task-token"


def experiment(number: int, **changes: Any) -> Experiment:
    record = Experiment(
        id=number,
        state=ExperimentState.ACTIVE,
        config=CONFIG,
        original_config="name: example\n",
        owner="determined",
        job_id=f"job-{number}",
        created=1_700_000_000.0,
        name="example",
        shown_state="RUNNING",
        num_trials=1,
    )
    return replace(record, **changes)


def trial(number: int, experiment_id: int, **changes: Any) -> Trial:
    record = Trial(
        id=number,
        experiment_id=experiment_id,
        request_id=f"r{number}",
        task_id=f"task-{number}",
        state=TrialState.ACTIVE,
        hparams={"lr": 0.1},
        seed=1,
        created=1_700_000_001.0,
        run_id=1,
        shown_state="RUNNING",
    )
    return replace(record, **changes)


def allocation(trial_id: int, experiment_id: int) -> Allocation:
    return Allocation(
        id=f"task-{trial_id}.1",
        trial_id=trial_id,
        experiment_id=experiment_id,
        task_id=f"task-{trial_id}",
        run_id=1,
        state=AllocationState.RUNNING,
        slots=(0,),
        created=1_700_000_001.0,
        resources_id=f"resources-{trial_id}",
        container_id=f"container-{trial_id}",
        started=1_700_000_002.0,
    )


def checkpoint(uuid: str, trial_id: int, experiment_id: int, **changes: Any) -> Checkpoint:
    record = Checkpoint(
        uuid=uuid,
        state=CheckpointState.COMPLETED,
        trial_id=trial_id,
        experiment_id=experiment_id,
        task_id=f"task-{trial_id}",
        allocation_id=f"task-{trial_id}.1",
        reported=1_700_000_010.0,
        metadata={"steps_completed": 5},
        resources={"state.json": 11},
        size=11,
        steps_completed=5,
        hparams={"lr": 0.1},
        experiment_config=CONFIG,
        validation_metrics={"validation_loss": 0.5},
        searcher_metric=0.5,
    )
    return replace(record, **changes)


@dataclass
class FakeExperiments:
    world: FakeCluster

    def create(self, new: NewExperiment) -> Created:
        if "wrong" in new.config_text:
            raise Invalid("<config>.searcher.name: must be one of the four searchers")
        number = 0 if new.validate_only else max(self.world.stored_experiments, default=0) + 1
        made = experiment(number, owner=new.owner, original_config=new.config_text, parent_id=new.parent_id)
        self.world.calls.append(("create", new))
        if number:
            self.world.stored_experiments[number] = made
            self.world.contexts[number] = new.context
        return Created(made, ("LAUNCH_WARNING_CURRENT_SLOTS_EXCEEDED", "a warning in words"))

    def get(self, experiment_id: int) -> Experiment:
        if experiment_id not in self.world.stored_experiments:
            raise NotFound(f"there is no experiment {experiment_id}")
        return self.world.stored_experiments[experiment_id]

    def all(self) -> list[Experiment]:
        return list(self.world.stored_experiments.values())

    def context(self, experiment_id: int) -> bytes:
        self.get(experiment_id)
        return self.world.contexts.get(experiment_id, b"")

    def _note(self, verb: str, experiment_id: int) -> None:
        self.get(experiment_id)
        self.world.calls.append((verb, experiment_id))

    def pause(self, experiment_id: int) -> None:
        self._note("pause", experiment_id)

    def activate(self, experiment_id: int) -> None:
        self._note("activate", experiment_id)

    def cancel(self, experiment_id: int) -> None:
        self._note("cancel", experiment_id)

    def kill(self, experiment_id: int) -> None:
        self._note("kill", experiment_id)

    def archive(self, experiment_id: int) -> None:
        self.get(experiment_id)
        raise Conflict("an experiment that runs is not archived")

    def unarchive(self, experiment_id: int) -> None:
        self._note("unarchive", experiment_id)

    def delete(self, experiment_id: int) -> None:
        self._note("delete", experiment_id)

    def patch(self, experiment_id: int, patch: ExperimentPatch) -> Experiment:
        found = self.get(experiment_id)
        self.world.calls.append(("patch", patch))
        changes = {
            name: getattr(patch, name) for name in ("name", "description", "notes") if getattr(patch, name) is not None
        }
        if patch.labels is not None:
            changes["labels"] = tuple(patch.labels)
        if patch.add_label is not None:
            changes["labels"] = (*found.labels, patch.add_label)
        if patch.remove_label is not None:
            changes["labels"] = tuple(label for label in found.labels if label != patch.remove_label)
        self.world.stored_experiments[experiment_id] = replace(found, **changes)
        return self.world.stored_experiments[experiment_id]

    def resume_ended(self, experiment_id: int, override_config: str) -> Created:
        self.world.calls.append(("continue", override_config))
        return Created(self.get(experiment_id))

    def preview_gc(self, experiment_id: int, policy: Any) -> list[Checkpoint]:
        self.world.calls.append(("preview_gc", policy))
        return self.checkpoints(experiment_id)

    def best_searcher_metric(self, experiment_id: int) -> float | None:
        self.get(experiment_id)
        return self.world.best

    def trials(self, experiment_id: int) -> list[Trial]:
        self.get(experiment_id)
        return [each for each in self.world.stored_trials.values() if each.experiment_id == experiment_id]

    def checkpoints(self, experiment_id: int) -> list[Checkpoint]:
        self.get(experiment_id)
        return [each for each in self.world.stored_checkpoints.values() if each.experiment_id == experiment_id]


@dataclass
class FakeTrials:
    world: FakeCluster

    def get(self, trial_id: int) -> Trial:
        if trial_id not in self.world.stored_trials:
            raise NotFound(f"there is no trial {trial_id}")
        return self.world.stored_trials[trial_id]

    def kill(self, trial_id: int) -> None:
        self.get(trial_id)
        self.world.calls.append(("kill_trial", trial_id))

    def workloads(self, trial_id: int, *, include_batch_metrics: bool = False) -> list[Workload]:
        self.get(trial_id)
        report = MetricReport(trial_id, 1, "training", 5, {"loss": float("nan")}, reported=1_700_000_005.0)
        validation = replace(report, group="validation", metrics={"validation_loss": 0.5})
        return [
            Workload(training=report),
            Workload(validation=validation),
            Workload(checkpoint=checkpoint(UUID, trial_id, 1)),
        ]

    def metrics(self, trial_id: int, group: str | None = None) -> list[MetricReport]:
        found = [each for each in self.world.reports if each.trial_id == trial_id]
        return [each for each in found if group is None or each.group == group]

    def checkpoints(self, trial_id: int) -> list[Checkpoint]:
        return [each for each in self.world.stored_checkpoints.values() if each.trial_id == trial_id]

    def logs(self, trial_id: int, query: LogQuery) -> Iterator[LogLine | None]:
        self.world.calls.append(("logs", query))
        found = [line for line in self.world.lines if line.trial_id == trial_id]
        if query.newest_first:
            found = found[::-1]
        yield from found[: query.limit]
        while query.follow and not self.world.log_ended.is_set():
            self.world.log_beats += 1
            yield None
            if self.world.log_ended.wait(0.02):
                break
        if query.follow:
            yield line("the last line")
        self.world.log_closed.set()

    def report_metrics(self, trial_id: int, **report: Any) -> None:
        if report["run_id"] != self.get(trial_id).run_id:
            raise Invalid("the run is over", got=report["run_id"], expected=self.get(trial_id).run_id)
        self.world.reports.append(
            MetricReport(
                trial_id,
                report["run_id"],
                report["group"],
                report["steps_completed"],
                report["metrics"],
                report["batch_metrics"],
                report["reported"] or 1_700_000_003.0,
            )
        )

    def report_progress(self, trial_id: int, progress: float, *, is_raw: bool) -> None:
        self.world.calls.append(("progress", progress, is_raw))

    def set_runner_state(self, trial_id: int, state: str) -> None:
        self.world.calls.append(("runner", state))

    def early_exit(self, trial_id: int, reason: str) -> None:
        self.world.calls.append(("early_exit", reason))

    def metadata(self, trial_id: int) -> dict[str, Any]:
        return self.world.run_metadata

    def set_metadata(self, trial_id: int, metadata: Any) -> None:
        self.world.run_metadata = dict(metadata)

    def start_run(self, trial_id: int) -> None:
        self.world.calls.append(("start_run", trial_id))


@dataclass
class FakeTasks:
    world: FakeCluster

    def task(self, task_id: str) -> Task:
        for found in self.tasks():
            if found.id == task_id:
                return found
        raise NotFound(f"there is no task {task_id}")

    def tasks(self) -> list[Task]:
        return [
            Task(
                each.task_id,
                each.trial_id,
                each.experiment_id,
                f"Experiment {each.experiment_id}",
                "determined",
                1_700_000_001.0,
                None,
                (each,),
            )
            for each in self.world.allocations.values()
        ]

    def allocation(self, allocation_id: str) -> Allocation:
        return self.world.allocations[allocation_id]

    def context(self, task_id: str) -> bytes:
        return self.world.contexts[self.task(task_id).experiment_id]

    def preemption_signal(self, allocation_id: str, timeout: float) -> bool:
        self.world.calls.append(("preemption", allocation_id, timeout))
        return self.world.preempt.wait(timeout)

    def ack_preemption(self, allocation_id: str) -> None:
        self.world.calls.append(("ack", allocation_id))

    def rendezvous(self, allocation_id: str, resources_id: str) -> RendezvousInfo:
        return RendezvousInfo(("127.0.0.1",), 0, (1,))

    def accelerator_data(self, allocation_id: str, data: Any) -> None:
        self.world.calls.append(("accelerator", data))

    def set_ready(self, allocation_id: str) -> None:
        self.world.calls.append(("ready", allocation_id))

    def append_logs(self, task_id: str, lines: Sequence[Any]) -> None:
        self.world.calls.append(("append_logs", task_id, list(lines)))

    def logs(self, task_id: str, query: LogQuery) -> Iterator[LogLine | None]:
        return self.world.trials.logs(self.task(task_id).trial_id, query)


@dataclass
class FakeCheckpoints:
    world: FakeCluster

    def get(self, uuid: str) -> Checkpoint:
        if uuid not in self.world.stored_checkpoints:
            raise NotFound(f"there is no checkpoint {uuid}")
        return self.world.stored_checkpoints[uuid]

    def report(self, checkpoint: Checkpoint) -> None:
        self.world.calls.append(("report_checkpoint", checkpoint))

    def patch_resources(self, uuid: str, resources: Any) -> None:
        self.world.calls.append(("patch_resources", uuid, dict(resources)))

    def delete(self, uuids: Sequence[str]) -> None:
        self.world.calls.append(("delete_checkpoints", list(uuids)))

    def remove_files(self, uuids: Sequence[str], globs: Sequence[str]) -> None:
        self.world.calls.append(("remove_files", list(uuids), list(globs)))

    def directory(self, uuid: str) -> Path:
        if self.world.files is None:
            raise NotFound(f"the files of {uuid} are gone")
        return self.world.files


@dataclass
class FakeMachine:
    world: FakeCluster

    def info(self) -> MasterInfo:
        return MasterInfo("0.38.1", "master", "cluster", "here")

    def log_file(self) -> Path:
        return self.world.log

    def agents(self) -> list[AgentInfo]:
        return [AgentInfo("laptop", tuple(self.slots()), 1_700_000_000.0, version="0.38.1")]

    def slots(self) -> list[SlotInfo]:
        return [
            SlotInfo(0, "cpu", "one core", allocation_id="task-1.1"),
            SlotInfo(1, "cpu", "one core", enabled=self.world.slot_enabled),
        ]

    def set_slot_enabled(self, number: int, enabled: bool) -> SlotInfo:
        if number > 1:
            raise NotFound(f"there is no slot {number}")
        self.world.slot_enabled = enabled
        return self.slots()[number]

    def jobs(self) -> list[Job]:
        return [Job("job-1", 1, "example", "determined", 1_700_000_000.0, 42, 1.0, "SCHEDULED", 1, 1, 0)]

    def resource_pools(self) -> list[ResourcePool]:
        return [ResourcePool("default", "this machine", "cpu", 2, 1)]


@dataclass
class FakeAccounts:
    world: FakeCluster

    def user(self, name: str) -> User | None:
        return next((user for user in self.world.stored_users.values() if user.name == name), None)

    def users(self) -> list[User]:
        return list(self.world.stored_users.values())

    def put_user(self, user: User) -> User:
        user = replace(user, id=user.id or max(self.world.stored_users, default=0) + 1)
        self.world.stored_users[user.id] = user
        return user

    def add_token(self, token_digest: str, user_id: int, expires: float | None = None) -> None:
        self.world.token_owners[token_digest] = user_id

    def drop_token(self, token_digest: str) -> None:
        self.world.token_owners.pop(token_digest, None)

    def token_owner(self, token_digest: str) -> TokenOwner | None:
        owner = self.world.token_owners.get(token_digest)
        if isinstance(owner, int):
            return TokenOwner(user=self.world.stored_users[owner])
        return TokenOwner(allocation=self.world.allocations[owner]) if isinstance(owner, str) else None


def line(message: str, trial_id: int = 1, **changes: Any) -> LogLine:
    return replace(
        LogLine("1", 1_700_000_004.0, message, trial_id, f"task-{trial_id}", f"task-{trial_id}.1"), **changes
    )


@dataclass
class FakeCluster:
    """Two experiments with one trial and one running allocation each; everything that a verb was asked lies in ``calls``."""

    calls: list[Any] = field(default_factory=list)
    stored_experiments: dict[int, Experiment] = field(default_factory=lambda: {1: experiment(1), 2: experiment(2)})
    stored_trials: dict[int, Trial] = field(default_factory=lambda: {1: trial(1, 1), 2: trial(2, 2)})
    stored_checkpoints: dict[str, Checkpoint] = field(default_factory=dict)
    stored_users: dict[int, User] = field(default_factory=lambda: {1: User(1, "determined", True, True, "")})
    contexts: dict[int, bytes] = field(default_factory=lambda: {1: b"context of 1", 2: b"context of 2"})
    allocations: dict[str, Allocation] = field(
        default_factory=lambda: {each.id: each for each in (allocation(1, 1), allocation(2, 2))}
    )
    token_owners: dict[str, int | str] = field(default_factory=dict)
    reports: list[MetricReport] = field(default_factory=list)
    lines: list[LogLine] = field(default_factory=lambda: [line("first"), line("second", rank=1, level="ERROR")])
    run_metadata: dict[str, Any] = field(default_factory=dict)
    files: Path | None = None
    log: Path = Path("/nowhere/master.log")
    best: float | None = None
    slot_enabled: bool = True
    preempt: threading.Event = field(default_factory=threading.Event)
    log_ended: threading.Event = field(default_factory=threading.Event)
    log_closed: threading.Event = field(default_factory=threading.Event)
    log_beats: int = 0

    def __post_init__(self) -> None:
        self.token_owners[auth.digest(USER_TOKEN)] = 1
        self.token_owners[auth.digest(TASK_TOKEN)] = "task-1.1"
        self.token_owners[auth.digest(OTHER_TASK_TOKEN)] = "task-2.1"
        self.experiments = FakeExperiments(self)
        self.trials = FakeTrials(self)
        self.tasks = FakeTasks(self)
        self.checkpoints = FakeCheckpoints(self)
        self.machine = FakeMachine(self)
        self.accounts = FakeAccounts(self)
