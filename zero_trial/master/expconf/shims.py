"""Older ways of writing an experiment, rewritten as they are written today. What is not understood is left to the rules to refuse."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any

from zero_trial.master.expconf.environment_section import HARDWARE

_SIZE = re.compile(r"\A((?:[0-9]*[.])?[0-9]+) ?(?:([kmgtp])(?:i?b)?|b)?\Z", re.IGNORECASE)
_POWERS = {None: 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}


def modern(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """``config`` in today's form, nulls left out, and one line for each old form that was rewritten or is ignored."""
    whole = {key: copy.deepcopy(value) for key, value in config.items() if value is not None}
    warnings: list[str] = []
    if isinstance(whole.get("environment"), dict):
        whole["environment"] = _environment(whole["environment"], warnings)
    if isinstance(whole.get("resources"), dict):
        whole["resources"] = _resources(whole["resources"], warnings)
    if isinstance(whole.get("log_policies"), list):
        whole["log_policies"] = [_log_policy(policy, warnings) for policy in whole["log_policies"]]
    for key in ("security", "records_per_epoch"):
        if whole.get(key):
            warnings.append(f"{key} is read by no trial of today, and has no effect")
    searcher = whole.get("searcher")
    if isinstance(searcher, dict) and searcher.get("name") == "adaptive_asha" and searcher.get("max_length"):
        warnings.append("searcher.max_length is the older form of max_time and time_metric")
        if isinstance(searcher["max_length"], dict) and "records" in searcher["max_length"]:
            warnings.append("searcher.max_length in records needs a validation metric named records; use batches")
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
    return new


def _cuda(section: dict[str, Any], where: str, warnings: list[str]) -> dict[str, Any]:
    if "gpu" not in section:
        return section
    warnings.append(f"{where}.gpu is the older name of {where}.cuda")
    rest = {key: value for key, value in section.items() if key != "gpu"}
    return {"cuda": section["gpu"], **rest} if rest.get("cuda") is None else rest


def _resources(section: dict[str, Any], warnings: list[str]) -> dict[str, Any]:
    new = dict(section)
    size = new.get("shm_size")
    match = _SIZE.match(size) if isinstance(size, str) else None
    if match:
        power = match[2].lower() if match[2] else None
        new["shm_size"] = int(float(match[1]) * 1024 ** _POWERS[power])
    if isinstance(new.get("devices"), list):
        new["devices"] = [_device(item) for item in new["devices"]]
    warnings += [
        f"resources.{key} has been removed from Determined, and has no effect"
        for key in ("agent_label", "slots")
        if new.get(key) is not None
    ]
    return new


def _device(item: Any) -> Any:
    """``/dev/a:/dev/b:mrw`` as a map."""
    parts = item.split(":") if isinstance(item, str) else []
    names = ("host_path", "container_path", "mode")
    return dict(zip(names, parts, strict=False)) if len(parts) in (2, 3) else item


def _log_policy(policy: Any, warnings: list[str]) -> Any:
    """``action: {type: cancel_retries}`` as ``action: cancel_retries``."""
    action = policy.get("action") if isinstance(policy, dict) else None
    if not isinstance(action, dict) or set(action) != {"type"}:
        return policy
    warnings.append("log_policies: action is written as a word today, such as action: cancel_retries")
    return {**policy, "action": action["type"]}
