"""Imports a module of one model folder, as a run does: by its bare name, with that folder first on
the path."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
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


@contextmanager
def forgotten() -> Iterator[None]:
    """Leave no trace of a model folder's modules in sys.modules and sys.path."""
    before, path = {name: sys.modules.pop(name) for name in BARE_NAMES if name in sys.modules}, list(sys.path)
    try:
        yield
    finally:
        sys.path[:] = path
        for name in BARE_NAMES:
            sys.modules.pop(name, None)
        sys.modules.update(before)


def import_from(folder: str, module: str) -> ModuleType:
    """Return the module; its neighbors are found by their bare names meanwhile."""
    with forgotten():
        sys.path.insert(0, str(MODEL_DEFS / folder))
        return importlib.import_module(module)
