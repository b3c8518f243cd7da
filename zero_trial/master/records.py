"""The values that the master's services accept and return, as frozen dataclasses, and the errors
that they raise for rejected requests.

Times are seconds since the epoch (UTC). States have Determined's names without the prefix
``STATE_``. Mappings contain plain JSON.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from enum import Enum
from typing import Any, TypeAlias, TypeVar

from zero_trial.errors import ZeroTrialError

Json = Mapping[str, Any]
T = TypeVar("T")
# The range of UTC times in RFC 3339: 0001-01-01T00:00:00Z to 9999-12-31T23:59:59Z.
EARLIEST, LATEST = -62135596800.0, 253402300799.0


class ExperimentState(str, Enum):
    """The state of an experiment or a trial. In a STOPPING state, it waits for its trials or its
    run to end; the states after the STOPPING states are final. Only experiments are deleted."""

    ACTIVE = "ACTIVE"
    PAUSED = "PAUSED"
    STOPPING_COMPLETED = "STOPPING_COMPLETED"
    STOPPING_CANCELED = "STOPPING_CANCELED"
    STOPPING_KILLED = "STOPPING_KILLED"
    STOPPING_ERROR = "STOPPING_ERROR"
    COMPLETED = "COMPLETED"
    CANCELED = "CANCELED"
    ERROR = "ERROR"
    DELETING = "DELETING"
    DELETE_FAILED = "DELETE_FAILED"

    @property
    def final(self) -> bool:
        """Return whether this state is final (except for ``continue``)."""
        return not self.stopping and self not in (ExperimentState.ACTIVE, ExperimentState.PAUSED)

    @property
    def stopping(self) -> bool:
        return self.value.startswith("STOPPING_")


TrialState: TypeAlias = ExperimentState


class AllocationState(str, Enum):
    """The state of one run of a trial: waiting for slots, starting, running, or ended."""

    QUEUED = "QUEUED"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    TERMINATED = "TERMINATED"


class CheckpointState(str, Enum):
    """The state of a checkpoint; only a COMPLETED checkpoint can be restored."""

    ACTIVE = "ACTIVE"
    COMPLETED = "COMPLETED"
    ERROR = "ERROR"
    DELETED = "DELETED"
    PARTIALLY_DELETED = "PARTIALLY_DELETED"


@dataclass(frozen=True)
class Experiment:
    """One submitted configuration and the search over its hyperparameters."""

    id: int
    state: ExperimentState
    config: Json  # completed, as used by the searcher and the trials
    original_config: str  # the YAML text as it was submitted
    owner: str
    job_id: str
    created: float
    ended: float | None = None
    parent_id: int | None = None
    archived: bool = False
    name: str = ""
    description: str = ""
    labels: tuple[str, ...] = ()
    notes: str = ""
    progress: float | None = None  # 0 to 1
    # Derived from the trials on read:
    num_trials: int = 0
    pruned_trials: int = 0  # points whose ds_config could not be reconciled; never launched
    best_trial_id: int | None = None
    best_metric: float | None = None  # the searcher's metric as reported, not sign-flipped
    checkpoint_count: int = 0
    checkpoint_size: int = 0  # bytes
    shown_state: str = ""  # ACTIVE refined to QUEUED, STARTING or RUNNING, else the state's name
    error: str = ""  # why it ended in ERROR; empty otherwise
    unmanaged: bool = False  # its trials are external processes that report their own state
    external_id: str | None = None  # the user's name for an unmanaged experiment
    project_id: int = 1
    project: Project | None = None  # derived on read


@dataclass(frozen=True)
class Trial:
    """One point of the search, including all its restarts."""

    id: int
    experiment_id: int
    request_id: str  # the searcher's name for it
    task_id: str
    state: TrialState
    hparams: Json
    seed: int
    created: float
    ended: float | None = None
    run_id: int = 0  # of its latest allocation; the first run is 1
    restarts: int = 0
    steps_completed: int = 0  # of the newest valid report
    latest_checkpoint: str | None = None  # the next run starts from it
    warm_start_checkpoint: str | None = None  # for a fork: initial weights from another trial
    progress: float | None = None
    runner_state: str = ""  # as reported by the harness
    reason: str = ""  # why it ended other than COMPLETED
    pruned: bool = False  # ended before it was ever launched
    log_policy_matched: str | None = None  # the name of the newest log policy that has matched
    external_id: str | None = None  # the user's name for an unmanaged trial
    last_activity: float | None = None  # time of an unmanaged trial's start or last heartbeat
    # Derived on read:
    latest_validation: MetricReport | None = None
    best_validation: MetricReport | None = None
    searcher_metric: float | None = None  # of the best validation
    checkpoint_count: int = 0
    checkpoint_size: int = 0  # bytes
    shown_state: str = ""  # as for an experiment
    task_ids: tuple[str, ...] = ()  # oldest first; each `continue` starts a new task
    # {group: {name: {type, last, and for numbers also count, min, max, sum, mean}}}
    summary_metrics: Json = field(default_factory=dict)
    wall_clock: float = 0.0  # seconds that its allocations ran


@dataclass(frozen=True)
class Allocation:
    """One run of one trial on some slots. Variables named ``run`` hold an Allocation."""

    id: str  # "<task id>.<run id>"
    trial_id: int
    experiment_id: int
    task_id: str
    run_id: int
    state: AllocationState
    slots: tuple[int, ...]  # slot numbers; empty while queued, or for a trial without slots
    created: float
    resources_id: str
    container_id: str
    started: float | None = None
    ended: float | None = None
    exit_code: int | None = None
    preempt: bool = False  # it was asked to stop at the next opportunity
    acked: bool = False  # it has acknowledged the preemption


@dataclass(frozen=True)
class MetricReport:
    """One report of metrics by one trial."""

    trial_id: int
    run_id: int
    group: str  # "training", "validation" or any other name
    steps_completed: int | None
    metrics: Json  # the averages
    batch_metrics: Any = None
    reported: float = 0.0
    id: int = 0
    archived: bool = False  # reported after the step from which a later run restarted


@dataclass(frozen=True)
class Checkpoint:
    """One saved state of a trial, in the experiment's checkpoint storage."""

    uuid: str
    state: CheckpointState
    trial_id: int | None
    experiment_id: int | None
    task_id: str
    allocation_id: str
    reported: float
    metadata: Json
    resources: Mapping[str, int]  # file -> bytes
    size: int = 0
    steps_completed: int = 0
    storage_id: int | None = None
    # Derived on read:
    storage: Json | None = None  # the checkpoint_storage of storage_id; None: its experiment's storage
    hparams: Json = field(default_factory=dict)
    experiment_config: Json = field(default_factory=dict)
    # averages of the validation at this step
    validation_metrics: Json = field(default_factory=dict)
    searcher_metric: float | None = None


