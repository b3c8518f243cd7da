"""Lines from either end of a file are the lines that it has, whatever the size of a block."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from zero_trial.master import logs


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    content=st.binary(max_size=60).map(lambda raw: raw.translate(bytes(10 if b < 90 else b for b in range(256)))),
    size=st.integers(1, 9),
)
def test_both_ends_see_the_same_lines(content: bytes, size: int, tmp_path: Path):
    path = tmp_path / "file"
    path.write_bytes(content)
    whole = content[: content.rfind(b"\n") + 1]
    expected, place = [], 0
    for line in whole.split(b"\n")[:-1]:
        expected.append((place, line + b"\n"))
        place += len(line) + 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logs, "BLOCK", size)
        assert list(logs.forward(path)) == expected
        assert list(logs.backward(path)) == expected[::-1]
        assert logs.end_of_lines(path) == len(whole)
        for start, _ in expected:
            assert list(logs.backward(path, start)) == [item for item in expected[::-1] if item[0] < start]
            assert list(logs.forward(path, start)) == [item for item in expected if item[0] >= start]


def test_what_never_ends_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Else a damaged file would be held in memory."""
    monkeypatch.setattr(logs, "BLOCK", 10)
    monkeypatch.setattr(logs, "LONGEST", 30)
    path = tmp_path / "file"
    path.write_bytes(b"a\n" + b"x" * 100 + b"\nb\n")
    for lines in (list(logs.forward(path)), list(logs.backward(path))[::-1]):
        texts = [line.strip() for _, line in lines]
        assert texts[0] == b"a" and texts[-1] == b"b"
        assert b"".join(texts[1:-1]) == b"x" * 100 and max(map(len, texts)) <= 40


def test_no_file(tmp_path: Path):
    assert list(logs.forward(tmp_path / "none")) == list(logs.backward(tmp_path / "none")) == []
    assert logs.end_of_lines(tmp_path / "none") == 0
