"""Named objects of users: workspaces and projects that group experiments, models with their
versions, and configuration templates.

The first workspace and the first project, both named Uncategorized, always exist and cannot be
changed. Only owners and administrators can change the others; all users can see everything and move
experiments between projects. A model has numbered versions; each version is a checkpoint. Neither
users, garbage collection, nor deleting an experiment can delete a registered checkpoint. A template
is a partial configuration that provides defaults for experiments created with its name.
"""

from __future__ import annotations

import re
import sqlite3
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from zero_trial.master.core.accounts import require_owner
from zero_trial.master.core.checkpoints import begin_deletion
from zero_trial.master.core.state import MasterState
from zero_trial.master.core.transaction import Transaction, transaction
from zero_trial.master.records import (
    CheckpointState,
    Conflict,
    ExperimentState,
    Invalid,
    ModelVersion,
    Project,
    RegisteredModel,
    Template,
    User,
    Workspace,
    existing,
)
from zero_trial.master.store import checkpoint_rows, experiment_rows, user_rows
from zero_trial.master.store.database import drop, insert, update

FIRST = 1  # the workspace and the project Uncategorized
UNCATEGORIZED = "Uncategorized"
_LONGEST_NAME = 80
_Place = TypeVar("_Place", Workspace, Project)
_SAME_NAME = "avoid names equal to other models (case-sensitive)"
_MODEL_COLUMNS = ("name", "description", "notes", "metadata", "labels")
_VERSION_COLUMNS = ("name", "comment", "notes", "metadata", "labels")


