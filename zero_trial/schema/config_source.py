"""Open a ds_config in any form (dict, file, url-safe base64 of JSON, JSON text) as a Document, and
read JSON.
"""

from __future__ import annotations

import base64
import binascii
import difflib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from zero_trial.errors import ConfigError
from zero_trial.schema.document import MOST_LEVELS, Document, Location, twice
from zero_trial.schema.document import Path as KeyPath
from zero_trial.schema.yaml_source import read_yaml

Source: TypeAlias = Document | Mapping[str, Any] | str | os.PathLike[str]


def open_source(source: Source, name: str | None = None) -> Document:
    """Return the Document of any of the forms; ``name`` stands in messages instead of the file's
    own name. Raises ConfigError.
    """
    if isinstance(source, Document):
        return source
    if isinstance(source, Mapping):
        return Document.of(source)
    if not isinstance(source, str | os.PathLike):
        raise ConfigError(
            "not a configuration",
            where="config",
            got=type(source).__name__,
            expected="a dict, a path, or base64 of JSON",
        )
    text = os.fspath(source).strip()
    if text.startswith("{"):
        return read_json(text, name or "config")
    if _is_file(text):
        return read_file(Path(text), name)
    decoded = _from_base64(text)
    if decoded is not None:
        return read_json(decoded, name or "base64")
    raise _no_such_file(text)


def read_file(path: Path, name: str | None = None) -> Document:
    """Return a JSON file, or a YAML one by its suffix."""
    text = read_text(path)
    reader = read_yaml if path.suffix in (".yaml", ".yml") else read_json
    return reader(text, name or path.name)


def read_text(path: Path) -> str:
    """Return the text of a configuration file; raises ConfigError, also where it is not UTF-8."""
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as problem:
        wide = problem.object.startswith((b"\xff\xfe", b"\xfe\xff"))
        found, code = ("UTF-16", "UTF-16") if wide else ("another encoding", "ITS_ENCODING")
        fix = f"Save it as UTF-8: iconv -f {code} -t UTF-8, or Set-Content -Encoding utf8 in PowerShell."
        raise ConfigError("cannot be read", where=str(path), got=found, expected="UTF-8", fix=fix) from None
    except (OSError, ValueError) as problem:
        raise ConfigError(f"cannot be read: {getattr(problem, 'strerror', None) or problem}", where=str(path)) from None


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except (OSError, ValueError):  # base64 text is longer than a file name may be
        return False


def _from_base64(text: str) -> str | None:
    """Return the JSON text behind url-safe base64, or None if it is not that."""
    try:
        decoded = base64.urlsafe_b64decode(text.encode("ascii")).decode("utf-8")
    except (binascii.Error, ValueError):
        return None
    return decoded if decoded.lstrip().startswith("{") else None


def _no_such_file(text: str) -> ConfigError:
    shown = text if len(text) <= 120 else f"{text[:117]}..."
    near: list[str] = []
    if len(text) <= 255 and "\0" not in text:
        folder = Path(text).parent
        names = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
        near = difflib.get_close_matches(Path(text).name, names, 1)
    fix = f'Did you mean "{near[0]}"?' if near else "Give a path to a JSON file, a dict, or url-safe base64 of JSON."
    return ConfigError("no such file", where=shown or '""', fix=fix)


# JSON as people write it: comments, trailing and missing commas, bare keys and words (the part of
# hjson that real ds_config files use). Every key keeps its line; a duplicate key in one object is a
# fault that names both lines.


_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?)")
_BARE_KEY = re.compile(r"[^\s,:\[\]{}\"'#/]+")
_WORDS = {
    "true": True,
    "false": False,
    "null": None,
    "Infinity": float("inf"),
    "-Infinity": float("-inf"),
    "NaN": float("nan"),
}
_ESCAPES = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", '"': '"', "'": "'", "\\": "\\", "/": "/"}


def read_json(text: str, file: str) -> Document:
    """Return the object in ``text``; raises ConfigError with file and line, for all duplicate keys
    together or for the first syntax error.
    """
    return _Parser(text, file).document()


