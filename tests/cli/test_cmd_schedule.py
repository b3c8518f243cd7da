"""The verb ``schedule``: its output and its exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from zero_trial.cli import cmd_schedule
from zero_trial.cli.main import main
from zero_trial.pipeline.schedule import RECIPES

TWO_BY_TWO = ["--stages", "2", "--micro-batches", "2"]


def test_all_that_is_printed(capsys: pytest.CaptureFixture[str]):
    assert main(["schedule", "1f1b", *TWO_BY_TWO, "--zero", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:9] == [
        "schedule  1f1b · 2 pipeline stages · 2 micro-batches · 1 chunk per rank · ZeRO stage 3 · reduce: boundary · parameters: hold",
        "bubble    33.3%: 9 units of time, of which a rank computes 6",
        "",
        "rank 0  F0 F1 .  .  B0 -  .  B1 -",
        "rank 1  .  F0 B0 -  F1 B1 -  .  .",
        "",
        "rank  chunks  idle  activations  parameters  gradients  gathers  reductions  volume  messages",
        "   0       0     3            2           1          1        1           1       2         2",
        "   1       1     3            1           1          1        1           1       2         2",
    ]


def test_json_is_all_that_is_printed(capsys: pytest.CaptureFixture[str]):
    words = [
        "schedule",
        "interleaved",
        *TWO_BY_TWO,
        "--chunks",
        "3",
        "--zero",
        "3",
        "--policy",
        "free",
        "--tied",
        "--json",
    ]
    assert main([*words, "--costs", "2", "1", "1"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert (body["chunks"], body["parameters"], body["reduction"]) == (3, "free", "micro")
    assert body["ranks"][1]["chunks"] == [1, 3, 5] and body["ranks"][1]["volume"] == 3 * 2
    assert body["makespan"] == (3 * 2 + 1) * 4
    assert body["actions"][1][-2:] == ["5TIED_REDUCE0", "STEP"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["pipedream"], "error   pipeline.schedule: unknown schedule: got 'pipedream'"),
        (["1f1b", "--chunks", "2"], "the number of chunks per rank cannot be chosen"),
        (["1f1b", "--zero", "2", "--policy", "hold"], "parameters are freed at ZeRO stage 3 only"),
    ],
)
def test_user_errors_are_2(words: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert main(["schedule", *words, *TWO_BY_TWO]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.out == ""


@pytest.mark.parametrize(
    "words", [["1f1b"], ["1f1b", *TWO_BY_TWO, "--costs", "0", "1", "1"], ["1f1b", *TWO_BY_TWO, "--zero", "4"]]
)
def test_arguments_that_it_does_not_take(words: list[str]):
    with pytest.raises(SystemExit) as ended:
        main(["schedule", *words])
    assert ended.value.code == 2


def test_the_help_names_every_schedule():
    """It lists them without importing them."""
    assert cmd_schedule._NAMES.split(", ") == list(RECIPES)


def test_it_needs_no_torch():
    code = (
        "import sys; from zero_trial.cli.main import main; "
        f"code = main(['schedule', 'zb_v', *{TWO_BY_TWO!r}]); "
        "sys.exit(3 if 'torch' in sys.modules else code)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False, capture_output=True).returncode == 0


def examples() -> list[tuple[str, str]]:
    """The guide's commands, each with the output that it shows."""
    text = (Path(__file__).parents[2] / "docs/guide/pipeline_schedules.md").read_text(encoding="utf-8")
    blocks = [block.split("\n```", 1)[0] for block in text.split("```console\n$ zero-trial ")[1:]]
    return [(command, output) for command, _, output in (block.partition("\n") for block in blocks)]


@pytest.mark.parametrize(("command", "output"), examples(), ids=[command for command, _ in examples()])
def test_the_guide_shows_what_is_printed(command: str, output: str, capsys: pytest.CaptureFixture[str]):
    assert main(command.split()) == 0
    assert capsys.readouterr().out.rstrip() == output


def test_the_guide_s_python_runs(capsys: pytest.CaptureFixture[str]):
    text = (Path(__file__).parents[2] / "docs/guide/pipeline_schedules.md").read_text(encoding="utf-8")
    blocks = [block.split("```", 1)[0] for block in text.split("```python\n")[1:]]
    assert len(blocks) == 2
    for block in blocks:
        scope: dict[str, object] = {}
        exec(block, scope)
    assert capsys.readouterr().out.startswith("5.9% 2\nrank 0  0F0")
    assert scope["ties"] == {"embed": (0, 1)}
