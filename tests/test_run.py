"""One rank from its command line to summary.json, and what it leaves when it fails."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import zero_trial
from tests.trial.fake_engine import fake_factory
from zero_trial.cli.main import main as command_line
from zero_trial.errors import ConfigError
from zero_trial.run import main
from zero_trial.trial.runs.events import read_lines
from zero_trial.trial.runs.run_layout import RunFolder

MODEL = '''
"""A line fitted through points."""
import torch
from zero_trial import ZeroTrial
from zero_trial.trial import DataLoader


class MyTrial(ZeroTrial):
    tokens_per_sample = 4

    def __init__(self, context):
        self.context = context
        self.engine = context.initialize(model=torch.nn.Linear(1, 1))

    def build_training_data_loader(self):
        return DataLoader(torch.linspace(0, 1, 24).reshape(24, 1), self.context.get_train_micro_batch_size_per_gpu())

    def build_validation_data_loader(self):
        return DataLoader(torch.linspace(0, 1, 8).reshape(8, 1), 2)

    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        x = next(dataloader_iter)
        loss = ((self.engine(x) - 3 * x) ** 2).mean() * float(self.context.get_hparams().get("factor", 1.0))
        self.engine.backward(loss)
        self.engine.step()
        return loss

    def evaluate_batch(self, dataloader_iter, batch_idx):
        x = next(dataloader_iter)
        return {"validation_loss": ((self.engine(x) - 3 * x) ** 2).mean()}

    def summary(self):
        return {"unigram_bits_per_byte": 4.5}
'''

YAML = """
name: line
entrypoint: model_def:MyTrial
searcher: {name: single, metric: validation_loss, max_length: {batches: 6}}
perform_initial_validation: true
min_checkpoint_period: {batches: 3}
reproducibility: {experiment_seed: 7}
data: {ds_config: ds_config.json}
hyperparameters: {global_batch_size: 4}
"""

DS_CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
    "zero_optimization": {"stage": 1},
}


@pytest.fixture()
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A model folder, and an experiment with its ds_config in a folder of its own."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model_def.py").write_text(MODEL)
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "const.yaml").write_text(YAML)
    (tmp_path / "experiment" / "ds_config.json").write_text(json.dumps(DS_CONFIG))
    path = list(sys.path)
    yield tmp_path
    sys.path[:] = path
    sys.modules.pop("model_def", None)


def run(folder: Path, *more: str, name: str = "run", **options: Any) -> int:
    words = ["--run-dir", str(folder / name), "--experiment", str(folder / "experiment" / "const.yaml")]
    code = main([*words, "--model-dir", str(folder / "model"), *more], **options)
    sys.modules.pop("model_def", None)
    return code


def error(folder: Path, name: str = "run") -> dict[str, Any]:
    content: dict[str, Any] = json.loads(RunFolder(folder / name).error(0).read_text())
    return content


def test_from_yaml_to_summary_with_the_real_engine(folder: Path) -> None:
    assert run(folder) == 0
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert (summary["step"], summary["ranks"], summary["zero_stage"], summary["seed"]) == (6, 1, 1, 7)
    assert (summary["global_batch_size"], summary["gradient_accumulation_steps"]) == (4, 2)
    assert summary["final_validation"]["validation_loss"] < summary["initial_validation"]["validation_loss"]
    assert summary["unigram_bits_per_byte"] == 4.5 and summary["peak_memory_bytes"][0] > 1e6
    assert abs(summary["memory_plan_error_percent"]) <= 10
    assert summary["memory_planned_states_bytes"] == summary["memory_measured_states_bytes"] > 0
    assert summary["tokens_per_second"] == pytest.approx(4 * summary["samples_per_second"])
    assert "zero_trial.run" in summary["repeat"] and summary["checkpoint"] == "step-000006"
    events = read_lines(folder / "run" / "events.jsonl")
    assert events[-1]["kind"] == "done" and events[-1]["end"] == "completed"
    assert {event["kind"] for event in events} >= {"start", "note", "train", "validation", "checkpoint", "done"}
    assert sorted(path.name for path in (folder / "run" / "checkpoints").iterdir()) == ["step-000006"]
    assert not (folder / "run" / "errors").exists()


def losses(folder: Path, name: str) -> list[tuple[int, float]]:
    lines = read_lines(folder / name / "metrics.jsonl")
    return [(line["step"], line["metrics"]["loss"]) for line in lines if line["group"] == "training"]


def longer(folder: Path, steps: int) -> None:
    text = YAML.replace("batches: 6", f"batches: {steps}") + "scheduling_unit: 1\n"
    (folder / "experiment" / "const.yaml").write_text(text)


def test_the_same_folder_again_goes_on_and_resume_and_warm_start_name_another(folder: Path) -> None:
    longer(folder, 6)
    assert run(folder, name="short") == 0
    longer(folder, 8)
    assert run(folder, name="whole") == 0
    assert run(folder, "--resume", str(folder / "short"), name="other") == 0
    assert run(folder, name="short") == 0
    assert losses(folder, "other") == losses(folder, "whole")[6:] and losses(folder, "short") == losses(folder, "whole")
    assert run(folder, "--warm-start", str(folder / "short" / "checkpoints" / "step-000008"), name="warm") == 0
    assert [step for step, _ in losses(folder, "warm")] == list(range(1, 9))
    assert losses(folder, "warm")[0] != losses(folder, "whole")[0]
    assert run(folder, "--resume", str(folder / "experiment"), name="nothing") == 2
    assert "there is no finished checkpoint" in error(folder, "nothing")["message"]


def test_a_preempted_run_exits_with_75_and_is_continued(folder: Path) -> None:
    longer(folder, 6)
    (folder / "run").mkdir()
    (folder / "run" / "preempt").touch()
    assert run(folder) == 75
    assert error(folder)["type"] == "Preempted" and "saved step-000001" in error(folder)["message"]
    (folder / "run" / "preempt").unlink()
    assert run(folder) == 0
    assert [step for step, _ in losses(folder, "run")] == [1, 2, 3, 4, 5, 6]


def test_a_wrong_name_says_which_trials_there_are(folder: Path) -> None:
    assert run(folder, "model_def:MyTrail") == 2
    message = error(folder)["message"]
    assert "model_def:MyTrail not found in ./model_def.py; it defines MyTrial(ZeroTrial)" in message
    assert "Use entrypoint: model_def:MyTrial." in message


def test_a_name_that_only_running_the_file_can_judge(folder: Path) -> None:
    path = folder / "model" / "model_def.py"
    path.write_text(path.read_text() + "\nOther = dict\n")
    assert run(folder, "model_def:Other") == 2
    assert "it defines MyTrial(ZeroTrial). Use entrypoint: model_def:MyTrial." in error(folder)["message"]


def test_wrong_batch_arithmetic(folder: Path) -> None:
    text = YAML.replace("global_batch_size: 4", "global_batch_size: 5")
    (folder / "experiment" / "const.yaml").write_text(text)
    assert run(folder) == 2
    assert error(folder)["expected"] and "5" in error(folder)["message"]


def test_a_loss_that_is_not_finite_exits_with_4(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    text = YAML.replace("global_batch_size: 4", "global_batch_size: 4, factor: .nan")
    (folder / "experiment" / "const.yaml").write_text(text)
    assert run(folder) == 4
    assert error(folder)["message"].startswith("rank 0, step 1: the loss became nan")
    assert error(folder)["step"] == 1
    shown = capfd.readouterr().err
    assert "the loss became nan" in shown and "Traceback" not in shown


def test_a_fault_in_the_users_code_shows_its_traceback_in_the_log(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = folder / "model" / "model_def.py"
    path.write_text(
        path.read_text().replace("x = next(dataloader_iter)\n        loss", "x = unknown_name\n        loss")
    )
    assert run(folder, engine_factory=fake_factory()) == 1
    assert error(folder)["message"].startswith("NameError: name 'unknown_name'") and not error(folder)["expected"]
    assert "Traceback" in capfd.readouterr().err


def test_an_invalid_hp_is_posted(folder: Path) -> None:
    path = folder / "model" / "model_def.py"
    raises = (
        'from zero_trial.errors import InvalidHP\n        raise InvalidHP("too small")\n        self.context = context'
    )
    path.write_text(path.read_text().replace("self.context = context", raises, 1))
    assert run(folder) == 2
    assert json.loads((folder / "run" / "early_exit.json").read_text())["reason"] == "INVALID_HP"
    assert error(folder)["type"] == "InvalidHP"


def test_without_a_folder_and_off_a_cluster_it_says_what_is_missing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("DET_TASK_TYPE", "DET_ALLOCATION_ID"):
        monkeypatch.delenv(name, raising=False)
    assert main(["model_def:MyTrial"]) == 2
    assert "give --run-dir and --experiment" in capsys.readouterr().err


def test_on_a_cluster_the_task_says_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the class is not named either, it is the experiment's entrypoint that names it."""
    monkeypatch.setenv("DET_TASK_TYPE", "TRIAL")
    monkeypatch.setenv("DET_ALLOCATION_ID", "trial.1")
    line = "python3 -m determined.launch.torch_distributed python3 -m zero_trial.run no_such_module:MyTrial"
    seen: list[Any] = []

    def train_task(load: Any, factory: Any) -> None:
        with pytest.raises(ConfigError, match="no_such_module"):
            load(SimpleNamespace(experiment={"entrypoint": line}))
        seen.append(factory)

    monkeypatch.setattr("zero_trial.run.train_task", train_task)
    assert main([]) == 0 and seen == [zero_trial.initialize]


