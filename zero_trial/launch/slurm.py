"""SLURM's host lists, ``gpu[01-03,7],login``, written out."""

from __future__ import annotations

import itertools
import re

from zero_trial.errors import ConfigError

_MOST_HOSTS = 100_000


def expand_hosts(text: str) -> list[str]:
    """The hosts of a list in order, with leading zeros kept: ``a[08-10]x,b`` is a08x a09x a10x b. Raises ConfigError when it is not a host list."""
    hosts = [host for part in _split(text) for host in _expand(part, text)]
    if not hosts or not all(hosts):
        raise _bad(text)
    return hosts


def _split(text: str) -> list[str]:
    """Parts between commas that are not inside brackets."""
    parts, depth, start = [], 0, 0
    for place, letter in enumerate(text):
        depth += (letter == "[") - (letter == "]")
        if depth not in (0, 1):
            raise _bad(text)
        if letter == "," and depth == 0:
            parts.append(text[start:place])
            start = place + 1
    if depth:
        raise _bad(text)
    return [*parts, text[start:]]


def _expand(part: str, text: str) -> list[str]:
    """All names of one part: each bracket is a choice, and the choices multiply."""
    pieces = re.split(r"\[([^\]]*)\]", part)
    choices = [[piece] if place % 2 == 0 else _numbers(piece, text) for place, piece in enumerate(pieces)]
    count = 1
    for choice in choices:
        count *= len(choice)
    if count > _MOST_HOSTS:
        raise _bad(text)
    return ["".join(names) for names in itertools.product(*choices)]


def _numbers(inside: str, text: str) -> list[str]:
    """The numbers of one bracket: ``08-10,12`` is 08 09 10 12."""
    numbers: list[str] = []
    for item in inside.split(","):
        found = re.fullmatch(r"(\d+)(?:-(\d+))?", item)
        if found is None:
            raise _bad(text)
        first, last = found[1], found[2] or found[1]
        if not 0 <= int(last) - int(first) < _MOST_HOSTS:
            raise _bad(text)
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers


def _bad(text: str) -> ConfigError:
    return ConfigError(
        "this is not a list of hosts",
        where="SLURM_NODELIST",
        got=repr(text[:80]),
        expected="for example gpu[01-03],login",
    )
