"""The translation experiment: T5's arithmetic, and a run from the words of a command line."""

from __future__ import annotations

import importlib.util
import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.model_defs.folder import ROOT, import_from
from zero_trial.errors import ConfigError, DataError

model_def = import_from("translation", "model_def")
PAD, T5, LibraryT5, build_model = model_def.PAD, model_def.T5, model_def.LibraryT5, model_def.build_model
mean, trimmed = model_def.mean, model_def.trimmed

SHAPE: dict[str, Any] = {"vocabulary": 50, "layers": 2, "heads": 4, "width": 32, "hidden": 48, "dropout": 0.0}


def sample(length: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    """Sources of several lengths, and the decoder's inputs."""
    torch.manual_seed(1)
    source, inputs = torch.randint(2, 50, (3, length)), torch.randint(2, 50, (3, length - 2))
    source[1, 4:], source[2, length - 3 :], inputs[:, 0] = PAD, PAD, PAD
    return source, inputs


@torch.no_grad()
def test_no_token_sees_what_comes_after_it() -> None:
    model, (source, inputs) = T5(**SHAPE), sample()
    other = inputs.clone()
    other[:, 6:] = 7
    first, second = (model(source, given)[0] for given in (inputs, other))
    assert torch.equal(first[:, :6], second[:, :6])
    assert not torch.equal(first[:, 6:], second[:, 6:])


@torch.no_grad()
def test_padding_changes_nothing_and_memory_stands_for_the_source() -> None:
    model, (source, inputs) = T5(**SHAPE), sample()
    scores, memory = model(source, inputs)
    alone, _ = model(trimmed(source[1:2]), inputs[1:2])
    assert trimmed(source[1:2]).shape == (1, 4)
    torch.testing.assert_close(scores[1:2], alone)
    torch.testing.assert_close(model(source, inputs, memory)[0], scores)


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is in the extra 'libraries'")
def test_it_is_the_t5_of_transformers() -> None:
    """All buckets of relative positions, scores and gradients."""
    with pytest.raises(ConfigError, match=r"hyperparameters\.model\.implementation"):
        build_model("t5", **SHAPE)
    own, (source, inputs) = T5(**SHAPE), sample(200)
    library = build_model("auto", **SHAPE)
    assert isinstance(library, LibraryT5)
    library = LibraryT5(own, **SHAPE)
    scores, _ = own(source, inputs)
    theirs, their_memory = library(source, inputs)
    torch.testing.assert_close(scores, theirs)
    torch.testing.assert_close(library(source, inputs, their_memory)[0], theirs)
    for found in (scores, theirs):
        found.square().mean().backward()
    named = dict(library.t5.named_parameters())
    assert set(named) == {name for name, _ in own.named_parameters()}
    for name, parameter in own.named_parameters():
        torch.testing.assert_close(parameter.grad, named[name].grad, msg=name)


WORDS = {"one": "un", "two": "deux", "three": "trois", "four": "quatre", "five": "cinq", "six": "six"}


@pytest.mark.smoke
def test_the_words_of_a_command_line_train_it(tmp_path: Path) -> None:
    """Two ranks at stage 3, where all of them take part in every forward pass of decoding."""
    lines = [" ".join(words) for words in ((a, b, c, d) for a in WORDS for b in WORDS for c in WORDS for d in WORDS)]
    (tmp_path / "x.en").write_text("\n".join(lines))
    (tmp_path / "x.fr").write_text("\n".join(" ".join(WORDS[word] for word in line.split()) for line in lines))
    steps, model = 60, "hyperparameters.model"
    command = [sys.executable, str(ROOT / "model_defs/translation/train.py"), "task=nlp/translation"]
    command += ["dataset=nlp/translation/wmt16", "trainer=deepspeed_offload", "zero_optimization.stage=3"]
    command += [f"data.source={tmp_path}", f"searcher.max_length.batches={steps}", "data.validation_pairs=32"]
    command += [f"min_validation_period.batches={steps}", "perform_initial_validation=true"]
    command += [f"scheduler.params.total_num_steps={steps}", "scheduler.params.warmup_num_steps=5"]
    command += ["optimizer.params.lr=0.01"]
    command += [f"{model}.vocabulary=280", f"{model}.layers=1", f"{model}.width=32", f"{model}.hidden=64"]
    command += [f"{model}.implementation=own", "hyperparameters.max_tokens=8", "--run-dir", str(tmp_path / "run")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["step"], summary["zero_stage"], summary["ranks"]) == (steps, 3, 2)
    assert (summary["data"]["source"], summary["most_frequent_bleu"]) == ("wmt16 en-fr", 0.0)
    first, last = summary["initial_validation"], summary["final_validation"]
    assert last["validation_loss"] < first["validation_loss"] - 3
    assert last["val_bits_per_token"] == pytest.approx(last["validation_loss"] / 0.6931471805599453)
    assert last["bleu"] >= summary["copy_bleu"] == 0


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


SPOKEN = [f"{a}{b}" for a in "abcdefghij" for b in "klmnopqrst"]


def test_catalogues_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    folder = tmp_path / "share" / "locale" / "qx" / "LC_MESSAGES"
    catalogue(folder / "a.mo", {f"open {word}": f"ouvrir {word}" for word in SPOKEN} | {"menu\x04Copy": "Copie"})
    (folder / "damaged.mo").write_bytes(b"\xde\x12\x04\x95" + b"\xff" * 40)
    pairs = translation.translation_pairs("gettext", languages=("en", "qx"))
    assert (pairs.name, pairs.source_count, pairs.instead_of) == ("gettext en-qx", 1, "")
    found = dict(pairs.train + pairs.val)
    assert found == {f"open {word}": f"ouvrir {word}" for word in SPOKEN} | {"Copy": "Copie"}
    assert 0 < len(pairs.val) < 0.15 * len(found)
    assert pairs == translation.translation_pairs("gettext", languages=("en", "qx"))
    wmt = translation.translation_pairs("wmt16", languages=("en", "qx"))
    assert (wmt.name, wmt.describe()["instead_of"], wmt.val) == ("gettext en-qx", "wmt16", pairs.val)


def parallel(folder: Path, source: list[str], target: list[str]) -> Path:
    for name, lines in (("x.en", source), ("x.fr", target)):
        (folder / name).write_text("\n".join(lines), encoding="utf-8")
    return folder


def test_the_sides_share_no_sentence_that_differs_in_case_digits_or_signs(tmp_path: Path) -> None:
    source = [form % word for word in SPOKEN for form in ("open %s", "Open: %s!", "open '%%s' %s 12")]
    pairs = translation.translation_pairs("wmt16", parallel(tmp_path, source, [line.upper() + "é" for line in source]))
    assert (pairs.name, pairs.instead_of) == ("wmt16 en-fr", "")
    sides = [{translation.key_of(line) for line, _ in side} for side in (pairs.train, pairs.val)]
    assert sides[0].isdisjoint(sides[1]) and len(sides[1]) > 2
    assert len(pairs.train) + len(pairs.val) == len(source)
    assert "instead_of" not in pairs.describe()
    fewer = translation.translation_pairs("wmt16", tmp_path, val_pairs=3)
    assert fewer.val == pairs.val[:3] and fewer.train == pairs.train
    assert fewer.describe()["sha256"] != pairs.describe()["sha256"]


def test_docstrings_where_there_are_no_catalogues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "a.py").write_text('def f():\n    """Do test."""\n')
    (tmp_path / "broken.py").write_text("def f(:\n")
    functions = [f'def f_{word}(a: int, *, b=None):\n    """Do {word}.\n\n    More."""\n' for word in SPOKEN]
    (tmp_path / "m.py").write_text("def bare(): ...\n" + "\n".join(functions))
    monkeypatch.setattr(translation.sysconfig, "get_path", lambda name: str(tmp_path))
    pairs = translation.translation_pairs("gettext", languages=("en", "no_such_language"))
    assert pairs.instead_of == "gettext en-no_such_language"
    assert dict(pairs.train + pairs.val) == {f"Do {word}.": f"def f_{word}(a, *, b=None):" for word in SPOKEN}
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


