"""``zero-trial ckpt``: ls, verify, show, export and import."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

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

Ckpt = Callable[..., Any]


@pytest.fixture
def ckpt(capsys: pytest.CaptureFixture[str]) -> Ckpt:
    """Return ``zero-trial ckpt WORDS``, which ends with ``code``; it gives what is printed."""

    def run(*words: object, code: int = 0) -> Any:
        assert main(["ckpt", *map(str, words)]) == code, words
        return capsys.readouterr()

    return run


def rows(printed: str, skip: int) -> list[list[str]]:
    return [line.split() for line in printed.splitlines()[skip:]]


def test_which_checkpoint_and_which_model_of_it(tmp_path: Path) -> None:
    for step in (4, 8, 12):
        trial(tmp_path / "checkpoints", step)
    (tmp_path / "checkpoints/step-000012/model0/rank-00000.safetensors").unlink()
    saved = choose_checkpoint(tmp_path)
    assert saved.step == 8
    assert only_engine(saved).folder == tmp_path / "checkpoints/step-000008/model0"
    with pytest.raises(CheckpointError, match="a file is missing"):
        choose_checkpoint(tmp_path / "checkpoints/step-000012")
    (trial(tmp_path / "none", 4) / "metadata.json").unlink()
    with pytest.raises(CheckpointError, match=r"no checkpoint here is intact: got .*metadata\.json"):
        choose_checkpoint(tmp_path / "none")
    two = trial(tmp_path / "two", 4, models=2)
    with pytest.raises(ConfigError, match=r"the trial has 2 models: got model0, model1\. Name one: .*model0"):
        only_engine(choose_checkpoint(two))
    assert only_engine(choose_checkpoint(two / "model1")).folder.name == "model1"
    by_itself = trial(tmp_path / "alone", 5)
    shutil.rmtree(by_itself / "model0")
    with pytest.raises(ConfigError, match="no engine has saved anything"):
        only_engine(choose_checkpoint(by_itself))


def test_the_list(tmp_path: Path, ckpt: Ckpt, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (8, 20, 100):
        trial(tmp_path / "checkpoints", step)
    (tmp_path / "checkpoints/step-000100/model0/rank-00000.safetensors").write_text("")
    (tmp_path / "checkpoints/step-000120.tmp-1").mkdir()
    monkeypatch.chdir(tmp_path)
    out = ckpt("ls", ".")
    assert out.out.splitlines()[0] == "checkpoints"
    head, first, *words = rows(out.out, 1)
    assert head == ["step", "saved", "(UTC)", "size", "files", "ranks", "stage", "name"]
    assert [(row[0], *row[5:7], *row[7:]) for row in words] == [
        ("8", "4", "1", "2", "step-000008", "whole"),
        ("20", "4", "1", "2", "step-000020", "latest"),
        ("100", "4", "1", "2", "step-000100", "broken"),
    ]
    assert first[0] == "-" and first[-3:] == ["step-000120.tmp-1", "left", "over"]
    assert out.err.startswith("broken  ") and "rank-00000.safetensors: the file has the wrong size" in out.err


def test_lists_of_several_folders_trials_and_engines(tmp_path: Path, ckpt: Ckpt) -> None:
    for folder, step in (("a", 1), ("b", 2)):
        engine(tmp_path / "several" / folder, "global_step", step)
    with pytest.raises(ConfigError, match="the folder contains checkpoints of 2 folders"):
        choose_checkpoint(tmp_path / "several")
    ckpt("verify", tmp_path / "several", code=2)
    ckpt("verify", "--all", tmp_path / "several")
    out = ckpt("ls", tmp_path / "several")
    assert [row[-2:] for row in rows(out.out, 2)] == [["a/global_step", "latest"], ["b/global_step", "latest"]]
    assert not out.err
    for step, name in ((1, "31"), (2, "32"), (3, "31")):
        trial(tmp_path / "shared", step, trial_id=name)
    head, *words = rows(ckpt("ls", tmp_path / "shared").out, 1)
    assert head[-1] == "trial"
    assert [row[-2:] for row in words] == [["31", "whole"], ["32", "latest"], ["31", "latest"]]
    engine(trial(tmp_path / "stages", 4), "model1", 4, zero_stage=1)
    assert rows(ckpt("ls", tmp_path / "stages").out, 2)[0][6:8] == ["1", "2,1"]
    found = json.loads(ckpt("ls", tmp_path / "stages", "--json").out)
    assert found["folder"] == str(tmp_path / "stages") and found["checkpoints"][0]["zero_stage"] == [2, 1]
    engine(tmp_path / "one", "a", 4, mesh=[1, 1, 1, 1])
    (one,) = json.loads(ckpt("ls", tmp_path / "one", "--json").out)["checkpoints"]
    assert (one["step"], one["ranks"], one["zero_stage"], one["mesh"]) == (4, 1, 2, [1, 1, 1, 1])
    assert (one["state"], one["latest"], one["fault"], one["files"], one["engines"]) == ("whole", True, None, 2, [])


def test_verify(tmp_path: Path, ckpt: Ckpt) -> None:
    for step in (4, 8):
        trial(tmp_path / "checkpoints", step)
    (tmp_path / "checkpoints/step-000012.tmp-1").mkdir()
    assert [row[0] for row in rows(ckpt("verify", tmp_path).out, 0)] == ["whole"]
    out = ckpt("verify", tmp_path, "--all")
    assert [row[0] for row in rows(out.out, 0)] == ["whole", "whole"] and out.err == ""
    flip(tmp_path / "checkpoints/step-000004/model0/rank-00000.safetensors")
    ckpt("verify", tmp_path)  # the newest one is whole
    found = json.loads(ckpt("verify", tmp_path, "--all", "--json", code=5).out)["checkpoints"]
    assert [(one["step"], one["whole"]) for one in found] == [(4, False), (8, True)]
    assert found[0]["damage"][0]["tensors"] == ["param/w", "state/exp_avg/w"]
    err = ckpt("verify", tmp_path / "checkpoints/step-000004", code=5).err
    assert "rank-00000.safetensors: a file is damaged" in err
    assert "affects 2 tensors: param/w, state/exp_avg/w" in err
    (tmp_path / "checkpoints/step-000008/model0/rank-00000.safetensors").unlink()
    ckpt("verify", tmp_path, code=5)  # the newest, though it is seen to be broken
    # what a trial has written next to its engines: another digit that is JSON still
    folder = trial(tmp_path / "written", 4)
    (folder / "trial_state.json").write_text('{"step": 4}')
    metadata = json.loads((folder / METADATA).read_text())
    (folder / METADATA).write_text(json.dumps(add_checksums(metadata, folder)))
    ckpt("verify", folder)
    (folder / "trial_state.json").write_text('{"step": 5}')
    assert "trial_state.json: the file is damaged" in ckpt("verify", folder, code=5).err


def test_the_page_of_a_checkpoint(tmp_path: Path, ckpt: Ckpt) -> None:
    """Of a real engine: bf16 with masters, a tied weight, a frozen parameter, a buffer."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[1].weight = model[0].weight
    model[1].bias.requires_grad_(False)
    config = {"train_batch_size": 4, "bf16": {"enabled": True}, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}
    made, *_ = zero_trial.initialize(model=model, config=config)
    made.backward(made(torch.ones(4, 2, dtype=torch.bfloat16)).float().square().sum())
    made.step()
    made.save_checkpoint(tmp_path, tag="a", client_state={"epoch": 3})
    lines = rows(ckpt("show", tmp_path / "a").out, 0)
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
    found = json.loads(ckpt("show", tmp_path / "a", "--json").out)
    (one,) = found["engines"]
    assert (found["step"], one["parts"], one["elements"], one["tied"]) == (1, 1, 12, {"1.weight": "0.weight"})
    assert one["parameters"][1] == {"name": "0.weight", "shape": [2, 2], "dtype": "float32", "lives": "bfloat16"} | {
        "part": 0,
        "optimizer_state": {"exp_avg": "float32", "exp_avg_sq": "float32"},
    }
    assert one["state"]["counters"]["global_steps"] == 1 and "dtypes" not in one["state"]
    pages = ckpt("show", trial(tmp_path / "two", 4, models=2)).out.split("\n\n")
    assert [pages[at].splitlines()[0].rsplit("/", 1)[-1] for at in (0, 2)] == ["model0", "model1"]


