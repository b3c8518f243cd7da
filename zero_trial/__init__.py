"""zero_trial: sharded, offloaded and pipeline-parallel training under one trial class, from a
laptop CPU to a cluster.

Public names are loaded on first use, so that importing the package costs nothing and the launcher
never imports torch.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from types import FrameType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from zero_trial import activation_checkpointing as checkpointing
    from zero_trial import pipeline as pipe
    from zero_trial import zero
    from zero_trial.comm import destroy_distributed, init_distributed
    from zero_trial.engine import Engine, RepeatingLoader, add_config_arguments, initialize
    from zero_trial.errors import (
        CheckpointError,
        ConfigError,
        DataError,
        Diverged,
        DoesNotFit,
        InvalidHP,
        KernelUnavailable,
        MasterError,
        MeshError,
        Preempted,
        StorageError,
        TrialError,
        WorkerLost,
        ZeroTrialError,
    )
    from zero_trial.long_sequences import chunked_cross_entropy, long_samples, tiled
    from zero_trial.pipeline import LayerSpec, PipelineModule, TiedLayerSpec
    from zero_trial.trial import (
        Batch,
        DataLoader,
        Epoch,
        MetricReducer,
        Record,
        Reducer,
        TrialCallback,
        ZeroTrial,
        ZeroTrialContext,
    )
    from zero_trial.trial.runtime.trainer import Trainer, init

_NAMES = {
    "comm": ("destroy_distributed", "init_distributed"),
    "engine": ("Engine", "RepeatingLoader", "add_config_arguments", "initialize"),
    "errors": (
        *("CheckpointError", "ConfigError", "DataError", "Diverged", "DoesNotFit", "InvalidHP", "KernelUnavailable"),
        *("MasterError", "MeshError", "Preempted", "StorageError", "TrialError", "WorkerLost", "ZeroTrialError"),
    ),
    "long_sequences": ("chunked_cross_entropy", "long_samples", "tiled"),
    "pipeline": ("LayerSpec", "PipelineModule", "TiedLayerSpec"),
    "trial.runtime.trainer": ("Trainer", "init"),
    "trial": (
        *("Batch", "DataLoader", "Epoch", "MetricReducer", "Record", "Reducer", "TrialCallback"),
        *("ZeroTrial", "ZeroTrialContext"),
    ),
}
_PLACES = {name: f"zero_trial.{module}" for module, names in _NAMES.items() for name in names}

_MODULES = {
    "checkpointing": "zero_trial.activation_checkpointing",
    "pipe": "zero_trial.pipeline",
    "zero": "zero_trial.zero",
}

__all__ = [
    "Batch",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "DataLoader",
    "Diverged",
    "DoesNotFit",
    "Engine",
    "Epoch",
    "InvalidHP",
    "KernelUnavailable",
    "LayerSpec",
    "MasterError",
    "MeshError",
    "MetricReducer",
    "PipelineModule",
    "Preempted",
    "Record",
    "Reducer",
    "RepeatingLoader",
    "StorageError",
    "TiedLayerSpec",
    "Trainer",
    "TrialCallback",
    "TrialError",
    "WorkerLost",
    "ZeroTrial",
    "ZeroTrialContext",
    "ZeroTrialError",
    "__version__",
    "add_config_arguments",
    "checkpointing",
    "chunked_cross_entropy",
    "destroy_distributed",
    "init",
    "init_distributed",
    "initialize",
    "long_samples",
    "pipe",
    "tiled",
    "zero",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(_MODULES[name])
    if name not in _PLACES:
        near = _nearest(name)
        if near and _imports(sys._getframe(1)):  # Python itself would drop what an AttributeError says
            raise ImportError(f"cannot import name {name!r} from 'zero_trial'{near}", name=__name__, path=__file__)
        raise AttributeError(f"module 'zero_trial' has no attribute {name!r}{near}")
    return getattr(import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    """List the public names; Python 3.12 and later suggests one of them for a misspelled import."""
    return __all__


def _nearest(name: str) -> str:
    """Return a question with the nearest public name; empty where none is near."""
    if name.startswith("_"):
        return ""
    import difflib

    lower = {known.lower(): known for known in __all__}
    near = difflib.get_close_matches(name.lower(), lower, 1, 0.7)
    return f". Did you mean {lower[near[0]]!r}?" if near else ""


def _imports(frame: FrameType) -> bool:
    """Return whether ``from zero_trial import ...`` is what a frame executes."""
    from opcode import opname

    return opname[frame.f_code.co_code[frame.f_lasti]] == "IMPORT_FROM"


def _is_determined_harness() -> bool:
    """Return whether this process is ``python -m determined.exec.harness``."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return getattr(spec, "name", None) == "determined.exec.harness"


if os.environ.get("ZERO_TRIAL_AS_DEEPSPEED", "0") not in ("", "0"):
    import_module("zero_trial.compat.deepspeed.deepspeed_table").install_deepspeed()

if _is_determined_harness():
    import_module("zero_trial.trial.runtime.task").install()
