"""Actions on many runs or many experiments at once: each has its own result, and one that is
refused does not hinder the others.

Which runs or experiments an action means is said by their ids or by a filter. A run of an
experiment that searches is neither paused nor moved by itself: an experiment has one state and one
project.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from zero_trial.master.core.accounts import require_owner
from zero_trial.master.core.experiments import ExperimentService
from zero_trial.master.core.state import MasterState
from zero_trial.master.core.tables import EVERYWHERE, TableService, multitrial
from zero_trial.master.core.transaction import transaction
from zero_trial.master.core.trials import TrialService
from zero_trial.master.core.workspaces import WorkspaceService, require_open
from zero_trial.master.records import (
    Conflict,
    Experiment,
    ExperimentState,
    Invalid,
    Project,
    ServiceError,
    Trial,
    User,
    existing,
)
from zero_trial.master.store import accounts, experiments, trials, workspaces


@dataclass(frozen=True)
class ActionResult:
    """What has become of one run or experiment; ``error`` is empty if it was done."""

    id: int
    error: str = ""


@dataclass(frozen=True)
class ExperimentFilter:
    """Which experiments an action means. What is empty or None excludes none."""

    name: str = ""  # a part of it, in any case
    description: str = ""
    labels: tuple[str, ...] = ()  # all of them
    states: tuple[str, ...] = ()
    user_ids: tuple[int, ...] = ()
    excluded: tuple[int, ...] = ()
    project_id: int = 0
    archived: bool | None = None


@dataclass(frozen=True)
class _Candidate:
    """A run that an action means, with its surroundings."""

    run: Trial
    experiment: Experiment
    project: Project

    @property
    def archived(self) -> bool:
        return self.run.archived or self.experiment.archived or self.project.archived


class BulkService:
    """Acts on many runs or experiments."""

    def __init__(self, state: MasterState) -> None:
        self._state = state
        self._experiments = ExperimentService(state)
        self._trials = TrialService(state)
        self._tables = TableService(state)
        self._workspaces = WorkspaceService(state)

    # -- runs

    def act_on_runs(
        self, operation: str, project_id: int, ids: Sequence[int], text: str | None, *, user: User
    ) -> list[ActionResult]:
        """Do an operation to the runs of a project that are named or filtered. Raises NotFound or
        Invalid.

        ``pause`` and ``resume`` change the experiments of the runs. ``delete`` takes the reports
        and logs of runs of this user (of an administrator: all) that have ended; the checkpoints
        stay with the experiment, whose search must have ended, too.

        Args:
            operation: one of ``RUN_OPERATIONS``.
        """
        acts: Mapping[str, Callable[[_Candidate], None]] = {
            "kill": self._kill,
            "pause": partial(self._steer, "Failed to pause associated experiment", self._experiments.pause),
            "resume": partial(self._steer, "Failed to resume associated experiment", self._experiments.activate),
            "archive": partial(self._archive, True),
            "unarchive": partial(self._archive, False),
            "delete": partial(self._delete, user),
        }
        return self._each_run(project_id, ids, text, acts[operation])

    def _kill(self, found: _Candidate) -> None:
        if not found.run.state.final:
            _explained("Failed to kill run", lambda: self._trials.kill(found.run.id))

    def _steer(self, failure: str, act: Callable[[int], None], found: _Candidate) -> None:
        if found.archived:
            raise Conflict("Run is archived.")
        if multitrial(found.experiment):
            raise Conflict(f"Cannot pause/unpause run '{found.run.id}' (part of multi-trial).")
        _explained(failure, lambda: act(found.experiment.id))

    def _archive(self, archived: bool, found: _Candidate) -> None:
        if found.experiment.archived:
            raise Conflict(f"Run is part of archived Search (id: '{found.experiment.id}').")
        if found.run.archived == archived:
            return
        if not found.run.state.final:
            raise Conflict("Run is not in terminal state.")
        with transaction(self._state) as tx:
            trials.change(tx.connection, found.run.id, archived=int(archived))

    def _delete(self, user: User, found: _Candidate) -> None:
        number = found.run.id
        _require_owner(user, found.experiment)
        with transaction(self._state) as tx:
            trial = tx.trial_of(number)
            if not trial.state.final:
                raise Conflict("Run is not in a terminal state.")
            if not tx.state_of(trial.experiment_id).final:
                raise Conflict(f"Run is part of Search '{trial.experiment_id}', which has not ended.")
            tasks = trials.task_ids(tx.connection, trial)
            trials.erase(tx.connection, number)
        self._state.directory.remove_runs(number, tasks)

    def move_runs(
        self,
        source_id: int,
        target_id: int,
        ids: Sequence[int],
        text: str | None,
        *,
        skip_multitrial: bool,
        user: User,
    ) -> list[ActionResult]:
        """Move the experiments of runs to another project, with all their runs: the results name
        these, too. Raises NotFound, or Conflict if a project is archived.
        """
        self._require_open(source_id, target_id)
        if source_id == target_id:
            return []
        going: dict[int, str] = {}

        def move(found: _Candidate) -> None:
            number = found.experiment.id
            _require_owner(user, found.experiment)
            if found.archived:
                raise Conflict("Run is archived.")
            if skip_multitrial and multitrial(found.experiment):
                raise Conflict(f"Skipping run '{found.run.id}' (part of multi-trial).")
            if number not in going:
                going[number] = _error_of(lambda: self._workspaces.move_experiment(number, target_id))
            if going[number]:
                raise Conflict("Failed to move associated experiment")

        results = self._each_run(source_id, ids, text, move)
        named = {result.id for result in results}
        with self._state.database.reading() as connection:
            moved = [number for number, error in going.items() if not error]
            others = [run.id for number in moved for run in trials.of_experiment(connection, number)]
        return results + [ActionResult(number) for number in others if number not in named]

    def _each_run(
        self, project_id: int, ids: Sequence[int], text: str | None, act: Callable[[_Candidate], None]
    ) -> list[ActionResult]:
        """Act on the runs of a project that are named or filtered. Raises NotFound or Invalid."""
        if text is not None and ids:
            raise Invalid("if filter is provided run id list must be empty")
        taken = self._tables.run_ids(project_id, text or "")
        there = set(taken)
        results = []
        for number in dict.fromkeys(ids if text is None else taken):
            candidate = self._candidate(number) if number in there else None
            if candidate is None:
                results.append(
                    ActionResult(number, f"Run with id '{number}' not found in project with id '{project_id}'")
                )
            else:
                results.append(ActionResult(number, _error_of(partial(act, candidate))))
        return results

    def _candidate(self, number: int) -> _Candidate | None:
        with self._state.database.reading() as connection:
            run = trials.get(connection, number)
            experiment = None if run is None else experiments.get(connection, run.experiment_id, derived=False)
            project = None if experiment is None else workspaces.project(connection, experiment.project_id)
        return None if run is None or experiment is None or project is None else _Candidate(run, experiment, project)

    def _require_open(self, *projects: int) -> None:
        with self._state.database.reading() as connection:
            for number in projects:
                require_open(existing(workspaces.project(connection, number), f"project {number}"))

    # -- experiments

    def act_on_experiments(
        self,
        operation: str,
        project_id: int,
        ids: Sequence[int],
        chosen: ExperimentFilter | None,
        *,
        user: User,
        target_id: int | None = None,
    ) -> list[ActionResult]:
        """Do to each experiment what ``ExperimentService.<operation>`` does, or move it.

        Args:
            operation: a key of ``BULK_OPERATIONS``.
            project_id: the project in which they are; EVERYWHERE: any.
            ids: their ids, if there is no filter; it takes those to which the operation applies.
            user: who asks: deletes and moves experiments of their own, or is an administrator.
            target_id: the project to which they move.
        """
        if target_id is not None:
            self._require_open(target_id)
        there = self._in_project(project_id)
        if chosen is not None:
            ids = [each.id for each in self._chosen(there.values(), chosen) if BULK_OPERATIONS[operation](each)]
        results = []
        for number in dict.fromkeys(ids):
            found = there.get(number)
            if found is None:
                results.append(ActionResult(number, f"experiment '{number}' not found"))
            else:
                results.append(ActionResult(number, _error_of(partial(self._act, operation, found, user, target_id))))
        return results

    def _act(self, operation: str, found: Experiment, user: User, target_id: int | None) -> None:
        if operation in ("delete", "move"):
            _require_owner(user, found)
        if found.archived and operation in _NOT_ARCHIVED:
            raise Conflict("Experiment is archived.")
        if operation in ("archive", "unarchive"):
            _check_archived(found, operation)
        if target_id is not None:
            self._workspaces.move_experiment(found.id, target_id)
        else:
            getattr(self._experiments, operation)(found.id)

    def _in_project(self, project_id: int) -> Mapping[int, Experiment]:
        found = self._state.read(experiments.of_project, None if project_id == EVERYWHERE else project_id)
        return {each.id: each for each in found}

    def _chosen(self, found: Iterable[Experiment], chosen: ExperimentFilter) -> list[Experiment]:
        ids = {user.name: user.id for user in self._state.read(accounts.users)}
        return [
            each
            for each in found
            if each.id not in chosen.excluded
            and chosen.name.lower() in each.name.lower()
            and chosen.description.lower() in each.description.lower()
            and set(chosen.labels) <= set(each.labels)
            and (not chosen.states or each.state.value in chosen.states)
            and (not chosen.user_ids or ids.get(each.owner) in chosen.user_ids)
            and chosen.project_id in (0, each.project_id)
            and chosen.archived in (None, each.archived)
        ]


RUN_OPERATIONS = ("kill", "pause", "resume", "archive", "unarchive", "delete")


def _ended(experiment: Experiment) -> bool:
    return experiment.state.final and experiment.state is not ExperimentState.DELETING


# The operations, each with the experiments to which it applies.
BULK_OPERATIONS: Mapping[str, Callable[[Experiment], bool]] = {
    "activate": lambda each: each.state is ExperimentState.PAUSED,
    "pause": lambda each: each.state is ExperimentState.ACTIVE,
    "cancel": lambda each: not each.state.final,
    "kill": lambda each: not each.state.final,
    "archive": lambda each: _ended(each) and not each.archived,
    "unarchive": lambda each: _ended(each) and each.archived,
    "delete": _ended,
    "move": lambda each: not each.archived,
}
_NOT_ARCHIVED = ("activate", "pause", "cancel", "kill", "move")


def _require_owner(user: User, experiment: Experiment) -> None:
    require_owner(user, experiment.owner, f"experiment {experiment.id}")


def _check_archived(found: Experiment, operation: str) -> None:
    """Raise Conflict unless the operation changes an experiment that has ended."""
    if found.archived == (operation == "archive"):
        raise Conflict("Experiment is already archived." if found.archived else "Experiment is not archived.")
    if not _ended(found):
        raise Conflict("Experiment is not in terminal state.")


def _error_of(act: Callable[[], None]) -> str:
    """Return how the action was refused; "" if it was done."""
    try:
        act()
    except ServiceError as error:
        return str(error)
    return ""


def _explained(what: str, act: Callable[[], None]) -> None:
    """Act; a refusal says what has failed."""
    try:
        act()
    except ServiceError as error:
        raise Conflict(f"{what}: {error}") from error
