"""Packages that a monitor needs."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from zero_trial.engine.monitors import load, require
from zero_trial.errors import ConfigError


def test_a_package_that_is_there():
    require("json", "tensorboard", "json")
    assert load("json").dumps(1) == "1"


@pytest.mark.parametrize("name", ["no_such_package_here", "no_such_package_here.part"])
def test_a_package_that_is_not(name: str):
    with pytest.raises(ConfigError) as error:
        require(name, "comet", "comet_ml")
    assert str(error.value) == (
        f"comet.enabled: the package {name} is not installed. Run: pip install comet_ml; or set comet.enabled to false."
    )


def test_a_stand_in_without_a_spec_is_not_taken_for_the_package(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "half_a_package", ModuleType("half_a_package"))
    with pytest.raises(ConfigError, match="half_a_package is not installed"):
        require("half_a_package", "wandb", "half_a_package")
