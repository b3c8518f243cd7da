"""Determined's names: what its DeepSpeedTrial, context, trainer and data loader take, ours take as
well. The original sources are read, not imported: they need DeepSpeed."""

from __future__ import annotations

import ast
import functools
import importlib.util
import inspect
import random
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import RandomSampler

import zero_trial
from tests.support.in_memory import InMemoryPlatform
from tests.trial.fake_engine import FakeEngine, fake_factory
from tests.trial.harness import DS_CONFIG, LineTrial, Points, run_rank, steps
from zero_trial.errors import ConfigError
from zero_trial.trial import DataLoader, Reducer, TrialCallback, ZeroTrial, ZeroTrialContext
from zero_trial.trial.data import accept_loader
from zero_trial.trial.trial import import_trial_class, overrides, seed_everything

CLASSES = [
    ("deepspeed/_deepspeed_context.py", "DeepSpeedTrialContext", zero_trial.ZeroTrialContext),
    ("_reducer.py", "_PyTorchReducerContext", zero_trial.ZeroTrialContext),
    ("_reducer.py", "MetricReducer", zero_trial.MetricReducer),
    ("deepspeed/_deepspeed_trial.py", "DeepSpeedTrial", zero_trial.ZeroTrial),
    ("deepspeed/_trainer.py", "Trainer", zero_trial.Trainer),
    ("_callback.py", "PyTorchCallback", zero_trial.TrialCallback),
    ("_data.py", "DataLoader", zero_trial.DataLoader),
]
OTHER_NAMES = {
    "load",  # users override it; it is called by position
    "set_profiler",  # *args and **options here and there
}
NOT_OURS = {
    "run_cross_slot_reduction",  # of the harness's own loop
    "on_checkpoint_end",  # deprecated there; called where a callback has it (below)
}


@functools.cache
def original(file: str) -> ast.Module:
    spec = importlib.util.find_spec("determined")
    assert spec is not None and spec.origin is not None
    return ast.parse((Path(spec.origin).parent / "pytorch" / file).read_text())


def public_methods(file: str, name: str) -> list[ast.FunctionDef]:
    found = next(node for node in ast.walk(original(file)) if isinstance(node, ast.ClassDef) and node.name == name)
    methods = [node for node in found.body if isinstance(node, ast.FunctionDef)]
    return [node for node in methods if not node.name.startswith("_") and node.name not in NOT_OURS]


@pytest.mark.parametrize(("file", "name", "ours"), CLASSES, ids=[row[1] for row in CLASSES])
def test_every_public_method_is_here_with_the_same_arguments(file: str, name: str, ours: type) -> None:
    methods = public_methods(file, name)
    assert methods
    for method in methods:
        mine = inspect.getattr_static(ours, method.name)
        is_property = any(isinstance(mark, ast.Name) and mark.id == "property" for mark in method.decorator_list)
        assert isinstance(mine, property) == is_property, method.name
        if not is_property:
            theirs = [argument.arg for argument in method.args.args]
            taken = list(inspect.signature(mine).parameters)
            assert taken[: len(theirs)] == theirs or method.name in OTHER_NAMES, method.name


def test_the_context_answers_the_older_names() -> None:
    context = ZeroTrialContext(InMemoryPlatform(), fake_factory())
    config = {**DS_CONFIG, "gradient_accumulation_steps": 3}
    engine = context.wrap_model_engine(model=FakeEngine(torch.nn.Linear(2, 1), config))
    assert context.models == [engine]
    assert context.train_micro_batch_size_per_gpu == context._train_micro_batch_size_per_gpu == 2
    assert context.num_micro_batches_per_slot == 3


# --- its data loader ------------------------------------------------------------------------------


def accepted(*arguments: Any, **options: Any) -> Any:
    from determined.pytorch import DataLoader as Theirs

    return accept_loader(Theirs(*arguments, **options), "x", check=True)


def indices(loader: Any, count: int | None = None) -> list[list[int]]:
    return [batch[0].tolist() for batch in islice(loader, count)]


def test_a_loader_of_determined_becomes_ours_with_the_same_options() -> None:
    loader = accepted(Points(9), batch_size=2, drop_last=True)
    assert type(loader) is DataLoader and indices(loader) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert not loader.shuffle and loader.workers["num_workers"] == 0
    assert indices(accepted(Points(9), 2, sampler=[8, 1, 5])) == [[8, 1], [5]]
    assert indices(accepted(Points(9), batch_sampler=[[8, 1, 5], [2]])) == [[8, 1, 5], [2]]
    collated = accepted([1, 2, 3], 3, collate_fn=sum)
    assert list(collated) == [6]
    assert accepted(Points(2), num_workers=2, prefetch_factor=4).workers["prefetch_factor"] == 4


