"""One set of values from a space of hyperparameters: ranges are drawn, maps are walked, everything else stands for itself."""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping
from typing import Any

from zero_trial.config.hyperparameters import is_range, ranges
from zero_trial.errors import ConfigError


def sample(space: Mapping[str, Any], rng: random.Random) -> dict[str, Any]:
    """``space`` with every range replaced by a value. Names are visited in alphabetical order, whatever their order in the YAML.

    The top level is a map of names even if one of them is ``type``, as in Determined.
    """
    drawn = {name: _value(space[name], rng) for name in sorted(space)}
    return {name: drawn[name] for name in space}


def has_ranges(space: Mapping[str, Any]) -> bool:
    """Whether two samples can differ."""
    return bool(ranges(space))


def _value(spec: Any, rng: random.Random) -> Any:
    if not isinstance(spec, Mapping):
        return copy.deepcopy(spec)
    if is_const(spec):
        return copy.deepcopy(spec.get("val"))
    if is_range(spec):
        return _draw(spec, rng)
    return sample(spec, rng)


def is_const(spec: Any) -> bool:
    """Whether ``spec`` is written ``{type: const, val: ...}``."""
    return isinstance(spec, Mapping) and spec.get("type") == "const"


def _draw(spec: Mapping[str, Any], rng: random.Random) -> Any:
    match spec["type"]:
        case "categorical":
            return copy.deepcopy(rng.choice(spec["vals"]))
        case "int":
            return rng.randint(spec["minval"], spec["maxval"])  # both ends included
        case "double":
            return rng.uniform(spec["minval"], spec["maxval"])
        case "log":
            return float(spec["base"]) ** rng.uniform(spec["minval"], spec["maxval"])
        case other:
            raise ConfigError("no kind of hyperparameter", got=other, expected="int, double, log, categorical or const")
