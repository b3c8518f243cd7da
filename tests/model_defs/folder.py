"""Imports a module of one model folder, as a run does: by its bare name, with that folder first on
the path."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
MODEL_DEFS = ROOT / "model_defs"
BARE_NAMES = (
    "model",
    "data",
    "distance",
    "layers",
    "model_def",
    "pairs",
    "pipeline_def",
    "train_bert",
    "train_bert_zero",
)


def import_from(folder: str, module: str) -> ModuleType:
    """The module, and no trace of it (or of its neighbours) in sys.modules and sys.path
    afterwards."""
    before = {name: sys.modules.pop(name) for name in BARE_NAMES if name in sys.modules}
    sys.path.insert(0, str(MODEL_DEFS / folder))
    try:
        return importlib.import_module(module)
    finally:
        sys.path.remove(str(MODEL_DEFS / folder))
        for name in BARE_NAMES:
            sys.modules.pop(name, None)
        sys.modules.update(before)
