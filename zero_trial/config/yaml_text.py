"""YAML with the line of every key; a key that stands twice in one mapping is a fault that names both lines."""

from __future__ import annotations

from typing import Any

import yaml

from zero_trial.config.document import MOST_LEVELS, MOST_VALUES, Document, Path, Place, twice
from zero_trial.config.numerals import EXPONENT, spell_float
from zero_trial.config.yaml_fault import yaml_fault
from zero_trial.errors import ConfigError


def read_yaml(text: str, file: str) -> Document:
    """The mapping in ``text``; raises ConfigError with file and line.

    Values are those of ``yaml.safe_load``, except that a bare ``1e-4``, a string in YAML 1.1 and a number in YAML 1.2, is a number, with a
    warning.
    """
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        loader = yaml.SafeLoader("")
    except yaml.MarkedYAMLError as problem:
        raise yaml_fault(problem, text, file) from None
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
    return Document(value, builder.places, Place(file), tuple(builder.warnings))


class _Builder:
    """Turns nodes into values and keeps the line of each key on the way."""

    def __init__(self, loader: yaml.SafeLoader, file: str) -> None:
        self.loader = loader
        self.file = file
        self.places: dict[Path, Place] = {}
        self.faults: list[ConfigError] = []
        self.warnings: list[str] = []
        self.nodes = 0

    def build(self, node: yaml.Node, path: Path) -> Any:
        """The value of a node. Aliases are expanded, within limits."""
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
            where = Place(self.file, node.start_mark.line + 1).where(".".join(path))
            self.warnings.append(f"{where}: '{value}' is a string in YAML 1.1. Write {spelled}.")
            return number
        return value

    def mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        written = {id(key) for key, _ in node.value}
        if any(key.tag == "tag:yaml.org,2002:merge" for key, _ in node.value):
            self.loader.flatten_mapping(node)  # what "<<" merges comes first, so that the mapping's own keys win
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
            self.places[inner] = Place(self.file, line)
            found[key] = self.build(value_node, inner)
        return found
