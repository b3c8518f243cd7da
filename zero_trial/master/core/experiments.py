"""Experiments: create, run, change, delete."""

from __future__ import annotations

import json
import re
import secrets
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from zero_trial.errors import ConfigError
from zero_trial.experiment.rules import ClusterDefaults, CompletedConfig, InvalidExperiment, complete, merge
from zero_trial.master.agent import storage
from zero_trial.master.agent.environment import check_length, check_size
from zero_trial.master.agent.resources import shape
from zero_trial.master.core import lifecycle
from zero_trial.master.core.checkpoints import begin_deletion, check_source, needed, require_ended, superfluous
from zero_trial.master.core.context_archive import check_model, read_context
from zero_trial.master.core.registry import find_template, place_of, refuse_control_characters
from zero_trial.master.core.state import MasterState, searcher_of
from zero_trial.master.core.transaction import Transaction, transaction
from zero_trial.master.core.trials import require_managed
from zero_trial.master.records import (
    Checkpoint,
    Conflict,
    Created,
    Experiment,
    ExperimentPatch,
    ExperimentState,
    GcPolicy,
    Invalid,
    Json,
    NewExperiment,
    NotFound,
    Trial,
    TrialState,
    Unsupported,
    existing,
)
from zero_trial.master.search.searcher import Create, PlannedTrials, Searcher, build
from zero_trial.master.store import checkpoint_rows, experiment_rows, trial_rows, user_rows
from zero_trial.schema.config_source import read_yaml

_NAME_BYTES = 4
# launchers that start one process per slot; Determined starts a lone module:Class with the first
_RANK_PER_SLOT = re.compile(r"determined\.launch\.(torch_distributed|deepspeed)\b|^[\w.]+:\w+$")


