"""The command line as a whole: fast, quiet, one block per error."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import zero_trial
from zero_trial.checkpoint.format import Slice
from zero_trial.checkpoint.writer import save_checkpoint
from zero_trial.cli.main import main, report_error
from zero_trial.errors import ConfigError, DoesNotFit


def test_help_names_the_verbs_and_the_exit_codes(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert all(word in text for word in ("run", "launch", "env", "75 preempted"))


def test_version(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"zero_trial {zero_trial.__version__}\n"


@pytest.mark.parametrize("words", [[], ["fly"], ["run", "--no-such-option"], ["launch"]])
def test_what_it_does_not_know_ends_with_2(words: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("usage: zero-trial")


def test_a_verb_that_is_nearly_right(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main(["rum", "const.yaml"])
    assert ended.value.code == 2 and "there is no verb rum. Did you mean run?" in capsys.readouterr().err


def test_nothing_at_all_is_answered_with_the_way_to_begin(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main([])
    assert "zero-trial init my_trial" in " ".join(capsys.readouterr().err.split())


def test_what_the_system_refuses_is_no_traceback(capsys: pytest.CaptureFixture[str]):
    error = OSError(28, "No space left on device", "/full/file")

    def refuse(options: object) -> int:
        raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zero_trial.cli.cmd_env._handle", refuse)
        assert main(["env"]) == 5
        assert capsys.readouterr().err == "error   /full/file: the system refused: No space left on device.\n"
        assert main(["--debug", "env"]) == 5
        assert "Traceback" in capsys.readouterr().err


def test_an_error_is_a_block_and_a_code(capsys: pytest.CaptureFixture[str]):
    assert main(["run", "nowhere.yaml", "."]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error   nowhere.yaml: cannot be read")
    assert "Traceback" not in captured.err and captured.out == ""


def test_debug_shows_where_it_was_raised(capsys: pytest.CaptureFixture[str]):
    assert main(["--debug", "run", "nowhere.yaml", "."]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_several_faults_are_indented():
    out = io.StringIO()
    code = report_error(ConfigError.many([ConfigError("a", where="x"), ConfigError("b")]), out)
    assert (code, out.getvalue()) == (2, "error   2 faults:\n          x: a.\n          b.\n")
    assert report_error(DoesNotFit("too big"), out) == 3


def test_no_control_character_of_an_error_reaches_the_terminal():
    out = io.StringIO()
    assert report_error(ConfigError("a\x1b]0;owned\x07b", got="\x1b[2Jc"), out) == 2
    assert r"a\x1b]0;owned\x07b" in out.getvalue() and out.getvalue().replace("\n", "").isprintable()


# Words and exit code, in the folder of the test below. Importing torch takes two seconds.
WITHOUT_TORCH = {
    "completion bash": 0,
    "init made": 0,
    "check --no-build made/const.yaml made": 0,
    "config made/ds_config.json": 0,
    "simulate made/const.yaml": 0,
    "schedule 1f1b --stages 2 --micro-batches 2": 0,
    "ckpt ls saved": 0,
    "ckpt verify saved --all": 0,
    "ckpt show saved": 0,
    "report run": 0,
    "diff run run": 1,
    "resume run": 0,
    "master status --root nowhere": 2,
    "--help": 0,
}


def test_verbs_that_need_no_torch(tmp_path: Path):
    """One program calls them all, and names the first that has imported torch."""
    save_checkpoint(tmp_path / "saved", "step-1", [Slice.whole("param/a", torch.ones(3))], step=1, state={})
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.lock.yaml").write_text("name: small\n")
    (run / "summary.json").write_text('{"step": 2, "total_steps": 2, "end": "completed"}')
    (run / "events.jsonl").write_text("")
    code = f"""
import sys
from zero_trial.cli.main import main
for words, expected in {WITHOUT_TORCH!r}.items():
    try:
        code = main(words.split())
    except SystemExit as end:
        code = end.code
    if "torch" in sys.modules or code != expected:
        sys.exit(f"{{words}}: exit code {{code}}, torch {{'torch' in sys.modules}}")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, timeout=60, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
