"""Pairs of sentences for translation from files of this machine, a vocabulary of byte pairs, and
BLEU."""

from __future__ import annotations

import ast
import gettext
import hashlib
import heapq
import math
import re
import struct
import sys
import sysconfig
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch.utils.data import Dataset

from zero_trial.errors import DataError

Pair = tuple[str, str]

DATASETS = ("gettext", "docstrings", "wmt16")
"""What ``translation_pairs`` reads without a folder."""

_VALIDATION_SHARE = 0.05  # of the keys
_LONGEST = 60  # characters of a sentence

_LETTERS, _PLACEHOLDER = re.compile(r"[^\W\d_]+"), re.compile(r"%[-\d.*]*l*[a-zA-Z]|\{\w*\}")

_NOT_THE_LIBRARY = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages"})


@dataclass(frozen=True)
class SentencePairs:
    """``train`` and ``val``: (source, target) each. The sides share no source sentence, also not
    one that differs in case, digits or punctuation only.

    Attributes:
        name: which pairs these are, such as ``gettext en-fr``.
        source_count: catalogues or files that were read.
        instead_of: the dataset that was asked for and is not on this machine; empty otherwise.
    """

    name: str
    train: tuple[Pair, ...]
    val: tuple[Pair, ...]
    source_count: int
    instead_of: str = ""

    def describe(self) -> dict[str, object]:
        """Return JSON-able facts for a summary, without paths. Figures compare only at the same
        sum."""
        digest = hashlib.sha256("\n".join("\t".join(pair) for pair in (*self.train, *self.val)).encode())
        facts = {"source": self.name, "split": "by hash of the source sentence", "files": self.source_count}
        facts |= {"train_pairs": len(self.train), "val_pairs": len(self.val), "sha256": digest.hexdigest()}
        return facts | ({"instead_of": self.instead_of} if self.instead_of else {})


def translation_pairs(
    dataset: str = "gettext",
    source: str | Path | None = None,
    *,
    languages: Sequence[str] = ("en", "fr"),
    val_pairs: int | None = None,
) -> SentencePairs:
    """Read sentence pairs and split them by a hash of the source sentence, without random state.

    Args:
        dataset: ``gettext``: the message catalogues of this machine's programs, from English into
            ``languages[1]``; where there are none, ``docstrings``: the first line of a docstring ->
            the ``def`` line of its function, from Python's standard library. ``wmt16`` means the
            files of WMT 2016 in ``source``; without them gettext's pairs stand in, and
            ``instead_of`` says so.
        source: a folder of parallel text: ``NAME.en`` and ``NAME.fr``, in which line i is the
            translation of line i. It replaces what is on the machine.
        val_pairs: how many pairs validation keeps, those with the lowest hashes (default: all).

    Raises DataError where there is nothing to read.
    """
    where = "data.dataset"
    if dataset not in DATASETS:
        raise DataError("the dataset does not exist", where=where, got=repr(dataset), expected=", ".join(DATASETS))
    if len(languages) != 2 or not all(isinstance(name, str) and name for name in languages):
        raise DataError("two languages are required", where="data.languages", got=languages, expected="[en, fr]")
    start, goal = languages
    instead_of = ""
    if source is not None:
        name, files = f"{dataset if dataset == 'wmt16' else 'files'} {start}-{goal}", _parallel_files(source, languages)
    elif dataset == "docstrings":
        name, files = "docstrings of the standard library", _docstrings()
    else:
        name, files = f"gettext {start}-{goal}", _catalogues(goal) if start == "en" else []
        instead_of = dataset if dataset == "wmt16" else ""
        if not files:
            instead_of = instead_of or name
            name, files = "docstrings of the standard library", _docstrings()
    kept = _distinct(pair for file in files for pair in file)
    ordered = sorted((_hash(pair[0]), pair) for pair in kept)
    edge = int(_VALIDATION_SHARE * 2**64)
    val = [pair for number, pair in ordered if number < edge]
    train = [pair for number, pair in ordered if number >= edge]
    if not val or not train:
        raise DataError(
            "too few sentence pairs",
            where=where if source is None else f"data.source {Path(source).name!r}",
            got=f"{len(ordered)} pairs of at most {_LONGEST} characters",
            expected="some hundreds",
        )
    return SentencePairs(name, tuple(train), tuple(val[:val_pairs]), len(files), instead_of)


def key_of(sentence: str) -> str:
    """Return what decides a sentence's side of the split: its words in lower case, without digits,
    placeholders and punctuation."""
    return " ".join(_LETTERS.findall(_PLACEHOLDER.sub(" ", sentence).casefold()))


def _hash(sentence: str) -> int:
    return int.from_bytes(hashlib.sha256(key_of(sentence).encode()).digest()[:8], "big")


