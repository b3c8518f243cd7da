"""``zero-trial ckpt ls``, ``verify`` and ``show``."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

import zero_trial
from tests.checkpoint.test_folder import engine, flip, trial
from zero_trial.checkpoint.folder import choose_checkpoint, only_engine
from zero_trial.checkpoint.format import Slice
from zero_trial.checkpoint.writer import save_checkpoint
from zero_trial.cli.main import main
from zero_trial.errors import CheckpointError, ConfigError
from zero_trial.trial.runs.run_checkpoints import add_checksums
from zero_trial.util.files import METADATA


@pytest.mark.parametrize("action", ["ls", "verify", "show", "export", "import"])
def test_every_action_explains_itself(action: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["ckpt", action, "--help"])
    assert ended.value.code == 0
    assert f"usage: zero-trial ckpt {action}" in capsys.readouterr().out


@pytest.mark.parametrize("words", [[], ["burn"]])
def test_what_it_does_not_know_ends_with_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["ckpt", *words])
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("usage: zero-trial ckpt")


def test_the_newest_whole_one_of_a_run(tmp_path: Path) -> None:
    for step in (4, 8, 12):
        trial(tmp_path / "checkpoints", step)
    (tmp_path / "checkpoints/step-000012/model0/rank-00000.safetensors").unlink()
    saved = choose_checkpoint(tmp_path)
    assert saved.step == 8
    assert only_engine(saved).folder == tmp_path / "checkpoints/step-000008/model0"
    with pytest.raises(CheckpointError, match="a file is missing"):
        choose_checkpoint(tmp_path / "checkpoints/step-000012")


def test_where_none_is_whole(tmp_path: Path) -> None:
    (trial(tmp_path, 4) / "metadata.json").unlink()
    with pytest.raises(CheckpointError, match=r"no checkpoint here is whole: got .*metadata\.json"):
        choose_checkpoint(tmp_path)


def test_several_models_and_none(tmp_path: Path) -> None:
    saved = choose_checkpoint(trial(tmp_path, 4, models=2))
    with pytest.raises(ConfigError, match=r"the trial has 2 models: got model0, model1\. Name one: .*model0"):
        only_engine(saved)
    assert only_engine(choose_checkpoint(tmp_path / "step-000004/model1")).folder.name == "model1"
    by_itself = trial(tmp_path, 5)
    shutil.rmtree(by_itself / "model0")
    with pytest.raises(ConfigError, match="no engine has saved anything"):
        only_engine(choose_checkpoint(by_itself))


def test_checkpoints_of_several_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder, step in (("a", 1), ("b", 2)):
        engine(tmp_path / folder, "global_step", step)
    with pytest.raises(ConfigError, match="checkpoints of 2 folders are here"):
        choose_checkpoint(tmp_path)
    assert main(["ckpt", "verify", str(tmp_path)]) == 2 and main(["ckpt", "verify", "--all", str(tmp_path)]) == 0
    capsys.readouterr()
    assert main(["ckpt", "ls", str(tmp_path)]) == 0
    out = capsys.readouterr()
    assert [line.split()[-2:] for line in out.out.splitlines()[2:]] == [
        ["a/global_step", "latest"],
        ["b/global_step", "latest"],
    ]
    assert not out.err


def test_the_list(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (8, 20, 100):
        trial(tmp_path / "checkpoints", step)
    (tmp_path / "checkpoints/step-000100/model0/rank-00000.safetensors").write_text("")
    (tmp_path / "checkpoints/step-000120.tmp-1").mkdir()
    monkeypatch.chdir(tmp_path)
    assert main(["ckpt", "ls", "."]) == 0
    out = capsys.readouterr()
    lines = out.out.splitlines()
    assert lines[0] == "checkpoints"
    assert lines[1].split() == ["step", "saved", "(UTC)", "size", "files", "ranks", "stage", "name"]
    words = [line.split() for line in lines[2:]]
    assert [(row[0], *row[5:7], *row[7:]) for row in words[1:]] == [
        ("8", "4", "1", "2", "step-000008", "whole"),
        ("20", "4", "1", "2", "step-000020", "latest"),
        ("100", "4", "1", "2", "step-000100", "broken"),
    ]
    assert words[0][0] == "-" and words[0][-3:] == ["step-000120.tmp-1", "left", "over"]
    assert out.err.startswith("broken  ") and "rank-00000.safetensors: a file is cut short" in out.err


def test_trials_that_share_a_storage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step, name in ((1, "31"), (2, "32"), (3, "31")):
        trial(tmp_path, step, trial_id=name)
    assert main(["ckpt", "ls", str(tmp_path)]) == 0
    words = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert words[0][-1] == "trial"
    assert [row[-2:] for row in words[1:]] == [["31", "whole"], ["32", "latest"], ["31", "latest"]]


def test_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine(tmp_path, "a", 4, mesh=[1, 1, 1, 1])
    assert main(["ckpt", "ls", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["folder"] == str(tmp_path)
    (one,) = found["checkpoints"]
    assert (one["step"], one["ranks"], one["zero_stage"], one["mesh"]) == (4, 1, 2, [1, 1, 1, 1])
    assert (one["state"], one["latest"], one["fault"], one["files"], one["engines"]) == ("whole", True, None, 2, [])


def test_engines_at_different_stages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = trial(tmp_path, 4)
    engine(place, "model1", 4, zero_stage=1)
    assert main(["ckpt", "ls", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[2].split()[6:8] == ["1", "2,1"]
    assert main(["ckpt", "ls", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["checkpoints"][0]["zero_stage"] == [2, 1]


def test_a_mistake_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ckpt", "ls", str(tmp_path / "no")]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error   {tmp_path / 'no'}: there is no such folder") and "Traceback" not in err


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (4, 8):
        trial(tmp_path / "checkpoints", step)
    (tmp_path / "checkpoints/step-000012.tmp-1").mkdir()
    return tmp_path


def test_whole(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ckpt", "verify", str(run)]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["whole"]
    assert main(["ckpt", "verify", str(run), "--all"]) == 0
    out = capsys.readouterr()
    assert [line.split()[0] for line in out.out.splitlines()] == ["whole", "whole"] and out.err == ""


def test_broken(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(run / "checkpoints/step-000004/model0/rank-00000.safetensors")
    assert main(["ckpt", "verify", str(run)]) == 0, "the newest one is whole"
    assert main(["ckpt", "verify", str(run), "--all", "--json"]) == 5
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["checkpoints"]
    assert [(one["step"], one["whole"]) for one in found] == [(4, False), (8, True)]
    assert found[0]["damage"][0]["tensors"] == ["param/w", "state/exp_avg/w"]
    assert main(["ckpt", "verify", str(run / "checkpoints/step-000004")]) == 5
    err = capsys.readouterr().err
    assert "rank-00000.safetensors: a file is damaged" in err
    assert "2 tensors are in it: param/w, state/exp_avg/w" in err


def test_the_newest_is_verified_also_where_it_is_seen_to_be_broken(run: Path) -> None:
    (run / "checkpoints/step-000008/model0/rank-00000.safetensors").unlink()
    assert main(["ckpt", "verify", str(run)]) == 5


def test_of_several_trials_there_is_no_newest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step, name in ((1, "31"), (2, "32")):
        trial(tmp_path, step, trial_id=name)
    assert main(["ckpt", "verify", str(tmp_path)]) == 2
    assert "checkpoints of 2 trials are here" in capsys.readouterr().err
    assert main(["ckpt", "verify", str(tmp_path), "--all"]) == 0


def test_nothing_but_leftovers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.tmp-1").mkdir()
    assert main(["ckpt", "verify", str(tmp_path)]) == 2
    assert "no finished checkpoint" in capsys.readouterr().err


def test_what_a_trial_has_written_beside_its_engines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A changed digit that is JSON still: a run would not go on from it."""
    folder = trial(tmp_path, 4)
    (folder / "trial_state.json").write_text('{"step": 4}')
    metadata = json.loads((folder / METADATA).read_text())
    (folder / METADATA).write_text(json.dumps(add_checksums(metadata, folder)))
    assert main(["ckpt", "verify", str(folder)]) == 0
    (folder / "trial_state.json").write_text('{"step": 5}')
    assert main(["ckpt", "verify", str(folder)]) == 5
    assert "trial_state.json: the file is damaged" in capsys.readouterr().err


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """By a real engine: bf16 with masters, a tied weight, a frozen parameter, a buffer."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[1].weight = model[0].weight
    model[1].bias.requires_grad_(False)
    config = {"train_batch_size": 4, "bf16": {"enabled": True}, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}
    made, *_ = zero_trial.initialize(model=model, config=config)
    made.backward(made(torch.ones(4, 2, dtype=torch.bfloat16)).float().square().sum())
    made.step()
    made.save_checkpoint(tmp_path, tag="a", client_state={"epoch": 3})
    return tmp_path / "a"


def test_the_page(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ckpt", "show", str(saved)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    heads = {words[0]: " ".join(words[1:]) for words in lines[1:6]}
    assert heads["step"].startswith("1 · 4 samples · 1 files, ")
    assert heads["world"].startswith("ZeRO-0 · written by 1 rank · mesh pipe=1 replica=1 shard=1 model=1;")
    assert heads["model"].startswith("5 parameters, 12 elements, bfloat16, float32 masters of bfloat16 weights")
    assert heads["update"].endswith("exp_avg, exp_avg_sq; 1 group, lr 0.01") and heads["client"] == "epoch"
    masters = ["float32", "(lives", "in", "bfloat16)", "exp_avg,", "exp_avg_sq"]
    assert ["param", "0.weight", "2x2", *masters] in lines
    assert ["param", "1.bias", "2", "bfloat16"] in lines
    assert ["buffer", "2.num_batches_tracked", "scalar", "int64"] in lines
    assert ["tied", "1.weight", "is", "0.weight"] in lines


def test_names_do_not_control_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "\x1b[31mred\x1b]0;title\x07"
    state = {"client": {name: 1}, "aliases": {f"{name}2": "w"}, "optimizer": {"class": name}}
    folder = save_checkpoint(tmp_path, "a", [Slice.whole("param/w", torch.ones(1))], step=1, state=state)
    assert main(["ckpt", "show", str(folder)]) == 0
    assert main(["ckpt", "export", str(folder), str(tmp_path / "w.safetensors")]) == 0
    (folder / "rank-00000.safetensors").rename(folder / name)
    assert main(["ckpt", "verify", str(tmp_path)]) == 5
    out = capsys.readouterr()
    assert "red" in out.out and "\x1b" not in out.out + out.err and "\x07" not in out.out + out.err


def test_as_json_ckpt_show(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ckpt", "show", str(saved), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (one,) = found["engines"]
    assert (found["step"], one["parts"], one["elements"], one["tied"]) == (1, 1, 12, {"1.weight": "0.weight"})
    assert one["parameters"][1] == {
        "name": "0.weight",
        "shape": [2, 2],
        "dtype": "float32",
        "lives": "bfloat16",
        "part": 0,
        "optimizer_state": {"exp_avg": "float32", "exp_avg_sq": "float32"},
    }
    assert one["state"]["counters"]["global_steps"] == 1 and "dtypes" not in one["state"]


def test_a_trial_with_two_models_has_two_pages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trial(tmp_path / "checkpoints", 4, models=2)
    assert main(["ckpt", "show", str(tmp_path)]) == 0
    pages = capsys.readouterr().out.split("\n\n")
    assert [line.rsplit("/", 1)[-1] for line in (pages[0].splitlines()[0], pages[2].splitlines()[0])] == [
        "model0",
        "model1",
    ]


def test_a_checkpoint_of_another_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Only the manifest is needed; what no engine has noted is left out."""
    engine(tmp_path, "a", 4)
    assert main(["ckpt", "show", str(tmp_path)]) == 0
    assert "param  w     5      float32  exp_avg" in capsys.readouterr().out
