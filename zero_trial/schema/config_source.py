"""Open a ds_config in any form (dict, file, url-safe base64 of JSON, JSON text) as a Document, and
read JSON.
"""

from __future__ import annotations

import base64
import binascii
import difflib
import os
import re
from collections.abc import Iterator, Mapping
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

_COMMENT = r"#[^\n]*|//[^\n]*|/\*.*?\*/"
_BLANK = re.compile(rf"(?:\s+|{_COMMENT})*", re.DOTALL)
_BETWEEN = re.compile(rf"(?:[\s,]+|{_COMMENT})*", re.DOTALL)
_STRING = re.compile(r"""(["'])((?:(?!\1)[^\\\n]|\\.)*)\1""")
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|.)")
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?)")
_BARE_KEY = re.compile(r"[^\s,:\[\]{}\"'#/]+")
_BARE_END = re.compile(r"[,\]}#]|//|/\*")
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
    return _Parser(text.removeprefix("\ufeff"), file).document()


class _Parser:
    """A cursor over the text; each method leaves it behind what it has read."""

    def __init__(self, text: str, file: str) -> None:
        self.text = text
        self.file = file
        self.at = 0
        self.places: dict[KeyPath, Location] = {}
        self.faults: list[ConfigError] = []

    def document(self) -> Document:
        if self.peek() != "{":
            raise self.fault("not a JSON object", expected='"{" at the start')
        value = self.object(())
        if self.peek():
            raise self.fault("text after the end of the object", got=self.rest())
        if self.faults:
            raise ConfigError.many(self.faults)
        return Document(value, self.places, Location(self.file))

    def object(self, path: KeyPath) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for start in self.until("}", path):
            line = self.line()
            key = self.string() if start in "\"'" else self.bare_key()
            if self.peek() != ":":
                raise self.fault(f'no value for the key "{key}"', got=self.rest(), expected='":"')
            self.at += 1
            inner = (*path, key)
            if key in found:
                self.faults.append(twice(self.file, inner, self.places[inner].line, line))
            else:
                self.places[inner] = Location(self.file, line)
            found[key] = self.value(inner)
        return found

    def array(self, path: KeyPath) -> list[Any]:
        found: list[Any] = []
        for _ in self.until("]", path):
            found.append(self.value((*path, f"[{len(found)}]")))
        return found

    def until(self, end: str, path: KeyPath) -> Iterator[str]:
        """Yield the first character of each item, up to the bracket ``end``. A missing comma
        between items and one after the last are both fine."""
        if len(path) > MOST_LEVELS:
            raise self.fault("too deeply nested", expected=f"at most {MOST_LEVELS} levels")
        self.at += 1
        while (start := self.peek(_BETWEEN)) != end:
            if not start:
                raise self.fault("the text ends inside an object or a list", expected='"}" or "]"')
            yield start
        self.at += 1

    def value(self, path: KeyPath) -> Any:
        start = self.peek()
        if start == "{":
            return self.object(path)
        if start == "[":
            return self.array(path)
        if not start or start in ",:]}":
            raise self.fault(f"no value for {'.'.join(path)}", got=self.rest(), expected="a value")
        return self.string() if start in "\"'" else self.bare()

    def bare(self) -> Any:
        """Return a number or word that ends at a comma, bracket, comment or line end; any other
        text is a string up to the end of its line.
        """
        line = self.text[self.at :].partition("\n")[0]
        token = _BARE_END.split(line, maxsplit=1)[0].strip()
        if token in _WORDS:
            self.at += len(token)
            return _WORDS[token]
        if _NUMBER.fullmatch(token):
            self.at += len(token)
            return float(token) if re.search(r"[.eE]", token) or len(token) > 400 else int(token)
        self.at += len(line)
        return line.strip()

    def bare_key(self) -> str:
        match = _BARE_KEY.match(self.text, self.at)
        if not match:
            raise self.fault("a key is missing", got=self.rest(), expected='a key or "}"')
        self.at = match.end()
        return match.group()

    def string(self) -> str:
        match = _STRING.match(self.text, self.at)
        if not match:
            raise self.fault("a string is not closed", expected=self.text[self.at])
        text = _ESCAPE.sub(self.unescaped, match[2])
        self.at = match.end()
        # two escaped halves are one character outside the basic plane; a lone half is replaced
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")

    def unescaped(self, escape: re.Match[str]) -> str:
        code = escape[1]
        if len(code) > 1:
            return chr(int(code[1:], 16))
        if code not in _ESCAPES:
            raise self.fault("an unknown escape in a string", got=f"\\{code}")
        return _ESCAPES[code]

    def peek(self, skipped: re.Pattern[str] = _BLANK) -> str:
        """Return the next character after white space and comments; empty at the end."""
        found = skipped.match(self.text, self.at)
        self.at = found.end() if found else self.at
        if self.text.startswith("/*", self.at):
            raise self.fault("a comment is not closed", expected='"*/"')
        return self.text[self.at : self.at + 1]

    def rest(self) -> str:
        return repr(self.text[self.at : self.at + 20].split("\n")[0]) if self.peek() else "the end of the text"

    def line(self) -> int:
        return self.text.count("\n", 0, self.at) + 1

    def fault(self, what: str, **facts: Any) -> ConfigError:
        return ConfigError(what, where=f"{self.file}:{self.line()}", **facts)
