"""YAML with the line of every key; a key that stands twice in one mapping is a fault that names both lines."""

from __future__ import annotations

from typing import Any

import yaml

from zero_trial.config.document import Document, Path, Place
from zero_trial.errors import ConfigError

_DEPTH = 64


def read_yaml(text: str, file: str) -> Document:
    """The mapping in ``text``; raises ConfigError with file and line. Values are those of ``yaml.safe_load``."""
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        loader = yaml.SafeLoader("")
    except yaml.MarkedYAMLError as problem:
        line = problem.problem_mark.line + 1 if problem.problem_mark else None
        where = f"{file}:{line}" if line else file
        raise ConfigError(f"not readable as YAML: {problem.problem or problem.context}", where=where) from None
    except (yaml.YAMLError, RecursionError) as problem:
        raise ConfigError(f"not readable as YAML: {str(problem) or 'too deeply nested'}", where=file) from None
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError("not a YAML mapping", where=file, expected="keys with values")
    places: dict[Path, Place] = {}
    faults: list[ConfigError] = []
    try:
        value = _build(node, (), loader, file, places, faults)
    except yaml.MarkedYAMLError as problem:
        line = problem.problem_mark.line + 1 if problem.problem_mark else 1
        raise ConfigError(f"not readable as YAML: {problem.problem}", where=f"{file}:{line}") from None
    except ValueError as problem:
        raise ConfigError(f"not readable as YAML: {problem}", where=file) from None
    if faults:
        raise ConfigError.many(faults)
    return Document(value, places, Place(file))


def _build(
    node: yaml.Node,
    path: Path,
    loader: yaml.SafeLoader,
    file: str,
    places: dict[Path, Place],
    faults: list[ConfigError],
) -> Any:
    """The value of a node; records the line of each key below it."""
    if len(path) > _DEPTH:
        raise ConfigError(
            "too deeply nested", where=f"{file}:{node.start_mark.line + 1}", expected=f"at most {_DEPTH} levels"
        )
    if isinstance(node, yaml.MappingNode):
        written = {id(key) for key, _ in node.value}
        if any(key.tag == "tag:yaml.org,2002:merge" for key, _ in node.value):
            loader.flatten_mapping(node)  # "<<" puts what it merges in front, so that the mapping's own keys win
        found: dict[str, Any] = {}
        own: dict[str, int] = {}
        for key_node, value_node in node.value:
            key = str(loader.construct_object(key_node, deep=True))
            line = key_node.start_mark.line + 1
            inner = (*path, key)
            if id(key_node) in written and key in own:
                faults.append(
                    ConfigError(
                        "the key stands twice",
                        where=f"{file}:{line} {'.'.join(inner)}",
                        got=f"it on line {own[key]} and line {line}",
                        fix="Remove one of them.",
                    )
                )
            if id(key_node) in written:
                own.setdefault(key, line)
            places[inner] = Place(file, line)
            found[key] = _build(value_node, inner, loader, file, places, faults)
        return found
    if isinstance(node, yaml.SequenceNode):
        return [
            _build(item, (*path, f"[{number}]"), loader, file, places, faults) for number, item in enumerate(node.value)
        ]
    return loader.construct_object(node, deep=True)
