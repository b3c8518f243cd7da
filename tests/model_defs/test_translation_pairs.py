"""Sentence pairs: what is read, which side of the split, the vocabulary, and BLEU by hand."""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import pytest

from tests.model_defs.folder import import_from
from zero_trial.errors import DataError

translation = import_from("translation", "pairs")
EOS, PAD = translation.EOS, translation.PAD


def catalogue(path: Path, messages: dict[str, str]) -> None:
    """Write a compiled catalogue: header, tables of (length, place), texts that end with NUL."""
    keys = sorted(["", *messages])
    texts = [key.encode() for key in keys]
    texts += [messages.get(key, "Content-Type: text/plain; charset=UTF-8\n").encode() for key in keys]
    place, table = 28 + 8 * len(texts), b""
    for text in texts:
        table += struct.pack("<2I", len(text), place)
        place += len(text) + 1
    head = struct.pack("<7I", 0x950412DE, 0, len(keys), 28, 28 + 8 * len(keys), 0, 0)
    path.parent.mkdir(parents=True)
    path.write_bytes(head + table + b"".join(text + b"\0" for text in texts))


WORDS = [f"{a}{b}" for a in "abcdefghij" for b in "klmnopqrst"]


def test_catalogues_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    folder = tmp_path / "share" / "locale" / "qx" / "LC_MESSAGES"
    catalogue(folder / "a.mo", {f"open {word}": f"ouvrir {word}" for word in WORDS} | {"menu\x04Copy": "Copie"})
    (folder / "damaged.mo").write_bytes(b"\xde\x12\x04\x95" + b"\xff" * 40)
    pairs = translation.translation_pairs("gettext", languages=("en", "qx"))
    assert (pairs.name, pairs.source_count, pairs.instead_of) == ("gettext en-qx", 1, "")
    found = dict(pairs.train + pairs.val)
    assert found == {f"open {word}": f"ouvrir {word}" for word in WORDS} | {"Copy": "Copie"}
    assert 0 < len(pairs.val) < 0.15 * len(found)
    assert pairs == translation.translation_pairs("gettext", languages=("en", "qx"))
    wmt = translation.translation_pairs("wmt16", languages=("en", "qx"))
    assert (wmt.name, wmt.describe()["instead_of"], wmt.val) == ("gettext en-qx", "wmt16", pairs.val)


def parallel(folder: Path, source: list[str], target: list[str]) -> Path:
    for name, lines in (("x.en", source), ("x.fr", target)):
        (folder / name).write_text("\n".join(lines), encoding="utf-8")
    return folder


def test_the_sides_share_no_sentence_that_differs_in_case_digits_or_signs(tmp_path: Path) -> None:
    source = [form % word for word in WORDS for form in ("open %s", "Open: %s!", "open '%%s' %s 12")]
    pairs = translation.translation_pairs("wmt16", parallel(tmp_path, source, [line.upper() + "é" for line in source]))
    assert (pairs.name, pairs.instead_of) == ("wmt16 en-fr", "")
    sides = [{translation.key_of(line) for line, _ in side} for side in (pairs.train, pairs.val)]
    assert sides[0].isdisjoint(sides[1]) and len(sides[1]) > 2
    assert len(pairs.train) + len(pairs.val) == len(source)
    assert "instead_of" not in pairs.describe()
    fewer = translation.translation_pairs("wmt16", tmp_path, val_pairs=3)
    assert fewer.val == pairs.val[:3] and fewer.train == pairs.train
    assert fewer.describe()["sha256"] != pairs.describe()["sha256"]


@pytest.mark.parametrize(
    ("pair", "kept"),
    [
        (("two  words", " deux mots "), ("two words", "deux mots")),
        (("the  same", "the same"), None),  # untranslated
        (("%d: %s", "%d : %s"), None),  # no words
        (("two\nlines", "deux lignes"), None),
        (("x" * 61, "long"), None),
        (("long", "y" * 61), None),
    ],
)
def test_which_pairs_are_kept(pair: tuple[str, str], kept: tuple[str, str] | None) -> None:
    assert translation._distinct([pair]) == ([kept] if kept else [])


def test_a_source_has_its_most_frequent_translation() -> None:
    pairs = [("open", "b"), ("open", "a"), ("close", "d"), ("open", "a"), ("close", "c")]
    assert translation._distinct(pairs) == [("open", "a"), ("close", "c")]


def test_docstrings_where_there_are_no_catalogues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "a.py").write_text('def f():\n    """Do test."""\n')
    (tmp_path / "broken.py").write_text("def f(:\n")
    functions = [f'def f_{word}(a: int, *, b=None):\n    """Do {word}.\n\n    More."""\n' for word in WORDS]
    (tmp_path / "m.py").write_text("def bare(): ...\n" + "\n".join(functions))
    monkeypatch.setattr(translation.sysconfig, "get_path", lambda name: str(tmp_path))
    pairs = translation.translation_pairs("gettext", languages=("en", "no_such_language"))
    assert pairs.instead_of == "gettext en-no_such_language"
    assert dict(pairs.train + pairs.val) == {f"Do {word}.": f"def f_{word}(a, *, b=None):" for word in WORDS}
    assert translation.translation_pairs("docstrings").val == pairs.val


