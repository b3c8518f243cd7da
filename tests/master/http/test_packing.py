"""A directory as a .tar.gz, made while it is sent."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from zero_trial.master.http import response
from zero_trial.master.http.response import pack


def test_files_come_out_as_they_went_in(tmp_path: Path) -> None:
    contents = {"a.txt": b"", "b/c.bin": bytes(512), "b/d/e.bin": bytes(range(256)) * 3000, "ü.txt": b"x"}
    for name, content in contents.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    with tarfile.open(fileobj=io.BytesIO(b"".join(pack(tmp_path))), mode="r:gz") as archive:
        found = {member.name: archive.extractfile(member).read() for member in archive}  # type: ignore[union-attr]
    assert found == contents


def test_links_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    inside = tmp_path / "checkpoint"
    inside.mkdir()
    (inside / "link").symlink_to(tmp_path / "secret")
    (inside / "up").symlink_to(tmp_path)
    with tarfile.open(fileobj=io.BytesIO(b"".join(pack(inside))), mode="r:gz") as archive:
        assert archive.getnames() == []


def test_a_file_that_shrinks_breaks_the_archive_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(b"x" * 100_000)
    monkeypatch.setattr(response, "PIECE", 10)

    def shrink(pieces: Iterator[bytes]) -> Iterator[bytes]:
        for number, piece in enumerate(pieces):
            if number == 2:
                (tmp_path / "a").write_bytes(b"")
            yield piece

    with pytest.raises(OSError, match="became shorter"):
        list(shrink(response._blocks(tmp_path)))