@dataclass(frozen=True)
class RegisteredModel:
    """A named model in the registry; its versions are checkpoints."""

    id: int
    name: str
    description: str
    notes: str
    metadata: Json
    labels: tuple[str, ...]
    user_id: int
    workspace_id: int
    archived: bool
    created: float
    updated: float
    # Derived on read:
    username: str = ""
    num_versions: int = 0


@dataclass(frozen=True)
class ModelVersion:
    """A checkpoint that is registered as a numbered version of a model."""

    id: int
    model: RegisteredModel
    checkpoint: Checkpoint
    version: int  # 1 is the first
    name: str
    comment: str
    notes: str
    metadata: Json
    labels: tuple[str, ...]
    user_id: int
    created: float
    updated: float
    username: str = ""


@dataclass(frozen=True)
class Registered:
    """The model and version that a checkpoint is registered as."""

    uuid: str
    model_name: str
    model_id: int
    version: int


@dataclass(frozen=True)
class Template:
    """A named part of a configuration. ``username``: its owner."""

    name: str
    config: Json
    workspace_id: int
    username: str


@dataclass(frozen=True)
class SlotInfo:
    """A slot, which holds one rank: a CPU process or a GPU."""

    number: int
    device_type: str  # "cpu" or "cuda"
    name: str
    uuid: str = ""
    allocation_id: str | None = None  # the allocation that holds the slot
    enabled: bool = True
    draining: bool = False  # disabled, but the run that holds it may finish


@dataclass(frozen=True)
class AgentInfo:
    """A machine, presented as an agent of the cluster."""

    id: str
    slots: tuple[SlotInfo, ...]
    registered: float
    resource_pools: tuple[str, ...] = ("default",)
    version: str = ""
    address: str = "127.0.0.1"

    @property
    def enabled(self) -> bool:
        """Return whether any of its slots is enabled."""
        return any(slot.enabled for slot in self.slots)

    @property
    def draining(self) -> bool:
        return not self.enabled and any(slot.draining for slot in self.slots)


@dataclass(frozen=True)
class Task:
    """The chain of allocations of one trial, from its start or a ``continue`` until the next one.

    Attributes:
        resources: this section of the experiment's configuration.
    """

    id: str
    trial_id: int
    experiment_id: int
    name: str
    owner: str
    started: float
    ended: float | None
    allocations: tuple[Allocation, ...]
    resources: Json = field(default_factory=dict)


@dataclass(frozen=True)
class Job:
    """An experiment in the queue."""

    id: str
    experiment_id: int
    name: str
    owner: str
    submitted: float
    priority: int
    weight: float
    state: str  # "QUEUED" or "SCHEDULED"
    requested_slots: int
    allocated_slots: int
    jobs_ahead: int
    progress: float | None = None
    workspace_id: int = 1
    pool: str = "default"


