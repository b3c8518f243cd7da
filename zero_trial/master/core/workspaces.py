"""Workspaces, and the projects in them in which experiments are listed.

The first of each, Uncategorized, is always there and stays as it is. The owner and administrators
change the others; everybody sees all, and moves experiments between them.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from zero_trial.master.core.accounts import require_owner
from zero_trial.master.core.checkpoints import begin_deletion
from zero_trial.master.core.registry import leave_workspace
from zero_trial.master.core.state import MasterState
from zero_trial.master.core.transaction import Transaction, transaction
from zero_trial.master.records import (
    Conflict,
    ExperimentState,
    Invalid,
    Project,
    User,
    Workspace,
    existing,
)
from zero_trial.master.store import experiment_rows, workspace_rows

FIRST = 1  # the workspace and the project Uncategorized
UNCATEGORIZED = "Uncategorized"
_LONGEST_NAME = 80
_Place = TypeVar("_Place", Workspace, Project)


class WorkspaceService:
    """Creates, changes and deletes workspaces and projects, and moves experiments."""

    def __init__(self, state: MasterState) -> None:
        self._state = state

    # -- reading

    def get(self, number: int) -> Workspace:
        """Return a workspace. Raises NotFound."""
        return existing(self._state.read(workspace_rows.get, number, counted=True), f"workspace {number}")

    def project(self, number: int) -> Project:
        """Return a project. Raises NotFound."""
        return existing(self._state.read(workspace_rows.project, number, counted=True), f"project {number}")

    # -- workspaces

    def create(self, name: str, user: User, storage: Mapping[str, Any] | None) -> Workspace:
        """Create a workspace. Raises Invalid or Conflict.

        Args:
            storage: the checkpoint_storage of its experiments that set none, already checked.
        """
        with transaction(self._state) as tx:
            _check_workspace_name(tx.connection, name)
            made = Workspace(0, name, user.name, storage=storage)
            number = workspace_rows.add(tx.connection, made)
        return self.get(number)

    def patch(self, number: int, user: User, name: str | None, **storage: Mapping[str, Any] | None) -> Workspace:
        """Change the name and, if ``storage`` is given, the checkpoint_storage of a workspace.
        Raises Conflict for an archived one.
        """
        _require_own(number, "workspace")
        with transaction(self._state) as tx:
            found = _changeable(workspace_rows.get(tx.connection, number), f"workspace {number}", user)
            if found.archived:
                raise Conflict(f"workspace {number} is archived")
            changes: dict[str, Any] = dict(storage)
            if name is not None and name != found.name:
                _check_workspace_name(tx.connection, name)
                changes["name"] = name
            workspace_rows.change(tx.connection, number, **changes)
        return self.get(number)

    def archive(self, number: int, user: User, archived: bool) -> None:
        """Archive a workspace with its projects, or show it again."""
        with transaction(self._state) as tx:
            _changeable(workspace_rows.get(tx.connection, number), f"workspace {number}", user)
            workspace_rows.change(tx.connection, number, archived=int(archived))

    def delete(self, number: int, user: User) -> bool:
        """Delete a workspace with its projects, templates and experiments; return whether it had no
        projects. Raises Conflict while it has models or an experiment that has not ended.
        """
        with transaction(self._state) as tx:
            found = _changeable(workspace_rows.get(tx.connection, number, counted=True), f"workspace {number}", user)
            leave_workspace(tx.connection, number)
            for project in workspace_rows.projects(tx.connection, number):
                _delete_experiments(tx, project.id)
            workspace_rows.erase(tx.connection, number)
        return found.projects == 0

    # -- projects

    def create_project(self, workspace_id: int, name: str, user: User, description: str, key: str | None) -> Project:
        """Create a project. Raises Invalid, or Conflict for an archived or the first workspace."""
        with transaction(self._state) as tx:
            self._open(tx, workspace_id)
            known = workspace_rows.projects(tx.connection)
            _check_project_name(known, workspace_id, name)
            made = Project(0, workspace_id, name, _key(known, name, key), user.name, description)
            number = workspace_rows.add_project(tx.connection, made)
        return self.project(number)

    def patch_project(self, number: int, user: User, name: str | None, description: str | None) -> Project:
        """Change name and description of a project. Raises Conflict for an archived one."""
        _require_own(number, "project")
        with transaction(self._state) as tx:
            found = _changeable(workspace_rows.project(tx.connection, number), f"project {number}", user)
            require_open(found)
            changes = {} if description is None else {"description": description}
            if name is not None and name != found.name:
                _check_project_name(workspace_rows.projects(tx.connection), found.workspace_id, name)
                changes["name"] = name
            workspace_rows.change_project(tx.connection, number, **changes)
        return self.project(number)

    def archive_project(self, number: int, user: User, archived: bool) -> None:
        """Archive a project, or show it again. Raises Conflict while its workspace is archived."""
        with transaction(self._state) as tx:
            found = _changeable(workspace_rows.project(tx.connection, number), f"project {number}", user)
            if found.archived and not found.own_archived:
                raise Conflict(f"workspace {found.workspace_id} is archived")
            workspace_rows.change_project(tx.connection, number, archived=int(archived))

    def set_notes(self, number: int, notes: Sequence[Mapping[str, str]]) -> None:
        """Replace the notes of a project."""
        with transaction(self._state) as tx:
            found = existing(workspace_rows.project(tx.connection, number), f"project {number}")
            require_open(found)
            workspace_rows.change_project(tx.connection, number, notes=notes)

    def delete_project(self, number: int, user: User) -> bool:
        """Delete a project with its experiments; return whether it had none. Raises Conflict while
        one has not ended.
        """
        with transaction(self._state) as tx:
            found = _changeable(workspace_rows.project(tx.connection, number, counted=True), f"project {number}", user)
            _delete_experiments(tx, number)
            workspace_rows.erase_project(tx.connection, number)
        return found.experiments == 0

    def _open(self, tx: Transaction, workspace_id: int) -> None:
        found = existing(workspace_rows.get(tx.connection, workspace_id), f"workspace {workspace_id}")
        _require_own(workspace_id, "workspace")
        if found.archived:
            raise Conflict(f"workspace {workspace_id} is archived")

    # -- experiments

    def move_experiment(self, experiment_id: int, project_id: int) -> None:
        """Move an experiment to another project. Raises Conflict if one of them is archived."""
        with transaction(self._state) as tx:
            experiment = tx.experiment_of(experiment_id)
            for number in (experiment.project_id, project_id):
                require_open(existing(workspace_rows.project(tx.connection, number), f"project {number}"))
            experiment_rows.change(tx.connection, experiment_id, project_id=project_id)


def place_of(connection: sqlite3.Connection, config: Mapping[str, Any], project_id: int) -> tuple[Workspace, Project]:
    """Return where a completed config belongs: where it says, else in ``project_id``.

    Raises Invalid for a workspace or project that is not there or archived, NotFound for a number.
    """
    if not config["workspace"] and not config["project"]:
        project = existing(workspace_rows.project(connection, project_id), f"project {project_id}")
        workspace = existing(workspace_rows.get(connection, project.workspace_id), f"workspace {project.workspace_id}")
    else:
        names = config["workspace"] or UNCATEGORIZED, config["project"] or UNCATEGORIZED
        workspace = _named(workspace_rows.all_(connection), names[0], "workspace")
        project = _named(workspace_rows.projects(connection, workspace.id), names[1], "project")
    if project.archived:
        raise Invalid("this project is archived", where="project", got=project.name)
    return workspace, project


def _named(found: Sequence[Any], name: str, kind: str) -> Any:
    for each in found:
        if each.name == name:
            return each
    raise Invalid(f"there is no such {kind}", where=kind, got=name, expected=", ".join(each.name for each in found))


def _check_name(name: str) -> None:
    if not name or name != name.strip() or len(name) > _LONGEST_NAME or not name.isprintable():
        raise Invalid(f"a name is 1 to {_LONGEST_NAME} printable characters without spaces around them", where="name")


def _check_workspace_name(connection: sqlite3.Connection, name: str) -> None:
    _check_name(name)
    if any(each.name.lower() == name.lower() for each in workspace_rows.all_(connection)):
        raise Conflict(f"workspace {name!r} exists already")


def _check_project_name(known: Sequence[Project], workspace_id: int, name: str) -> None:
    _check_name(name)
    if any(each.workspace_id == workspace_id and each.name == name for each in known):
        raise Conflict(f"project {name!r} exists already")


def _key(known: Sequence[Project], name: str, wanted: str | None) -> str:
    """Return the short name of a project, which no other has: up to five capitals and digits."""
    taken = {each.key for each in known}
    if wanted is not None:
        if not re.fullmatch("[A-Z0-9]{1,5}", wanted.upper()) or wanted.upper() in taken:
            raise Invalid("a key is 1 to 5 letters and digits that no project has yet", where="key", got=wanted[:20])
        return wanted.upper()
    stem = re.sub("[^A-Z0-9]", "", name.upper())[:3] or "P"
    return next(key for key in (stem, *(f"{stem[: 5 - len(str(n))]}{n}" for n in range(1, 10**4))) if key not in taken)


def _changeable(found: _Place | None, name: str, user: User) -> _Place:
    """Return a workspace or a project that this user may change. Raises NotFound, PermissionDenied
    or, for the first, Conflict.
    """
    place = existing(found, name)
    require_owner(user, "" if place.id == FIRST else place.owner, name)
    _require_own(place.id, name.partition(" ")[0])
    return place


def _require_own(number: int, kind: str) -> None:
    if number == FIRST:
        raise Conflict(f"the {kind} {UNCATEGORIZED} stays as it is")


def require_open(project: Project) -> None:
    """Raise Conflict for a project that is archived, by itself or with its workspace."""
    if project.archived:
        raise Conflict(f"project {project.id} is archived")


def _delete_experiments(tx: Transaction, project_id: int) -> None:
    """Begin to delete all experiments of a project that is about to go. Until their files are
    gone, they are listed in Uncategorized.
    """
    for number in workspace_rows.experiments_of(tx.connection, project_id):
        if tx.state_of(number) is not ExperimentState.DELETING:
            begin_deletion(tx, number)
        experiment_rows.change(tx.connection, number, project_id=FIRST)