def test_names_do_not_control_the_terminal(tmp_path: Path, ckpt: Ckpt) -> None:
    name = "\x1b[31mred\x1b]0;title\x07"
    state = {"client": {name: 1}, "aliases": {f"{name}2": "w"}, "optimizer": {"class": name}}
    folder = save_checkpoint(tmp_path, "a", [Slice.whole("param/w", torch.ones(1))], step=1, state=state)
    said = [ckpt("show", folder), ckpt("export", folder, tmp_path / "w.safetensors")]
    (folder / "rank-00000.safetensors").rename(folder / name)
    said.append(ckpt("verify", tmp_path, code=5))
    text = "".join(out.out + out.err for out in said)
    assert "red" in text and "\x1b" not in text and "\x07" not in text


def test_export(tmp_path: Path, ckpt: Ckpt, monkeypatch: pytest.MonkeyPatch) -> None:
    trial(tmp_path / "checkpoints", 4)
    monkeypatch.chdir(tmp_path)
    lines = ckpt("export", ".", "out").out.splitlines()
    assert lines[0] == "from    checkpoints/step-000004/model0"
    assert lines[1].startswith("took    weights as stored, float32; the checkpoint has no masters")
    assert lines[2] == "wrote   1 tensors, 5 elements, 20 B, float32"
    assert lines[3].startswith("file    out/model.safetensors  ")
    assert torch.equal(load_file("out/model.safetensors")["w"], torch.arange(5.0))
    tensors = [Slice.whole(f"param/{name}", torch.tensor([1e6, 2.0])) for name in "ab"]
    state = {"aliases": {"c": "a"}, "dtypes": {"a": "float16"}}
    save_checkpoint(tmp_path / "two", "a", tensors, step=1, state=state)
    out = ckpt("export", "two", "m.safetensors", "--dtype", "fp16")
    assert "took    float32 masters of 1 of 2 parameters; the model computes in float16\n" in out.out
    assert "tied    c = a: written once\n" in out.out
    assert "warn    1 values of a overflow fp16 and are infinite in the file\n" in out.err
    found = json.loads(ckpt("export", "two", "shards", "--dtype", "fp16", "--shard-size", "5B", "--json").out)
    names = [*(f"model-0000{n}-of-00002.safetensors" for n in (1, 2)), "model.safetensors.index.json"]
    assert [Path(path).name for path in found["files"]] == names
    assert (found["tensors"], found["bytes"], found["tied"]) == (2, 8, {"c": "a"})
    assert found["overflowed"] == {"a": 1, "b": 1}
    flip(trial(tmp_path / "damaged", 4) / "model0/rank-00000.safetensors")
    assert "a file is damaged" in ckpt("export", "damaged", "none", code=5).err and not Path("none").exists()
    ckpt("export", "damaged", "none", "--no-verify")


