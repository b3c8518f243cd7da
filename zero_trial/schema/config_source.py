"""Open a ds_config in any form (dict, file, url-safe base64 of JSON, JSON text) as a Document; read
lenient JSON, and YAML like a Determined master. Every key keeps its line; errors about duplicate
keys and syntax name the line. Write YAML that all readers interpret in the same way."""

from __future__ import annotations

import base64
import binascii
import difflib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from zero_trial.errors import ConfigError
from zero_trial.schema.document import (
    EXPONENT,
    MOST_LEVELS,
    MOST_VALUES,
    Document,
    Location,
    shown,
    spell_float,
    twice,
)
from zero_trial.schema.document import Path as KeyPath

Source: TypeAlias = Document | Mapping[str, Any] | str | os.PathLike[str]


def open_source(source: Source, name: str | None = None) -> Document:
    """Return any form as a Document; ``name`` is for messages. Raises ConfigError."""
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
    """Read a JSON file, or a YAML file by its suffix."""
    text = read_text(path)
    reader = read_yaml if path.suffix in (".yaml", ".yml") else read_json
    return reader(text, name or path.name)


def read_text(path: Path) -> str:
    """Return the text of a configuration file. Raises ConfigError, also if it is not UTF-8."""
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as problem:
        wide = problem.object.startswith((b"\xff\xfe", b"\xfe\xff"))
        found, code = ("UTF-16", "UTF-16") if wide else ("another encoding", "ITS_ENCODING")
        fix = f"Save it as UTF-8: iconv -f {code} -t UTF-8, or Set-Content -Encoding utf8 in PowerShell."
        raise ConfigError("cannot be read", where=str(path), got=found, expected="UTF-8", fix=fix) from None
    except (OSError, ValueError) as problem:
        what = f"cannot be read: {getattr(problem, 'strerror', None) or problem}"
        raise ConfigError(what, where=str(path), fix="Give the file in it." if path.is_dir() else None) from None


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except (OSError, ValueError):  # base64 text can exceed the limit of file names
        return False


def _from_base64(text: str) -> str | None:
    """Decode url-safe base64 to JSON text; return None if ``text`` is anything else."""
    try:
        decoded = base64.urlsafe_b64decode(text.encode("ascii")).decode("utf-8")
    except (binascii.Error, ValueError):
        return None
    return decoded if decoded.lstrip().startswith("{") else None


def _no_such_file(text: str) -> ConfigError:
    quoted = text if len(text) <= 120 else f"{text[:117]}..."
    near: list[str] = []
    what = "no such file" if Path(text).is_absolute() else f"no such file in {Path.cwd()}"
    if len(text) <= 255 and "\0" not in text:
        if text and Path(text).is_dir():
            what = "this is a folder"
        folder = Path(text).parent
        names = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
        near = difflib.get_close_matches(Path(text).name, names, 1)
    fix = f'Did you mean "{near[0]}"?' if near else "Pass a path to a JSON file, a dict, or URL-safe base64 of JSON."
    return ConfigError(what, where=quoted or '""', fix=fix)


# Lenient JSON: comments, trailing and missing commas, bare keys and words (the part of hjson that
# actual ds_config files use). Every key keeps its line; the error for a duplicate key in an object
# names both lines.

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
_PYTHON = {"True": "true", "False": "false", "None": "null"}
_ESCAPES = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", '"': '"', "'": "'", "\\": "\\", "/": "/"}


def read_json(text: str, file: str) -> Document:
    """Return the object in ``text``. Raises ConfigError with file and line, for all duplicate keys
    together or for the first syntax error."""
    return _Parser(text.removeprefix("\ufeff"), file).document()


class _Parser:
    """A cursor over the text; each method moves it past the text that it has read."""

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
        """Yield the first character of each item, up to the bracket ``end``. Commas may be missing
        between items, or follow the last item."""
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
        """Return a number or word that ends at a comma, bracket, comment or line end. Any other
        text is a string up to the end of the line."""
        line = self.text[self.at :].partition("\n")[0]
        token = _BARE_END.split(line, maxsplit=1)[0].strip()
        if token in _WORDS:
            self.at += len(token)
            return _WORDS[token]
        if _NUMBER.fullmatch(token):
            self.at += len(token)
            return float(token) if re.search(r"[.eE]", token) or len(token) > 400 else int(token)
        if token in _PYTHON and token != line.strip():  # alone on a line it is text, and the key's type rejects it
            raise self.fault("Python, not JSON", got=token, expected=_PYTHON[token])
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
            raise self.fault("a string is not terminated", expected=self.text[self.at])
        text = _ESCAPE.sub(self.unescaped, match[2])
        self.at = match.end()
        # join escaped surrogate pairs into one character; replace unpaired surrogates
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")

    def unescaped(self, escape: re.Match[str]) -> str:
        code = escape[1]
        if len(code) > 1:
            return chr(int(code[1:], 16))
        if code not in _ESCAPES:
            raise self.fault("an unknown escape in a string", got=f"\\{code}")
        return _ESCAPES[code]

    def peek(self, skipped: re.Pattern[str] = _BLANK) -> str:
        """Return the next character after whitespace and comments; "" at the end."""
        found = skipped.match(self.text, self.at)
        self.at = found.end() if found else self.at
        if self.text.startswith("/*", self.at):
            raise self.fault("a comment is not terminated", expected='"*/"')
        return self.text[self.at : self.at + 1]

    def rest(self) -> str:
        return repr(self.text[self.at : self.at + 20].split("\n")[0]) if self.peek() else "the end of the text"

    def line(self) -> int:
        return self.text.count("\n", 0, self.at) + 1

    def fault(self, what: str, **facts: Any) -> ConfigError:
        return ConfigError(what, where=f"{self.file}:{self.line()}", **facts)


