"""What a shell offers behind ``zero-trial``."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from zero_trial.cli.main import main

ASK = """source ./completion.bash
COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
_shtab_zero_trial zero-trial; printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("zero-trial ru", {"run"}),
        ("zero-trial ckpt ve", {"verify"}),
        ("zero-trial plan --gpu-m", {"--gpu-memory"}),
        ("zero-trial run con", {"const.yaml"}),
    ],
)
def test_bash_offers_verbs_options_and_files(
    words: str, offered: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion", "bash"]) == 0
    (tmp_path / "completion.bash").write_text(capsys.readouterr().out)
    (tmp_path / "const.yaml").touch()
    said = subprocess.run(["bash", "-c", ASK.format(words=words)], cwd=tmp_path, capture_output=True, text=True)
    assert offered <= set(said.stdout.split()) and "report" not in said.stdout, said.stderr


def test_other_shells_have_one_too(capsys: pytest.CaptureFixture[str]) -> None:
    for shell in ("zsh", "tcsh"):
        assert main(["completion", shell]) == 0
        assert "report" in capsys.readouterr().out