def test_what_cannot_be_read(tmp_path: Path) -> None:
    for where, call in (
        ("data.dataset", lambda: translation.translation_pairs("wmt")),
        ("data.languages", lambda: translation.translation_pairs(languages=("en",))),
        ("data.source", lambda: translation.translation_pairs(source=tmp_path)),
        ("data.source", lambda: translation.translation_pairs(source=parallel(tmp_path, ["a", "b"], ["c"]))),
        ("data.source", lambda: translation.translation_pairs(source=parallel(tmp_path, ["a"], ["c"]))),
    ):
        with pytest.raises(DataError) as caught:
            call()
        assert str(caught.value.where).startswith(where)


@pytest.mark.parametrize(("text", "key"), [("Can't open %s!", "can t open"), ("%-5.2f {name} É1", "é"), ("%% 12", "")])
def test_the_key_of_a_sentence(text: str, key: str) -> None:
    assert translation.key_of(text) == key


def test_merges_are_the_most_frequent_pairs() -> None:
    """(a, a) is as frequent as (a, b) and comes first; then (aa, b); " aab" is another word."""
    words = translation.Vocabulary(["aab aab", "aab aab"], 258 + 3)
    assert [piece.decode() for piece in words.pieces[258:]] == ["aa", "aab", " aab"]
    assert words.encode("aab aab b") == [259, 260, 2 + ord(" "), 2 + ord("b")]
    assert len(translation.Vocabulary(["ab"], 300)) == 258  # no pair is there twice
    with pytest.raises(DataError):
        translation.Vocabulary(["ab"], 257)


@pytest.mark.parametrize("text", ["", "hello", "L'été: « déjà »  %s\n", "漢字 \x00"])
def test_every_text_can_be_written(text: str) -> None:
    words = translation.Vocabulary(["hello hello", "été été"], 280)
    assert words.decode(words.encode(text)) == text
    row = translation.PairDataset([("", text)], words, 40)[0][1].tolist()
    assert len(row) == 40 and words.decode(row) == text
    assert row.index(EOS) == len(words.encode(text)) and set(row[row.index(EOS) + 1 :]) == {PAD}


def test_what_is_too_long_is_cut() -> None:
    pairs = translation.PairDataset([("abcd", ""), ("", "")], translation.Vocabulary([], 258), 3)
    assert [side.tolist() for side in pairs[0]] == [
        [2 + ord("a"), 2 + ord("b"), EOS],
        [EOS, PAD, PAD],
        0,
    ]
    assert len(pairs) == 2


CAT = "the cat sat on the mat"


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        ([(CAT, CAT)], 100.0),
        ([("the cat sat on a mat", CAT)], 100 * (5 / 6 * 3 / 5 * 2 / 4 * 1 / 3) ** 0.25),
        ([("the cat sat on", CAT)], 100 * 2.718281828459045 ** (1 - 6 / 4)),  # the brevity penalty
        ([(CAT + " now", CAT)], 100 * (6 / 7 * 5 / 6 * 4 / 5 * 3 / 4) ** 0.25),
        ([("The Cat Sat On The Mat", CAT)], 0.0),
        ([("", CAT)], 0.0),
        ([], 0.0),
        # of the corpus, not a mean over sentences
        ([(CAT, CAT), ("a dog", "a cat")], 100 * (7 / 8 * 5 / 6 * 4 / 4 * 3 / 3) ** 0.25),
        ([("open(x)", "open(x)")], 100.0),  # signs are words
    ],
)
def test_bleu(pairs: list[tuple[str, str]], expected: float) -> None:
    assert translation.bleu(translation.bleu_counts(mine, true) for mine, true in pairs) == pytest.approx(
        expected, rel=1e-12
    )


def test_a_word_matches_as_often_as_the_reference_has_it() -> None:
    """The example of Papineni et al., section 2.1: the modified unigram precision is 2/7."""
    counts = translation.bleu_counts("the the the the the the the", "the cat is on the mat")
    assert counts == (2, 0, 0, 0, 7, 6, 5, 4, 7, 6)


def test_the_baselines() -> None:
    pairs = [("open a b c d", "open a b c d"), ("x", "y")]
    assert translation.copy_bleu(pairs) == pytest.approx(100 * (5 / 6) ** 0.25)
    train = [("q", "open a b c d"), ("r", "open a b c d"), ("s", "other")]
    assert translation.most_frequent_bleu(train, pairs) == pytest.approx(100 * (5 / 10 * 4 / 8 * 3 / 6 * 2 / 4) ** 0.25)
