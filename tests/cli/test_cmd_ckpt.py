"""``zero-trial ckpt``: ls, verify, show, export and import."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import zero_trial
from tests.checkpoint.test_folder import engine, flip, trial
from tests.compat.importing.checkpoints import unpack
from zero_trial.checkpoint.folder import choose_checkpoint, only_engine
from zero_trial.checkpoint.format import Slice
from zero_trial.checkpoint.range_reader import CheckpointReader
from zero_trial.checkpoint.writer import save_checkpoint
from zero_trial.cli.cmd_ckpt import read_names
from zero_trial.cli.main import main
from zero_trial.errors import CheckpointError, ConfigError
from zero_trial.trial.runs.run_checkpoints import add_checksums
from zero_trial.util.files import METADATA


def test_the_newest_whole_one_of_a_run(tmp_path: Path) -> None:
    for step in (4, 8, 12):
        trial(tmp_path / "checkpoints", step)
    (tmp_path / "checkpoints/step-000012/model0/rank-00000.safetensors").unlink()
    saved = choose_checkpoint(tmp_path)
    assert saved.step == 8
    assert only_engine(saved).folder == tmp_path / "checkpoints/step-000008/model0"
    with pytest.raises(CheckpointError, match="a file is missing"):
        choose_checkpoint(tmp_path / "checkpoints/step-000012")
    (trial(tmp_path / "none", 4) / "metadata.json").unlink()
    with pytest.raises(CheckpointError, match=r"no checkpoint here is whole: got .*metadata\.json"):
        choose_checkpoint(tmp_path / "none")


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


def test_the_newest_of_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trial(tmp_path / "checkpoints", 4)
    monkeypatch.chdir(tmp_path)
    assert main(["ckpt", "export", ".", "out"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "from    checkpoints/step-000004/model0"
    assert lines[1].startswith("took    weights as they are stored, float32; the checkpoint has no masters")
    assert lines[2] == "wrote   1 tensors, 5 elements, 20 B, float32"
    assert lines[3].startswith("file    out/model.safetensors  ")
    assert torch.equal(load_file("out/model.safetensors")["w"], torch.arange(5.0))


def test_shards_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = [Slice.whole(f"param/{name}", torch.tensor([1e6, 2.0])) for name in "ab"]
    save_checkpoint(tmp_path, "a", tensors, step=1, state={"aliases": {"c": "a"}})
    words = [
        "ckpt",
        "export",
        str(tmp_path / "a"),
        str(tmp_path / "out"),
        "--dtype",
        "fp16",
        "--shard-size",
        "5B",
        "--json",
    ]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert [Path(path).name for path in found["files"]] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]
    assert (found["tensors"], found["bytes"], found["tied"], found["overflowed"]) == (
        2,
        8,
        {"c": "a"},
        {"a": 1, "b": 1},
    )


def test_tied_weights_and_lost_values_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = {"aliases": {"c": "a"}, "dtypes": {"a": "float16"}}
    save_checkpoint(tmp_path, "a", [Slice.whole("param/a", torch.tensor([1e6, 2.0]))], step=1, state=state)
    assert main(["ckpt", "export", str(tmp_path), str(tmp_path / "m.safetensors"), "--dtype", "fp16"]) == 0
    out = capsys.readouterr()
    assert "took    float32 masters of 1 of 1 parameters; the model computes in float16\n" in out.out
    assert "tied    c = a: written once\n" in out.out
    assert out.err == "warn    1 values of a are beyond what fp16 holds: infinite now\n"


def test_a_damaged_file_is_not_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(trial(tmp_path, 4) / "model0/rank-00000.safetensors")
    assert main(["ckpt", "export", str(tmp_path), str(tmp_path / "out")]) == 5
    assert "a file is damaged" in capsys.readouterr().err and not (tmp_path / "out").exists()
    assert main(["ckpt", "export", str(tmp_path), str(tmp_path / "out"), "--no-verify"]) == 0


def test_what_it_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = unpack("fp32-stage2-ranks3", tmp_path)
    assert main(["ckpt", "import", str(source), str(tmp_path / "out")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["from", "to", "holds", "left", "resume"]
    assert lines[0].endswith("DeepSpeed 0.19.8, ZeRO stage 2, 3 ranks")
    assert "9 parameters, 2 buffers, optimizer state exp_avg exp_avg_sq in 2 groups; step 5, 60 samples" in lines[2]
    assert lines[3] == "left out   client state 'where': pathlib.PurePosixPath"
    assert lines[4] == f"resume     engine.load_checkpoint({str(tmp_path / 'out')!r}, tag='global_step5')"
    CheckpointReader(tmp_path / "out" / "global_step5").verify()


def test_as_json_and_weights_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = unpack("fp32-stage3-ranks2", tmp_path)
    words = ["--tag", "global_step5", "--as", "start", "--no-optimizer", "--json"]
    assert main(["ckpt", "import", str(source), str(tmp_path / "out"), *words]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["folder"] == str(tmp_path / "out" / "start") and found["kinds"] == [] and found["groups"] == 0
    assert (found["parameters"], found["buffers"], found["step"], found["samples"]) == (9, 2, 5, 60)


def test_weights_and_how_to_load_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"module.a": torch.zeros(2), "module.scale": torch.ones(1)}, tmp_path / "w.pt")
    words = ["--strip", "module.", "--buffer", "scale"]
    assert main(["ckpt", "import", str(tmp_path / "w.pt"), str(tmp_path / "out"), *words]) == 0
    printed = capsys.readouterr().out
    assert "tag='w', load_module_only=True)" in printed and "taken for buffers, by name or dtype: scale" in printed
    assert set(CheckpointReader(tmp_path / "out" / "w").shapes) == {"param/a", "buffer/scale"}


def test_mistakes_are_one_block(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trial(tmp_path / "a", 4)
    here, out = str(tmp_path / "a"), str(tmp_path / "x.safetensors")
    (tmp_path / "left over" / "a.tmp-1").mkdir(parents=True)
    (tmp_path / "bad.pt").write_bytes(b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00true\x85R.")  # no zip archive
    for words, code, said in (
        (["ls", str(tmp_path / "no")], 2, f"error   {tmp_path / 'no'}: there is no such folder"),
        (["verify", str(tmp_path / "left over")], 2, "no finished checkpoint"),
        (["export", str(tmp_path / "no"), "x"], 2, "no such folder"),
        (["export", here, out, "--shard-size", "4B"], 0, ""),
        (["export", here, out, "--shard-size", "many"], 2, "not a size"),
        (["export", here, str(tmp_path / "y"), "--part", "1"], 2, "no such part"),
        (["export", here, out], 2, "there are weights already"),
        (["import", str(tmp_path / "none"), str(tmp_path / "out")], 5, "no such file or folder"),
        (["import", str(tmp_path / "bad.pt"), str(tmp_path / "out")], 5, "this is not a whole file of torch.save"),
    ):
        assert main(["ckpt", *words]) == code, words
        err = capsys.readouterr().err
        assert said in err and "Traceback" not in err, words
    assert not (tmp_path / "out").exists()


def test_names_of_groups(tmp_path: Path) -> None:
    path = tmp_path / "names.json"
    path.write_text('[["a"], []]')
    assert read_names(path) == [["a"], []]
    for text in ("", "{}", '["a"]', "[[1]]"):
        path.write_text(text)
        with pytest.raises(ConfigError, match="--names"):
            read_names(path)
