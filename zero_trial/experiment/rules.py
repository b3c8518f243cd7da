"""The whole experiment: the type and default of every top-level key, and its completion as in a
master: older forms are rewritten, a template and the cluster's defaults fill missing keys."""

from __future__ import annotations

import copy
import datetime
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from zero_trial.ds_config.table import TABLE
from zero_trial.errors import ConfigError
from zero_trial.experiment.sections import (
    BIND_MOUNTS,
    ENVIRONMENT,
    HARDWARE,
    INTEGRATIONS,
    LOG_POLICIES,
    NEEDED_TEXT,
    OFF,
    OPTIMIZATIONS,
    PBS,
    PERIOD,
    PROFILING,
    REPRODUCIBILITY,
    RESOURCES,
    RETENTION,
    SEARCHER,
    SEARCHER_COMMON,
    SECURITY,
    SLURM,
    STORAGE,
    STORAGE_KEPT,
    TENSORBOARD,
    TEXT,
    Arranged,
)
from zero_trial.experiment.space import Grid, Hyperparameters, as_sent, check_counts
from zero_trial.schema.config_source import read_yaml
from zero_trial.schema.document import Document
from zero_trial.schema.types import (
    CHOICE,
    CLUSTER,
    MISSING,
    REMOVED,
    RENAMED,
    RULE,
    AnyOf,
    Field,
    Fields,
    Forbidden,
    Issue,
    ListOf,
    MapOf,
    Path,
    Tagged,
    exact_int,
    exact_text,
)

ROOT = "<config>"

_COMMAND = AnyOf((exact_text(), ListOf(exact_text())), "is neither a string nor a list of strings")


def _both_places(section: Mapping[str, Any]) -> str | None:
    given = [bool(section.get(name)) for name in ("workspace", "project")]
    return "workspace and project must either both be set or neither" if given[0] != given[1] else None


_TOP = Fields(
    {
        "name": NEEDED_TEXT,
        "description": TEXT,
        "labels": Field(Arranged(exact_text(), lambda labels: list(dict.fromkeys(labels))), []),
        "workspace": Field(exact_text(), ""),
        "project": Field(exact_text(), ""),
        "entrypoint": Field(_COMMAND),
        "data": Field(MapOf(), {}),
        "hyperparameters": Field(Hyperparameters(), {}),
        "searcher": Field(SEARCHER, required=True),
        "resources": Field(RESOURCES, {}),
        "environment": Field(ENVIRONMENT, {}),
        "bind_mounts": Field(BIND_MOUNTS, []),
        "checkpoint_storage": Field(STORAGE, required=True),
        "checkpoint_policy": Field(exact_text(("best", "all", "none")), "best"),
        "min_checkpoint_period": Field(PERIOD, {"batches": 0}),
        "min_validation_period": Field(PERIOD, {"batches": 0}),
        "perform_initial_validation": OFF,
        "scheduling_unit": Field(exact_int(1), 100),
        "records_per_epoch": Field(exact_int(), 0),
        "max_restarts": Field(exact_int(0), 5),
        "preemption_timeout": Field(exact_int(1), 3600),
        "reproducibility": Field(REPRODUCIBILITY, {}),
        "profiling": Field(PROFILING, {}),
        "optimizations": Field(OPTIMIZATIONS, {}),
        "log_policies": Field(LOG_POLICIES, []),
        "retention_policy": Field(RETENTION, shown=False),
        "integrations": Field(INTEGRATIONS),
        "slurm": Field(SLURM, {}),
        "pbs": Field(PBS, {}),
        "debug": OFF,
        "data_layer": Field(MapOf(), shown=False),
        "security": Field(SECURITY, shown=False),
        "tensorboard_storage": Field(TENSORBOARD, shown=False),
        "internal": Field(Forbidden("is reserved for the master. Remove it."), shown=False),
    },
    (_both_places,),
    hint="Settings of your own belong under data: or hyperparameters:.",
    # arguments of zero-trial run, passed to det experiment create --config
    instead={
        "trainer": "hyperparameters.trainer",
        "dataset": "data.dataset",
        **{key: f"hyperparameters.ds_config.{key}" for key in TABLE if "." not in key},
    },
)


def known_keys(section: str = "") -> frozenset[str]:
    """Return the valid keys at the top level, or in ``section`` (of all its kinds)."""
    if not section:
        return frozenset(_TOP.keys)
    inner = _TOP.keys[section].type
    if isinstance(inner, Tagged):
        return frozenset(key for kind in inner.kinds.values() for key in kind.keys)
    return frozenset(inner.keys) if isinstance(inner, Fields) else frozenset()


