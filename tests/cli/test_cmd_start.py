"""zero-trial init, env and completion; templates, made into folders and trained on one rank."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from zero_trial.cli import cmd_start
from zero_trial.cli.cmd_start import FILES, TEMPLATES, Fact, as_text, experiment_name, plant, template
from zero_trial.cli.main import main
from zero_trial.cli.templates.text.model_def import BYTES, LanguageModel
from zero_trial.errors import ConfigError
from zero_trial.ops import dispatch


def test_init_writes_a_folder_or_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is overwritten: neither a file nor a link to nothing."""
    monkeypatch.chdir(tmp_path)
    assert main(["init", "my_trial"]) == 0
    assert sorted(path.name for path in Path("my_trial").iterdir()) == sorted([*FILES, ".detignore"])
    made, *commands = capsys.readouterr().out.splitlines()
    assert made.startswith("made    my_trial/model_def.py · my_trial/const.yaml · ")
    check = ["zero-trial check const.yaml .", "zero-trial run const.yaml .", "zero-trial report runs/0001"]
    assert [line.strip() for line in commands] == ["next    cd my_trial", *check]
    assert main(["init", "my_trial/model_def.py"]) == 2
    assert "FOLDER: this is a file" in capsys.readouterr().err
    assert main(["init", "my_trial/model_def.py/y"]) == 2
    assert "cannot be written (Not a directory)" in capsys.readouterr().err
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    (here / "const.yaml").write_text("mine")
    (here / "README.md").symlink_to(here / "gone")
    assert main(["init"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error   FOLDER: existing files are not overwritten: got const.yaml, README.md in ")
    assert "zero-trial init my_trial" in said
    assert sorted(path.name for path in here.iterdir()) == ["README.md", "const.yaml"]
    assert (here / "const.yaml").read_text() == "mine"
    for name in ("README.md", "const.yaml"):
        (here / name).unlink()
    assert main(["init", "--template", "image", "--json"]) == 0  # here needs no cd
    found = json.loads(capsys.readouterr().out)
    assert (found["folder"], found["next"][0]) == (str(here), "zero-trial check const.yaml .")
    assert "ImageTrial" in Path("model_def.py").read_text()


def test_the_experiment_is_called_as_the_folder_where_yaml_allows(tmp_path: Path) -> None:
    others = dict.fromkeys(("2nd", "with space", "on"), "other")
    for folder, name in ({"my_trial": "my_trial", "a.b-2": "a.b-2"} | others).items():
        assert experiment_name(tmp_path / folder, "other") == name
        assert yaml.safe_load(template("text", name)["const.yaml"])["name"] == name


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_is_made_passes_the_check(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its schedule is as long as the training."""
    folder = tmp_path / "made"
    assert main(["init", str(folder), "--template", name]) == 0
    assert main(["check", str(folder / "const.yaml"), str(folder)]) == 0
    assert "warn" not in capsys.readouterr().out
    assert os.listdir(tmp_path) == ["made"]
    schedule = json.loads((folder / "ds_config.json").read_text())["scheduler"]["params"]["total_num_steps"]
    assert yaml.safe_load((folder / "const.yaml").read_text())["searcher"]["max_length"]["batches"] == schedule


def test_everything_is_there_or_says_why(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert main(["env", "--json"]) == 0
    facts = [Fact(**fact) for fact in json.loads(capsys.readouterr().out)["facts"]]
    assert all(bool(fact.value) != bool(fact.why) for fact in facts)
    known = {fact.name: fact for fact in facts}
    assert known["torch"].value == metadata.version("torch")
    assert known["gloo"].value == "available" and known["OMP_NUM_THREADS"].value == "3"
    assert {"cpu", "cuda", "nccl", "g++", "cores", "memory"} <= set(known)
    assert {"cpu", "cuda"} <= {fact.name for fact in facts if fact.section == "kernels"}


def test_what_cannot_be_asked_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """A choice of kernels that does not exist; and where native code ends the process."""

    def refused() -> object:
        raise ConfigError("no such choice", where="ZERO_TRIAL_OPS")

    monkeypatch.setattr(dispatch, "report", refused)
    assert cmd_start._kernels() == [Fact("kernels", "ops", "", "ZERO_TRIAL_OPS: no such choice.")]
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    assert [(fact.section, fact.value, "exit code 1" in fact.why) for fact in cmd_start.native_facts()] == [
        ("backends", "", True),
        ("kernels", "", True),
    ]
    facts = [Fact("a", "one", "1"), Fact("a", "three", "", "not here"), Fact("b", "two", "2")]
    assert as_text(facts) == "a\n  one    1\n  three  no: not here\nb\n  two    2"


def train_made(tmp_path: Path, name: str, steps: int, data: dict[str, Any], sizes: dict[str, Any]) -> dict[str, Any]:
    """The run's summary."""
    folder = tmp_path / "made"
    plant(folder, template(name, "made"))
    experiment = yaml.safe_load((folder / "const.yaml").read_text())
    experiment["searcher"]["max_length"]["batches"] = experiment["min_validation_period"]["batches"] = steps
    experiment["data"].update(data)
    experiment["hyperparameters"]["model"].update(sizes)
    (folder / "short.yaml").write_text(yaml.safe_dump(experiment))
    command = [sys.executable, "-m", "zero_trial.run", "--run-dir", str(tmp_path / "run"), "--model-dir", str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--experiment", str(folder / "short.yaml")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary: dict[str, Any] = json.loads((tmp_path / "run" / "summary.json").read_text())
    return summary


def test_an_image_network_learns(tmp_path: Path) -> None:
    summary = train_made(tmp_path, "image", 30, {"characters": "oxl", "variants": 4}, {"width": 8})
    assert summary["accuracy"] > 0.6
    assert (summary["step"], summary["data"]["classes"]) == (30, 3)


SENTENCES = "the quick brown fox jumps over the lazy dog and runs away from {} hounds\n"


def test_a_language_model_learns(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.mkdir()
    for number in range(12):
        (text / f"{number}.txt").write_text(SENTENCES.format(number) * 40)
    summary = train_made(tmp_path, "text", 40, {"source": str(text)}, {"sequence": 32, "layers": 1, "width": 32})
    assert summary["val_bits_per_byte"] < summary["unigram_bits_per_byte"] < 5.0
    assert (summary["step"], summary["data"]["files"]) == (40, 12)


def test_no_byte_sees_what_comes_after_it() -> None:
    torch.manual_seed(0)
    model = LanguageModel(sequence=8, layers=2, heads=2, width=16)
    inputs = torch.randint(BYTES, (1, 8))
    other = inputs.clone()
    other[0, 5:] += 1
    losses = [model(x % BYTES, torch.where(torch.arange(8) < 5, inputs, -100)) for x in (inputs, other)]
    assert torch.equal(losses[0], losses[1])
