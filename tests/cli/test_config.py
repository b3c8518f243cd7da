"""The verb ``config``: the resolved configuration by command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.planning.project import DS_CONFIG, EXPERIMENT, project
from zero_trial.cli.main import main
from zero_trial.ds_config.reader import read_ds_config
from zero_trial.errors import ConfigError


def test_every_value_and_where_it_came_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config = {**DS_CONFIG, "zero_optimization": {"round_robin_gradients": True}}
    made = project(tmp_path, ds_config=config)
    assert main(["config", str(made.experiment), str(tmp_path)]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "train_micro_batch_size_per_gpu 4 derived: 8 // 2 ranks // 1" in lines
    assert "train_batch_size 8 ds_config.json:2" in lines
    assert "gradient_clipping 1.0 default 0.0 before DeepSpeed 0.19.8" in lines
    assert "fp16.enabled false default" in lines
    assert any(
        line.startswith("zero_optimization.round_robin_gradients true ds_config.json:10 no effect: ") for line in lines
    )
    assert main(["config", str(made.experiment), str(tmp_path), "--given"]) == 0
    assert "fp16.enabled" not in capsys.readouterr().out


def test_json_repeats_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    made = project(tmp_path)
    assert main(["config", str(made.experiment), str(tmp_path), "--slots", "4", "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert {row["name"]: row["value"] for row in body["batch"]}["ranks"] == 4
    assert read_ds_config(body["ds_config"]) == read_ds_config(body["ds_config"] | {"steps_per_print": None})
    assert body["ds_config"]["gradient_clipping"] == 1.0


def test_a_point_of_a_search(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    experiment = EXPERIMENT.replace("name: single", "name: grid")
    made = project(tmp_path, experiment + "  global_batch_size: {type: categorical, vals: [3, 8]}\n")
    assert main(["config", str(made.experiment), str(tmp_path)]) == 0
    assert capsys.readouterr().err == "point   global_batch_size=8\n"


def test_faults(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    made = project(tmp_path, ds_config={"train_batch_size": 3})
    assert main(["config", str(made.experiment), str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("error   train_batch_size 3 ≠")


def test_a_ds_config_by_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The first question of the one who has one: what would be done with it."""
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "sparse_gradients": True}))
    assert main(["config", str(path), "--slots", "2", "--given"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "gradient_accumulation_steps 4 derived: 32 // 4 // 2 ranks" in lines
    assert any(line.startswith("sparse_gradients true ds_config.json:1 no effect: ") for line in lines)
    path.write_text(json.dumps({"gradient_clipping": 1.0}))
    assert main(["config", str(path), "--slots", "2"]) == 0
    assert "no batch size is given" in capsys.readouterr().out
    path.write_text(json.dumps({"train_batch_size": 32, "zero_optimisation": {}}))
    assert main(["config", str(path)]) == 2
    assert 'Did you mean "zero_optimization"?' in capsys.readouterr().err


def test_auto_stays_in_a_ds_config_by_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """A file for Hugging Face's Trainer is filled in by the script, which is not here."""
    path = tmp_path / "ds_config.json"
    given = {
        "train_batch_size": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "eps": 1e-6}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}},
    }
    path.write_text(json.dumps(given))
    assert main(["config", str(path), "--given"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    filled = "filled in from args.{0} of a script, or the trial's hyperparameter {0}"
    for key, name in {
        "gradient_clipping": "max_grad_norm",
        "bf16.enabled": "bf16",
        "optimizer.params.lr": "learning_rate",
        "scheduler.params.total_num_steps": "max_steps",
    }.items():
        assert f'{key} "auto" ds_config.json:1 {filled.format(name)}' in lines
    assert any(line.startswith("optimizer.params {eps: 1e-06}") for line in lines)
    assert main(["config", str(path), "--json"]) == 0
    again = json.loads(capsys.readouterr().out)["ds_config"]
    assert again["gradient_clipping"] == again["bf16"]["enabled"] == "auto"
    assert again["optimizer"]["params"] == {"lr": "auto", "eps": 1e-6}
    with pytest.raises(ConfigError, match='"auto" has no source'):
        read_ds_config(given)


@pytest.mark.parametrize("section", ["optimizer", "scheduler"])
def test_what_no_script_fills_in_is_a_fault(section: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps({"train_batch_size": 8, section: {"type": "auto"}}))
    assert main(["config", str(path)]) == 2
    assert f'ds_config.json:1 {section}.type: "auto" has no source' in capsys.readouterr().err


def test_the_ranks_of_a_ds_config_by_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "ds_config.json"
    sizes = {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
    path.write_text(json.dumps(sizes))
    assert main(["config", str(path)]) == 0
    assert "data-parallel ranks             4" in capsys.readouterr().out
    assert main(["config", str(path), "--slots", "2"]) == 2
    assert "or start 4 data-parallel ranks" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["run", "check", "plan"])
def test_no_other_verb_takes_one_for_an_experiment(verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps({"train_batch_size": 32, "optimizer": {"type": "AdamW"}}))
    assert main([verb, str(path)]) == 2
    said = "".join(capsys.readouterr())
    assert "this is a ds_config, not an experiment: got train_batch_size, optimizer" in said
    assert "zero-trial config ds_config.json" in said and "unknown key" not in said