def test_its_shuffle_is_drawn_like_ours_and_resumes_like_ours() -> None:
    ours = DataLoader(Points(30), 5, shuffle=True).get_data_loader(repeat=True, skip=4, seed=3)
    theirs = accepted(Points(30), 5, shuffle=True).get_data_loader(repeat=True, skip=4, seed=3)
    assert indices(theirs, 6) == indices(ours, 6)
    own = torch.Generator().manual_seed(8)
    assert accepted(Points(30), 5, shuffle=True, generator=own).seed == 8


def test_a_sampler_that_draws_otherwise_is_kept() -> None:
    sampler = RandomSampler(Points(30), replacement=True, num_samples=10)
    assert accepted(Points(30), 5, sampler=sampler).sampler is sampler


class ReturnsTheirs(LineTrial):
    def build_training_data_loader(self) -> Any:
        from determined.pytorch import DataLoader as Theirs

        return Theirs(self.data, batch_size=2)

    def build_validation_data_loader(self) -> Any:
        return self.build_training_data_loader()

    def build_callbacks(self) -> dict[str, Any]:
        self.written = Older()
        return {"older": self.written}


class Older(TrialCallback):
    """With the name that PyTorchCallback had before ``on_checkpoint_write_end``."""

    def __init__(self) -> None:
        self.folders: list[Path] = []

    def on_checkpoint_end(self, checkpoint_dir: str) -> None:
        assert Path(checkpoint_dir).is_dir()
        self.folders.append(Path(checkpoint_dir))


def test_a_trial_with_its_loaders_and_callbacks_trains(tmp_path: Path) -> None:
    run = run_rank(ReturnsTheirs, steps(3), storage=tmp_path)
    assert run.trial.seen[:3] == [[0, 1], [2, 3], [4, 5]] and len(run.trial.written.folders) == 1


class Least(ZeroTrial):
    """Only what is required."""

    def __init__(self) -> None:
        pass

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> Any:
        return 0.0

    def build_training_data_loader(self) -> Any:
        return []


def test_two_methods_are_required() -> None:
    with pytest.raises(TypeError, match="abstract"):
        ZeroTrial(None)  # type: ignore[abstract,arg-type]
    trial = Least()
    assert trial.evaluation_reducer() is Reducer.AVG and trial.build_callbacks() == {} and trial.summary() == {}
    assert trial.build_validation_data_loader() is None and trial.tokens_per_sample is None
    batch = torch.zeros(5, 3)
    assert [trial.get_batch_length(nested) for nested in (batch, [batch, 1], {"x": (batch,)})] == [5, 5, 5]
    line = LineTrial.__new__(LineTrial)
    assert overrides(line, "evaluate_batch") and not overrides(line, "evaluate_full_dataset")
    assert not overrides(trial, "evaluate_batch")


def draw() -> list[float]:
    numpy = sys.modules.get("numpy")
    return [random.random(), torch.rand(()).item(), *([float(numpy.random.rand())] if numpy else [])]


def test_the_same_seed_the_same_numbers() -> None:
    seed_everything(5)
    first = draw()
    seed_everything(5)
    assert draw() == first
    seed_everything(6)
    assert all(a != b for a, b in zip(draw(), first, strict=True))


@pytest.fixture
def search_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.mark.usefixtures("search_path")
def test_the_class_and_what_is_none(tmp_path: Path):
    (tmp_path / "loading_sample.py").write_text(
        "from zero_trial import ZeroTrial\nclass Mine(ZeroTrial): ...\nclass Other: ...\nsomething = 3\n"
    )
    assert import_trial_class("loading_sample", "Mine", tmp_path).__name__ == "Mine"
    for name in ("Other", "something", "nothing"):
        with pytest.raises(ConfigError, match=r"it defines Mine\(ZeroTrial\). Use entrypoint: loading_sample:Mine."):
            import_trial_class("loading_sample", name, tmp_path)
    (tmp_path / "of_determined.py").write_text("class PyTorchTrial: ...\nclass Mine(PyTorchTrial): ...\n")
    with pytest.raises(
        ConfigError, match=r"with determined\.exec\.harness of_determined:Mine.*From PyTorchTrial, in docs"
    ):
        import_trial_class("of_determined", "Mine", tmp_path)
