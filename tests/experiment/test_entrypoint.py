"""Entrypoints: found by reading, refused with the name that was probably meant."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from zero_trial.errors import ConfigError
from zero_trial.experiment.entrypoint import (
    Entrypoint,
    check_entrypoint,
    check_imports,
    check_metric,
    parse_entrypoint,
    trial_classes,
    warn_of_methods,
)
from zero_trial.util.speed import SPEED_METRIC

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
    with pytest.raises(ConfigError, match=r"no trial class is named.*Write entrypoint: model_def:MyTrial"):
        parse_entrypoint(value)


def test_a_class_that_is_there(model_dir: Path):
    check_entrypoint(Entrypoint("model_def", "MyTrial"), model_dir)


def test_a_wrong_name(model_dir: Path):
    """The fifth of the ten most common mistakes."""
    with pytest.raises(ConfigError) as caught:
        check_entrypoint(Entrypoint("model_def", "MyTrail"), model_dir)
    assert str(caught.value) == (
        "model_def:MyTrail not found in ./model_def.py; it defines MyTrial(ZeroTrial). Use entrypoint: model_def:MyTrial."
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model_def:Helper", "model_def:Helper is not a ZeroTrial in ./model_def.py; it defines MyTrial(ZeroTrial)."),
        ("model_dfe:MyTrial", "there is no module model_dfe in"),
    ],
)
def test_other_mistakes(name: str, message: str, model_dir: Path):
    with pytest.raises(ConfigError) as caught:
        check_entrypoint(parse_entrypoint(name), model_dir)
    assert message in str(caught.value) and "Use entrypoint: model_def:MyTrial." in str(caught.value)


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
        "from elsewhere import Base\nclass MyTrial(Base): ...",
        "import zero_trial as z\nclass MyTrial(z.ZeroTrial): ...",
        "from zero_trial import ZeroTrial as T\nclass MyTrial(T): ...",
        "from zero_trial import ZeroTrial\nclass Base(ZeroTrial): ...\nclass MyTrial(Base): ...",
        "from elsewhere import Far\nclass Base(Far): ...\nclass MyTrial(Base): ...",
        "from torch import nn\nfrom elsewhere import Far\nclass MyTrial(nn.Module, Far): ...",
        "class MyTrial(make_base(object)): ...",
        "from typing import Any, cast\nfrom zero_trial import ZeroTrial\nclass MyTrial(cast(Any, ZeroTrial)): ...",
        "import trace\nclass MyTrial(trace.Base): ...",
    ],
)
def test_what_only_running_could_show_is_let_through(source: str, tmp_path: Path):
    (tmp_path / "trace.py").touch()  # the user's own, and not Python's
    (tmp_path / "model_def.py").write_text(source)
    check_entrypoint(Entrypoint("model_def", "MyTrial"), tmp_path)


@pytest.mark.parametrize(
    "source",
    [
        "from torch import nn\nclass MyTrial(nn.Module): ...",
        "import torch.nn as layers\nclass Base(layers.Module): ...\nclass MyTrial(Base, object): ...",
        "from typing import Generic, TypeVar\nT = TypeVar('T')\nclass MyTrial(Generic[T]): ...",
    ],
)
def test_a_class_of_torch_or_of_python_is_no_trial(source: str, tmp_path: Path):
    (tmp_path / "model_def.py").write_text(source)
    with pytest.raises(ConfigError, match=r"model_def:MyTrial is not a ZeroTrial in \./model_def\.py"):
        check_entrypoint(Entrypoint("model_def", "MyTrial"), tmp_path)


def test_a_package_that_is_not_there_is_named_with_its_line(tmp_path: Path):
    head = '"""A trial."""\nimport math\nSIZE: int = 2 * 4\nNAMES = [SIZE]\ndef f(): ...\nclass A: ...\n'
    (tmp_path / "model_def.py").write_text(f"{head}from nonesuch.inner import thing\n")
    with pytest.raises(ConfigError, match=r"model_def\.py:7: No module named 'nonesuch'.*from nonesuch\.inner"):
        check_imports(Entrypoint("model_def", "MyTrial"), tmp_path)


@pytest.mark.parametrize(
    "line",
    [
        "import math, torch.nn as nn",
        "from beside import x",
        "import folder.inner",
        "from .beside import x",
        "import deepspeed",
        "try:\n    import nonesuch\nexcept ImportError:\n    nonesuch = None",
        "if False:\n    import nonesuch",
        "def f():\n    import nonesuch",
        "import sys\nsys.path.insert(0, 'src')\nimport nonesuch",
        "from sys import modules\nmodules['nonesuch'] = modules['sys']\nimport nonesuch",
        "class Finder:\n    import sys\n    sys.meta_path.append(None)\nimport nonesuch",
        "import os as o\no.sys.path += ['src']\nimport nonesuch",
        "import beside\nimport nonesuch",
        "from . import beside\nimport nonesuch",
        "x = __import__('beside').x\nimport nonesuch",
    ],
)
def test_imports_that_may_well_be_found(line: str, tmp_path: Path):
    (tmp_path / "model_def.py").write_text(line)
    (tmp_path / "beside.py").touch()
    (tmp_path / "folder").mkdir()
    check_imports(Entrypoint("model_def", "MyTrial"), tmp_path)


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


REPORTS = """
from zero_trial import ZeroTrial
from elsewhere import Base, measure