def _check_grid(config: Mapping[str, Any], issues: list[Issue]) -> list[Issue]:
    """Check the requirements of a grid search: a count for every range, and a limited size."""
    searcher, space = config.get("searcher"), config.get("hyperparameters")
    if not isinstance(searcher, Mapping) or searcher.get("name") != "grid" or not isinstance(space, Mapping):
        return []
    path = ("hyperparameters",)
    found = [issue for name, value in space.items() for issue in check_counts(value, (*path, name))]
    if not found and not issues:
        try:
            Grid.of(space)
        except ConfigError as error:
            found.append(Issue(path, RULE, error.describe()))
    return found


class InvalidExperiment(ConfigError):
    """An experiment that Determined's master would reject; ``messages`` has one line per error."""

    def __init__(self, messages: list[str]) -> None:
        self.messages = list(messages)
        super().__init__("\n".join(["invalid experiment configuration:", *(f"  {line}" for line in messages)]))


@dataclass(frozen=True)
class Examined:
    """An experiment merged with defaults: ``merged`` as JSON data, issues, and old forms."""

    merged: dict[str, Any]
    issues: list[Issue]
    warnings: list[str]


@dataclass(frozen=True)
class CompletedConfig:
    """``config``: every key of an experiment with its value, as JSON data.

    ``warnings``: one line each.
    """

    config: dict[str, Any]
    warnings: list[str] = field(default_factory=list)


def complete(
    source: str | Mapping[str, Any], defaults: ClusterDefaults, *, template: Mapping[str, Any] | None = None
) -> CompletedConfig:
    """Return the completed experiment of YAML text or a dict, over ``template``. Pure.

    Raises InvalidExperiment with all errors. A cluster also accepts every experiment that is
    accepted here, and completes it to the same configuration; docs/guide/master.md lists what is
    rejected only here.
    """
    try:
        document = read_yaml(source, "experiment") if isinstance(source, str) else Document.of(source)
    except ConfigError as error:
        raise InvalidExperiment([fault.describe() for fault in error.faults or (error,)]) from None
    examined = examine(document, defaults, template)
    if examined.issues:
        raise InvalidExperiment([issue.line(ROOT) for issue in examined.issues])
    return CompletedConfig(_TOP.fill(examined.merged), [*document.warnings, *examined.warnings])


def examine(document: Document, defaults: ClusterDefaults, template: Mapping[str, Any] | None = None) -> Examined:
    """Rewrite old forms, merge with ``template`` and ``defaults``, and check every key. Pure."""
    issues: list[Issue] = []
    plain = _as_json(document.value, (), issues)
    if issues:
        return Examined({}, issues, [])
    issues, old_forms = _check_keys(document)
    issues += _check_storage_kind(plain.get("checkpoint_storage"))
    resources = plain.get("resources")
    if isinstance(resources, Mapping) and resources.get("slots") is not None:  # commands use templates, too
        issues.append(Issue(("resources", "slots"), REMOVED, "is only for commands. Write slots_per_trial."))
    own, more = modern(plain)
    old_forms += more
    below, _ = modern(defaults.as_config())
    if template is not None:
        above, more = modern(template)
        below = merge(above, below)
        old_forms += more
    merged = merge(own, below)
    found = _TOP.check(merged, ())
    if not merged.get("entrypoint"):
        found.append(Issue(("entrypoint",), MISSING, "managed experiments require entrypoint"))
    return Examined(merged, [*issues, *found, *_check_grid(merged, found)], list(dict.fromkeys(old_forms)))


def _check_keys(document: Document) -> tuple[list[Issue], list[str]]:
    """Return issues and warnings for keys that YAML 1.1 reads under another name."""
    issues, warnings = [], []
    for path, spelling in document.respelled.items():
        text = f"{spelling} is {path[-1]} in YAML 1.1, and is read under that name. Write '{spelling}' in quotes, or use another name"
        if path[0] == "hyperparameters" and path[-1] in ("true", "false"):
            issues.append(Issue(path, RENAMED, text))
        else:
            warnings.append(f"{'.'.join(path)}: {text}")
    return issues, warnings


def _check_storage_kind(written: Any) -> list[Issue]:
    """Return an issue if the storage has keys of a type but no type."""
    if not isinstance(written, Mapping):
        return []
    path = ("checkpoint_storage", "type")
    if "type" in written:
        return [Issue(path, CHOICE, "null is not a storage type")] if written["type"] is None else []
    own = [str(key) for key in written if key not in STORAGE_KEPT]
    return [Issue(path, MISSING, f"is a required property, because {own[0]} is set")] if own else []