class WorkspaceService:
    """Creates, changes and deletes workspaces and projects, and moves experiments."""

    def __init__(self, state: MasterState) -> None:
        self._state = state

    # -- reading

    def get(self, number: int) -> Workspace:
        """Return a workspace. Raises NotFound."""
        return existing(self._state.read(user_rows.workspace, number, counted=True), f"workspace {number}")

    def project(self, number: int) -> Project:
        """Return a project. Raises NotFound."""
        return existing(self._state.read(user_rows.project, number, counted=True), f"project {number}")

    # -- workspaces

    def create(self, name: str, user: User, storage: Mapping[str, Any] | None) -> Workspace:
        """Create a workspace. Raises Invalid or Conflict.

        Args:
            storage: default checkpoint_storage of its experiments; must be validated already.
        """
        with transaction(self._state) as tx:
            _check_workspace_name(tx.connection, name)
            number = insert(tx.connection, "workspaces", {"name": name, "owner": user.name, "storage": storage})
        return self.get(number)

    def patch(self, number: int, user: User, name: str | None, **storage: Mapping[str, Any] | None) -> Workspace:
        """Change the name of a workspace and, if ``storage`` is given, its checkpoint_storage.
        Raises Conflict for an archived workspace."""
        _require_own(number, "workspace")
        with transaction(self._state) as tx:
            found = _changeable(user_rows.workspace(tx.connection, number), f"workspace {number}", user)
            if found.archived:
                raise Conflict(f"workspace {number} is archived")
            changes: dict[str, Any] = dict(storage)
            if name is not None and name != found.name:
                _check_workspace_name(tx.connection, name)
                changes["name"] = name
            update(tx.connection, "workspaces", "id", number, changes)
        return self.get(number)

    def archive(self, number: int, user: User, archived: bool) -> None:
        """Archive or unarchive a workspace with its projects."""
        with transaction(self._state) as tx:
            _changeable(user_rows.workspace(tx.connection, number), f"workspace {number}", user)
            update(tx.connection, "workspaces", "id", number, {"archived": int(archived)})

    def delete(self, number: int, user: User) -> bool:
        """Delete a workspace with its projects, templates and experiments. Return True if it had no
        projects. Raises Conflict if it contains models or an experiment that has not ended."""
        with transaction(self._state) as tx:
            found = _changeable(user_rows.workspace(tx.connection, number, counted=True), f"workspace {number}", user)
            if any(model.workspace_id == number for model in checkpoint_rows.models(tx.connection)):
                raise Conflict(f"workspace ({number}) contains models; move or delete models first")
            for project in user_rows.projects(tx.connection, number):
                _delete_experiments(tx, project.id)
            for table in ("templates", "projects"):
                drop(tx.connection, table, "workspace_id", number)
            drop(tx.connection, "workspaces", "id", number)
        return found.projects == 0

    # -- projects

    def create_project(self, workspace_id: int, name: str, user: User, description: str, key: str | None) -> Project:
        """Create a project. Raises Invalid, or Conflict in an archived or the first workspace."""
        with transaction(self._state) as tx:
            place = existing(user_rows.workspace(tx.connection, workspace_id), f"workspace {workspace_id}")
            _require_own(workspace_id, "workspace")
            if place.archived:
                raise Conflict(f"workspace {workspace_id} is archived")
            known = user_rows.projects(tx.connection)
            _check_project_name(known, workspace_id, name)
            made = {"workspace_id": workspace_id, "name": name, "key": _key(known, name, key)}
            number = insert(tx.connection, "projects", {**made, "owner": user.name, "description": description})
        return self.project(number)

    def patch_project(self, number: int, user: User, name: str | None, description: str | None) -> Project:
        """Change the name and description of a project. Raises Conflict for an archived project."""
        _require_own(number, "project")
        with transaction(self._state) as tx:
            found = _changeable(user_rows.project(tx.connection, number), f"project {number}", user)
            require_open(found)
            changes = {} if description is None else {"description": description}
            if name is not None and name != found.name:
                _check_project_name(user_rows.projects(tx.connection), found.workspace_id, name)
                changes["name"] = name
            update(tx.connection, "projects", "id", number, changes)
        return self.project(number)

    def archive_project(self, number: int, user: User, archived: bool) -> None:
        """Archive or unarchive a project. Raises Conflict while its workspace is archived."""
        with transaction(self._state) as tx:
            found = _changeable(user_rows.project(tx.connection, number), f"project {number}", user)
            if found.archived and not found.own_archived:
                raise Conflict(f"workspace {found.workspace_id} is archived")
            update(tx.connection, "projects", "id", number, {"archived": int(archived)})

    def set_notes(self, number: int, notes: Sequence[Mapping[str, str]]) -> None:
        """Replace the notes of a project."""
        with transaction(self._state) as tx:
            found = existing(user_rows.project(tx.connection, number), f"project {number}")
            require_open(found)
            update(tx.connection, "projects", "id", number, {"notes": notes})

    def delete_project(self, number: int, user: User) -> bool:
        """Delete a project with its experiments. Return True if it had none. Raises Conflict."""
        with transaction(self._state) as tx:
            found = _changeable(user_rows.project(tx.connection, number, counted=True), f"project {number}", user)
            _delete_experiments(tx, number)
            drop(tx.connection, "projects", "id", number)
        return found.experiments == 0

    # -- experiments

    def move_experiment(self, experiment_id: int, project_id: int) -> None:
        """Move an experiment to another project. Raises Conflict if either project is archived."""
        with transaction(self._state) as tx:
            experiment = tx.experiment_of(experiment_id)
            for number in (experiment.project_id, project_id):
                require_open(existing(user_rows.project(tx.connection, number), f"project {number}"))
            experiment_rows.change(tx.connection, experiment_id, project_id=project_id)


def place_of(connection: sqlite3.Connection, config: Mapping[str, Any], project_id: int) -> tuple[Workspace, Project]:
    """Return the workspace and project that a completed config names; default: ``project_id``.

    Raises Invalid if the workspace or project is missing or archived, NotFound for a missing id.
    """
    if not config["workspace"] and not config["project"]:
        project = existing(user_rows.project(connection, project_id), f"project {project_id}")
        workspace = existing(user_rows.workspace(connection, project.workspace_id), f"workspace {project.workspace_id}")
    else:
        names = config["workspace"] or UNCATEGORIZED, config["project"] or UNCATEGORIZED
        workspace = _named(user_rows.workspaces(connection), names[0], "workspace")
        project = _named(user_rows.projects(connection, workspace.id), names[1], "project")
    if project.archived:
        raise Invalid("this project is archived", where="project", got=project.name)
    return workspace, project


