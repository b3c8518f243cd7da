"""Text corpora from local files, windows of their bytes, and baselines that a loss has to beat."""

from __future__ import annotations

import hashlib
import lzma
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils.data import Dataset

from zero_trial.errors import DataError


class ByteDataset(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Windows of ``sequence`` bytes and the bytes that follow each of them: item i is ``(inputs,
    targets)``, both (sequence,) int64.

    ``text`` is 1-D uint8. Windows do not overlap in the bytes that they predict: window i starts at
    i * sequence. With ``windows`` given, that many windows are spread evenly over the whole text
    instead (a validation set of bounded cost that is not a prefix). An item depends on its index
    only, so shuffling, sharding and resuming are left to the sampler.
    """

    def __init__(self, text: torch.Tensor, sequence: int, windows: int | None = None) -> None:
        fitting = (text.numel() - 1) // sequence if text.numel() else 0
        if fitting < 1:
            raise DataError(
                "the text is shorter than one window",
                where="ByteDataset",
                got=f"{text.numel()} bytes",
                expected=f"at least {sequence + 1} (sequence + 1)",
                fix="Use more text or a shorter sequence.",
            )
        self.text = text
        self.sequence = sequence
        self.windows = fitting if windows is None else min(windows, fitting)
        self._fitting = fitting

    def __len__(self) -> int:
        return self.windows

    def start(self, index: int) -> int:
        """Return where window ``index`` begins in the text."""
        if not 0 <= index < self.windows:
            raise IndexError(f"window {index} of {self.windows}")
        return (index * self._fitting // self.windows) * self.sequence

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = self.start(index)
        window = self.text[start : start + self.sequence + 1].long()
        return window[:-1], window[1:]

    def predicted_bytes(self) -> torch.Tensor:
        """Return all bytes that the windows predict, (windows * sequence,) uint8."""
        starts = (self.start(index) + 1 for index in range(self.windows))
        return torch.cat([self.text[start : start + self.sequence] for start in starts])


_BYTE_VALUES = 256


def unigram_bits_per_byte(train: torch.Tensor, val: torch.Tensor) -> float:
    """Return the cross entropy of ``val`` under the byte frequencies of ``train``, in bits per
    byte.

    Both are 1-D uint8. Add-one (Laplace) smoothing: p(b) = (count(b) + 1) / (len(train) + 256), so
    a byte that training never showed costs a finite number of bits.
    """
    _not_empty(val)
    counts = torch.bincount(train.long(), minlength=_BYTE_VALUES).double() + 1.0
    bits = -torch.log2(counts / counts.sum())
    return float(bits[val.long()].mean())


def xz_bits_per_byte(val: torch.Tensor, max_bytes: int = 4_000_000) -> float:
    """Return the size of ``val`` (1-D uint8, its first ``max_bytes``) as one xz stream at preset 6,
    in bits per input byte.

    xz sees the validation text alone and learns while it reads; the model has seen other files
    before. It is a yardstick, not a like-for-like comparison.
    """
    _not_empty(val)
    sample = val[:max_bytes].numpy().tobytes() if max_bytes < val.numel() else val.numpy().tobytes()
    return 8.0 * len(lzma.compress(sample, preset=6)) / len(sample)


def _not_empty(val: torch.Tensor) -> None:
    if val.numel() == 0:
        raise DataError("there is no validation text to measure a baseline on", where="baseline", got="0 bytes")


# Tests differ between distributions (Debian leaves them out), and the rest is installed or built
# here: none of it is the library's own text.
_STDLIB_SKIPPED_FOLDERS = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages"})

_STDLIB_SKIPPED_PREFIXES = ("_sysconfigdata", "config-")

_TEXT_PROBE_BYTES = 8192  # a file with a zero byte in its first 8 KiB counts as binary


@dataclass(frozen=True)
class Fingerprint:
    """Identifies the text: counts of files and bytes, and a sha256 over the files' sorted sums."""

    files: int
    bytes: int
    sha256: str

    def __str__(self) -> str:
        return f"{self.files} files, {self.bytes} bytes, sha256 {self.sha256[:16]}"


@dataclass(frozen=True)
class Corpus:
    """``train`` and ``val``: 1-D uint8 tensors, the files of each side end to end. No file is on
    both sides, unless there is only one file, whose end is ``val``.

    Figures such as bits per byte compare only between corpora with the same fingerprint.
    """

    source: str
    split: str  # "by file", or "by position" if there is only one file
    train: torch.Tensor
    val: torch.Tensor
    fingerprint: Fingerprint

    def describe(self) -> dict[str, object]:
        """Return JSON-able facts for a summary, without paths."""
        return {
            "source": self.source,
            "split": self.split,
            "files": self.fingerprint.files,
            "bytes": self.fingerprint.bytes,
            "sha256": self.fingerprint.sha256,
            "train_bytes": self.train.numel(),
            "val_bytes": self.val.numel(),
        }


@dataclass(frozen=True)
class _TextFile:
    content: bytes
    digest: str


def local_corpus(
    source: str | Path = "stdlib",
    *,
    suffixes: Sequence[str] | None = None,
    max_bytes: int | None = None,
    val_share: float = 0.1,
) -> Corpus:
    """Read ``source``: ``"stdlib"`` (Python's own library, without its tests), a folder, or one
    file.

    Files are read in sorted order and exact duplicates dropped. A file belongs to validation if its
    sha256 falls in the first ``val_share`` of all hashes, so the split needs no random state
    and does not move when files are added. A single file is cut by position: its last
    ``val_share`` is validation. ``suffixes`` defaults to ``.py`` for the standard library and
    otherwise to every file that is not binary; hidden files and folders are not read. ``max_bytes``
    keeps whole files, chosen by hash (an even sample, not the first letters of the alphabet), up to
    that many bytes. Raises DataError if there is nothing to read.
    """
    if not 0.0 < val_share < 1.0:
        raise DataError("the validation share must be between 0 and 1", where="local_corpus(val_share)", got=val_share)
    _check(source, max_bytes)
    files = _limit(_distinct(_read_all(source, suffixes)), max_bytes)
    if not files:
        kinds = ", ".join(suffixes) if suffixes else "any kind of text"
        limit = "" if max_bytes is None else f" of at most {max_bytes} bytes (max_bytes)"
        raise DataError(
            "no text to train on", where=f"data source {str(source)!r}", expected=f"files of {kinds}{limit}"
        )
    train, val, split = _split(files, val_share)
    digests = hashlib.sha256("".join(sorted(file.digest for file in files)).encode())
    total = sum(len(file.content) for file in files)
    name = "stdlib" if source == "stdlib" else Path(source).name
    return Corpus(name, split, _tensor(train), _tensor(val), Fingerprint(len(files), total, digests.hexdigest()))


def _check(source: object, max_bytes: object) -> None:
    """Raise DataError for values that are not a text source or a size."""
    if not isinstance(source, (str, Path)) or not str(source):
        raise DataError("no text source", where="local_corpus(source)", got=repr(source), expected="a path or stdlib")
    if max_bytes is not None and (not isinstance(max_bytes, int) or isinstance(max_bytes, bool) or max_bytes < 2):
        expected = "a whole number of at least 2"
        raise DataError(
            "cannot limit the text", where="local_corpus(max_bytes)", got=repr(max_bytes), expected=expected
        )


def _read_all(source: str | Path, suffixes: Sequence[str] | None) -> Iterator[_TextFile]:
    for path in _paths(source, suffixes):
        try:
            content = path.read_bytes()
        except OSError as error:
            raise DataError(f"cannot be read ({error.strerror})", where=str(path)) from error
        if content and (suffixes or b"\0" not in content[:_TEXT_PROBE_BYTES]):
            yield _text_file(content)


def _text_file(content: bytes) -> _TextFile:
    return _TextFile(content, hashlib.sha256(content).hexdigest())


def _paths(source: str | Path, suffixes: Sequence[str] | None) -> list[Path]:
    if source == "stdlib":
        return _walk(Path(sysconfig.get_path("stdlib")), suffixes or (".py",), stdlib=True)
    path = Path(source).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        return _walk(path, suffixes, stdlib=False)
    raise DataError(
        "no such file or folder", where=f"data source {str(source)!r}", fix='Pass a text file, a folder, or "stdlib".'
    )


def _walk(root: Path, suffixes: Sequence[str] | None, *, stdlib: bool) -> list[Path]:
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if not _skipped(name, stdlib)]
        found += [Path(folder, name) for name in names if not _skipped(name, stdlib)]
    wanted = [path for path in found if (suffixes is None or path.suffix in suffixes) and path.is_file()]
    return sorted(wanted, key=lambda path: path.relative_to(root).as_posix())