def test_import(tmp_path: Path, ckpt: Ckpt) -> None:
    lines = ckpt("import", unpack("fp32-stage2-ranks3", tmp_path), tmp_path / "out").out.splitlines()
    assert [line.split()[0] for line in lines] == ["from", "to", "holds", "left", "resume"]
    assert lines[0].endswith("DeepSpeed 0.19.8, ZeRO stage 2, 3 ranks")
    assert "9 parameters, 2 buffers, optimizer state exp_avg exp_avg_sq in 2 groups; step 5, 60 samples" in lines[2]
    assert lines[3] == "left out   client state 'where': pathlib.PurePosixPath"
    assert lines[4] == f"resume     engine.load_checkpoint({str(tmp_path / 'out')!r}, tag='global_step5')"
    CheckpointReader(tmp_path / "out" / "global_step5").verify()
    words = ["--tag", "global_step5", "--as", "start", "--no-optimizer", "--json"]
    found = json.loads(ckpt("import", unpack("fp32-stage3-ranks2", tmp_path), tmp_path / "out", *words).out)
    assert found["folder"] == str(tmp_path / "out" / "start") and found["kinds"] == [] and found["groups"] == 0
    assert (found["parameters"], found["buffers"], found["step"], found["samples"]) == (9, 2, 5, 60)
    torch.save({"module.a": torch.zeros(2), "module.scale": torch.ones(1)}, tmp_path / "w.pt")
    words = ["--strip", "module.", "--buffer", "scale"]
    printed = ckpt("import", tmp_path / "w.pt", tmp_path / "out", *words).out
    assert "tag='w', load_module_only=True)" in printed and "treated as buffers, by name or dtype: scale" in printed
    assert set(CheckpointReader(tmp_path / "out" / "w").shapes) == {"param/a", "buffer/scale"}


def test_mistakes_are_one_block(tmp_path: Path, ckpt: Ckpt) -> None:
    trial(tmp_path / "a", 4)
    here, out, names = tmp_path / "a", tmp_path / "x.safetensors", tmp_path / "names.json"
    (tmp_path / "left over" / "a.tmp-1").mkdir(parents=True)
    (tmp_path / "bad.pt").write_bytes(b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00true\x85R.")  # no zip archive
    for words, code, said in (
        (["ls", tmp_path / "no"], 2, f"error   {tmp_path / 'no'}: the folder does not exist"),
        (["verify", tmp_path / "left over"], 2, "no finished checkpoint"),
        (["export", tmp_path / "no", "x"], 2, "folder does not exist"),
        (["export", here, out, "--shard-size", "4B"], 0, ""),
        (["export", here, out, "--shard-size", "many"], 2, "not a size"),
        (["export", here, tmp_path / "y", "--part", "1"], 2, "no such part"),
        (["export", here, out], 2, "the folder already contains weights"),
        (["import", tmp_path / "none", tmp_path / "out"], 5, "no such file or folder"),
        (["import", tmp_path / "bad.pt", tmp_path / "out"], 5, "this is not a complete file of torch.save"),
    ):
        err = ckpt(*words, code=code).err
        assert said in err and "Traceback" not in err, words
    assert not (tmp_path / "out").exists()
    names.write_text('[["a"], []]')
    assert read_names(names) == [["a"], []]
    for text in ("", "{}", '["a"]', "[[1]]"):
        names.write_text(text)
        with pytest.raises(ConfigError, match="--names"):
            read_names(names)
