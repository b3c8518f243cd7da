"""A trial built in this process: what it does wrong becomes issues, and nothing of it stays."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import pytest

import zero_trial
from tests.planning.project import DS_CONFIG, EXPERIMENT, MODEL, messages, project
from zero_trial.experiment.entrypoint import Entrypoint
from zero_trial.experiment.experiment import read_experiment
from zero_trial.planning import trial_dry_run
from zero_trial.planning.issues import Area
from zero_trial.planning.lone_task import DryRunRequest, trial_code_error
from zero_trial.planning.trial_dry_run import DryRunResult, dry_run_trial
from zero_trial.trial.metrics import SPEED_METRIC
from zero_trial.util.memory import machine_memory


def run(folder: Path, model: str = MODEL, experiment: str = EXPERIMENT, **options: Any) -> DryRunResult:
    made = project(folder, experiment, model=model)
    read = read_experiment(made.experiment)
    return dry_run_trial(
        DryRunRequest(read, Entrypoint("model_def", "LineTrial"), read.hyperparameters, folder, 2, **options)
    )


def said(found: DryRunResult) -> list[str]:
    return [f"{issue.severity.value}: {issue.text}" for issue in found.issues]


def changed(old: str, new: str) -> str:
    assert old in MODEL
    return MODEL.replace(old, new)


ASKS = "assert (batch_idx, self.context.is_epoch_start(), self.context.current_train_batch()) == "


def test_a_good_trial(tmp_path: Path):
    """It may write to TensorBoard, and ask where it is, before and after the step, as on a rank."""
    writes = 'context.get_tensorboard_writer().add_scalar("a", 1.0, 0)\n        self.engine = context'
    model = changed("self.engine = context", writes).replace(TRAINS, f"{ASKS}(0, True, 0)\n        {TRAINS}")
    model = model.replace(EVALUATES, f"{ASKS}(0, False, 1)\n        {EVALUATES}")
    found = run(tmp_path, model, dry_run=True)
    assert said(found) == []
    assert (found.parameters, found.epoch_steps, found.validation_batches) == (5, 5, 2)
    assert found.metrics == ("validation_loss",)
    fault = trial_code_error(KeyError("x"), tmp_path, "import")  # outside of the model's folder
    assert str(fault) == "import raised KeyError: 'x'." and fault.exit_code == 1
    for metric in ("batches", SPEED_METRIC):  # always there
        experiment = EXPERIMENT.replace("metric: validation_loss", f"metric: {metric}")
        experiment = experiment.replace("{batches: 4}", "{records: 80}") + "min_validation_period: {records: 40}\n"
        assert said(run(tmp_path, experiment=experiment, dry_run=True)) == []


def test_nothing_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path, working = list(sys.path), Path.cwd()
    run(tmp_path / "a", changed("import torch\n", "import torch\nprint(open('model_def.py').read() and 'hello')\n"))
    assert capsys.readouterr() == ("", "hello\n"), "what is printed goes to stderr"
    assert sys.path == path and Path.cwd() == working and "model_def" not in sys.modules
    assert zero_trial.initialize.__module__ == "zero_trial.engine.start"
    again = run(tmp_path / "b", changed("import torch\n", "import torch\n1 / 0\n"))
    assert "ZeroDivisionError" in said(again)[0], "another module of the same name"


def test_a_module_that_stays_keeps_the_real_initialize(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """One outside of the model's folder, imported while initialize was replaced, or before; it may
    give initialize another name."""
    made = tmp_path / "installed"
    made.mkdir()
    (made / "zt_helper_of_a_trial.py").write_text("from zero_trial import initialize as make_engine\n")
    monkeypatch.syspath_prepend(str(made))
    own = "from zt_helper_of_a_trial import make_engine"
    makes = f"{own}\n        engine, *_ = make_engine(model=torch.nn.Linear(4, 1), config=context.get_data_config()['ds_config'])"
    wraps = f"{makes}\n        self.engine = context.wrap_model_engine(engine)"
    model = changed('self.engine = context.initialize(model=torch.nn.Linear(context.get_hparam("width"), 1))', wraps)
    try:
        for folder in ("a", "b"):
            assert said(run(tmp_path / folder, model)) == []
            assert sys.modules["zt_helper_of_a_trial"].make_engine is zero_trial.initialize
    finally:
        del sys.modules["zt_helper_of_a_trial"]
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "c", changed("import torch\n", "import torch\nraise KeyboardInterrupt\n"))
    assert zero_trial.initialize.__module__ == "zero_trial.engine.start" and "model_def" not in sys.modules


TRAINS = "loss = self.engine(next(dataloader_iter)).mean()"
EVALUATES = 'return {"validation_loss": self.engine(next(dataloader_iter)).mean()}'

ENGINE = "self.engine = context"
WIDTH = 'torch.nn.Linear(context.get_hparam("width"), 1)'
AFTER = "\n        self.engine = context"
CONTEXT = "self.context = context"
LOADER = "build_training_data_loader"
ITEMS = "return DataLoader([torch.ones(4)] * 40"
MICRO = "* 40, self.context.get_train_micro_batch_size_per_gpu()"
INVALID = "raise __import__('zero_trial.errors').errors.InvalidHP('too wide')"
FLIES = "context.initialize(model=torch.nn.Linear(2, 2)).fly()"
REDUCES = "self.context = context\n        context.wrap_reducer(lambda values: 1 / 0, 'hits', for_training=False)"
# What is changed in the model, and the first of what is said. Where evaluate_batch was not run for
# that reason, a note says so: one cause, one fault.
MISTAKES = [
    (TRAINS, TRAINS.replace("))", ")[:, :3])"), "error: model_def.py:19: train_batch raised RuntimeError: mat1 and mat2 shapes"),
    ("[torch.ones(4)] * 40", "['text'] * 40", "error: model_def.py:19: train_batch raised "),
    ("[torch.ones(4)] * 40", "[None] * 40", "error: reading a batch of build_training_data_loader raised TypeError"),
    (TRAINS, TRAINS.replace("next(dataloader_iter)", "torch.ones(4, 4)"), "warn: rank 0, step 1: epochs, records and progress count 1 "),
    ("self.engine.step()", "pass", "error: rank 0, step 1: train_batch did not train"),
    ("return loss", "return self.engine.module.weight", "error: rank 0, step 1: train_batch returned a loss that is not a scalar"),
    (EVALUATES, EVALUATES.replace("))", ").long())"), "error: model_def.py:25: evaluation raised RuntimeError: "),
    (EVALUATES, EVALUATES.replace("self.engine(next(dataloader_iter)).mean()", "'low'"), "error: "),
    (EVALUATES, EVALUATES.replace(".mean()", ""), "error: const.yaml:7 searcher.metric: the searcher's metric 'validation_loss'"),
    (CONTEXT, REDUCES, "warn: model_def.py:10: evaluation after one batch raised ZeroDivisionError"),
    ("import torch\n", "import torch\n1 / 0\n", "error: model_def.py:3: import raised ZeroDivisionError: division by zero in: 1 / 0."),
    ("import torch\n", "import torch\nraise SystemExit(3)\n", "error: model_def.py:3: import raised SystemExit: 3 in: raise"),
    ('"width"', '"height"', "error: hyperparameters.height: no such hyperparameter: expected one of ['width']."),
    ('"width"', '"widht"', "error: hyperparameters.widht: no such hyperparameter: expected one of ['width']. Did you mean width?"),
    ("= context\n", "= contex\n", "error: model_def.py:9: LineTrial.__init__ raised NameError: name 'contex'"),
    ("context.initialize(", "dict(", "error: ZeroTrialContext: Must have at least one model engine."),
    ("* 40", "* 0", f"error: rank 0, 1: {LOADER} returned an empty loader: got batches per rank: [0, 0]"),
    ("* 12", "* 0", "error: rank 0, 1: build_validation_data_loader returned an empty loader"),
    (ITEMS, "return list([1]", f"error: model_def.py:13: {LOADER} raised TypeError: list expected"),
    (ITEMS, "(lambda *a: 0)([1]", f"error: {LOADER} must return"),
    (ITEMS, ITEMS.replace("DataL", "torch.utils.data.DataL"), f"error: {LOADER} returned torch.utils.data.dataloader.DataLoader"),
    (MICRO, "* 40, 3", f"warn: {LOADER}: batches of 3 samples, but"),
    (ENGINE, FLIES + AFTER, "error: model_def.py:10: LineTrial.__init__ raised AttributeError: 'Engine' object has no attribute 'fly'"),
    (WIDTH, f"{WIDTH}.requires_grad_(False)", "error: initialize(model): the optimizer has no parameter that requires a gradient"),
    (ENGINE, INVALID + AFTER, "error: too wide."),
    ("def evaluate_batch", "def evaluate", 'warn: const.yaml:7 searcher.metric: "validation_loss" never reported; the trial has no'),
    ("LineTrial(ZeroTrial)", "LineTrial(object)", "error: entrypoint: model_def:LineTrial is not a ZeroTrial in"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "message"), MISTAKES, ids=[message[:60] for *_, message in MISTAKES])
def test_what_a_trial_can_do_wrong(tmp_path: Path, old: str, new: str, message: str):
    found = said(run(tmp_path, changed(old, new)))
    assert found[0].startswith(message), found
    assert all(text.startswith("note: evaluate_batch was not run, because the") for text in found[1:]), (
        "one cause, one fault"
    )
    assert len(found) < 3
    assert ("context.disable_dataset_reproducibility_checks()" in found[0]) is ("torch.utils.data.DataL" in new)


@pytest.mark.parametrize("place", [TRAINS, EVALUATES])
def test_what_callbacks_make_is_missed_with_a_warning(tmp_path: Path, place: str):
    callbacks = "def build_callbacks(self):\n        return {}\n\n    def train_batch"
    model = changed("def train_batch", callbacks).replace(place, f"self.made_by_a_hook\n        {place}")
    text = said(run(tmp_path, model))[0]
    assert text.startswith("warn: ") and "without the trial's callbacks raised AttributeError" in text


def test_all_micro_batches_of_a_step_are_trained(tmp_path: Path):
    """By the trial itself where it has switched off the calls per micro-batch."""
    own = "self.context = context\n        context.disable_auto_grad_accumulation()"
    twice = f"for _ in range(2):\n            {TRAINS}\n            self.engine.backward(loss)\n            self.engine.step()"
    once = f"{TRAINS}\n        self.engine.backward(loss)\n        self.engine.step()"
    accumulates = EXPERIMENT + "  ds_config: {gradient_accumulation_steps: 2}\n"
    model = changed("self.context = context", own)
    assert said(run(tmp_path, MODEL, accumulates)) == []
    assert said(run(tmp_path, model.replace(once, twice), accumulates)) == []
    text, _ = said(run(tmp_path, model, accumulates))
    assert "train_batch did not train for gradient accumulation steps" in text


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("import torch.distributed as dist; dist.all_reduce(loss)", "note: model_def.py:20: train_batch, which calls torch.distributed"),
        ("loss = loss * float('nan')", ""),
        ("loss.cuda()", "note: model_def.py:20: train_batch, which needs another device"),
        ("raise RuntimeError('Expected all tensors to be on the same device, but found cuda:0 and cpu')", "note: "),
        ("print('hello')", ""),
    ],
)  # fmt: skip
def test_what_only_real_ranks_can_tell_is_no_fault(tmp_path: Path, more: str, message: str):
    found = said(run(tmp_path, changed(TRAINS, f"{TRAINS}\n        {more}")))
    assert len(found) == 2 * bool(message), found
    assert not message or (found[0].startswith(message) and "evaluate_batch was not run" in found[1])


SHARDED = {**DS_CONFIG, "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
AWAY = {"device": "nvme", "nvme_path": "."}


@pytest.mark.parametrize(
    ("stage", "away"),
    [
        (0, {}),
        (2, {"offload_optimizer": AWAY}),
        (3, {}),
        (3, {"offload_optimizer": AWAY, "offload_param": {**AWAY, "max_in_cpu": 0}}),
    ],
)
def test_the_values_of_other_ranks_are_there(tmp_path: Path, stage: int, away: dict[str, Any]):
    """A trial that computes with its weights gets numbers as on a rank: what the engine returns for
    ones is the sum of the weights and the bias, after a step without a learning rate, too."""
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, **away}
    config = {**DS_CONFIG, "optimizer": {"type": "AdamW", "params": {"lr": 0.0}}, "zero_optimization": zero}
    keeps = "model = torch.nn.Linear(4, 1)\n        self.sum = sum(each.sum().item() for each in model.parameters())"
    model = changed("self.engine = context", f"{keeps}\n        self.engine = context")
    model = model.replace('model=torch.nn.Linear(context.get_hparam("width"), 1)', "model=model")
    right = "assert abs(self.engine(torch.ones(1, 4)).item() - self.sum) < 1e-5"
    for place in (TRAINS, EVALUATES):
        model = model.replace(place, f"{right}\n        {place}")
    model = model.replace("self.engine.backward(loss)", "self.engine.backward(loss * 3, weight=3)")
    made = project(tmp_path, ds_config=config, model=model)
    assert [text for text in messages(made.check()) if "memory" not in text] == []


def test_a_model_without_room_is_trained_only_if_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(trial_dry_run, "MOST_VALUES", 4)
    made = project(tmp_path, ds_config=SHARDED, model=changed(TRAINS, f"{TRAINS}\n        assert loss != loss"))
    first, second = messages(made.check())
    assert "train_batch was not run" in first and "evaluate_batch was not run" in second
    first, second = messages(made.check(dry_run=True))
    assert first.startswith("error: model_def.py:20: train_batch raised AssertionError")
    assert "evaluate_batch was not run" in second


def test_work_ends_after_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(trial_dry_run, "_MOST_SECONDS", 0.05)
    endless = "while True:\n            try:\n                sum(range(1000))\n            except Exception:\n                pass"
    before = signal.getsignal(signal.SIGALRM)
    first, second = said(run(tmp_path / "a", changed(TRAINS, f"{endless}\n        {TRAINS}")))
    assert first.startswith("note: train_batch was not run to its end") and "evaluate_batch was not run" in second
    monkeypatch.setattr(trial_dry_run, "_MOST_SECONDS", 30)  # of the step, which may be slow here
    short = "__import__('zero_trial.planning.trial_dry_run').planning.trial_dry_run._MOST_SECONDS = 0.05"
    model = changed(EVALUATES, f"{endless}\n        {EVALUATES}").replace(
        "return loss", f"{short}\n        return loss"
    )
    (text,) = said(run(tmp_path / "b", model))
    assert text.startswith("note: evaluate_batch was not run to its end")
    assert signal.getsignal(signal.SIGALRM) is before


def test_work_ends_before_the_memory_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(trial_dry_run, "available_memory", lambda: machine_memory() // 20)
    (text,) = said(run(tmp_path, changed(TRAINS, f"__import__('time').sleep(1)\n        {TRAINS}")))[:1]
    assert text.startswith("note: train_batch was not run to its end: it takes the last 10% of the memory")


REDUCER = "self.context = context\n        context.wrap_reducer(len, {}, for_validation={})"
UNKNOWN = "note: const.yaml:7 searcher.metric: whether "


@pytest.mark.parametrize(
    ("old", "new", "metric", "message"),
    [
        ("", "", "validation_loss", ""),
        ("", "", "epochs", ""),
        (CONTEXT, REDUCER.format("'hits'", True), "hits", ""),
        (CONTEXT, REDUCER.format("'hits'", False), "hits", 'error: const.yaml:7 searcher.metric: "hits" never'),
        (CONTEXT, REDUCER.format(None, True), "hits", f'{UNKNOWN}"hits"'),
        (
            'return {"validation_loss"',
            'return batch_idx or {"validation_loss"',
            "validation_loss",
            f'{UNKNOWN}"validation_loss" is reported is unknown without --dry-run',
        ),
    ],
)
def test_the_metric_without_an_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str, metric: str, message: str
):
    """By the source of evaluate_batch and the reducers; where these do not say, that is said."""
    monkeypatch.setattr(trial_dry_run, "MOST_VALUES", 0)
    experiment = EXPERIMENT.replace("metric: validation_loss", f"metric: {metric}")
    found = said(run(tmp_path, changed(old, new) if old else MODEL, experiment))
    assert ["was not run" in text for text in found[:2]] == [True, True]
    assert len(found[2:]) == bool(message) and all(text.startswith(message) for text in found[2:]), found


PIPELINE = MODEL
for old, new in (
    ("from zero_trial import ", "from zero_trial import PipelineModule, "),
    ("model=", "model=PipelineModule([torch.nn.Linear(4, 4), torch.nn.Tanh(), "),
    (", 1))", ", 1)], loss_fn=torch.nn.functional.mse_loss))"),
    ("[torch.ones(4)] * 40", "[(torch.ones(4), torch.ones(1))] * 40"),
    ("[torch.ones(4)] * 12", "[(torch.ones(4), torch.ones(1))] * 16"),
    (f"{TRAINS}\n        self.engine.backward(loss)\n        self.engine.step()", "loss = self.engine.train_batch(dataloader_iter)"),
    ("self.engine(next(dataloader_iter)).mean()", "self.engine.eval_batch(dataloader_iter)"),
):  # fmt: skip
    assert PIPELINE.count(old) == 1, old
    PIPELINE = PIPELINE.replace(old, new)
STAGES = {**DS_CONFIG, "gradient_accumulation_steps": 4, "mesh": {"pipe": 2}}


def test_a_pipeline(tmp_path: Path):
    """Two ranks are two stages: one data-parallel rank, whose evaluation takes four micro-batches
    of two."""
    report = project(tmp_path, ds_config=STAGES, model=PIPELINE).check(dry_run=True)
    assert messages(report) == []
    assert report.looked[Area.TRIAL] == "25 parameters" and "reports validation_loss" in report.looked[Area.METRIC]
    assert report.looked[Area.LOADERS] == "5 steps per epoch, 2 validation batches"


DETERMINED = '''"""Fits a line, in layers, as code for Determined's DeepSpeedTrial does it."""
import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from determined.pytorch import DataLoader
from determined.pytorch import deepspeed as det_ds