def test_merges_are_the_most_frequent_pairs() -> None:
    """(a, a) is as frequent as (a, b) and comes first; then (aa, b); " aab" is another word."""
    words = translation.Vocabulary(["aab aab", "aab aab"], 258 + 3)
    assert [piece.decode() for piece in words.pieces[258:]] == ["aa", "aab", " aab"]
    assert words.encode("aab aab b") == [259, 260, 2 + ord(" "), 2 + ord("b")]
    assert len(translation.Vocabulary(["ab"], 300)) == 258  # no pair is there twice
    with pytest.raises(DataError):
        translation.Vocabulary(["ab"], 257)
    pairs = translation.PairDataset([("abcd", ""), ("", "")], translation.Vocabulary([], 258), 3)  # too long: is cut
    assert [side.tolist() for side in pairs[0]] == [[2 + ord("a"), 2 + ord("b"), EOS], [EOS, PAD, PAD], 0]
    assert len(pairs) == 2


@pytest.mark.parametrize("text", ["", "hello", "L'été: « déjà »  %s\n", "漢字 \x00"])
def test_every_text_can_be_written(text: str) -> None:
    words = translation.Vocabulary(["hello hello", "été été"], 280)
    assert words.decode(words.encode(text)) == text
    row = translation.PairDataset([("", text)], words, 40)[0][1].tolist()
    assert len(row) == 40 and words.decode(row) == text
    assert row.index(EOS) == len(words.encode(text)) and set(row[row.index(EOS) + 1 :]) == {PAD}


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


def test_counts_and_baselines() -> None:
    """A word matches as often as the reference has it: in the example of Papineni et al., section
    2.1, the modified unigram precision is 2/7. A source has its most frequent translation."""
    counts = translation.bleu_counts("the the the the the the the", "the cat is on the mat")
    assert counts == (2, 0, 0, 0, 7, 6, 5, 4, 7, 6)
    pairs = [("open a b c d", "open a b c d"), ("x", "y")]
    assert translation.copy_bleu(pairs) == pytest.approx(100 * (5 / 6) ** 0.25)
    train = [("q", "open a b c d"), ("r", "open a b c d"), ("s", "other")]
    assert translation.most_frequent_bleu(train, pairs) == pytest.approx(100 * (5 / 10 * 4 / 8 * 3 / 6 * 2 / 4) ** 0.25)
    said = [("open", "b"), ("open", "a"), ("close", "d"), ("open", "a"), ("close", "c")]
    assert translation._distinct(said) == [("open", "a"), ("close", "c")]