def _named(found: Sequence[Any], name: str, kind: str) -> Any:
    for each in found:
        if each.name == name:
            return each
    raise Invalid(f"the {kind} does not exist", where=kind, got=name, expected=", ".join(each.name for each in found))


def _check_name(name: str) -> None:
    if not name or name != name.strip() or len(name) > _LONGEST_NAME or not name.isprintable():
        raise Invalid(
            f"a name must be 1 to {_LONGEST_NAME} printable characters, without leading or trailing spaces",
            where="name",
        )


def _check_workspace_name(connection: sqlite3.Connection, name: str) -> None:
    _check_name(name)
    if any(each.name.lower() == name.lower() for each in user_rows.workspaces(connection)):
        raise Conflict(f"workspace {name!r} already exists")


def _check_project_name(known: Sequence[Project], workspace_id: int, name: str) -> None:
    _check_name(name)
    if any(each.workspace_id == workspace_id and each.name == name for each in known):
        raise Conflict(f"project {name!r} already exists")


def _key(known: Sequence[Project], name: str, wanted: str | None) -> str:
    """Return a unique short name for a project: up to five capital letters and digits."""
    taken = {each.key for each in known}
    if wanted is not None:
        if not re.fullmatch("[A-Z0-9]{1,5}", wanted.upper()) or wanted.upper() in taken:
            raise Invalid("a key must be 1 to 5 letters and digits, and unique", where="key", got=wanted[:20])
        return wanted.upper()
    stem = re.sub("[^A-Z0-9]", "", name.upper())[:3] or "P"
    return next(key for key in (stem, *(f"{stem[: 5 - len(str(n))]}{n}" for n in range(1, 10**4))) if key not in taken)


def _changeable(found: _Place | None, name: str, user: User) -> _Place:
    """Return a place if this user may change it. Raises NotFound, PermissionDenied, Conflict."""
    place = existing(found, name)
    require_owner(user, "" if place.id == FIRST else place.owner, name)
    _require_own(place.id, name.partition(" ")[0])
    return place


def _require_own(number: int, kind: str) -> None:
    if number == FIRST:
        raise Conflict(f"the {kind} {UNCATEGORIZED} cannot be changed")


def require_open(project: Project) -> None:
    """Raise Conflict for a project that is archived, directly or with its workspace."""
    if project.archived:
        raise Conflict(f"project {project.id} is archived")


def _delete_experiments(tx: Transaction, project_id: int) -> None:
    """Begin to delete all experiments of a project that is about to be deleted. Until their files
    are deleted, the experiments are listed in Uncategorized."""
    for number in experiment_rows.of_project(tx.connection, project_id):
        if tx.state_of(number) is not ExperimentState.DELETING:
            begin_deletion(tx, number)
        experiment_rows.change(tx.connection, number, project_id=FIRST)


