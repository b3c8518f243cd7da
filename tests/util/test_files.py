"""Files that appear whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from zero_trial.util.files import replacing, write_atomic


def test_the_content_is_replaced_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    write_atomic(path, "one")
    write_atomic(path, b"two", durable=False)
    assert path.read_text() == "two" and os.listdir(tmp_path) == ["state.json"]


def test_a_failure_leaves_the_old_content(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    write_atomic(path, "old")
    with pytest.raises(ZeroDivisionError), replacing(path) as draft:
        draft.write_text("half")
        raise ZeroDivisionError
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["state.json"]


def test_modes(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_atomic(tmp_path / "open", "x")
        write_atomic(tmp_path / "secret", "x", private=True)
    finally:
        os.umask(before)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("open", "secret")] == [0o640, 0o600]
