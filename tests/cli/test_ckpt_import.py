"""``zero-trial ckpt import``: what a person sees."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.importing.checkpoints import unpack
from zero_trial.checkpoint import CheckpointReader
from zero_trial.cli.ckpt_import import read_names
from zero_trial.cli.main import main
from zero_trial.errors import ConfigError


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
    (tmp_path / "bad.pt").write_bytes(b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00true\x85R.")
    assert main(["ckpt", "import", str(tmp_path / "bad.pt"), str(tmp_path / "out")]) == 5
    printed = capsys.readouterr().err
    assert (
        "no such file or folder" in printed
        and "would run a program if it were loaded with pickle: got it names os.system" in printed
    )
    assert not (tmp_path / "out").exists()


def test_names_of_groups(tmp_path: Path) -> None:
    path = tmp_path / "names.json"
    path.write_text('[["a"], []]')
    assert read_names(path) == [["a"], []]
    for text in ("", "{}", '["a"]', "[[1]]"):
        path.write_text(text)
        with pytest.raises(ConfigError, match="--names"):
            read_names(path)