# --- YAML ---

_FIXES = (
    (r"'\t'", "There is a tab: indent with spaces."),
    ("could not find expected ':'", "Write key: value, with a space after the colon."),
    ("expected ',' or", "The bracket that line {opened} opens is not closed."),
    ("unexpected end of stream", "The quote that line {opened} opens is not closed."),
    ("cannot start any token", "Put the value into quotes."),
    (
        "mapping values are not allowed",
        "Check the indentation, put a value with a colon into quotes, and a space after the colon of a key.",
    ),
    ("expected '<document start>'", "Check the indentation and the quotes."),
    ("expected <block end>", "Check the indentation and the quotes."),
)
"""Part of PyYAML's message -> what to do."""


def _yaml_fault(problem: yaml.MarkedYAMLError, text: str, file: str) -> ConfigError:
    """Return PyYAML's error with its line and, if the cause is known, the fix."""
    said = str(problem.problem or problem.context)
    marks = [mark.line for mark in (problem.problem_mark, problem.context_mark) if mark is not None]
    # PyYAML detects a missing colon one line later
    number = marks[-1] if "could not find expected ':'" in said else marks[0]
    line = "".join(text.splitlines()[number : number + 1]).strip()
    fix = next((fix.format(opened=marks[-1] + 1) for part, fix in _FIXES if part in said), None)
    return ConfigError(
        f"not readable as YAML: {said}", where=f"{file}:{number + 1}", got=repr(line) if line else None, fix=fix
    )


# The plain scalars of YAML 1.1 that Go's parser knows, in the order of matching. PyYAML differs: it
# reads y and n as text, = as a special value, and dates and base-60 numbers.
_BOOLEANS = {
    **dict.fromkeys(("y", "Y", "yes", "Yes", "YES", "true", "True", "TRUE", "on", "On", "ON"), True),
    **dict.fromkeys(("n", "N", "no", "No", "NO", "false", "False", "FALSE", "off", "Off", "OFF"), False),
}
_PLAIN = (
    ("bool", "|".join(_BOOLEANS), "yYnNtTfFoO"),
    ("null", "~|null|Null|NULL|", "~nN\0"),
    ("int", r"[-+]?(?:0[bB][01_]+|0[oO][0-7_]+|0[xX][0-9a-fA-F_]+|[0-9][0-9_]*)", "-+0123456789"),
    ("float", r"[-+]?(?:\.[0-9]+|[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|\.[0-9]+[eE][-+]?[0-9]+)", "-+0123456789."),
    ("float", r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", "-+."),
    ("merge", "<<", "<"),
)
_BASES = {"b": 2, "o": 8, "x": 16}
_Resolvers: TypeAlias = dict[str, list[tuple[str, re.Pattern[str]]]]


class _Loader(yaml.SafeLoader):
    """Resolves plain scalars by ``_PLAIN``."""

    yaml_implicit_resolvers: _Resolvers = {}  # noqa: RUF012, replaced by add_implicit_resolver


class _Dumper(yaml.SafeDumper):
    """Quotes every string that ``_Loader`` or PyYAML would read as another type."""


for _tag, _pattern, _first in _PLAIN:
    for _class in (_Loader, _Dumper):
        _letters = ["" if letter == "\0" else letter for letter in _first]
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"(?:{_pattern})\Z"), _letters)


def _construct_bool(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> bool:
    text = loader.construct_scalar(node)
    if text not in _BOOLEANS:
        raise ValueError(f"{text!r} is neither true nor false")
    return _BOOLEANS[text]


def _construct_int(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    text = loader.construct_scalar(node).replace("_", "").lower()
    digits = text.lstrip("+-")
    base = 8 if digits.startswith("0") and not set(digits) & set("89") else 10
    base = _BASES.get(digits[1:2], base)
    return int(digits, base) * (-1 if text.startswith("-") else 1)


_Dumper.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(rf"(?:{EXPONENT.pattern})\Z"), list("-+.0123456789")
)
_Loader.add_constructor("tag:yaml.org,2002:bool", _construct_bool)
_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)


