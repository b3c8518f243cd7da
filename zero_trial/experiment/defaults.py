"""Defaults of a cluster, older forms of an experiment, and how one configuration is laid over
another.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from zero_trial.experiment.sections import HARDWARE, POD_KEYS, SEARCHER_COMMON
from zero_trial.experiment.sections import STORAGE_KEPT as STORAGE_COMMON

_ENVIRONMENT = ("image", "environment_variables", "force_pull_image", "registry_auth", "add_capabilities")


@dataclass(frozen=True)
class ClusterDefaults:
    """``checkpoint_storage`` and ``task_container_defaults`` of the master's own configuration;
    and, because both are random on a real master, the ``name`` and the ``experiment_seed`` of an
    experiment without one.
    """

    checkpoint_storage: Mapping[str, Any] | None = None
    task_container_defaults: Mapping[str, Any] = field(default_factory=dict)
    name: str = "Experiment"
    experiment_seed: int = 0

    def as_config(self) -> dict[str, Any]:
        """Return the same as an experiment configuration."""
        tasks = self.task_container_defaults
        return {
            "name": self.name,
            "reproducibility": {"experiment_seed": self.experiment_seed},
            "checkpoint_storage": self.checkpoint_storage and dict(self.checkpoint_storage),
            "environment": {key: tasks.get(key) for key in (*_ENVIRONMENT, "drop_capabilities")},
            "resources": {"devices": tasks.get("devices"), "shm_size": tasks.get("shm_size_bytes")},
            **{key: tasks.get(key) for key in ("bind_mounts", "slurm", "pbs", "log_policies", "preemption_timeout")},
        }


# Laying one experiment configuration over another: maps are united, lists replaced, and null counts
# as not written.
#
# The exceptions: lists of mounts, devices, variables, ports, labels and policies add up; a
# hyperparameter with a type, and a storage or a searcher of another kind, are never mixed.


Json = Any

_UNIONS: Mapping[tuple[str, ...], tuple[str, tuple[str, ...]]] = {
    ("checkpoint_storage",): ("type", STORAGE_COMMON),
    ("searcher",): ("name", tuple(SEARCHER_COMMON)),
}


# Lists whose items have a key: an item above hides the item below with the same one.
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


def merge(above: Mapping[str, Json], below: Mapping[str, Json]) -> dict[str, Json]:
    """Return ``above`` with ``below`` where it has no value. Neither is changed."""
    merged: dict[str, Json] = _merge(above, below, ())
    return merged


def _merge(above: Json, below: Json, path: tuple[str, ...]) -> Json:
    if above is None or below is None:
        return copy.deepcopy(below if above is None else above)
    if isinstance(above, Mapping) and isinstance(below, Mapping):
        return _merge_maps(above, below, path)
    if isinstance(above, list) and isinstance(below, list):
        return _merge_lists(above, below, path)
    return copy.deepcopy(above)


def _merge_maps(above: Mapping[str, Json], below: Mapping[str, Json], path: tuple[str, ...]) -> Json:
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


def _merge_hyperparameters(above: Mapping[str, Json], below: Mapping[str, Json], *, top: bool) -> Json:
    """Merge namespaces; a value or a range is one thing. A null is a value here."""
    if not top and ("type" in above or "type" in below):
        return copy.deepcopy(dict(above))
    merged = copy.deepcopy(dict(above))
    for name, value in below.items():
        if name not in merged:
            merged[name] = copy.deepcopy(value)
        elif isinstance(merged[name], Mapping) and isinstance(value, Mapping):
            merged[name] = _merge_hyperparameters(merged[name], value, top=False)
    return merged


def _merge_lists(above: list[Json], below: list[Json], path: tuple[str, ...]) -> Json:
    above, below = copy.deepcopy(above), copy.deepcopy(below)
    if path in _KEYED:
        taken = [item.get(_KEYED[path]) for item in above if isinstance(item, Mapping)]
        return above + [
            item
            for item in below
            if not isinstance(item, Mapping) or item.get(_KEYED[path]) is None or item.get(_KEYED[path]) not in taken
        ]
    if path in _APPENDED:
        # the last one of two variables of the same name is the one that counts
        return below + above
    if path == ("labels",):
        return above + [label for label in below if label not in above]
    return above


# Older ways of writing an experiment, rewritten as they are written today. What is not understood
# is left to the rules to refuse.


# Keys that are taken and ignored: they are not part of a completed configuration.
_GONE = {
    ("data_layer",): dict,
    ("resources", "agent_label"): str,
}

# Keys that are taken, completed and shown, but read by no trial of today.
_WITHOUT_EFFECT = ("security", "records_per_epoch", "tensorboard_storage")


def modern(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return ``config`` in today's form, without nulls, and one line for each old form that was
    rewritten or is ignored."""
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
    warnings += [f"{key} is read by no trial of today, and has no effect" for key in _WITHOUT_EFFECT if whole.get(key)]
    searcher = whole.get("searcher")
    if isinstance(searcher, dict) and searcher.get("name") == "adaptive_asha":
        if searcher.get("stop_once") is not None:
            warnings.append("searcher.stop_once has no effect: adaptive_asha stops every trial for good")
        if searcher.get("max_length") is not None:
            warnings.append("searcher.max_length has no effect in adaptive_asha: max_time and time_metric count")
    return whole, warnings


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
    warnings += _pod_warnings(new.get("pod_spec"))
    return new


def _pod_warnings(pod: Any) -> list[str]:
    """Return what of a pod_spec a cluster drops without a word."""
    if not isinstance(pod, dict):
        return []
    spec = pod.get("spec")
    containers = spec.get("containers") if isinstance(spec, dict) else None
    found = [
        f"environment.pod_spec.{key} is not a key of a pod, and has no effect" for key in pod if key not in POD_KEYS
    ]
    return found + [
        f"environment.pod_spec.spec.containers[{index}].security_context has no effect"
        for index, item in enumerate(containers if isinstance(containers, list) else [])
        if isinstance(item, dict) and "security_context" in item
    ]


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
    warnings.append("log_policies: action is written as a word today, such as action: cancel_retries")
    return {**policy, "action": action["type"]}
