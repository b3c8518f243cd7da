"""Importing the user's trial class from the model's folder."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from zero_trial.errors import ConfigError
from zero_trial.trial.trial import ZeroTrial


def import_trial_class(module: str, name: str, model_dir: Path) -> type[ZeroTrial]:
    """The class ``name`` of ``module``, with ``model_dir`` first on the search path. Raises ConfigError, naming the
    trials that there are,
    if it is none; what the module itself raises comes through.
    """
    sys.path.insert(0, str(model_dir))
    content = vars(importlib.import_module(module))
    kind = content.get(name)
    if isinstance(kind, type) and issubclass(kind, ZeroTrial):
        return kind
    trials = [
        key
        for key, value in content.items()
        if isinstance(value, type) and issubclass(value, ZeroTrial) and value is not ZeroTrial
    ]
    listed = ", ".join(f"{key}(ZeroTrial)" for key in trials)
    raise ConfigError(
        f"{module}:{name} not found in {model_dir / module}.py; it defines {listed or 'no ZeroTrial'}",
        where="entrypoint",
        fix=f"Use entrypoint: {module}:{trials[0]}." if trials else "Write a subclass of zero_trial.ZeroTrial.",
    )
