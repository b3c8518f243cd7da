"""Last words are what torch reads them to be, once, and nothing where nobody asks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from zero_trial.errors import ConfigError, TrialError
from zero_trial.runtime.open import error_text, print_error, rank_of_task, write_error_file
from zero_trial.runtime.rank import RankState


def test_torch_reports_the_words(tmp_path: Path):
    place = tmp_path / "error.json"
    write_error_file("ValueError: boom\nmore", printed=True, path=str(place), now=1_700_000_000.9)
    failure = ProcessFailure(1, 42, 2, str(place))
    report = ChildFailedError("run", {1: failure}).format_msg()
    assert "traceback : ValueError: boom\n  more" in report
    assert failure.timestamp == 1_700_000_000


def test_the_first_words_are_kept(tmp_path: Path):
    place = tmp_path / "error.json"
    for words in ("first", "second"):
        write_error_file(words, printed=True, path=str(place), now=1.0)
    assert json.loads(place.read_text())["message"]["message"] == "first"


def test_an_error_that_is_printed_is_left_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    print_error(ConfigError("bad", where="here", fix="Mend it."))
    left = json.loads((tmp_path / "error.json").read_text())["message"]
    assert (left["message"], left["printed"]) == ("here: bad. Mend it.", True)
    assert capsys.readouterr().err == "error   here: bad. Mend it.\n"


def test_a_script_s_own_error_is_left_for_the_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    with pytest.raises(KeyError), rank_of_task(RankState(), script=True):
        raise KeyError("no such thing")
    left = json.loads((tmp_path / "error.json").read_text())["message"]
    assert left["message"].startswith("KeyError: 'no such thing'") and not left["printed"]


def test_nowhere_and_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    write_error_file("nobody asks", printed=True)
    write_error_file("no such folder", printed=True, path=str(tmp_path / "gone" / "error.json"))
    assert list(tmp_path.iterdir()) == []


def test_words_of_an_error():
    assert error_text(ValueError("boom")) == "ValueError: boom"
    assert error_text(KeyboardInterrupt()) == "KeyboardInterrupt"


def raised_here(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def test_the_line_of_the_user_s_code_stands_beside_what_it_did():
    place = f"(test_error_file.py:{raised_here.__code__.co_firstlineno + 2} in raised_here: raise error)"
    assert error_text(raised_here(ValueError("boom"))) == f"ValueError: boom {place}"
    assert error_text(raised_here(TrialError("no step"))) == f"no step. {place}"
    assert error_text(raised_here(ConfigError("bad", where="ds_config.json:4"))) == "ds_config.json:4: bad."
