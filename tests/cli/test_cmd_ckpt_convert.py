"""``zero-trial ckpt export`` and ``import``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoint.test_folder import flip, trial
from tests.compat.importing.checkpoints import unpack
from zero_trial.checkpoint.format import Slice
from zero_trial.checkpoint.range_reader import CheckpointReader
from zero_trial.checkpoint.writer import save_checkpoint
from zero_trial.cli.cmd_ckpt_convert import read_names
from zero_trial.cli.main import main
from zero_trial.errors import ConfigError


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


def test_mistakes_are_one_block(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trial(tmp_path, 4)
    for words, said in (
        ([str(tmp_path / "no"), "x"], "no such folder"),
        ([str(tmp_path), str(tmp_path / "x.safetensors"), "--shard-size", "4B"], ""),
        ([str(tmp_path), str(tmp_path / "x.safetensors"), "--shard-size", "many"], "not a size"),
        ([str(tmp_path), str(tmp_path / "y"), "--part", "1"], "no such part"),
        ([str(tmp_path), str(tmp_path / "x.safetensors")], "there are weights already"),
    ):
        code, err = main(["ckpt", "export", *words]), capsys.readouterr().err
        assert (code, "Traceback" in err) == (2 if said else 0, False) and said in err


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


def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ckpt", "import", str(tmp_path / "none"), str(tmp_path / "out")]) == 5
    (tmp_path / "bad.pt").write_bytes(b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00true\x85R.")  # no zip archive
    assert main(["ckpt", "import", str(tmp_path / "bad.pt"), str(tmp_path / "out")]) == 5
    printed = capsys.readouterr().err
    assert "no such file or folder" in printed and "this is not a whole file of torch.save" in printed
    assert not (tmp_path / "out").exists()


def test_names_of_groups(tmp_path: Path) -> None:
    path = tmp_path / "names.json"
    path.write_text('[["a"], []]')
    assert read_names(path) == [["a"], []]
    for text in ("", "{}", '["a"]', "[[1]]"):
        path.write_text(text)
        with pytest.raises(ConfigError, match="--names"):
            read_names(path)