def _as_json(value: Any, path: Path, issues: list[Issue]) -> Any:
    """Return ``value`` as JSON data, as a master written in Go stores it: 1.0 becomes 1.

    YAML has more types: dates become text, and values without a JSON form are issues.
    """
    if isinstance(value, dict):
        return {_text(key, path, issues): _as_json(inner, (*path, key), issues) for key, inner in value.items()}
    if isinstance(value, list):
        return [_as_json(inner, (*path, index), issues) for index, inner in enumerate(value)]
    if isinstance(value, str):
        return _text(value, path, issues)
    if isinstance(value, datetime.date):
        return value.isoformat()
    if isinstance(value, float) and not math.isfinite(value):
        issues.append(Issue(path, CLUSTER, f"{value} is not a valid JSON number"))
    elif isinstance(value, float):
        return as_sent(value)
    elif value is not None and not isinstance(value, int | float):
        issues.append(Issue(path, CLUSTER, f"a YAML value of type {type(value).__name__} has no JSON equivalent"))
    return value


def _text(text: str, path: Path, issues: list[Issue]) -> str:
    """Return ``text``; an unpaired surrogate (``"\\ud800"``) is an issue."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        ascii_path = tuple(step.encode("ascii", "replace").decode() if isinstance(step, str) else step for step in path)
        issues.append(Issue(ascii_path, CLUSTER, "invalid Unicode (unpaired surrogate)"))
    return text


# Defaults of a cluster, and how two configurations are merged.


@dataclass(frozen=True)
class ClusterDefaults:
    """``checkpoint_storage`` of the master's own configuration, and the ``name`` and
    ``experiment_seed`` for experiments without one (Determined's master draws both at random)."""

    checkpoint_storage: Mapping[str, Any] | None = None
    name: str = "Experiment"
    experiment_seed: int = 0

    def as_config(self) -> dict[str, Any]:
        """Return these defaults as an experiment configuration."""
        return {
            "name": self.name,
            "reproducibility": {"experiment_seed": self.experiment_seed},
            "checkpoint_storage": self.checkpoint_storage and dict(self.checkpoint_storage),
        }


# Merging two experiment configurations: maps are merged, lists are replaced, and null counts as
# absent.
#
# Exceptions: lists of mounts, devices, variables, ports, labels and policies are concatenated; a
# hyperparameter with a type, and a storage or searcher of another kind, are never merged.


_UNIONS: Mapping[tuple[str, ...], tuple[str, tuple[str, ...]]] = {
    ("checkpoint_storage",): ("type", STORAGE_KEPT),
    ("searcher",): ("name", tuple(SEARCHER_COMMON)),
}


# Lists whose items have a key: an item above replaces the item below with the same key.
_KEYED = {
    ("bind_mounts",): "container_path",
    ("resources", "devices"): "container_path",
    ("environment", "proxy_ports"): "proxy_port",
    ("log_policies",): "name",
}

_APPENDED = (
    *(("environment", "environment_variables", kind) for kind in ("cpu", "cuda", "rocm")),
    ("slurm", "sbatch_args"),
    ("pbs", "pbsbatch_args"),
)

_ATOMIC = (("data",), ("environment", "pod_spec"))


def merge(above: Mapping[str, Any], below: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``above`` with missing values filled from ``below``. Changes neither."""
    return dict(_merge(above, below, ()))


def _merge(above: Any, below: Any, path: tuple[str, ...]) -> Any:
    if above is None or below is None:
        return copy.deepcopy(below if above is None else above)
    if isinstance(above, Mapping) and isinstance(below, Mapping):
        return _merge_maps(above, below, path)
    if isinstance(above, list) and isinstance(below, list):
        return _merge_lists(above, below, path)
    return copy.deepcopy(above)


def _merge_maps(above: Mapping[str, Any], below: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    if path[:1] == ("hyperparameters",):
        return _merge_hyperparameters(above, below, top=len(path) == 1)
    if path in _UNIONS:
        key, common = _UNIONS[path]
        if None not in (above.get(key), below.get(key)) and above[key] != below[key]:
            below = {name: value for name, value in below.items() if name in common}
    if len(path) > 1 and path[:-1] in _ATOMIC:
        return copy.deepcopy(dict(above))
    names = [*above, *(name for name in below if name not in above)]
    return {name: _merge(above.get(name), below.get(name), (*path, name)) for name in names}


def _merge_hyperparameters(above: Mapping[str, Any], below: Mapping[str, Any], *, top: bool) -> Any:
    """Merge namespaces, but not inside a value or a range. Null is a value here."""
    merged = copy.deepcopy(dict(above))
    if not top and ("type" in above or "type" in below):
        return merged
    for name, value in below.items():
        if name not in merged:
            merged[name] = copy.deepcopy(value)
        elif isinstance(merged[name], Mapping) and isinstance(value, Mapping):
            merged[name] = _merge_hyperparameters(merged[name], value, top=False)
    return merged


def _merge_lists(above: list[Any], below: list[Any], path: tuple[str, ...]) -> Any:
    above, below = copy.deepcopy(above), copy.deepcopy(below)
    if path in _KEYED:
        key = _KEYED[path]
        taken = [item[key] for item in above if isinstance(item, Mapping) and item.get(key) is not None]
        return above + [item for item in below if not isinstance(item, Mapping) or item.get(key) not in taken]
    if path in _APPENDED:
        # of two variables with the same name, the last is used
        return below + above
    if path == ("labels",):
        return above + [label for label in below if label not in above]
    return above


# Older forms of an experiment are rewritten to the current form. The rules reject all other forms.


# Keys that are accepted and ignored: they are not part of a completed configuration.
_GONE = {
    ("data_layer",): dict,
    ("resources", "agent_label"): str,
}

# Keys that are accepted, completed and shown, but that current trials do not read.
_WITHOUT_EFFECT = ("security", "records_per_epoch", "tensorboard_storage")


def modern(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return ``config`` in the current form, and a line for each old form."""
    whole = {key: copy.deepcopy(value) for key, value in config.items() if value is not None}
    warnings: list[str] = []
    for path, kind in _GONE.items():
        section = whole if len(path) == 1 else whole.get(path[0])
        if isinstance(section, dict) and isinstance(section.get(path[-1]), kind):
            del section[path[-1]]
            warnings.append(f"{'.'.join(path)} has been removed from Determined, and has no effect")
    if isinstance(whole.get("environment"), dict):
        whole["environment"] = _environment(whole["environment"], warnings)
    devices = whole["resources"].get("devices") if isinstance(whole.get("resources"), dict) else None
    if isinstance(devices, list):
        whole["resources"]["devices"] = [_device(item) for item in devices]
    if isinstance(whole.get("log_policies"), list):
        whole["log_policies"] = [_log_policy(policy, warnings) for policy in whole["log_policies"]]
    warnings += [f"{key} is not used by current trials, and has no effect" for key in _WITHOUT_EFFECT if whole.get(key)]
    searcher = whole.get("searcher")
    if isinstance(searcher, dict) and searcher.get("name") == "adaptive_asha":
        if searcher.get("stop_once") is not None:
            warnings.append("searcher.stop_once has no effect: adaptive_asha always stops a trial permanently")
        if searcher.get("max_length") is not None:
            warnings.append("searcher.max_length has no effect in adaptive_asha: max_time and time_metric apply")
    if isinstance(whole.get("hyperparameters"), dict):
        warnings += _exponents(whole["hyperparameters"], "hyperparameters")
    return whole, warnings


def _exponents(section: Mapping[str, Any], path: str) -> Iterator[str]:
    """Yield a line for each log range whose ends look like values, because they are exponents."""
    low, high, base = section.get("minval"), section.get("maxval"), section.get("base")
    if (
        section.get("type") == "log"
        and base == 10
        and isinstance(low, float)
        and isinstance(high, float)
        and 0 < low < high < 1
    ):
        yield (
            f"{path}: minval and maxval of a log range are exponents, so the values are {10**low:.4g} to {10**high:.4g}. "
            f"For {low:g} to {high:g}, write minval: {math.log10(low):.4g}, maxval: {math.log10(high):.4g}"
        )
    for name, value in section.items():
        if isinstance(value, dict):
            yield from _exponents(value, f"{path}.{name}")


def _environment(section: dict[str, Any], warnings: list[str]) -> dict[str, Any]:
    new = dict(section)
    image, variables = new.get("image"), new.get("environment_variables")
    if isinstance(image, str):
        new["image"] = dict.fromkeys(HARDWARE, image)
    elif isinstance(image, dict):
        new["image"] = _cuda(image, "environment.image", warnings)
    if isinstance(variables, list):
        new["environment_variables"] = {kind: list(variables) for kind in HARDWARE}
    elif isinstance(variables, dict):
        new["environment_variables"] = _cuda(variables, "environment.environment_variables", warnings)
    return new


def _cuda(section: dict[str, Any], where: str, warnings: list[str]) -> dict[str, Any]:
    if "gpu" not in section:
        return section
    warnings.append(f"{where}.gpu is the older name of {where}.cuda")
    rest = {key: value for key, value in section.items() if key != "gpu"}
    return {"cuda": section["gpu"], **rest} if rest.get("cuda") is None else rest


def _device(item: Any) -> Any:
    """Return ``/dev/a:/dev/b:mrw`` as a map."""
    parts = item.split(":") if isinstance(item, str) else []
    names = ("host_path", "container_path", "mode")
    return dict(zip(names, parts, strict=False)) if len(parts) in (2, 3) else item


def _log_policy(policy: Any, warnings: list[str]) -> Any:
    """Return ``action: {type: cancel_retries}`` as ``action: cancel_retries``."""
    action = policy.get("action") if isinstance(policy, dict) else None
    if not isinstance(action, dict) or set(action) != {"type"} or not isinstance(action["type"], str):
        return policy
    warnings.append("log_policies: write action as a string, such as action: cancel_retries")
    return {**policy, "action": action["type"]}
