"""What ``deepspeed.runtime.lr_schedules`` has beside the schedules: names of parameters, and
arguments of a script that choose a schedule."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Mapping
from typing import Any

from zero_trial.engine.lr_schedules import LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR

LR_SCHEDULE = "lr_schedule"
_CLASSES = {cls.__name__: cls for cls in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)}
_PARAMETERS = sorted({name for cls in _CLASSES.values() for name in inspect.signature(cls).parameters} - {"optimizer"})

CONSTANTS: dict[str, str] = {
    **{name.upper(): name for name in _PARAMETERS},
    "LR_SCHEDULE": LR_SCHEDULE,
    "LR_RANGE_TEST": "LRRangeTest",
    "ONE_CYCLE": "OneCycle",
    "WARMUP_LR": "WarmupLR",
    "WARMUP_DECAY_LR": "WarmupDecayLR",
    "WARMUP_COSINE_LR": "WarmupCosineLR",
    "WARMUP_LOG_RATE": "log",
    "WARMUP_LINEAR_RATE": "linear",
    "EDGE_VALUE": "edge_value",
    "MID_VALUE": "mid_value",
}
"""DeepSpeed's names of schedules and of their parameters, by the constant that has them."""


def __getattr__(name: str) -> str:
    if name in CONSTANTS:
        return CONSTANTS[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# Parameters that a script may give on its command line, with DeepSpeed's defaults.
_NUMBERS: dict[str, int | float] = {
    "lr_range_test_min_lr": 0.001,
    "lr_range_test_step_rate": 1.0,
    "lr_range_test_step_size": 1000,
    "cycle_first_step_size": 1000,
    "cycle_first_stair_count": -1,
    "cycle_second_step_size": -1,
    "cycle_second_stair_count": -1,
    "decay_step_size": 1000,
    "cycle_min_lr": 0.01,
    "cycle_max_lr": 0.1,
    "decay_lr_rate": 0.0,
    "cycle_min_mom": 0.8,
    "cycle_max_mom": 0.9,
    "decay_mom_rate": 0.0,
    "warmup_min_lr": 0.0,
    "warmup_max_lr": 0.001,
    "warmup_num_steps": 1000,
    "warmup_min_ratio": 0.01,
    "cos_min_ratio": 0.01,
}
_FLAGS = ("lr_range_test_staircase", "cycle_momentum")


def add_tuning_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--lr_schedule NAME`` and an argument for each parameter of the schedules. Returns the
    parser, as DeepSpeed does. :func:`get_config_from_args` reads the result."""
    group = parser.add_argument_group("schedule", "learning rate schedule by DeepSpeed's names")
    group.add_argument(f"--{LR_SCHEDULE}", default=None, help=", ".join(_CLASSES))
    for name, default in _NUMBERS.items():
        group.add_argument(f"--{name}", type=type(default), default=default, help=f"default {default:g}")
    for name in _FLAGS:
        group.add_argument(f"--{name}", action="store_true")
    group.add_argument("--warmup_type", default="log", help="log or linear")
    return parser


def get_config_from_args(args: Any) -> tuple[dict[str, Any] | None, str | None]:
    """Return the ``scheduler`` section that parsed arguments mean, and None; or None, and why there
    is none."""
    name = getattr(args, LR_SCHEDULE, None)
    if name is None:
        return None, f"--{LR_SCHEDULE} not specified on command line"
    if name not in _CLASSES:
        return None, f"{name} is not supported LR schedule"
    given = {key: getattr(args, key, None) for key in inspect.signature(_CLASSES[name]).parameters}
    # a size or count below 0 means that none was given
    params = {
        key: value
        for key, value in given.items()
        if value is not None and not (key.startswith("cycle_") and key.endswith(("_size", "_count")) and value < 0)
    }
    return {"type": name, "params": params}, None


def get_lr_from_config(config: Mapping[str, Any]) -> tuple[float | list[float] | None, str]:
    """Return the learning rate that a ``scheduler`` section sets, and ""; or None, and why there is
    none."""
    for key in ("type", "params"):
        if key not in config:
            return None, f"LR schedule {key} not defined in config"
    name = config["type"]
    if name not in _CLASSES:
        return None, f"{name} is not a valid LR schedule"
    if name == "WarmupCosineLR":
        return None, f"{name} scales the optimizer's learning rate, so its params have none"
    rate = {"LRRangeTest": "lr_range_test_min_lr", "OneCycle": "cycle_max_lr"}.get(name, "warmup_max_lr")
    return config["params"][rate], ""