def _distinct(pairs: Iterable[Pair]) -> list[Pair]:
    """Return one pair per source sentence, with its most frequent translation. Sentences without
    words, longer than _LONGEST, of several lines or left untranslated are dropped."""
    found: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for pair in pairs:
        source, target = (side.strip() for side in pair)
        if any(sign in side for side in (source, target) for sign in "\n\t\r"):
            continue
        source, target = (" ".join(filter(None, side.split(" "))) for side in (source, target))
        if source == target or max(len(source), len(target)) > _LONGEST:
            continue
        if not (key_of(source) and key_of(target)):
            continue
        found[source][target] += 1
    return [(source, min(targets, key=lambda text: (-targets[text], text))) for source, targets in found.items()]


def _catalogues(language: str) -> list[list[Pair]]:
    """Return the messages of each compiled catalogue of ``language``: of the system's programs and
    of Python packages."""
    inner = f"{language}/LC_MESSAGES/*.mo"
    roots = {Path("/usr/share/locale"), Path("/usr/local/share/locale"), Path(sys.prefix, "share", "locale")}
    paths = [path for root in sorted(roots) for path in sorted(root.glob(inner))]
    for folder in sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}):
        for pattern in ("*/locale*", "*/*/locale*", "*/*/*/locale*"):
            paths += sorted(Path(folder).glob(f"{pattern}/{inner}"))
    return [pairs for path in dict.fromkeys(paths) if (pairs := _catalogue(path))]


def _catalogue(path: Path) -> list[Pair]:
    """Return the messages of one catalogue without plural forms and contexts; none of a damaged or
    foreign file."""
    try:
        with path.open("rb") as file:
            messages: Mapping[object, str] = vars(gettext.GNUTranslations(file))["_catalog"]
    except (OSError, UnicodeDecodeError, ValueError, LookupError, struct.error):
        return []
    # a context comes before the message, with this character between
    return [
        (key.rpartition("\x04")[2], text) for key, text in messages.items() if isinstance(key, str) and key and text
    ]


def _docstrings() -> list[list[Pair]]:
    """Return (first line of the docstring, ``def`` line without annotations) of the functions of
    each file of the standard library."""
    root = Path(sysconfig.get_path("stdlib"))
    files = []
    for path in sorted(root.rglob("*.py")):
        if _NOT_THE_LIBRARY.intersection(path.relative_to(root).parts):
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (OSError, SyntaxError, ValueError):  # lib2to3 ships files that are not of this Python
            continue
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        if pairs := [
            (text.partition("\n")[0], _signature(node)) for node in functions if (text := ast.get_docstring(node))
        ]:
            files.append(pairs)
    return files


def _signature(function: ast.FunctionDef) -> str:
    for node in ast.walk(function.args):
        if isinstance(node, ast.arg):
            node.annotation = None
    return f"def {function.name}({ast.unparse(function.args)}):"


def _parallel_files(source: str | Path, languages: Sequence[str]) -> list[list[Pair]]:
    folder = Path(source).expanduser()
    start, goal = languages
    files = []
    for path in sorted(folder.glob(f"*.{start}")):
        other = path.with_suffix(f".{goal}")
        if not other.is_file():
            continue
        texts = [file.read_text(encoding="utf-8").splitlines() for file in (path, other)]
        if len(texts[0]) != len(texts[1]):
            raise DataError(
                "parallel files must have the same number of lines",
                where=f"data.source {folder.name!r}",
                got=f"{path.name} with {len(texts[0])} lines, {other.name} with {len(texts[1])}",
            )
        files.append(list(zip(*texts, strict=True)))
    if not files:
        raise DataError(
            "no parallel text",
            where=f"data.source {str(source)!r}",
            expected=f"files NAME.{start} and NAME.{goal}, line by line",
        )
    return files


PAD, EOS = 0, 1
_FIRST_BYTE = 2
_WORD = re.compile(r" ?\w+| ?[^\w\s]+|\s+")


