"""The model registry and the templates of configurations.

A model has numbered versions, and each version is a checkpoint. A registered checkpoint is not
deleted, neither by a user nor by the garbage collector nor with its experiment. A template is a
part of a configuration that is laid under an experiment which is created with its name.
"""

from __future__ import annotations

import re
import sqlite3
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zero_trial.master.core.accounts import require_owner
from zero_trial.master.core.state import MasterState
from zero_trial.master.records import (
    CheckpointState,
    Conflict,
    ExperimentState,
    Invalid,
    Json,
    ModelVersion,
    RegisteredModel,
    Template,
    User,
    existing,
)
from zero_trial.master.store import checkpoint_rows, experiment_rows, registry_rows, workspace_rows

_SAME_NAME = "avoid names equal to other models (case-sensitive)"


@dataclass(frozen=True)
class Words:
    """What users write on a model or a version; None leaves a field as it is, and is empty for a
    new one. Of a model there is no ``comment``, of a version no ``description``.
    """

    name: str | None = None
    description: str | None = None
    comment: str | None = None
    notes: str | None = None
    metadata: Json | None = None
    labels: Sequence[str] | None = None

    def columns(self, *names: str) -> dict[str, Any]:
        """Return those of ``names`` that are given."""
        found = {name: getattr(self, name) for name in names}
        return {name: value for name, value in found.items() if value is not None}


class RegistryService:
    """Keeps models, their versions and templates.

    Only owners and administrators change or delete them; others get PermissionDenied.
    """

    def __init__(self, state: MasterState) -> None:
        self._state = state

    # -- models

    def create(self, words: Words, user: User, workspace_id: int) -> RegisteredModel:
        """Create a model. Raises Invalid for its name, Conflict if there is one of that name."""
        _check_name(words.name or "")
        now = self._state.clock()
        empty = {"description": "", "notes": "", "metadata": {}, "labels": []}
        given = words.columns("name", "description", "notes", "metadata", "labels")
        with self._state.database.transaction() as connection:
            _require_workspace(connection, workspace_id)
            if registry_rows.model_named(connection, words.name or "") is not None:
                raise Conflict(_SAME_NAME)
            fixed = {"user_id": user.id, "workspace_id": workspace_id, "created": now, "updated": now}
            number = registry_rows.add_model(connection, {**empty, **given, **fixed})
            return find_model(connection, str(number))

    def change(self, identifier: str, user: User, words: Words, *, workspace_id: int | None = None) -> RegisteredModel:
        """Change what ``words`` gives. Raises Conflict for an archived model or a taken name."""
        with self._state.database.transaction() as connection:
            found = _own_model(connection, identifier, user)
            if found.archived:
                raise Conflict(f'model "{found.name}" is archived and cannot have attributes updated')
            columns = words.columns("name", "description", "notes", "metadata", "labels")
            if workspace_id is not None:
                _require_workspace(connection, workspace_id)
                columns["workspace_id"] = workspace_id
            changed = _changed(found, columns)
            if "name" in changed:
                _check_name(changed["name"])
                if registry_rows.model_named(connection, changed["name"]) is not None:
                    raise Conflict(_SAME_NAME)
            if changed:
                registry_rows.change_model(connection, found.id, **changed, updated=self._state.clock())
            return find_model(connection, str(found.id))

    def archive(self, identifier: str, user: User, archived: bool) -> None:
        """Archive a model, or show it again."""
        with self._state.database.transaction() as connection:
            found = _own_model(connection, identifier, user)
            registry_rows.change_model(connection, found.id, archived=int(archived), updated=self._state.clock())

    def delete(self, identifier: str, user: User) -> None:
        """Delete a model with its versions; the checkpoints stay."""
        with self._state.database.transaction() as connection:
            registry_rows.drop_model(connection, _own_model(connection, identifier, user).id)

    # -- versions

    def register(self, identifier: str, uuid: str, words: Words, user: User) -> ModelVersion:
        """Make a checkpoint the next version of a model.

        Raises Conflict for an archived model, and for a checkpoint that is not complete or is about
        to be deleted.
        """
        now = self._state.clock()
        empty = {"name": "", "comment": "", "notes": "", "metadata": {}, "labels": []}
        given = words.columns("name", "comment", "notes", "metadata", "labels")
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
            number = registry_rows.add_version(connection, found.id, {**empty, **given, **fixed})
            return find_version(connection, str(found.id), number)

    def change_version(self, identifier: str, number: int, user: User, words: Words) -> ModelVersion:
        """Change what ``words`` gives of a version."""
        with self._state.database.transaction() as connection:
            _own_model(connection, identifier, user)
            found = find_version(connection, identifier, number)
            changed = _changed(found, words.columns("name", "comment", "notes", "metadata", "labels"))
            if changed:
                registry_rows.change_version(connection, found.id, **changed, updated=self._state.clock())
            return find_version(connection, identifier, number)

    def delete_version(self, identifier: str, number: int, user: User) -> None:
        """Delete a version; its checkpoint stays."""
        with self._state.database.transaction() as connection:
            found = find_version(connection, identifier, number)
            require_owner(user, found.username, f"version {number}")
            registry_rows.drop_version(connection, found.id)

    # -- templates

    def create_template(self, name: str, user: User, home: int, **columns: Any) -> Template:
        """Create a template of the columns ``config`` and ``workspace_id``, empty and in the
        workspace ``home`` by default. Raises Conflict if there is one of its name.
        """
        _check_printable(name)
        with self._state.database.transaction() as connection:
            if registry_rows.template(connection, name) is not None:
                raise Conflict(f"template {name!r} exists already")
            made = {"name": name, "config": {}, "workspace_id": home, "user_id": user.id, **columns}
            _require_workspace(connection, made["workspace_id"])
            registry_rows.add_template(connection, made)
            return find_template(connection, name)

    def change_template(self, name: str, user: User, config: Mapping[str, Any]) -> Template:
        """Replace the configuration of a template. Raises NotFound."""
        with self._state.database.transaction() as connection:
            _own_template(connection, name, user)
            registry_rows.change_template(connection, name, config=config)
            return find_template(connection, name)

    def delete_template(self, name: str, user: User) -> None:
        """Delete a template. Raises NotFound."""
        with self._state.database.transaction() as connection:
            registry_rows.drop_template(connection, _own_template(connection, name, user).name)


