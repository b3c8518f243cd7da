"""The command-line reference is current."""

from __future__ import annotations

from pathlib import Path

from zero_trial.cli.cli_page import render
from zero_trial.cli.main import VERBS
from zero_trial.errors import ExitStatus, ZeroTrialError

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "cli.md"


def test_the_page_is_what_the_parsers_say() -> None:
    """If this fails: python -m zero_trial.cli.cli_page docs/reference/cli.md"""
    assert PAGE.read_text(encoding="utf-8") == render()


def test_every_verb_is_there_and_every_argument_has_a_meaning() -> None:
    page = render()
    assert all(f"## zero-trial {verb}" in page for verb in VERBS)
    assert [line for line in page.splitlines() if line.endswith("|  |")] == []


def test_every_error_ends_with_a_code_of_the_table() -> None:
    def kinds(base: type[ZeroTrialError]) -> list[type[ZeroTrialError]]:
        return [base, *(kind for child in base.__subclasses__() for kind in kinds(child))]

    for kind in kinds(ZeroTrialError):
        assert ExitStatus(kind.exit_code).meaning
