"""The command line arguments that scripts for DeepSpeed declare: which ds_config to use."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

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
