"""What a stored tensor is, by its name: a parameter, optimizer state, a buffer, or something that belongs to the run."""

from __future__ import annotations

import re
from enum import Enum
from typing import NamedTuple

_PART = re.compile(r"part(\d+)of(\d+)/(.*)", re.DOTALL)


class Kind(Enum):
    """The four things that an engine's checkpoint holds."""

    PARAM = "param"
    STATE = "state"
    BUFFER = "buffer"
    RUN = "run"  # random generators, the client's tensors, buffers of single ranks


class Stored(NamedTuple):
    """``name`` as the model has it; ``state`` such as ``exp_avg``; ``part`` of ``parts`` where the model is parallel itself."""

    kind: Kind
    name: str
    state: str = ""
    part: int = 0
    parts: int = 1


def parse(stored: str) -> Stored:
    """``part0of2/state/exp_avg/head.weight`` as its parts. A name of no known form belongs to the run."""
    part, parts, rest = 0, 1, stored
    found = _PART.fullmatch(stored)
    if found is not None:
        part, parts, rest = int(found[1]), int(found[2]), found[3]
    word, _, name = rest.partition("/")
    if word in (Kind.PARAM.value, Kind.BUFFER.value) and name:
        return Stored(Kind(word), name, "", part, parts)
    if word == Kind.STATE.value:
        state, _, name = name.partition("/")
        if state and name:
            return Stored(Kind.STATE, name, state, part, parts)
    return Stored(Kind.RUN, stored)


def natural(name: str) -> list[tuple[int, int, str]]:
    """A key to sort names by, so that ``blocks.2`` comes before ``blocks.10``."""
    return [(0, int(word), "") if word.isdigit() else (1, 0, word) for word in re.split(r"(\d+)", name)]