def test_a_run_that_gets_sigterm_has_saved_and_exits_with_75(folder: Path) -> None:
    longer(folder, 6)
    path = folder / "model" / "model_def.py"
    text = path.read_text()
    kill = "if batch_idx == 2 and not vars(self).setdefault('reported', []):\n            "
    kill += "import os, signal; self.reported.append(1); os.kill(os.getpid(), signal.SIGTERM)\n        "
    kill += "x = next(dataloader_iter)\n        loss"
    path.write_text(text.replace("x = next(dataloader_iter)\n        loss", kill))
    assert run(folder) == 75
    assert "saved step-000003" in error(folder)["message"]
    path.write_text(text)
    assert run(folder) == 0
    assert [step for step, _ in losses(folder, "run")] == [1, 2, 3, 4, 5, 6]


def test_what_runs_leave_can_be_compared(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same twice has the same bits at every step; another seed and other code are named, and
    the first step that shows them."""
    assert run(folder, name="a") == 0 and run(folder, name="b") == 0
    model = folder / "model" / "model_def.py"
    model.write_text(model.read_text() + "# changed\n")
    assert run(folder, "--seed", "8", name="c") == 0
    capsys.readouterr()
    assert command_line(["diff", str(folder / "a"), str(folder / "b")]) == 0
    assert "loss of rank 0 (6 steps)" in capsys.readouterr().out
    assert command_line(["diff", str(folder / "a"), str(folder / "c"), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["settings"] == [{"key": "seed", "a": 7, "b": 8}]
    assert [change["key"] for change in found["code"]] == ["model_def.py"] and found["first_step"] <= 1
    assert command_line(["ckpt", "verify", str(folder / "a"), "--all"]) == 0
