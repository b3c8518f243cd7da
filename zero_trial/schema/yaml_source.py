"""Read YAML with the line of every key; a duplicate key and a text that is not YAML are explained
with their line.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from zero_trial.errors import ConfigError
from zero_trial.schema.document import EXPONENT, MOST_LEVELS, MOST_VALUES, Document, Location, Path, spell_float, twice


def _yaml_fault(problem: yaml.MarkedYAMLError, text: str, file: str) -> ConfigError:
    """Return the reader's complaint with the line it is about and, where its cause can be told, the
    mending.
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


def read_yaml(text: str, file: str) -> Document:
    """Return the mapping in ``text``; raises ConfigError with file and line.

    Values are those of ``yaml.safe_load``, except that a bare ``1e-4``, a string in YAML 1.1 and a
    number in YAML 1.2, is a number, with a warning.
    """
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        loader = yaml.SafeLoader("")
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
    except ValueError as problem:
        raise ConfigError(f"not readable as YAML: {problem}", where=file) from None
    if builder.faults:
        raise ConfigError.many(builder.faults)
    return Document(value, builder.places, Location(file), tuple(builder.warnings))


class _Builder:
    """Turns nodes into values and keeps the line of each key on the way."""

    def __init__(self, loader: yaml.SafeLoader, file: str) -> None:
        self.loader = loader
        self.file = file
        self.places: dict[Path, Location] = {}
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
        if (
            isinstance(value, str)
            and isinstance(node, yaml.ScalarNode)
            and node.style is None
            and EXPONENT.fullmatch(value)
        ):
            number = float(value)
            spelled = str(int(number)) if number.is_integer() and abs(number) < 1e15 else spell_float(number)
            where = Location(self.file, node.start_mark.line + 1).where(".".join(path))
            self.warnings.append(f"{where}: '{value}' is a string in YAML 1.1. Write {spelled}.")
            return number
        return value

    def mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        written = {id(key) for key, _ in node.value}
        if any(key.tag == "tag:yaml.org,2002:merge" for key, _ in node.value):
            # what "<<" merges comes first, so that the mapping's own keys win
            self.loader.flatten_mapping(node)
        found: dict[str, Any] = {}
        own: dict[str, int] = {}
        for key_node, value_node in node.value:
            key = str(self.loader.construct_object(key_node, deep=True))
            line = key_node.start_mark.line + 1
            inner = (*path, key)
            if id(key_node) in written and key in own:
                self.faults.append(twice(self.file, inner, own[key], line))
            if id(key_node) in written:
                own.setdefault(key, line)
            self.places[inner] = Location(self.file, line)
            found[key] = self.build(value_node, inner)
        return found
