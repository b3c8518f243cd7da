"""Entrypoints: found by reading, refused with the name that was probably meant."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from zero_trial.errors import ConfigError
from zero_trial.experiment.entrypoint import (
    Entrypoint,
    check_entrypoint,
    parse_entrypoint,
    trial_classes,
)

SOURCE = """
from zero_trial import ZeroTrial
class MyTrial(ZeroTrial): ...
class Helper: ...
"""


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    (tmp_path / "model_def.py").write_text(SOURCE)
    return tmp_path


@pytest.mark.parametrize(
    "value",
    [
        "model_def:MyTrial",
        "python3 -m determined.launch.torch_distributed python3 -m zero_trial.run model_def:MyTrial",
        ["python3", "-m", "zero_trial.run", "model_def:MyTrial"],
    ],
)
def test_forms(value: str | list[str]):
    assert parse_entrypoint(value) == Entrypoint("model_def", "MyTrial")


@pytest.mark.parametrize("value", [None, "", "train.py", "a:B c:D", "model_def:"])
def test_no_class_is_named(value: str | None):
    with pytest.raises(ConfigError, match=r"the entrypoint names no trial class.*Write entrypoint: model_def:MyTrial"):
        parse_entrypoint(value)


def test_a_class_that_is_there(model_dir: Path):
    check_entrypoint(Entrypoint("model_def", "MyTrial"), model_dir)


@pytest.mark.parametrize("base", ["ZeroTrial", "DeepSpeedTrial"])
def test_a_wrong_name(tmp_path: Path, base: str):
    """The fifth of the ten most common mistakes."""
    (tmp_path / "model_def.py").write_text(f"class MyTrial({base}): ...\n")
    with pytest.raises(ConfigError) as caught:
        check_entrypoint(Entrypoint("model_def", "MyTrail", as_determined=base == "DeepSpeedTrial"), tmp_path)
    assert str(caught.value) == (
        f"model_def:MyTrail not found in ./model_def.py; it defines MyTrial({base}). Use entrypoint: model_def:MyTrial."
    )


def test_a_wrong_module(model_dir: Path):
    with pytest.raises(ConfigError) as caught:
        check_entrypoint(Entrypoint("model_dfe", "MyTrial"), model_dir)
    assert "module model_dfe does not exist in" in str(caught.value) and "Use entrypoint: model_def:MyTrial." in str(
        caught.value
    )


def test_a_package_and_a_dotted_module(tmp_path: Path):
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").write_text(SOURCE)
    (tmp_path / "pkg" / "inner.py").write_text(SOURCE)
    check_entrypoint(Entrypoint("pkg", "MyTrial"), tmp_path)
    check_entrypoint(Entrypoint("pkg.inner", "MyTrial"), tmp_path)


@pytest.mark.parametrize(
    "source",
    [
        "from elsewhere import MyTrial",
        "MyTrial = make()",
        "from elsewhere import *",
        "class MyTrial(make_base(object)): ...",
    ],
)
def test_what_only_running_could_show_is_let_through(source: str, tmp_path: Path):
    (tmp_path / "model_def.py").write_text(source)
    check_entrypoint(Entrypoint("model_def", "MyTrial"), tmp_path)


def test_a_syntax_error_is_named_with_its_line(tmp_path: Path):
    (tmp_path / "model_def.py").write_text("x = 1\nclass MyTrial(:\n")
    with pytest.raises(ConfigError, match=r"model_def\.py:2: not Python"):
        check_entrypoint(Entrypoint("model_def", "MyTrial"), tmp_path)


def test_a_class_of_another_module_is_named(model_dir: Path):
    (model_dir / "broken.py").write_text("class MyOther(:")
    (model_dir / "other.py").write_text("from model_def import MyTrial\nclass MyOther(MyTrial): ...\n")
    with pytest.raises(ConfigError) as caught:
        check_entrypoint(Entrypoint("model_def", "MyOther"), model_dir)
    assert caught.value.fix == "Use entrypoint: other:MyOther."


def test_trials_in_order():
    tree = ast.parse("class A(ZeroTrial): ...\nclass B: ...\nclass C(A): ...\nclass D(zero_trial.ZeroTrial[int]): ...")
    assert trial_classes(tree) == ["A", "C", "D"]
