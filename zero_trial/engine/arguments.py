"""The arguments that scripts for DeepSpeed hand over: which ds_config to use, and what its "auto" values stand for."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from zero_trial.config.auto_rules import hint_names
from zero_trial.errors import ConfigError


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--deepspeed`` (a flag that is accepted and changes nothing) and ``--deepspeed_config FILE`` with its name of ours,
    ``--zero_trial_config``. Returns the parser, as DeepSpeed does. ``config_of(args)`` reads the result."""
    group = parser.add_argument_group("zero_trial", "configuration of zero_trial.initialize")
    group.add_argument(
        "--deepspeed", "--zero_trial", default=False, action="store_true", help="accepted; initialize() alone decides"
    )
    group.add_argument(
        "--deepspeed_config", "--zero_trial_config", metavar="FILE", type=Path, default=None, help="ds_config in JSON"
    )
    return parser


def config_of(args: Any) -> Path | None:
    """The ds_config that parsed arguments (any object with attributes, or None) name, or None. Raises ConfigError when there is no such file."""
    value = getattr(args, "deepspeed_config", None)
    if value is None:
        return None
    path = Path(value)
    if not path.is_file():
        raise ConfigError(
            "there is no such file", where="--deepspeed_config", got=str(path), expected="a ds_config in JSON"
        )
    return path


def hints_of(args: Any) -> dict[str, Any]:
    """Values for "auto", by the names that Hugging Face's TrainingArguments and plain scripts use; of an object with attributes, or None.

    What says nothing is left out: None, ``max_steps=-1``, and ``warmup_steps=0`` beside a ``warmup_ratio``. TrainingArguments'
    ``train_batch_size`` is that of one device, under another name here.
    """
    found = {name: value for name in hint_names() if (value := getattr(args, name, None)) is not None}
    if "per_device_train_batch_size" in found:
        found.pop("train_batch_size", None)
    for name in ("max_steps", "num_training_steps", "total_num_steps"):
        if isinstance(found.get(name), int) and found[name] < 1:
            found.pop(name)
    if not found.get("warmup_steps") and found.get("warmup_ratio"):
        found.pop("warmup_steps", None)
    return {name: value for name, value in found.items() if isinstance(value, (bool, int, float, str, list, tuple))}