class RegistryService:
    """Manages models, their versions, and templates.

    Only owners and administrators can change or delete them; other users get PermissionDenied.
    ``words`` are user-written columns; columns that an item does not have are ignored.
    """

    def __init__(self, state: MasterState) -> None:
        self._state = state

    # -- models

    def create(self, words: Mapping[str, Any], user: User, workspace_id: int) -> RegisteredModel:
        """Create a model. Raises Invalid for a bad name, Conflict if the name is taken."""
        name = str(words["name"])
        _check_model_name(name)
        now = self._state.clock()
        empty = {"description": "", "notes": "", "metadata": {}, "labels": []}
        with self._state.database.transaction() as connection:
            _require_workspace(connection, workspace_id)
            if checkpoint_rows.model(connection, name) is not None:
                raise Conflict(_SAME_NAME)
            fixed = {"user_id": user.id, "workspace_id": workspace_id, "created": now, "updated": now}
            number = insert(connection, "models", {**empty, **_columns(words, _MODEL_COLUMNS), **fixed})
            return find_model(connection, str(number))

    def change(
        self, identifier: str, user: User, words: Mapping[str, Any], *, workspace_id: int | None = None
    ) -> RegisteredModel:
        """Change the columns in ``words``. Raises Conflict if archived or the name is taken."""
        with self._state.database.transaction() as connection:
            found = _own_model(connection, identifier, user)
            if found.archived:
                raise Conflict(f'model "{found.name}" is archived and cannot have attributes updated')
            columns = _columns(words, _MODEL_COLUMNS)
            if workspace_id is not None:
                _require_workspace(connection, workspace_id)
                columns["workspace_id"] = workspace_id
            changed = _changed(found, columns)
            if "name" in changed:
                _check_model_name(changed["name"])
                if checkpoint_rows.model(connection, changed["name"]) is not None:
                    raise Conflict(_SAME_NAME)
            if changed:
                update(connection, "models", "id", found.id, {**changed, "updated": self._state.clock()})
            return find_model(connection, str(found.id))

    def archive(self, identifier: str, user: User, archived: bool) -> None:
        """Archive or unarchive a model."""
        with self._state.database.transaction() as connection:
            found = _own_model(connection, identifier, user)
            changes = {"archived": int(archived), "updated": self._state.clock()}
            update(connection, "models", "id", found.id, changes)

    def delete(self, identifier: str, user: User) -> None:
        """Delete a model with its versions; the checkpoints are kept."""
        with self._state.database.transaction() as connection:
            number = _own_model(connection, identifier, user).id
            drop(connection, "model_versions", "model_id", number)
            drop(connection, "models", "id", number)

    # -- versions

    def register(self, identifier: str, uuid: str, words: Mapping[str, Any], user: User) -> ModelVersion:
        """Register a checkpoint as the next version of a model.

        Raises Conflict if the model is archived, or if the checkpoint is not complete or is about
        to be deleted.
        """
        now = self._state.clock()
        empty = {"name": "", "comment": "", "notes": "", "metadata": {}, "labels": []}
        with self._state.database.transaction() as connection:
            found = _own_model(connection, identifier, user)
            if found.archived:
                raise Conflict(f'model "{found.name}" is archived and cannot register new versions')
            saved = existing(checkpoint_rows.get(connection, uuid, derived=False), f"checkpoint {uuid}")
            state = saved.state
            owner = saved.experiment_id
            experiment = None if owner is None else experiment_rows.get(connection, owner, derived=False)
            leaving = (ExperimentState.DELETING, ExperimentState.DELETE_FAILED)
            if checkpoint_rows.is_marked(connection, uuid) or (experiment is not None and experiment.state in leaving):
                state = CheckpointState.DELETED
            if state is not CheckpointState.COMPLETED:
                raise Conflict(
                    f"checkpoint {uuid} is in STATE_{state.value} state. "
                    "checkpoints for model versions must be in a COMPLETED state"
                )
            fixed = {"checkpoint_uuid": uuid, "user_id": user.id, "created": now, "updated": now}
            number = checkpoint_rows.add_version(
                connection, found.id, {**empty, **_columns(words, _VERSION_COLUMNS), **fixed}
            )
            return find_version(connection, str(found.id), number)

    def change_version(self, identifier: str, number: int, user: User, words: Mapping[str, Any]) -> ModelVersion:
        """Change the columns of a version that are in ``words``."""
        with self._state.database.transaction() as connection:
            _own_model(connection, identifier, user)
            found = find_version(connection, identifier, number)
            changed = _changed(found, _columns(words, _VERSION_COLUMNS))
            if changed:
                update(connection, "model_versions", "id", found.id, {**changed, "updated": self._state.clock()})
            return find_version(connection, identifier, number)

    def delete_version(self, identifier: str, number: int, user: User) -> None:
        """Delete a version; its checkpoint is kept."""
        with self._state.database.transaction() as connection:
            found = find_version(connection, identifier, number)
            require_owner(user, found.username, f"version {number}")
            drop(connection, "model_versions", "id", found.id)

    # -- templates

    def create_template(self, name: str, user: User, home: int, **columns: Any) -> Template:
        """Create a template from the columns ``config`` (default: empty) and ``workspace_id``
        (default: ``home``). Raises Conflict if the name is taken."""
        _check_printable(name)
        with self._state.database.transaction() as connection:
            if user_rows.template(connection, name) is not None:
                raise Conflict(f"template {name!r} already exists")
            made = {"name": name, "config": {}, "workspace_id": home, "user_id": user.id, **columns}
            _require_workspace(connection, made["workspace_id"])
            insert(connection, "templates", made)
            return find_template(connection, name)

    def change_template(self, name: str, user: User, config: Mapping[str, Any]) -> Template:
        """Replace the configuration of a template. Raises NotFound."""
        with self._state.database.transaction() as connection:
            _own_template(connection, name, user)
            update(connection, "templates", "name", name, {"config": config})
            return find_template(connection, name)

    def delete_template(self, name: str, user: User) -> None:
        """Delete a template. Raises NotFound."""
        with self._state.database.transaction() as connection:
            drop(connection, "templates", "name", _own_template(connection, name, user).name)


