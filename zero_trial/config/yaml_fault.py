"""What is wrong with a text that is no YAML, in words that say what to do about the line. Pure."""

from __future__ import annotations

import re

import yaml

from zero_trial.errors import ConfigError


def yaml_fault(problem: yaml.MarkedYAMLError, text: str, file: str) -> ConfigError:
    """The reader's complaint with the line it is about and, where its cause can be told, the mending."""
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
    """The nearest line above that says something."""
    said = (index for index in range(number - 1, -1, -1) if lines[index].strip() and lines[index].lstrip()[0] != "#")
    return next(said, None)


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip(" "))