def _own_template(connection: sqlite3.Connection, name: str, user: User) -> Template:
    found = find_template(connection, name)
    require_owner(user, found.username, f"template {found.name!r}")
    return found


def find_template(connection: sqlite3.Connection, name: str) -> Template:
    """Return a template. Raises NotFound."""
    return existing(registry_rows.template(connection, name), f"template {name[:60]!r}")


def require_unregistered(connection: sqlite3.Connection, uuids: Iterable[str], verb: str) -> None:
    """Raise Invalid, in Determined's words, if one of these checkpoints is a version of a model.

    Args:
        verb: what cannot be done to them: "deleted" or "patched".
    """
    found = registry_rows.registered(connection, uuids)
    if found:
        names = [
            f"{each.uuid}, registered to {each.model_name} (model #{each.model_id}), version {each.version}"
            for each in found
        ]
        raise Invalid(
            f"this subset of checkpoints provided are in the model registry and cannot be {verb}: {', '.join(names)}."
        )


def leave_workspace(connection: sqlite3.Connection, number: int) -> None:
    """Delete the templates of a workspace that is about to go. Raises Conflict if it has models."""
    if any(model.workspace_id == number for model in registry_rows.models(connection)):
        raise Conflict(f"workspace ({number}) contains models; move or delete models first")
    for template in registry_rows.templates(connection):
        if template.workspace_id == number:
            registry_rows.drop_template(connection, template.name)


def _require_workspace(connection: sqlite3.Connection, number: int) -> None:
    existing(workspace_rows.get(connection, number), f"workspace {number}")


def find_model(connection: sqlite3.Connection, identifier: str) -> RegisteredModel:
    """Return a model by name, or by id if ``identifier`` is digits: no model has such a name.
    Raises NotFound.
    """
    by_id = re.fullmatch("[0-9]{1,9}", identifier) is not None
    found = (
        registry_rows.model(connection, int(identifier)) if by_id else registry_rows.model_named(connection, identifier)
    )
    return existing(found, f'model "{identifier[:80]}"')


def _own_model(connection: sqlite3.Connection, identifier: str, user: User) -> RegisteredModel:
    found = find_model(connection, identifier)
    require_owner(user, found.username, f"model {found.name!r}")
    return found


def find_version(connection: sqlite3.Connection, identifier: str, number: int) -> ModelVersion:
    """Return one version of a model. Raises NotFound."""
    found = registry_rows.version(connection, find_model(connection, identifier), number)
    return existing(found, f'version {number} for model "{identifier[:80]}"')


def _changed(found: object, columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns whose value differs; each label once."""
    fresh = {name: tuple(dict.fromkeys(value)) if name == "labels" else value for name, value in columns.items()}
    return {name: value for name, value in fresh.items() if value != getattr(found, name)}


def _check_name(name: str) -> None:
    """Refuse a model's name that Determined's master refuses, or that would change a terminal."""
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
    if any(unicodedata.category(character) == "Cc" for character in name):
        raise Invalid("the name contains control characters", where="name", got=repr(name)[:60])