def write_yaml(value: Mapping[str, Any], *, width: int = 80) -> str:
    """Return ``value`` as YAML, in the order of its keys."""
    return yaml.dump(dict(value), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=width)


def read_yaml(text: str, file: str) -> Document:
    """Return the mapping in ``text``. Raises ConfigError with the line and ``file``, the name in
    messages.

    Interprets plain scalars like a Determined master: y, n, yes, no, on and off are booleans, also
    as keys, and keys of other types become text (``on`` becomes ``true``; ``Document.respelled``
    has the original spelling). A bare ``1e-4``, which other YAML 1.1 readers read as a string, is a
    number, with a warning.
    """
    try:
        node = yaml.compose(text, Loader=_Loader)
        loader = _Loader("")
    except yaml.MarkedYAMLError as problem:
        raise _yaml_fault(problem, text, file) from None
    except (yaml.YAMLError, RecursionError) as problem:
        why = " ".join(str(problem).split()) or "too deeply nested"
        raise ConfigError(f"not readable as YAML: {why}", where=file) from None
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError("not a YAML mapping", where=file, expected="keys with values")
    builder = _Builder(loader, file)
    try:
        value = builder.build(node, ())
    except yaml.MarkedYAMLError as problem:
        line = problem.problem_mark.line + 1 if problem.problem_mark else 1
        raise ConfigError(f"not readable as YAML: {problem.problem}", where=f"{file}:{line}") from None
    except ConfigError:
        raise
    except ValueError as problem:
        raise ConfigError(f"not readable as YAML: {problem}", where=file) from None
    if builder.faults:
        raise ConfigError.many(builder.faults)
    return Document(value, builder.places, Location(file), tuple(builder.warnings), builder.respelled)


class _Builder:
    """Converts nodes to values and records the line of each key."""

    def __init__(self, loader: yaml.SafeLoader, file: str) -> None:
        self.loader = loader
        self.file = file
        self.places: dict[KeyPath, Location] = {}
        self.respelled: dict[KeyPath, str] = {}
        self.faults: list[ConfigError] = []
        self.warnings: list[str] = []
        self.nodes = 0

    def build(self, node: yaml.Node, path: KeyPath) -> Any:
        """Return the value of a node. Aliases are expanded, within limits."""
        self.nodes += 1
        if len(path) > MOST_LEVELS or self.nodes > MOST_VALUES:
            where = f"{self.file}:{node.start_mark.line + 1}"
            raise ConfigError(
                "too deeply nested or too large",
                where=where,
                expected=f"at most {MOST_LEVELS} levels and {MOST_VALUES} values",
            )
        if isinstance(node, yaml.MappingNode):
            return self.mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.build(item, (*path, f"[{number}]")) for number, item in enumerate(node.value)]
        value = self.loader.construct_object(node, deep=True)
        if not isinstance(node, yaml.ScalarNode) or node.style is not None:
            return value
        where = Location(self.file, node.start_mark.line + 1).where(".".join(path))
        if isinstance(value, bool) and len(node.value) == 1:
            self.warnings.append(
                f"{where}: {node.value} is {shown(value)} in YAML 1.1. Write '{node.value}' for the text."
            )
        elif isinstance(value, str) and EXPONENT.fullmatch(value):
            number = float(value)
            spelled = str(int(number)) if number.is_integer() and abs(number) < 1e15 else spell_float(number)
            self.warnings.append(f"{where}: '{value}' is a string in YAML 1.1. Write {spelled}.")
            return number
        return value

    def key(self, node: yaml.Node, above: KeyPath) -> str:
        """Return a key as text, because a master stores configurations as JSON."""
        value = self.loader.construct_object(node, deep=True)
        if isinstance(value, str) and getattr(node, "style", "") is None and EXPONENT.fullmatch(value):
            value = float(value)
        if isinstance(value, str):
            return value
        if not isinstance(value, int | float):
            self.faults.append(
                ConfigError(
                    "this key is not a string",
                    where=f"{self.file}:{node.start_mark.line + 1} {'.'.join(above)}".strip(),
                    got=shown(value),
                    fix="Put it into quotes." if value is None else "Write a name.",
                )
            )
            return str(value)
        text = shown(value) if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
        if text != node.value:
            key = (*above, text)
            self.respelled[key] = node.value
        return text

    def mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        written = {id(key) for key, _ in node.value}
        self.loader.flatten_mapping(node)  # puts "<<" merges first, so that the mapping's own keys win
        found: dict[str, Any] = {}
        own: dict[str, int] = {}
        for key_node, value_node in node.value:
            key = self.key(key_node, path)
            line = key_node.start_mark.line + 1
            inner = (*path, key)
            if id(key_node) in written:
                if key in own:
                    self.faults.append(twice(self.file, inner, own[key], line))
                own.setdefault(key, line)
            self.places[inner] = Location(self.file, line)
            found[key] = self.build(value_node, inner)
        return found
