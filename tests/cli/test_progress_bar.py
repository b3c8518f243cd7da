"""A bar only where somebody watches."""

from __future__ import annotations

import io
import sys

import pytest

from zero_trial.cli import output


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""


@pytest.mark.parametrize(
    ("watched", "quiet", "drawn"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_it_is_drawn_on_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, watched: bool, quiet: bool, drawn: bool
) -> None:
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(output, "is_terminal", lambda _: watched)
    bar = output.bytes_bar("verify", 100, quiet=quiet)
    bar.update(50)
    bar.refresh()
    bar.close()
    assert ("verify  50" in stream.getvalue()) is drawn
