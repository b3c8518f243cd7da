"""Read YAML as a Determined master does, with the line of every key; a duplicate key and a text
that is not YAML are explained with their line. Write YAML that every reader understands alike.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeAlias

import yaml

from zero_trial.errors import ConfigError
from zero_trial.schema.document import (
    EXPONENT,
    MOST_LEVELS,
    MOST_VALUES,
    Document,
    Location,
    Path,
    shown,
    spell_float,
    twice,
)

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
    """Return PyYAML's complaint with the line that it is about and, where the cause is known, the
    fix.
    """
    said = str(problem.problem or problem.context)
    marks = [mark.line for mark in (problem.problem_mark, problem.context_mark) if mark is not None]
    # a missing colon is noticed in the line after
    number = marks[-1] if "could not find expected ':'" in said else marks[0]
    line = "".join(text.splitlines()[number : number + 1]).strip()
    fix = next((fix.format(opened=marks[-1] + 1) for part, fix in _FIXES if part in said), None)
    return ConfigError(
        f"not readable as YAML: {said}", where=f"{file}:{number + 1}", got=repr(line) if line else None, fix=fix
    )


# The plain scalars of YAML 1.1 that Go's reader knows, in the order in which they are tried. PyYAML
# takes y and n for text, = for something else, and reads dates and numbers of base 60.
_WORDS = {
    **dict.fromkeys(("y", "Y", "yes", "Yes", "YES", "true", "True", "TRUE", "on", "On", "ON"), True),
    **dict.fromkeys(("n", "N", "no", "No", "NO", "false", "False", "FALSE", "off", "Off", "OFF"), False),
}
_PLAIN = (
    ("bool", "|".join(_WORDS), "yYnNtTfFoO"),
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
    """Puts every text into quotes that ``_Loader`` or PyYAML would read as something else."""


for _tag, _pattern, _first in _PLAIN:
    for _class in (_Loader, _Dumper):
        _letters = ["" if letter == "\0" else letter for letter in _first]
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"(?:{_pattern})\Z"), _letters)


def _construct_bool(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> bool:
    text = loader.construct_scalar(node)
    if text not in _WORDS:
        raise ValueError(f"{text!r} is neither true nor false")
    return _WORDS[text]


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
    """Return the mapping in ``text``, of the ``file`` in messages; raises ConfigError with file and
    line.

    Plain scalars mean what a Determined master takes them for: y, n, yes, no, on and off are
    booleans, as keys too, and a key that is not text becomes text (``on`` becomes ``true``, with
    its own spelling in ``Document.respelled``). A bare ``1e-4``, a string to other YAML 1.1
    readers, is a number, with a warning.
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
    """Turns nodes into values and keeps the line of each key on the way."""

    def __init__(self, loader: yaml.SafeLoader, file: str) -> None:
        self.loader = loader
        self.file = file
        self.places: dict[Path, Location] = {}
        self.respelled: dict[Path, str] = {}
        self.faults: list[ConfigError] = []
        self.warnings: list[str] = []
        self.nodes = 0

    def build(self, node: yaml.Node, path: Path) -> Any:
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

    def key(self, node: yaml.Node, above: Path) -> str:
        """Return the text of a key: JSON, in which a master keeps configurations, has no other."""
        value = self.loader.construct_object(node, deep=True)
        if isinstance(value, str) and getattr(node, "style", "") is None and EXPONENT.fullmatch(value):
            value = float(value)
        if isinstance(value, str):
            return value
        if not isinstance(value, int | float):
            self.faults.append(
                ConfigError(
                    "this key is not text",
                    where=f"{self.file}:{node.start_mark.line + 1} {'.'.join(above)}".strip(),
                    got=shown(value),
                    fix="Put it into quotes." if value is None else "Write a name.",
                )
            )
            return str(value)
        text = shown(value) if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
        if text != node.value:
            self.respelled[(*above, text)] = node.value
        return text

    def mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        written = {id(key) for key, _ in node.value}
        self.loader.flatten_mapping(node)  # what "<<" merges comes first, so that the mapping's own keys win
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
