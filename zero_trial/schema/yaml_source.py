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


def _yaml_fault(problem: yaml.MarkedYAMLError, text: str, file: str) -> ConfigError:
    """Return the reader's complaint with the line it is about and, where its cause can be told, the
    fixing.
    """
    said = str(problem.problem or problem.context)
    mark = problem.problem_mark
    if mark is None:
        return ConfigError(f"not readable as YAML: {said}", where=file)
    lines = text.splitlines()
    number = mark.line
    if "could not find expected ':'" in said and problem.context_mark is not None:
        number = problem.context_mark.line  # it is noticed in the line after
    line = lines[number] if number < len(lines) else ""
    return ConfigError(
        f"not readable as YAML: {said}",
        where=f"{file}:{number + 1}",
        got=repr(line.strip()) if line.strip() else None,
        fix=_fix(problem, said, lines, number),
    )


def _fix(problem: yaml.MarkedYAMLError, said: str, lines: list[str], number: int) -> str | None:
    line = lines[number] if number < len(lines) else ""
    if r"'\t'" in said:
        return "There is a tab: indent with spaces."
    if "could not find expected ':'" in said:
        return "Write key: value, with a space after the colon."
    if said.startswith("expected ',' or") and problem.context_mark is not None:
        return f"The bracket that line {problem.context_mark.line + 1} opens is not closed."
    if "unexpected end of stream" in said and problem.context_mark is not None:
        return f"The quote that line {problem.context_mark.line + 1} opens is not closed."
    if "cannot start any token" in said:
        return "Put the value into quotes."
    if said.startswith("expected '<document start>'") or "expected <block end>" in said:
        return _indentation(lines, number)
    if "mapping values are not allowed" in said:
        if ": " in line.partition(": ")[2]:
            return "Put a value that has a colon in it into quotes."
        above = _above(lines, number)
        if above is not None and re.match(r"\s*[\w.-]+:\S", lines[above]):
            return f"Write a space after the colon in line {above + 1}."
        return _indentation(lines, number)
    return None


def _indentation(lines: list[str], number: int) -> str | None:
    above = _above(lines, number)
    if above is None or _indent(lines[number]) == _indent(lines[above]):
        return None
    here, there = _indent(lines[number]), _indent(lines[above])
    return f"It is indented by {here}, line {above + 1} by {there}; the keys of one section stand exactly under each other."


def _above(lines: list[str], number: int) -> int | None:
    """Return the nearest line above that says something."""
    said = (index for index in range(number - 1, -1, -1) if lines[index].strip() and lines[index].lstrip()[0] != "#")
    return next(said, None)


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip(" "))


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


def read_yaml(text: str, file: str, *, letters: bool = True) -> Document:
    """Return the mapping in ``text``; raises ConfigError with file and line.

    Plain scalars mean what a Determined master takes them for: y, n, yes, no, on and off are
    booleans, as keys too, and a key that is not text becomes text (``on`` becomes ``true``, with
    its own spelling in ``Document.respelled``). A bare ``1e-4``, a string to other YAML 1.1
    readers, is a number, with a warning.

    Args:
        text: the YAML.
        file: its name in messages.
        letters: whether y and n alone are booleans. They are text in what older releases wrote.
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
    builder = _Builder(loader, file, letters)
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

    def __init__(self, loader: yaml.SafeLoader, file: str, letters: bool) -> None:
        self.loader = loader
        self.file = file
        self.letters = letters
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
        value = self.scalar(node)
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

    def scalar(self, node: yaml.Node) -> Any:
        if not self.letters and isinstance(node, yaml.ScalarNode) and node.value in ("y", "Y", "n", "N"):
            return node.value
        return self.loader.construct_object(node, deep=True)

    def key(self, node: yaml.Node, above: Path) -> str:
        """Return the text of a key: JSON, in which a master keeps configurations, has no other."""
        value = self.scalar(node)
        line = node.start_mark.line + 1
        if (
            isinstance(value, str)
            and isinstance(node, yaml.ScalarNode)
            and node.style is None
            and EXPONENT.fullmatch(value)
        ):
            value = float(value)
        if isinstance(value, str):
            return value
        if not isinstance(value, int | float):
            self.faults.append(
                ConfigError(
                    "this key is not text",
                    where=f"{self.file}:{line} {'.'.join(above)}".strip(),
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
        if any(key.tag == "tag:yaml.org,2002:merge" for key, _ in node.value):
            # what "<<" merges comes first, so that the mapping's own keys win
            self.loader.flatten_mapping(node)
        found: dict[str, Any] = {}
        own: dict[str, int] = {}
        for key_node, value_node in node.value:
            key = self.key(key_node, path)
            line = key_node.start_mark.line + 1
            inner = (*path, key)
            if id(key_node) in written and key in own:
                self.faults.append(twice(self.file, inner, own[key], line))
            if id(key_node) in written:
                own.setdefault(key, line)
            self.places[inner] = Location(self.file, line)
            found[key] = self.build(value_node, inner)
        return found
