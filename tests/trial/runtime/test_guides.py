"""The guides to clusters and to moving over: every name of this package in them is one."""

from __future__ import annotations

import pkgutil
import re
from pathlib import Path

import pytest

GUIDES = Path(__file__).parents[3] / "docs" / "guide"


@pytest.mark.parametrize("name", ["determined.md", "moving_from_deepspeedtrial.md"])
def test_the_names_exist(name: str) -> None:
    text = (GUIDES / name).read_text()
    # the last imports Lightning; tests/exactness/test_lightning.py uses it
    apart = {"zero_trial.run", "zero_trial.as_determined", "zero_trial.lightning"}
    dotted = set(re.findall(r"zero_trial(?:\.\w+)+", text)) - apart
    dotted |= {f"zero_trial.{imported}" for imported in re.findall(r"from zero_trial import (\w+)", text)}
    dotted |= {f"zero_trial.ZeroTrialContext.{method}" for method in re.findall(r"context\.(\w+)\(", text) if method}
    assert len(dotted) > 3
    for path in sorted(dotted - {"zero_trial.ZeroTrialContext.get_hparams"}):
        pkgutil.resolve_name(path)