def _own_template(connection: sqlite3.Connection, name: str, user: User) -> Template:
    found = find_template(connection, name)
    require_owner(user, found.username, f"template {found.name!r}")
    return found


def find_template(connection: sqlite3.Connection, name: str) -> Template:
    """Return a template. Raises NotFound."""
    return existing(user_rows.template(connection, name), f"template {name[:60]!r}")


def _require_workspace(connection: sqlite3.Connection, number: int) -> None:
    existing(user_rows.workspace(connection, number), f"workspace {number}")


def find_model(connection: sqlite3.Connection, identifier: str) -> RegisteredModel:
    """Return a model by name, or by id if ``identifier`` is digits. Raises NotFound."""
    by_id = re.fullmatch("[0-9]{1,9}", identifier) is not None
    found = (
        checkpoint_rows.model(connection, int(identifier)) if by_id else checkpoint_rows.model(connection, identifier)
    )
    return existing(found, f'model "{identifier[:80]}"')


def _own_model(connection: sqlite3.Connection, identifier: str, user: User) -> RegisteredModel:
    found = find_model(connection, identifier)
    require_owner(user, found.username, f"model {found.name!r}")
    return found


def find_version(connection: sqlite3.Connection, identifier: str, number: int) -> ModelVersion:
    """Return one version of a model. Raises NotFound."""
    found = checkpoint_rows.version(connection, find_model(connection, identifier), number)
    return existing(found, f'version {number} for model "{identifier[:80]}"')


def _changed(found: object, columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns whose values differ, without duplicate labels."""
    fresh = {name: tuple(dict.fromkeys(value)) if name == "labels" else value for name, value in columns.items()}
    return {name: value for name, value in fresh.items() if value != getattr(found, name)}


def _columns(words: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: words[name] for name in names if name in words}


def _check_model_name(name: str) -> None:
    """Raise Invalid for model names that Determined rejects, or with control characters."""
    for wrong, why in (
        (not name.strip(" "), "model names cannot be blank"),
        ("  " in name, "model names cannot have excessive spacing"),
        ("/" in name or "\\" in name, "model names cannot have slashes"),
        (name.isdecimal() and name.isascii(), "model names cannot be only numbers"),
    ):
        if wrong:
            raise Invalid(why)
    _check_printable(name)


def _check_printable(name: str) -> None:
    if not name:
        raise Invalid("name is required")
    refuse_control_characters(name)


def refuse_control_characters(name: str) -> None:
    """Raise Invalid for a name with control characters, which would corrupt a terminal."""
    if any(unicodedata.category(character) == "Cc" for character in name):
        raise Invalid("the name contains control characters", where="name", got=repr(name)[:60])