def _skipped(name: str, stdlib: bool) -> bool:
    if name.startswith(".") or name == "__pycache__":
        return True
    return stdlib and (name in _STDLIB_SKIPPED_FOLDERS or name.startswith(_STDLIB_SKIPPED_PREFIXES))


def _distinct(files: Iterator[_TextFile]) -> list[_TextFile]:
    seen: dict[str, _TextFile] = {}
    for file in files:
        seen.setdefault(file.digest, file)
    return list(seen.values())


def _limit(files: list[_TextFile], max_bytes: int | None) -> list[_TextFile]:
    if max_bytes is None or len(files) == 1:
        return [_text_file(file.content[:max_bytes]) for file in files]
    kept, total = set(), 0
    for file in sorted(files, key=lambda file: file.digest):
        if total + len(file.content) <= max_bytes:
            kept.add(file.digest)
            total += len(file.content)
    return [file for file in files if file.digest in kept]


def _split(files: list[_TextFile], val_share: float) -> tuple[list[bytes], list[bytes], str]:
    if len(files) == 1:
        content = files[0].content
        cut = len(content) - max(1, int(len(content) * val_share))
        return [content[:cut]], [content[cut:]], "by position"
    bound = int(val_share * 16**8)
    chosen = {file.digest for file in files if int(file.digest[:8], 16) < bound}
    if not chosen or len(chosen) == len(
        files
    ):  # few files: the smallest hash still gives validation exactly one of them
        chosen = {min(file.digest for file in files)}
    train = [file.content for file in files if file.digest not in chosen]
    return train, [file.content for file in files if file.digest in chosen], "by file"


def _tensor(parts: list[bytes]) -> torch.Tensor:
    joined = bytearray().join(parts)
    return torch.frombuffer(joined, dtype=torch.uint8) if joined else torch.empty(0, dtype=torch.uint8)