class MyTrial(ZeroTrial):
    def __init__(self, context):
        self.context = context
        self.mine, width, data = context, context.get_hparam("width"), context.get_data_config()
        self.train_data = Data(data["source"], self.context.distributed.rank)
        self.engine = context.initialize(model=Net(width))

    def build_training_data_loader(self):
        return DataLoader(self.train_data, self.context.get_train_micro_batch_size_per_gpu())

    def evaluate_batch(self, dataloader_iter, batch_idx):
        loss = criterion(self.engine(next(dataloader_iter)))
        return {"loss": loss}
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('{"loss": loss}', "measure(loss)"),
        ('{"loss": loss}', '{**measure(loss), "loss": loss}'),
        ("(ZeroTrial)", "(Base)"),
        ("(ZeroTrial)", "(Base, ZeroTrial)"),
        ("(ZeroTrial)", "(ZeroTrial, metaclass=Base)"),
        ("class MyTrial", "@measure\nclass MyTrial"),
        ("self.context = context", "context.wrap_reducer(measure, 'f1')"),
        ("self.context = context", "measure(context)"),
        ("self.context = context", "measure(metrics=context)"),
        ("self.context = context", "self.mine = context; measure(self.mine)"),
        ("self.context = context", "mine, width = context, 3; measure([mine])"),
        ("self.context = context", "measure(lambda: context)"),
        ("self.context = context", "measure(self)"),
        ("def evaluate_batch", "def evaluate_full_dataset(self, loader): ...\n\n    def evaluate_batch"),
        ("class MyTrial", "Base.evaluate_batch = measure\n\nclass MyTrial"),
        ("def evaluate_batch", "def other"),
        ("", ""),
    ],
)
def test_a_metric_that_is_never_reported(tmp_path: Path, old: str, new: str):
    """It is refused only where the source leaves no doubt: the last of these."""
    (tmp_path / "model_def.py").write_text(REPORTS.replace(old, new) if old else REPORTS)
    entrypoint = Entrypoint("model_def", "MyTrial")
    for metric in ("loss", "batches", "epochs", SPEED_METRIC, None, ""):
        check_metric(entrypoint, tmp_path, metric)
    if old:
        check_metric(entrypoint, tmp_path, "f1")
        return
    with pytest.raises(ConfigError) as refused:
        check_metric(entrypoint, tmp_path, "f1", "const.yaml:4 searcher.metric")
    assert refused.value.where == "const.yaml:4 searcher.metric" and "Write metric: loss." in str(refused.value)


