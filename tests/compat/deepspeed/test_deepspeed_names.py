"""Every public name of DeepSpeed 0.19.8 is answered: ours, or refused with a reason."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from zero_trial.compat.deepspeed import deepspeed_config, deepspeed_refused
from zero_trial.compat.deepspeed.deepspeed_table import OURS, TABLE, install_deepspeed
from zero_trial.compat.finder import Refused, StandIn

UPSTREAM: dict[str, list[str]] = {}
for line in Path(__file__).with_name("deepspeed_names.txt").read_text().replace("\n  ", " ").splitlines():
    if not line.startswith("#"):
        module, _, names = line.partition(":")
        UPSTREAM["deepspeed" if module == "-" else f"deepspeed.{module}"] = names.split()

# What libraries and scripts ask for besides: submodules and names that are not DeepSpeed's own.
ALSO_DEFINED = {"checkpointing", "zero", "get_accelerator", "ReduceOp", "__version__", *deepspeed_config.BUILDERS}
ALSO_DEFINED |= {"DeepSpeedZeroOffloadOptimizerConfig", "DeepSpeedZeroOffloadParamConfig"}

# Modules of older releases that scripts still ask for.
OLDER = {"compression.compress", "compression.scheduler", "ops.sparse_attention", "elasticity", "nebula"}


@pytest.fixture(scope="module")
def stand_in() -> Iterator[StandIn]:
    before = list(sys.meta_path)
    yield install_deepspeed().stand_in
    sys.meta_path[:] = before
    for name in [name for name in sys.modules if name.partition(".")[0] == "deepspeed"]:
        del sys.modules[name]


def test_the_list_is_that_of_the_real_one():
    assert len(UPSTREAM) > 700 and sum(map(len, UPSTREAM.values())) > 3900


@pytest.mark.parametrize("top", sorted({".".join(name.split(".")[:2]) for name in UPSTREAM}))
def test_every_name_is_ours_or_refused_with_its_reason(stand_in: StandIn, top: str):
    for module, names in UPSTREAM.items():
        if module != top and (top == "deepspeed" or not module.startswith(f"{top}.")):
            continue
        for name in names:
            statement = f"from {module} import {name}"
            if name in stand_in.ours(module):
                exec(statement, {})
                continue
            reason = stand_in.reason(module, name)
            assert reason, f"{statement}: neither ours nor refused"
            try:
                exec(statement, {})
            except ImportError as refusal:
                assert reason in str(refusal), statement
            else:
                pytest.fail(f"{statement}: nothing is raised")


def test_the_table_has_no_name_that_deepspeed_lacks():
    inner = {
        f"{module}.{name}"
        for module, names in OURS.items()
        for name in names
        if name not in UPSTREAM.get(module, ()) and name not in ALSO_DEFINED and not name.startswith("_")
    }
    assert inner == set()


def test_what_is_ours_is_not_refused_as_well():
    both = {
        f"{module}.{name}"
        for module, names in OURS.items()
        for name in deepspeed_refused.refused_names(module)
        if name in names
    }
    assert both == set()


def test_every_refusal_covers_a_real_name(stand_in: StandIn):
    """A refusal that no name of DeepSpeed meets is a slip of the pen."""
    for module, names in TABLE.items():
        if isinstance(names, Refused):
            real = [*UPSTREAM, *(f"deepspeed.{name}" for name in OLDER)]
            assert any(name == module or name.startswith(f"{module}.") for name in real), module
            continue
        for pattern in (name for name, target in names.items() if isinstance(target, Refused)):
            assert any(stand_in.reason(module, name) for name in UPSTREAM.get(module, ())), (module, pattern)


def test_a_function_is_not_hidden_by_the_module_of_its_name(stand_in: StandIn):
    utils = importlib.import_module("deepspeed.utils")
    importlib.import_module("deepspeed.utils.z3_leaf_module")
    assert callable(utils.z3_leaf_module)
