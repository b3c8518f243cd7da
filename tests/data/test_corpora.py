"""Text corpora, windows of bytes and baselines."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from zero_trial.data.corpora import ByteDataset, local_corpus, unigram_bits_per_byte, xz_bits_per_byte
from zero_trial.errors import DataError

TEXT = torch.arange(101, dtype=torch.uint8)


def test_windows_and_the_bytes_that_follow() -> None:
    """All windows predict every byte but the first once; fewer are spread over the whole text."""
    data = ByteDataset(TEXT, sequence=10)
    inputs, targets = data[3]
    assert inputs.tolist() == list(range(30, 40)) and targets.tolist() == list(range(31, 41))
    assert inputs.dtype == targets.dtype == torch.int64
    assert len(data) == 10
    assert data.predicted_bytes().tolist() == list(range(1, 101))
    assert torch.cat([data[i][1] for i in range(10)]).tolist() == data.predicted_bytes().tolist()
    fewer = ByteDataset(TEXT, sequence=10, windows=4)
    assert [fewer.start(i) for i in range(4)] == [0, 20, 50, 70]
    assert len(ByteDataset(TEXT, sequence=10, windows=99)) == 10
    assert len(list(ByteDataset(TEXT, sequence=50))) == 2
    with pytest.raises(IndexError):
        data[-1]
    for length in (0, 1, 10):
        with pytest.raises(DataError, match=rf"got {length} bytes, expected at least 11"):
            ByteDataset(TEXT[:length], sequence=10)


def test_baselines_by_hand() -> None:
    # p(7) = 4/260, p(9) = 2/260, anything else 1/260
    train = torch.tensor([7, 7, 7, 9], dtype=torch.uint8)
    val = torch.tensor([7, 9, 200], dtype=torch.uint8)
    expected = -(math.log2(4 / 260) + math.log2(2 / 260) + math.log2(1 / 260)) / 3
    assert unigram_bits_per_byte(train, val) == pytest.approx(expected, rel=1e-12)
    nothing = torch.empty(0, dtype=torch.uint8)
    assert unigram_bits_per_byte(nothing, torch.tensor([1, 2], dtype=torch.uint8)) == pytest.approx(8.0)
    noise = torch.randint(0, 256, (20_000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    assert xz_bits_per_byte(noise) > 8.0
    assert xz_bits_per_byte(noise[:100].repeat(200)) < 0.2
    # a container of some 60 bytes round 5 bytes
    assert xz_bits_per_byte(noise, max_bytes=5) == pytest.approx(8 * 64 / 5, rel=0.2)
    for measure in (lambda: unigram_bits_per_byte(nothing, nothing), lambda: xz_bits_per_byte(nothing)):
        with pytest.raises(DataError, match="no validation text"):
            measure()


def text_of(part: torch.Tensor) -> bytes:
    return part.numpy().tobytes()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(40):
        (tmp_path / f"file{number:02}.txt").write_text(f"<{number}>" * 10)
    return tmp_path


def test_a_folder_is_split_by_whole_files(folder: Path) -> None:
    corpus = local_corpus(folder, val_share=0.25)
    sides = [text_of(corpus.train), text_of(corpus.val)]
    for number in range(40):
        whole = (f"<{number}>" * 10).encode()
        assert sorted(side.count(whole) for side in sides) == [0, 1]
    assert corpus.split == "by file"
    assert corpus.fingerprint.files == 40
    assert corpus.fingerprint.bytes == len(sides[0]) + len(sides[1])
    assert 0 < len(sides[1]) < len(sides[0])


def test_what_changes_a_corpus(folder: Path) -> None:
    """A new file never moves another one; duplicates, binaries, empty and hidden files, and names
    do not count; one byte does."""
    first = local_corpus(folder)
    (folder / "zz.txt").write_text("a new file")
    assert text_of(local_corpus(folder).val).replace(b"a new file", b"") == text_of(first.val)
    (folder / "zz.txt").unlink()
    (folder / "copy.txt").write_text("<3>" * 10)
    (folder / "binary.bin").write_bytes(b"ab\0cd")
    (folder / "empty.txt").write_bytes(b"")
    (folder / ".hidden").write_text("secret")
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_text("hidden too")
    (folder / "file39.txt").rename(folder / "file39.md")
    assert local_corpus(folder).fingerprint == first.fingerprint
    (folder / "file39.md").write_text("<38>" * 9 + "<3X>")
    assert local_corpus(folder).fingerprint.sha256 != first.fingerprint.sha256


def test_suffixes_choose_files(folder: Path) -> None:
    (folder / "code.py").write_text("print(1)")
    (folder / "more.py").write_text("print(2)")
    corpus = local_corpus(folder, suffixes=(".py",))
    assert corpus.fingerprint.files == 2
    # two files: one on each side
    assert {text_of(corpus.train), text_of(corpus.val)} == {b"print(1)", b"print(2)"}


def test_one_file_is_cut_by_position(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_bytes(bytes(range(1, 101)))
    for source in (tmp_path, tmp_path / "book.txt"):
        corpus = local_corpus(source, val_share=0.2)
        assert (text_of(corpus.train), text_of(corpus.val)) == (bytes(range(1, 81)), bytes(range(81, 101)))
        assert corpus.split == "by position"


def test_max_bytes_keeps_whole_files_up_to_the_limit(folder: Path) -> None:
    corpus = local_corpus(folder, max_bytes=400)
    assert 300 < corpus.fingerprint.bytes <= 400
    kept = text_of(corpus.train) + text_of(corpus.val)
    assert any(f"<{number}>".encode() in kept for number in range(20, 40)), "not just the first files"
    assert corpus.fingerprint.sha256 == local_corpus(folder, max_bytes=400).fingerprint.sha256
    single = local_corpus(folder / "file01.txt", max_bytes=20)
    assert single.fingerprint.bytes == 20
    assert single.fingerprint.sha256 != local_corpus(folder / "file01.txt").fingerprint.sha256


def test_the_standard_library_is_always_there() -> None:
    corpus = local_corpus("stdlib", max_bytes=300_000)
    assert corpus.source == "stdlib"
    assert corpus.fingerprint.files > 5
    assert b"import " in text_of(corpus.train) + text_of(corpus.val)


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        *((source, {}, rf"{source}.*no such file or folder.*stdlib") for source in ("no/such/folder", "stdlub")),
        *((source, {}, "no text source") for source in (None, 3, "")),
        *(("stdlib", {"max_bytes": limit}, "cannot limit the text") for limit in ("1e6", 1.5, 0, True)),
        ("tests/ds_config/corpus", {"suffixes": (".py",)}, r"no text to train on.*\.py"),
        ("tests/ds_config/corpus", {"val_share": 1.0}, "between 0 and 1"),
    ],
)
def test_what_is_no_corpus(source: Any, options: dict[str, Any], message: str) -> None:
    if source == "tests/ds_config/corpus":
        source = str(Path(__file__).parents[2] / source)
    with pytest.raises(DataError, match=message):
        local_corpus(source, **options)