class Vocabulary:
    """Byte pair encoding (Sennrich et al. 2016, algorithm 1) over bytes: every text can be written.

    Tokens 0 and 1 are PAD (also what a decoder begins with) and EOS, then come the 256 bytes and
    the merges, most frequent pair first; ties are broken by the smaller pair of tokens. A merge
    never crosses a word, which holds the space before it.
    """

    def __init__(self, texts: Iterable[str], size: int) -> None:
        if size < _FIRST_BYTE + 256:
            raise DataError("the vocabulary is too small", where="Vocabulary(size)", got=size, expected="at least 258")
        self.pieces = [b"", b"", *(bytes([value]) for value in range(256))]
        self._merges: dict[tuple[int, int], int] = {}
        self._known: dict[str, list[int]] = {}
        words = Counter(word for text in texts for word in _WORD.findall(text))
        spelled = [([_FIRST_BYTE + value for value in word.encode()], count) for word, count in sorted(words.items())]
        self._learn(spelled, size)

    def __len__(self) -> int:
        return len(self.pieces)

    def _learn(self, words: list[tuple[list[int], int]], size: int) -> None:
        """Merge the most frequent pair until there are ``size`` tokens or no pair is left twice."""
        counts: Counter[tuple[int, int]] = Counter()
        places: defaultdict[tuple[int, int], set[int]] = defaultdict(set)
        for index, (tokens, count) in enumerate(words):
            for pair in pairwise(tokens):
                counts[pair] += count
                places[pair].add(index)
        # every pair has an entry of at least its count
        queue = [(-count, pair) for pair, count in counts.items()]
        heapq.heapify(queue)
        while len(self.pieces) < size and queue:
            expected, best = heapq.heappop(queue)
            if counts[best] != -expected:
                heapq.heappush(queue, (-counts[best], best))
                continue
            if counts[best] < 2:
                break
            token = self._merges[best] = len(self.pieces)
            self.pieces.append(self.pieces[best[0]] + self.pieces[best[1]])
            grown: set[tuple[int, int]] = set()
            for index in places.pop(best):
                tokens, count = words[index]
                merged = _merged(tokens, best, token)
                words[index] = (merged, count)
                for pair in pairwise(tokens):
                    counts[pair] -= count
                for pair in pairwise(merged):
                    counts[pair] += count
                    if token in pair:
                        places[pair].add(index)
                        grown.add(pair)
            for pair in grown:
                heapq.heappush(queue, (-counts[pair], pair))

    def encode(self, text: str) -> list[int]:
        """Return the tokens of ``text``, without EOS."""
        return [token for word in _WORD.findall(text) for token in self._word(word)]

    def _word(self, word: str) -> list[int]:
        known = self._known.get(word)
        if known is None:
            known = [_FIRST_BYTE + value for value in word.encode()]
            while len(known) > 1:
                rank, pair = min((self._merges.get(pair, len(self)), pair) for pair in pairwise(known))
                if rank == len(self):
                    break
                known = _merged(known, pair, rank)
            self._known[word] = known
        return known

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text up to the first EOS; bytes that are no UTF-8 become U+FFFD."""
        found = b""
        for token in tokens:
            if token == EOS:
                break
            found += self.pieces[token]
        return found.decode(errors="replace")


class PairDataset(Dataset[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]):
    """Item i is the tokens of pair i's source and target, both (length,) int64: cut at ``length``,
    EOS, PAD after it; and i."""

    def __init__(self, pairs: Sequence[Pair], vocabulary: Vocabulary, length: int) -> None:
        self.pairs, self.vocabulary, self.length = pairs, vocabulary, length

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        source, target = self.pairs[index]
        return self._tokens(source), self._tokens(target), torch.tensor(index)

    def _tokens(self, text: str) -> torch.Tensor:
        tokens = [*self.vocabulary.encode(text)[: self.length - 1], EOS]
        return torch.tensor(tokens + [PAD] * (self.length - len(tokens)))


def _merged(tokens: list[int], pair: tuple[int, int], token: int) -> list[int]:
    found: list[int] = []
    for part in tokens:
        if found and (found[-1], part) == pair:
            found[-1] = token
        else:
            found.append(part)
    return found


_ORDERS = 4


def bleu_counts(hypothesis: str, reference: str) -> tuple[int, ...]:
    """Return ten counts that add up over sentences: matching n-grams of orders 1 to 4, n-grams of
    the hypothesis of orders 1 to 4, and both lengths, in words and punctuation marks."""
    mine, true = (re.findall(r"\w+|[^\w\s]", text) for text in (hypothesis, reference))
    grams = [
        [Counter(zip(*(words[i:] for i in range(n)), strict=False)) for n in range(1, _ORDERS + 1)]
        for words in (mine, true)
    ]
    matches = [(first & second).total() for first, second in zip(*grams, strict=True)]
    return (*matches, *(found.total() for found in grams[0]), len(mine), len(true))


def bleu(counts: Iterable[Sequence[float]]) -> float:
    """Return the corpus BLEU of Papineni et al. 2002 in percent, from each sentence's
    ``bleu_counts``, with one reference and no smoothing:

        100 BP exp(1/4 sum_n log p_n),  n = 1 to 4
        p_n  matching n-grams / n-grams of the hypotheses; a match counts as often as the n-gram
             is in its reference at most
        BP   min(1, exp(1 - reference length / hypothesis length)), the brevity penalty

    0 where an order has no match. Words are compared with their case.
    """
    total = [sum(column) for column in zip(*counts, strict=True)]
    if not total or min(total[:_ORDERS]) == 0:
        return 0.0
    precision = sum(math.log(total[n] / total[n + _ORDERS]) for n in range(_ORDERS)) / _ORDERS
    ours, theirs = total[-2:]
    return 100.0 * math.exp(min(0.0, 1.0 - theirs / ours) + precision)


def copy_bleu(pairs: Sequence[Pair]) -> float:
    """Return the BLEU of the source sentences themselves: the baseline of names, numbers and
    placeholders."""
    return bleu(bleu_counts(source, target) for source, target in pairs)


def most_frequent_bleu(train: Sequence[Pair], pairs: Sequence[Pair]) -> float:
    """Return the BLEU of the most frequent target of ``train``, given for every sentence."""
    frequent = Counter(target for _, target in train)
    answer = min(frequent, key=lambda text: (-frequent[text], text))
    return bleu(bleu_counts(answer, target) for _, target in pairs)