class _Parser:
    """A cursor over the text; each method leaves it behind what it has read."""

    def __init__(self, text: str, file: str) -> None:
        self.text = text.removeprefix("\ufeff")
        self.file = file
        self.at = 0
        self.counted = 0
        self.lines = 1
        self.places: dict[KeyPath, Location] = {}
        self.faults: list[ConfigError] = []

    def document(self) -> Document:
        self.skip()
        if self.peek() != "{":
            raise self.fault("not a JSON object", expected='"{" at the start')
        value = self.object(())
        self.skip()
        if self.at < len(self.text):
            raise self.fault("text after the end of the object", got=self.rest())
        if self.faults:
            raise ConfigError.many(self.faults)
        return Document(value, self.places, Location(self.file))

    def object(self, path: KeyPath) -> dict[str, Any]:
        self.enter(path)
        found: dict[str, Any] = {}
        while True:
            self.separators()
            if self.peek() == "}":
                self.at += 1
                return found
            line = self.line()
            key = self.key()
            self.skip()
            if self.peek() != ":":
                raise self.fault(f'no value for the key "{key}"', got=self.rest(), expected='":"')
            self.at += 1
            inner = (*path, key)
            if key in found:
                self.faults.append(twice(self.file, inner, self.places[inner].line, line))
            else:
                self.places[inner] = Location(self.file, line)
            found[key] = self.value(inner)

    def array(self, path: KeyPath) -> list[Any]:
        self.enter(path)
        found: list[Any] = []
        while True:
            self.separators()
            if self.peek() == "]":
                self.at += 1
                return found
            found.append(self.value((*path, f"[{len(found)}]")))

    def value(self, path: KeyPath) -> Any:
        self.skip()
        start = self.peek()
        if start == "{":
            return self.object(path)
        if start == "[":
            return self.array(path)
        if start and start in "\"'":
            return self.string()
        if not start or start in ",:]}":
            raise self.fault(f"no value for {'.'.join(path)}", got=self.rest(), expected="a value")
        return self.bare()

    def bare(self) -> Any:
        """Return a number or word that ends at a comma, bracket, comment or line end; any other
        text is a string up to the end of its line.
        """
        line_end = self.text.find("\n", self.at)
        line_end = len(self.text) if line_end < 0 else line_end
        token = re.split(r"[,\]}#]|//|/\*", self.text[self.at : line_end], maxsplit=1)[0].strip()
        if token in _WORDS:
            self.at += len(token)
            return _WORDS[token]
        if _NUMBER.fullmatch(token):
            self.at += len(token)
            return float(token) if re.search(r"[.eE]", token) or len(token) > 400 else int(token)
        text = self.text[self.at : line_end].strip()
        self.at = line_end
        return text

    def key(self) -> str:
        start = self.peek()
        if start and start in "\"'":
            return self.string()
        match = _BARE_KEY.match(self.text, self.at)
        if not match:
            raise self.fault("a key is missing", got=self.rest(), expected='a key or "}"')
        self.at = match.end()
        return match.group()

    def string(self) -> str:
        quote = self.text[self.at]
        opened = self.line()
        self.at += 1
        parts: list[str] = []
        while True:
            char = self.text[self.at : self.at + 1]
            if char in ("", "\n"):
                raise self.fault("a string is not closed", line=opened, expected=quote)
            self.at += 1
            if char == quote:
                return _joined("".join(parts))
            parts.append(self.escape() if char == "\\" else char)

    def escape(self) -> str:
        code = self.text[self.at : self.at + 1]
        self.at += 1
        if code == "u":
            digits = self.text[self.at : self.at + 4]
            self.at += 4
            if re.fullmatch(r"[0-9a-fA-F]{4}", digits):
                return chr(int(digits, 16))
        if code not in _ESCAPES:
            raise self.fault("an unknown escape in a string", got=f"\\{code}")
        return _ESCAPES[code]

    def enter(self, path: KeyPath) -> None:
        if len(path) > MOST_LEVELS:
            raise self.fault("too deeply nested", expected=f"at most {MOST_LEVELS} levels")
        self.at += 1

    def separators(self) -> None:
        """Skip white space, comments and commas: a missing comma between lines and one after the
        last value are both fine.
        """
        self.skip()
        while self.peek() == ",":
            self.at += 1
            self.skip()
        if self.at >= len(self.text):
            raise self.fault("the text ends inside an object or a list", expected='"}" or "]"')

    def skip(self) -> None:
        while self.at < len(self.text):
            two = self.text[self.at : self.at + 2]
            if self.text[self.at].isspace():
                self.at += 1
            elif two == "//" or two[0] == "#":
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
            elif two == "/*":
                end = self.text.find("*/", self.at + 2)
                if end < 0:
                    raise self.fault("a comment is not closed", expected='"*/"')
                self.at = end + 2
            else:
                return

    def peek(self) -> str:
        return self.text[self.at : self.at + 1]

    def rest(self) -> str:
        return (
            repr(self.text[self.at : self.at + 20].split("\n")[0])
            if self.at < len(self.text)
            else "the end of the text"
        )

    def line(self) -> int:
        """Return the line of the cursor, counted on from the last time it was asked, so that a long
        file stays linear.
        """
        self.lines += self.text.count("\n", self.counted, self.at)
        self.counted = self.at
        return self.lines

    def fault(self, what: str, *, line: int | None = None, **facts: Any) -> ConfigError:
        return ConfigError(what, where=f"{self.file}:{line or self.line()}", **facts)


def _joined(text: str) -> str:
    """Join the two halves of an escaped character outside the basic plane; a lone half becomes the
    replacement mark.
    """
    if not any("\ud800" <= char <= "\udfff" for char in text):
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
