"""The names that ``import zero_trial`` offers: each exists, and a type checker knows it too."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import zero_trial
from zero_trial.errors import ZeroTrialError


def names_for_type_checkers() -> set[str]:
    """What the ``if TYPE_CHECKING`` block of the package imports."""
    tree = ast.parse(Path(zero_trial.__file__).read_text(encoding="utf-8"))
    blocks = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.asname or alias.name for node in imports for alias in node.names}


def test_every_public_name_exists_and_has_a_type() -> None:
    from zero_trial.trial import Batch

    assert all(getattr(zero_trial, name) is not None for name in zero_trial.__all__) and zero_trial.Batch is Batch
    assert names_for_type_checkers() == set(zero_trial.__all__) - {"__version__"}


def test_a_script_needs_no_other_import() -> None:
    assert {"Trainer", "init", "Batch", "Epoch", "Record", "DataLoader", "ZeroTrial"} <= set(zero_trial.__all__)


def test_every_error_is_a_public_name() -> None:
    assert {kind.__name__ for kind in subclasses(ZeroTrialError)} <= set(zero_trial.__all__)


def subclasses(kind: type) -> set[type]:
    """``kind`` and what is derived from it in its own file."""
    found = {kind}.union(*(subclasses(below) for below in kind.__subclasses__()))
    return {one for one in found if one.__module__ == kind.__module__}


def test_a_wrong_name_suggests_the_right_one() -> None:
    with pytest.raises(AttributeError, match="Did you mean 'DataLoader'"):
        _ = zero_trial.Dataloader
    with pytest.raises(ImportError, match="Did you mean 'DataLoader'"):
        exec("from zero_trial import Dataloader")
    with pytest.raises(ImportError, match="cannot import name 'unheard_of'"):
        exec("from zero_trial import unheard_of")
    assert not hasattr(zero_trial, "__wrapped__") and dir(zero_trial) == sorted(zero_trial.__all__)