WHOLE = """from zero_trial import ZeroTrial
class T(ZeroTrial):
    def train_batch(self, dataloader_iter, epoch_idx, batch_idx): ...
    def build_training_data_loader(self): ...
    def build_validation_data_loader(self): ...
    def evaluate_batch(self, dataloader_iter, batch_idx): ...
"""


@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        ("train_batch", "train_bach", "model_def.py:3: T has train_bach, which zero_trial never calls, and no"),
        ("train_batch", "step", "model_def.py:2: T has no train_batch, which every ZeroTrial must have"),
        ("def train_batch", "def helper(self): self.train_bach\n    def train_bach", "T has no train_batch"),
        ("train_batch", "train_batc", "Did you mean train_batch?"),
    ],
)
def test_a_method_that_is_missing_or_misspelled(right: str, wrong: str, message: str, tmp_path: Path):
    (tmp_path / "model_def.py").write_text(WHOLE.replace(right, wrong))
    with pytest.raises(ConfigError) as caught:
        check_entrypoint(Entrypoint("model_def", "T"), tmp_path)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        ("build_validation_data_loader", "build_val_data_loader", "Did you mean build_validation_data_loader?"),
        ("evaluate_batch", "evalute_batch", "model_def.py:6: T has evalute_batch, which nothing in this file calls"),
        ("evaluate_batch", "evaluate_batch", None),
        ("ZeroTrial\nclass", "ZeroTrial, one\n@one\nclass", None),
    ],
)
def test_a_method_that_only_may_be_misspelled_is_a_warning(right: str, wrong: str, message: str | None, tmp_path: Path):
    """It may be called from another file."""
    (tmp_path / "model_def.py").write_text(WHOLE.replace(right, wrong))
    entrypoint = Entrypoint("model_def", "T")
    check_entrypoint(entrypoint, tmp_path)
    warnings = warn_of_methods(entrypoint, tmp_path)
    assert len(warnings) == (message is not None) and (message or "") in "".join(warnings)
    assert not warn_of_methods(Entrypoint("model_def", "T", as_determined=True), tmp_path)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("def train_batch", "from steps import train_batch\n    def train_bach"),
        ("def train_batch", "import steps as train_batch\n    def train_bach"),
        ("def train_batch", "def __init__(self, context): T.train_batch = T.step\n    def step"),
        ("def train_batch", "def __init__(self, context): setattr(T, 'train_batch', 1)\n    def step"),
        ("def evaluate_batch", "def evaluate_dataset"),
        ("def train_batch", "def train_bach"),
        ("T(ZeroTrial)", "T(ZeroTrial, Mixin)"),
        ("from zero_trial import", "from mine import"),
        ("def train_batch", "train_batch = made()\n    def train_bach"),
        ("class T", "@completed\nclass T"),
        ("    def evaluate_batch", "    def train_one(self): self.evaluate_batches()\n    def evaluate_batches"),
    ],
)
def test_methods_that_may_come_from_elsewhere_pass(right: str, wrong: str, tmp_path: Path):
    """The first one is a DeepSpeedTrial, whose methods have other names."""
    source = WHOLE.replace(right, wrong)
    if right != "def train_batch" and "evaluate_" not in wrong:
        source = source.replace("train_batch", "train_bach")
    (tmp_path / "model_def.py").write_text(source)
    moved = wrong == "def train_bach"
    check_entrypoint(Entrypoint("model_def", "T", as_determined=moved), tmp_path)


def test_a_misspelled_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "model_def.py").write_text("from zero_trail import ZeroTrial")
    with pytest.raises(ConfigError, match=r"model_def.py:1: No module named 'zero_trail'.*Did you mean zero_trial\?"):
        check_imports(Entrypoint("model_def", "T"), tmp_path)
    monkeypatch.chdir(tmp_path)
    for package in ("not_installed_here", "torchzz"):
        (tmp_path / "model_def.py").write_text(f"import {package}")
        with pytest.raises(
            ConfigError, match=rf"import {package}\. Install it where .*put {package}\.py into this folder"
        ):
            check_imports(Entrypoint("model_def", "T"), Path())