class LineTrial(det_ds.DeepSpeedTrial):
    def __init__(self, context):
        self.context = context
        layers = [LayerSpec(torch.nn.Linear, 4, 4), LayerSpec(torch.nn.Linear, 4, 1)]
        model = PipelineModule(layers, loss_fn=torch.nn.functional.mse_loss, num_stages=2)
        params = [param for param in model.parameters() if param.requires_grad]
        config = det_ds.overwrite_deepspeed_config("ds_config.json", {})
        engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=params)
        self.engine = context.wrap_model_engine(engine)

    def build_training_data_loader(self):
        return DataLoader([(torch.ones(4), torch.ones(1))] * 40, self.context.train_micro_batch_size_per_gpu)

    def build_validation_data_loader(self):
        return self.build_training_data_loader()

    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        return {"loss": self.engine.train_batch(dataloader_iter)}

    def evaluate_batch(self, dataloader_iter, batch_idx):
        return {"validation_loss": self.engine.eval_batch(dataloader_iter)}
'''


def test_a_pipeline_of_determined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its stages are built where it is made, and their parameters are given to ``initialize``."""
    pytest.importorskip("determined")
    entrypoint = "python3 -m determined.launch.deepspeed python3 -m determined.exec.harness model_def:LineTrial"
    experiment = EXPERIMENT.replace("model_def:LineTrial", entrypoint)
    experiment = experiment.replace("data:\n  ds_config: ds_config.json\n", "").replace("width: 4", "n_layers: 2")
    ds_config = {**DS_CONFIG, "gradient_accumulation_steps": 2}
    monkeypatch.chdir(tmp_path)
    report = project(tmp_path, experiment, ds_config, DETERMINED).check()
    assert messages(report) == [] and report.looked[Area.TRIAL] == "25 parameters"
    assert report.looked[Area.METRIC] == "reports validation_loss"
    # of another length: within a second of the first file, Python takes the code that it has cached
    wrong = DETERMINED.replace("(torch.ones(4), torch.ones(1))", "(torch.ones(30), torch.ones(1))")
    text, *_ = messages(project(tmp_path, experiment, ds_config, wrong).check())
    assert "mat1 and mat2 shapes" in text