class ExperimentService:
    """Creates, runs, changes and deletes experiments."""

    def __init__(self, state: MasterState) -> None:
        self._state = state

    # -- creation

    def create(self, new: NewExperiment) -> Created:
        """Validate a submission, store it, and activate it if requested.

        Raises Invalid with all errors of the configuration, or if the experiment needs more slots
        than the machines have.
        """
        template: Json | None = None
        if new.template:
            with self._state.database.reading() as connection:
                template = find_template(connection, new.template).config
        if new.unmanaged:
            return self._create_unmanaged(new, template)
        done, project = self._complete_in_place(new.config_text, template, new.project_id)
        warnings = (*done.warnings, *self._check_machine(done.config))
        with self._state.database.reading() as connection:
            if new.parent_id is not None and experiment_rows.get(connection, new.parent_id, derived=False) is None:
                raise NotFound(f"parent experiment {new.parent_id} not found")
            check_source(connection, done.config)
        check_model(done.config, new.context)
        context = read_context(new.context)
        draft = self._draft(new, self._placed(done.config), project)
        if new.validate_only:
            return Created(draft, done.config, warnings)
        with transaction(self._state) as tx:
            # check again: the checkpoint or project may have been deleted in the meantime
            check_source(tx.connection, done.config)
            existing(user_rows.project(tx.connection, project), f"project {project}")
            number = experiment_rows.add(tx.connection, draft, new.context)
            self._state.contexts[number] = context
            tx.search(number, Searcher.start)
        return Created(self.get(number), done.config, warnings)

    def _create_unmanaged(self, new: NewExperiment, template: Json | None) -> Created:
        """Store an experiment whose trials report from outside; it needs no entrypoint, no slots
        and no search. If the external id is known, replace the configuration of that experiment."""
        written = _mapping(new.config_text, "config")
        entrypoint = written.get("entrypoint") or (template or {}).get("entrypoint")
        stand_in = {**written, "entrypoint": entrypoint or "none"}
        done, project = self._complete_in_place(stand_in, template, new.project_id)
        config = {**done.config, "entrypoint": entrypoint}
        warnings = (*done.warnings, *self._check_here(config))
        draft = replace(
            self._draft(new, config, project), state=ExperimentState.PAUSED, unmanaged=True, external_id=new.external_id
        )
        if new.validate_only:
            return Created(draft, config, warnings)
        with transaction(self._state) as tx:
            existing(user_rows.project(tx.connection, project), f"project {project}")
            name = new.external_id
            number = None if name is None else experiment_rows.of_external_id(tx.connection, name)
            if number is None:
                number = experiment_rows.add(tx.connection, draft, new.context)
            elif tx.state_of(number) is ExperimentState.DELETING:
                raise Conflict(f"experiment {number} is being deleted")
            else:
                experiment_rows.change(tx.connection, number, config=config)
        return Created(self.get(number), config, warnings)

    def _complete_in_place(
        self, source: str | Mapping[str, Any], template: Json | None, project_id: int
    ) -> tuple[CompletedConfig, int]:
        """Complete a config with its workspace's checkpoint_storage; also return its project."""
        done = self._complete(source, template)
        with self._state.database.reading() as connection:
            workspace, project = place_of(connection, done.config, project_id)
        if workspace.storage is not None:
            done = self._complete(source, template, storage_above=workspace.storage)
        return done, project.id

    def check_storage(self, section: Mapping[str, Any]) -> None:
        """Raise Invalid if no experiment can have this section as its ``checkpoint_storage``."""
        searcher = {"name": "single", "metric": "none"}
        self._complete({"entrypoint": "none", "searcher": searcher, "checkpoint_storage": dict(section)})

    def _complete(
        self, source: str | Mapping[str, Any], template: Json | None = None, *, storage_above: Json | None = None
    ) -> CompletedConfig:
        section: dict[str, Any] = {"type": "shared_fs", "host_path": str(self._state.directory.storage)}
        if storage_above is not None:
            section = merge({"checkpoint_storage": storage_above}, {"checkpoint_storage": section})[
                "checkpoint_storage"
            ]
        defaults = ClusterDefaults(
            checkpoint_storage=section,
            name=f"Experiment ({secrets.token_hex(_NAME_BYTES)})",
            experiment_seed=secrets.randbelow(1 << 31),
        )
        if isinstance(source, str):
            check_length(source)
        try:
            return complete(source, defaults, template=template)
        except InvalidExperiment as error:
            raise Invalid("\n".join(error.messages)) from error
        except ConfigError as error:
            raise Invalid(str(error)) from error

    def _check_here(self, config: Mapping[str, Any]) -> list[str]:
        """Raise Invalid for settings rejected by this master; warn about differences."""
        check_size(config)
        refuse_control_characters(str(config.get("name") or ""))
        self._pool_of(config)
        if storage.base_of(config) is None:
            kind = (config.get("checkpoint_storage") or {}).get("type")
            return [f"this master does not garbage-collect checkpoints in storage of type {kind}"]
        return []

    def _pool_of(self, config: Mapping[str, Any]) -> str:
        """Return the resource pool of an experiment. Raises Invalid if the pool does not exist."""
        pools = self._state.agent.pools()
        pool = str(config["resources"]["resource_pool"] or pools[0])
        if pool not in pools:
            raise Invalid(
                "there is no such resource pool", where="resources.resource_pool", got=pool, expected=", ".join(pools)
            )
        return pool

    def _placed(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the config with its resource pool filled in, as Determined's master does."""
        return {**config, "resources": {**config["resources"], "resource_pool": self._pool_of(config)}}

    def _check_machine(self, config: Mapping[str, Any]) -> list[str]:
        """Raise Invalid for settings that can never run here; return warnings about differences."""
        warnings = self._check_here(config)
        resources = config.get("resources") or {}
        wanted, pool = resources.get("slots_per_trial"), self._pool_of(config)
        sizes = [node.slots for node in self._state.agent.nodes() if pool in node.pools]
        parts = None if wanted is None else shape(wanted, sizes)
        if parts is not None and parts[0] > 1 and resources.get("is_single_node"):
            raise Invalid(
                "no machine of the pool has enough slots",
                where="resources.slots_per_trial",
                got=wanted,
                expected=f"at most {max(sizes)}, because of resources.is_single_node",
                fix="Request fewer, or remove resources.is_single_node.",
            )
        if wanted is not None and parts is None:
            several = len(sizes) > 1
            raise Invalid(
                f"the machines of the pool {pool} do not have enough slots in equal parts"
                if several
                else "the experiment needs more slots than this machine has",
                where="resources.slots_per_trial",
                got=wanted,
                expected=f"at most {sum(sizes)}",
                fix="Request fewer, or a number that can be split evenly over machines; the slots of the machines are "
                + ", ".join(map(str, sizes))
                if several
                else "Request fewer, or start the master with more: zero-trial master up --slots N.",
            )
        given = config.get("entrypoint") or ""
        if wanted == 0 and _RANK_PER_SLOT.search(given if isinstance(given, str) else " ".join(given)):
            raise Invalid(
                "Determined's launcher starts one process per slot",
                where="resources.slots_per_trial",
                got=0,
                expected="at least 1",
                fix="Request 1. A process without a slot needs an entrypoint without the launcher: python3 -m zero_trial.run model_def:MyTrial.",
            )
        try:
            self._state.agent.check(config)
        except ConfigError as error:
            raise Invalid(str(error)) from error
        limit = resources.get("max_slots")
        if limit is not None and wanted is not None and limit < wanted:
            raise Invalid(
                "max_slots is less than one trial needs",
                where="resources.max_slots",
                got=limit,
                expected=f"at least {wanted}",
            )
        if config.get("bind_mounts"):
            warnings.append(
                "bind_mounts are ignored: trials run directly on this machine and access its files at their own paths"
            )
        return warnings

    def _draft(self, new: NewExperiment, config: Mapping[str, Any], project_id: int) -> Experiment:
        return Experiment(
            id=0,
            state=ExperimentState.ACTIVE if new.activate else ExperimentState.PAUSED,
            config=config,
            original_config=new.config_text,
            owner=new.owner,
            job_id=str(uuid.uuid4()),
            created=self._state.clock(),
            parent_id=new.parent_id,
            name=str(config.get("name") or ""),
            description=str(config.get("description") or ""),
            labels=tuple(config.get("labels") or ()),
            project_id=project_id,
        )

    def preview_search(self, config: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[PlannedTrials]]:
        """Return the completed ``searcher`` of a config and the trials that its search would train
        (`Searcher.preview`). Only ``searcher`` and ``hyperparameters`` are required in the config.

        Raises Invalid under the same conditions as `create`.
        """
        check_length(json.dumps(config))
        done = self._complete({**config, "entrypoint": config.get("entrypoint") or "none"}).config
        return done["searcher"], build(done["searcher"], done["hyperparameters"], 0).preview()

    # -- reading

    def get(self, experiment_id: int) -> Experiment:
        """Return an experiment. Raises NotFound."""
        return existing(self._state.read(experiment_rows.get, experiment_id), f"experiment {experiment_id}")

    def all(self) -> Iterator[Experiment]:
        """Yield all experiments, even archived, without counts; one in memory at a time."""
        with self._state.database.reading() as connection:
            yield from experiment_rows.all_(connection, counted=False)

    def context(self, experiment_id: int) -> bytes:
        """Return the model definition as .tar.gz. Raises NotFound."""
        return existing(self._state.read(experiment_rows.context, experiment_id), f"experiment {experiment_id}")

    def trials(self, experiment_id: int) -> list[Trial]:
        """List the trials of an experiment, without their summaries. Raises NotFound."""
        with self._state.database.reading() as connection:
            existing(experiment_rows.config(connection, experiment_id), f"experiment {experiment_id}")
            return trial_rows.of_experiment(connection, experiment_id, derived=True)

    def checkpoints(self, experiment_id: int) -> list[Checkpoint]:
        """List the checkpoints of all its trials, even deleted ones. Raises NotFound."""
        with self._state.database.reading() as connection:
            existing(experiment_rows.config(connection, experiment_id), f"experiment {experiment_id}")
            return checkpoint_rows.of_experiment(connection, experiment_id)

    def preview_gc(self, experiment_id: int, policy: GcPolicy) -> list[Checkpoint]:
        """List the checkpoints that this policy would delete, without deleting them."""
        config = self.get(experiment_id).config
        smaller = experiment_rows.smaller_is_better(config)
        saved = self.checkpoints(experiment_id)
        with self._state.database.reading() as connection:
            keep = needed(connection)
        return superfluous(saved, policy, smaller_is_better=smaller, keep=keep)

    # -- running

    def pause(self, experiment_id: int) -> None:
        """Preempt the trials and keep them waiting. Raises Conflict for an ended experiment."""
        self._run(experiment_id, lifecycle.ExperimentEvent.PAUSE)

    def activate(self, experiment_id: int) -> None:
        """Resume the trials from their last checkpoints. Raises Conflict if it has ended."""
        self._run(experiment_id, lifecycle.ExperimentEvent.ACTIVATE)

    def cancel(self, experiment_id: int) -> None:
        """Stop the trials at their next opportunity, with a checkpoint; no effect after the end."""
        self._stop(experiment_id, lifecycle.ExperimentEvent.CANCEL)

    def kill(self, experiment_id: int) -> None:
        """Kill the trials; the experiment ends CANCELED. No effect on an ended experiment."""
        self._stop(experiment_id, lifecycle.ExperimentEvent.KILL)

    def _stop(self, experiment_id: int, event: lifecycle.ExperimentEvent) -> None:
        with transaction(self._state) as tx:
            experiment = tx.experiment_of(experiment_id)
            if any(trial.state is TrialState.ACTIVE for trial in trial_rows.live(tx.connection, experiment_id)):
                require_managed(experiment)
            tx.apply_to_experiment(experiment_id, event)

    def _run(self, experiment_id: int, event: lifecycle.ExperimentEvent) -> None:
        with transaction(self._state) as tx:
            found = tx.experiment_of(experiment_id)
            require_managed(found)
            if found.state not in (ExperimentState.ACTIVE, ExperimentState.PAUSED):
                raise Conflict(f"experiment {experiment_id} is {found.state.value}", expected="ACTIVE or PAUSED")
            tx.apply_to_experiment(experiment_id, event)

    # -- archiving, deletion and changes

    def archive(self, experiment_id: int) -> None:
        """Archive an ended experiment. Raises Conflict if the experiment has not ended."""
        self._set_ended(experiment_id, archived=1)

    def unarchive(self, experiment_id: int) -> None:
        """Unarchive an experiment. Raises Conflict unless the experiment has ended."""
        self._set_ended(experiment_id, archived=0)

    def delete(self, experiment_id: int) -> None:
        """Begin to delete an ended experiment with its checkpoints. Raises Conflict if it has not
        ended, and Invalid if one of its checkpoints is registered."""
        with transaction(self._state) as tx:
            begin_deletion(tx, experiment_id)

    def _set_ended(self, experiment_id: int, **columns: Any) -> None:
        with transaction(self._state) as tx:
            require_ended(tx, experiment_id)
            experiment_rows.change(tx.connection, experiment_id, **columns)

    def patch(self, experiment_id: int, patch: ExperimentPatch) -> Experiment:
        """Apply the fields set in the patch, and return the changed experiment."""
        with transaction(self._state) as tx:
            found = tx.experiment_of(experiment_id)
            patch = replace(patch, labels=_labels(found.labels, patch))
            config = _patched(found.config, patch)
            # a name that an older master accepted must not block other changes
            if patch.name is not None:
                refuse_control_characters(patch.name)
            check_size(config)
            names = ("name", "description", "notes", "labels")
            columns = {name: value for name in names if (value := getattr(patch, name)) is not None}
            if patch.gc_policy is not None and found.state.final:
                columns["collect"] = 1
                tx.garbage = True
            experiment_rows.change(tx.connection, experiment_id, config=config, **columns)
            if patch.resources is not None:
                tx.reschedule()
            after = experiment_rows.get(tx.connection, experiment_id)
        return existing(after, f"experiment {experiment_id}")

    def resume_ended(self, experiment_id: int, override_config: str) -> Created:
        """Run an ended experiment again. Trials that did not complete resume from their last
        checkpoints, and the search creates its missing trials. An experiment with the searcher
        `single` can always resume, and its config can be changed.

        This implements ``det experiment continue``. Raises Invalid, Unsupported or Conflict.
        """
        override = _mapping(override_config, "overrideConfig")
        with transaction(self._state) as tx:
            done = self._resume_ended(tx, experiment_id, override)
        return Created(self.get(experiment_id), done.config, tuple(done.warnings))

    def _resume_ended(self, tx: Transaction, experiment_id: int, override: Mapping[str, Any]) -> CompletedConfig:
        found = tx.experiment_of(experiment_id)
        require_managed(found)
        known = trial_rows.of_experiment(tx.connection, experiment_id)
        kind = found.config["searcher"]["name"]
        if kind not in ("single", "random", "grid"):
            raise Unsupported(
                "only experiments with the searchers single, random and grid can be continued",
                got=kind,
                fix="Create a new experiment from its checkpoint: searcher.source_checkpoint_uuid.",
            )
        if kind != "single" and override:
            raise Invalid(
                "the config of a finished search cannot be changed",
                where="overrideConfig",
                got=", ".join(map(str, override)),
                fix="Continue it unchanged, or create a new experiment.",
            )
        for place in ("workspace", "project"):
            if override.get(place) is not None:
                raise Invalid(
                    "cannot be changed by continuing",
                    where=place,
                    fix="Move the experiment first: det experiment move.",
                )
        done = self._complete(merge(override, found.config))
        if done.config["searcher"]["name"] != kind:
            raise Invalid("the searcher cannot be changed", where="searcher.name", expected=kind)
        self._check_machine(done.config)
        require_ended(tx, experiment_id)
        completed = found.state is ExperimentState.COMPLETED
        if kind != "single" and completed and all(trial.state is TrialState.COMPLETED for trial in known):
            raise Conflict(f"all trials of experiment {experiment_id} are COMPLETED", fix="Create a new experiment.")
        self._revive(tx, experiment_id, self._placed(done.config))
        return done

    def _revive(self, tx: Transaction, experiment_id: int, config: Mapping[str, Any]) -> None:
        """Restart the search from its beginning with the existing trials, matched by request id."""
        self._state.forget(experiment_id)
        experiment_rows.change(
            tx.connection,
            experiment_id,
            state=ExperimentState.ACTIVE,
            config=config,
            ended=None,
            archived=0,
            collect=0,
            progress=0.0,
            error="",
            snapshot=searcher_of(config).snapshot(),
        )
        known = trial_rows.of_experiment(tx.connection, experiment_id)
        if config["searcher"]["name"] == "single" and known:
            # its only trial resumes, even if COMPLETED, with the changed config's hyperparameters
            first = next(action for action in searcher_of(config).start() if isinstance(action, Create))
            trial_rows.change(
                tx.connection,
                known[0].id,
                state=TrialState.PAUSED,
                request_id=first.request_id,
                hparams=first.hparams,
                pruned=0,
                early_exit="",
            )
        tx.search(experiment_id, Searcher.start)


def _labels(there: Sequence[str], patch: ExperimentPatch) -> list[str] | None:
    """Return the labels after the patch, without duplicates; None if they do not change."""
    if patch.labels is None and patch.add_label is None and patch.remove_label is None:
        return None
    labels = there if patch.labels is None else patch.labels
    kept = [label for label in labels if label not in (patch.add_label, patch.remove_label)]
    return list(dict.fromkeys(kept if patch.add_label is None else [*kept, patch.add_label]))


def _patched(config: Mapping[str, Any], patch: ExperimentPatch) -> dict[str, Any]:
    """Return the config with the patch applied, so that later trials see it."""
    names = ("name", "description", "labels")
    merged = {**config, **{name: value for name in names if (value := getattr(patch, name)) is not None}}
    if patch.resources is not None:
        merged["resources"] = {**(config.get("resources") or {}), **_checked(patch.resources)}
    if patch.gc_policy is not None:
        merged["checkpoint_storage"] = {**(config.get("checkpoint_storage") or {}), **asdict(patch.gc_policy)}
    return merged


def _checked(resources: Mapping[str, float | None]) -> dict[str, Any]:
    known = {"max_slots": int, "weight": float, "priority": int}
    values: dict[str, Any] = {}
    for key, value in resources.items():
        if key not in known:
            raise Invalid("cannot be changed", where=f"resources.{key}", expected=", ".join(known))
        if value is None and key != "max_slots":
            raise Invalid("needs a value", where=f"resources.{key}")
        if value is not None and value < 0:
            raise Invalid("must not be negative", where=f"resources.{key}", got=value)
        if key == "priority" and value is not None and not 1 <= value <= 99:
            raise Invalid("is out of range", where="resources.priority", got=value, expected="1 to 99")
        values[key] = None if value is None else known[key](value)
    return values


def _mapping(text: str, name: str) -> dict[str, Any]:
    """Parse a YAML text as a map. Raises Invalid, with ``name`` as the location."""
    if not text.strip():
        return {}
    check_length(text)
    try:
        document = read_yaml(text, name)
    except ConfigError as error:
        raise Invalid(str(error)) from error
    for path, spelling in document.respelled.items():
        raise Invalid("this key is not a string", where=".".join(path), got=spelling, fix="Put it into quotes.")
    return document.value
