"""Laying one experiment configuration over another: maps are united, lists replaced, and null counts as not written.

The exceptions: lists of mounts, devices, variables, ports, labels and policies add up; a hyperparameter with a type, and a storage or a searcher
of another kind, are never mixed.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from zero_trial.master.expconf.searcher_section import COMMON as SEARCHER_COMMON
from zero_trial.master.expconf.storage import COMMON as STORAGE_COMMON

Json = Any
_UNIONS: Mapping[tuple[str, ...], tuple[str, tuple[str, ...]]] = {
    ("checkpoint_storage",): ("type", STORAGE_COMMON),
    ("searcher",): ("name", tuple(SEARCHER_COMMON)),
    ("data_layer",): ("type", ()),
}
# Lists whose items are told apart by a key: an item above hides its twin below.
_KEYED = {("bind_mounts",): "container_path", ("resources", "devices"): "container_path", ("log_policies",): "name"}
_APPENDED = (
    *(("environment", "environment_variables", kind) for kind in ("cpu", "cuda", "rocm")),
    ("slurm", "sbatch_args"),
    ("pbs", "pbsbatch_args"),
)
_ATOMIC = (("data",), ("environment", "pod_spec"))


def merge(above: Mapping[str, Json], below: Mapping[str, Json]) -> dict[str, Json]:
    """``above`` where it says something, else ``below``. Neither is changed."""
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
    """Namespaces are united; a value or a range is one thing. A null is a value here."""
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
        return below + above  # the last one of two variables of the same name is the one that counts
    if path == ("labels",):
        return above + [label for label in below if label not in above]
    if path == ("environment", "proxy_ports"):
        return above + below
    return above
