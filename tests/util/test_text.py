"""What is printed on a terminal holds no control characters."""

from __future__ import annotations

import pytest

from zero_trial.util.text import strip_control


@pytest.mark.parametrize(
    ("raw", "plain"),
    [
        ("loss 2.1\n\tnext line", "loss 2.1\n\tnext line"),
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b]0;owned\x07title", "title"),
        ("\x1b]52;c;ZWNobw==\x1b\\clipboard", "clipboard"),
        ("\x1b]0;never ends\nnext line", "\nnext line"),
        ("\x9b2Jcleared \x9d0;x\x9cdone", "cleared done"),
        ("\x1bPdevice\x1b\\ string", " string"),
        ("\x1bcreset", "reset"),
        ("over\rwritten \x08\x00\x7f", "overwritten "),
        ("ends in \x1b", "ends in "),
        ("ends in \x1b[38;5", "ends in "),
        ("half \ud800 pair", "half ? pair"),
        ("Größe ≤ 3 · 日本", "Größe ≤ 3 · 日本"),
    ],
)
def test_escape_sequences_and_control_characters_are_removed(raw: str, plain: str):
    assert strip_control(raw) == plain
    assert strip_control(plain) == plain


def test_the_time_is_linear_in_the_length():
    assert strip_control("\x1b]" * 200_000 + "\x1b[" * 200_000 + "\nend") == "\nend"