@dataclass(frozen=True)
class ResourcePool:
    """The slots of some machines, presented as a Determined resource pool."""

    name: str
    description: str
    slot_type: str  # "cpu" or "cuda"
    slots: int
    used: int
    agents: int = 1
    default: bool = True


@dataclass(frozen=True)
class Workspace:
    """A group of projects."""

    id: int
    name: str
    owner: str
    archived: bool = False
    storage: Json | None = None  # default checkpoint_storage of its experiments
    # Derived on read:
    projects: int = 0
    experiments: int = 0


@dataclass(frozen=True)
class Project:
    """A group of experiments in a workspace."""

    id: int
    workspace_id: int
    name: str
    key: str
    owner: str
    description: str = ""
    archived: bool = False  # directly, or with its workspace
    notes: tuple[Json, ...] = ()  # each with name and contents
    # Derived on read:
    own_archived: bool = False
    workspace_name: str = ""
    experiments: int = 0
    active: int = 0  # experiments that have not ended
    last_started: float | None = None


@dataclass(frozen=True)
class User:
    """A user; only active users can log in."""

    id: int
    name: str
    admin: bool
    active: bool
    password: str  # salted and hashed; never shown
    display_name: str = ""


@dataclass(frozen=True)
class MasterInfo:
    """Public version and identity of this master."""

    version: str
    master_id: str
    cluster_id: str
    cluster_name: str


@dataclass(frozen=True)
class NewExperiment:
    """A submitted experiment. ``context``: a clean .tar.gz of the model definition.

    If an unmanaged experiment with this ``external_id`` exists, only its configuration is replaced.
    """

    config_text: str
    context: bytes
    owner: str
    activate: bool = True
    validate_only: bool = False
    parent_id: int | None = None
    unmanaged: bool = False
    external_id: str | None = None
    template: str = ""  # name of the template; "": none
    project_id: int = 1  # default if the configuration names no project


@dataclass(frozen=True)
class Created:
    """The response to a submission. ``experiment`` has id 0 if it was only validated. ``config`` is
    the completed configuration, without the default resource pool."""

    experiment: Experiment
    config: Json
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class ExperimentPatch:
    """Changes to an experiment; None keeps a field. Keys of ``resources`` are max_slots (None
    removes the limit), weight and priority.

    ``add_label`` and ``remove_label`` modify the labels as of the time when the patch is applied.
    """

    name: str | None = None
    description: str | None = None
    labels: Sequence[str] | None = None
    add_label: str | None = None
    remove_label: str | None = None
    notes: str | None = None
    resources: Mapping[str, float | None] | None = None
    gc_policy: GcPolicy | None = None


@dataclass(frozen=True)
class GcPolicy:
    """How many checkpoints of an ended experiment to keep."""

    save_experiment_best: int
    save_trial_best: int
    save_trial_latest: int


def as_number(value: Any) -> float | None:
    """Return a metric's value as a float; None if its type is not numeric.

    "NaN", "Infinity" and "-Infinity" count as numbers, because JSON clients write them this way. An
    integer too large for a float becomes infinity.
    """
    if isinstance(value, str):
        return float(value) if value in ("NaN", "Infinity", "-Infinity") else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


# -- errors


class ServiceError(ZeroTrialError):
    """A request was rejected; nothing has changed."""


class NotFound(ServiceError):
    """The requested object does not exist (404)."""


def existing(record: T | None, name: str) -> T:
    """Return ``record``. Raises NotFound with ``name`` if it is None."""
    if record is None:
        raise NotFound(f"{name} not found")
    return record


class Conflict(ServiceError):
    """The object's state does not allow this (409; for some requests 400, as in Determined)."""


class Invalid(ServiceError):
    """The request itself is invalid: a configuration, a field, a stale run id (400)."""


class PermissionDenied(ServiceError):
    """The token does not permit this (403)."""


class Unsupported(ServiceError):
    """Determined supports this, this master does not (501); the message suggests an alternative."""


class Unavailable(ServiceError):
    """The request cannot be handled now (503; if a disk is full, 507); it may succeed later.

    Attributes:
        full: whether a disk is full.
    """

    def __init__(self, what: str, *, full: bool, where: str = "", fix: str) -> None:
        super().__init__(what, where=where or None, fix=fix)
        self.full = full


def parse_time(text: str, name: str) -> float:
    """Parse an RFC 3339 time; return seconds since the epoch. Raises Invalid."""
    try:
        found = datetime.fromisoformat(text.strip().replace("Z", "+00:00").replace("z", "+00:00"))
        seconds = (found if found.tzinfo else found.replace(tzinfo=timezone.utc)).timestamp()
    except (ValueError, OverflowError):
        raise Invalid(f"{name} must be a time such as 2026-01-31T12:00:00Z", got=repr(text)[:60]) from None
    if not EARLIEST <= seconds <= LATEST:
        raise Invalid(f"{name} must be a time in the years 1 to 9999 of UTC", got=repr(text)[:60])
    return seconds
