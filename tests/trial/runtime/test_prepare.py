"""The preparation of a trial while its master is away."""

from __future__ import annotations

import runpy
import sys

import pytest

pytest.importorskip("determined")
from determined.common.api.errors import BadRequestException, MasterNotFoundException, UnauthenticatedException

from zero_trial.trial.runtime import prepare


@pytest.fixture
def outcomes(monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    """What the next preparations raise, in this order."""
    left: list[BaseException] = []

    def run_module(name: str, **_: object) -> None:
        assert name == "determined.exec.prep_container" and "--rendezvous" in sys.argv
        if left:
            raise left.pop(0)

    monkeypatch.setattr(sys, "argv", ["prepare", "--rendezvous"])
    monkeypatch.setattr(runpy, "run_module", run_module)
    monkeypatch.setattr(prepare, "_PAUSE_SECONDS", 0.0)
    return left


def test_it_is_repeated_until_the_master_answers(
    outcomes: list[BaseException], capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes += [MasterNotFoundException("refused"), BadRequestException("broken"), MasterNotFoundException("refused")]
    prepare.main()
    assert not outcomes and capsys.readouterr().err.count("the master cannot be reached") == 3


def test_it_gives_up_in_the_end(outcomes: list[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "_SECONDS", -1.0)
    outcomes += [MasterNotFoundException("refused")] * 2
    with pytest.raises(MasterNotFoundException):
        prepare.main()
    assert len(outcomes) == 1


def test_what_a_master_refuses_is_not_repeated(outcomes: list[BaseException]) -> None:
    outcomes += [UnauthenticatedException()] * 2
    with pytest.raises(UnauthenticatedException):
        prepare.main()
    assert len(outcomes) == 1
