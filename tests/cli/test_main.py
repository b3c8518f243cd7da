"""The command line as a whole: fast, quiet, one block per error; its page and completion."""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.docs.reference import FOLDER, cli_page
from zero_trial.checkpoint.format import Slice
from zero_trial.checkpoint.writer import save_checkpoint
from zero_trial.cli import output
from zero_trial.cli.main import VERBS, main, report_error
from zero_trial.cli.output import disk_lines, report_outcome, shown
from zero_trial.errors import ConfigError, DoesNotFit, ExitStatus, ZeroTrialError
from zero_trial.launch.first_cause import Cause
from zero_trial.launch.supervisor import LaunchResult


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("--help", 0, "75 preempted"),
        ("", 2, "usage: zero-trial"),
        ("fly", 2, "usage: zero-trial"),
        ("run --no-such-option", 2, "usage: zero-trial"),
        ("launch", 2, "usage: zero-trial"),
        ("launch --num_gpu 2 train.py", 2, "unrecognized arguments: --num_gpu. Did you mean --num_gpus?"),
        ("run const.yaml . --lr 0.1", 2, "Write a hyperparameter after the folder: hyperparameters.lr=VALUE"),
        ("run const.yaml . --slot 2", 2, "Did you mean --slots?"),
        ("ckpt verify --jsno runs", 2, "Did you mean --json?"),
        ("rum const.yaml", 2, "unknown verb rum. Did you mean run?"),
    ],
)
def test_help_and_what_it_does_not_know(words: str, code: int, said: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    shown = capsys.readouterr()
    assert ended.value.code == code and said in (shown.err if code else shown.out)


def test_what_the_system_refuses_is_no_traceback(capsys: pytest.CaptureFixture[str]):
    error = OSError(28, "No space left on device", "/full/file")

    def refuse(options: object) -> int:
        raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zero_trial.cli.cmd_start._env", refuse)
        assert main(["env"]) == 5
        assert (
            capsys.readouterr().err == "error   /full/file: the operating system reported: No space left on device.\n"
        )
        assert main(["--debug", "env"]) == 5
        assert "Traceback" in capsys.readouterr().err


def test_an_error_is_a_block_and_a_code(capsys: pytest.CaptureFixture[str]):
    assert main(["run", "nowhere.yaml", "."]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error   nowhere.yaml: cannot be read")
    assert "Traceback" not in captured.err and captured.out == ""
    for error, code, text in (
        (
            ConfigError.many([ConfigError("a", where="x"), ConfigError("b")]),
            2,
            "2 faults:\n          x: a.\n          b.",
        ),
        (DoesNotFit("too big"), 3, "too big."),
        (ConfigError("a\x1b]0;owned\x07b", got="\x1b[2Jc"), 2, r"a\x1b]0;owned\x07b: got \x1b[2Jc."),
    ):
        out = io.StringIO()
        assert (report_error(error, out), out.getvalue()) == (code, f"error   {text}\n")


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


def test_the_page_is_what_the_parsers_say() -> None:
    """If this fails: python -m tests.docs.reference"""
    page = cli_page()
    assert (FOLDER / "cli.md").read_text(encoding="utf-8") == page
    assert all(f"## zero-trial {verb}" in page for verb in VERBS)
    assert [line for line in page.splitlines() if line.endswith("|  |")] == []


def test_every_error_ends_with_a_code_of_the_table() -> None:
    def kinds(base: type[ZeroTrialError]) -> list[type[ZeroTrialError]]:
        return [base, *(kind for child in base.__subclasses__() for kind in kinds(child))]

    for kind in kinds(ZeroTrialError):
        assert ExitStatus(kind.exit_code).meaning


ASK = """source ./completion.bash
COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
_shtab_zero_trial zero-trial; printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_bash_offers_verbs_options_and_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    (tmp_path / "completion.bash").write_text(capsys.readouterr().out)
    (tmp_path / "const.yaml").touch()
    for words, offered in (
        ("zero-trial ru", "run"),
        ("zero-trial ckpt ve", "verify"),
        ("zero-trial plan --gpu-m", "--gpu-memory"),
        ("zero-trial run con", "const.yaml"),
    ):
        said = subprocess.run(["bash", "-c", ASK.format(words=words)], cwd=tmp_path, capture_output=True, text=True)
        assert offered in said.stdout.split() and "report" not in said.stdout, said.stderr


def report(outcome: LaunchResult, folder: Path) -> tuple[int, str]:
    out = io.StringIO()
    return report_outcome(outcome, folder, out), out.getvalue()


def test_the_end_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Which rank, its words without control characters, and its log; a stop is no failure."""
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs" / "0001"
    log = "log     runs/0001/logs/rank-1.log\n"
    hostile = "ValueError: \x1b]52;c;ZWNobw==\x07red \x1b[31mflag\r"
    verdict = "rank 0, step 6: the loss became nan"
    for code, cause, text in (
        (2, Cause(1, "a\nb", 2), f"failed  rank 1: a\n        b\n{log}"),
        (1, Cause(1, hostile, 1), f"failed  rank 1: ValueError: red flag\n{log}"),
        (4, Cause(1, verdict, 4), f"failed  {verdict}\n{log}"),
        (5, Cause(None, "port in use", 5), "failed  port in use\nlog     runs/0001/logs\n"),
        *((code, Cause(None, "stopped by SIGINT", code), "stopped by SIGINT\n") for code in (75, 130, 143)),
        (0, None, ""),
    ):
        assert report(LaunchResult(code, cause), run) == (code, text)


def test_a_full_disk_is_named(tmp_path: Path):
    """The rank that met it could not write what it met."""
    assert disk_lines(tmp_path, room=0) == [] == disk_lines(tmp_path / "gone")
    (line,) = disk_lines(tmp_path, room=1 << 62)
    assert line.startswith("note    the disk of ") and line.endswith(
        "KiB free): free some space, or pass --run-dir DIR"
    )


@pytest.mark.parametrize(
    ("watched", "quiet", "drawn"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_it_is_drawn_on_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, watched: bool, quiet: bool, drawn: bool
) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(output, "is_terminal", lambda _: watched)
    bar = output.bytes_bar("verify", 100, quiet=quiet)
    bar.update(50)
    bar.refresh()
    bar.close()
    assert ("verify  50" in stream.getvalue()) is drawn
    assert shown(Path("/none/x\x1b[2J")) == "/none/x"
