"""``zero-trial ckpt``: every action is there, says what it does, and brings no torch before it is run."""

from __future__ import annotations

import pytest

from zero_trial.cli.ckpt import ACTIONS
from zero_trial.cli.main import main


@pytest.mark.parametrize("action", ACTIONS)
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
