"""An action: one thing that one pipeline rank does at one place of its schedule.

Its text form is short enough to draw: ``2F0`` is chunk 2's forward of micro-batch 0, ``2REDUCE`` the reduction of chunk 2's gradients.
A chunk is a run of layers; chunks are numbered through the whole model, so that chunk c feeds chunk c + 1 wherever the two are.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import NamedTuple

from zero_trial.errors import ConfigError

NONE = -1
"""The number of a chunk, micro-batch or tie in an action that has none."""


class Kind(str, Enum):
    """What is done. A kind's value is its name in the text form."""

    F = "F"  # forward
    B = "B"  # whole backward: I and W at once
    I = "I"  # noqa: E741  gradient of the chunk's input, which the chunk before waits for
    W = "W"  # gradient of the chunk's weights, which nobody waits for before the reduction

    # A send is asynchronous; a receive is where the payload has to be there (it may be asked for earlier, in the same order).
    SEND_F = "SEND_F"  # 1SEND_F0: the output of chunk 1, to chunk 2
    RECV_F = "RECV_F"  # 2RECV_F0: the input of chunk 2, from chunk 1
    SEND_B = "SEND_B"  # 2SEND_B0: the gradient of chunk 2's input, to chunk 1
    RECV_B = "RECV_B"  # 1RECV_B0: the gradient of chunk 1's output, from chunk 2

    UNSHARD = "UNSHARD"  # gather the chunk's parameters over the shard axis
    RESHARD = "RESHARD"  # free them again
    REDUCE = "REDUCE"  # 2REDUCE: all that chunk 2 has gathered up; 2REDUCE1: micro-batch 1's gradients
    TIED_REDUCE = "TIED_REDUCE"  # 0TIED_REDUCE1: tie 1 over the ranks that hold it; 0 is the first chunk here that does
    STEP = "STEP"  # the optimizer's; it belongs to no chunk


COMPUTE = frozenset({Kind.F, Kind.B, Kind.I, Kind.W})
SENDS = frozenset({Kind.SEND_F, Kind.SEND_B})
RECEIVES = frozenset({Kind.RECV_F, Kind.RECV_B})

_BY_LENGTH = sorted((kind.value for kind in Kind), key=len, reverse=True)
_TEXT = re.compile(rf"(\d+)?({'|'.join(_BY_LENGTH)})(\d+)?")
_WITH_MICRO_BATCH = COMPUTE | SENDS | RECEIVES


class Action(NamedTuple):
    """A kind with its chunk and, where it has one, its micro-batch or tie. A tuple, because simulations make and hash millions."""

    kind: Kind
    chunk: int = NONE
    micro_batch: int = NONE
    tie: int = NONE

    def __str__(self) -> str:
        number = self.tie if self.kind is Kind.TIED_REDUCE else self.micro_batch
        return f"{_text(self.chunk)}{self.kind.value}{_text(number)}"

    @staticmethod
    def parse(text: str) -> Action:
        """The inverse of ``str``. Raises ConfigError for a text that no action has."""
        found = _TEXT.fullmatch(text.strip())
        if found is None:
            raise _unreadable(text)
        kind = Kind(found[2])
        chunk, number = (NONE if part is None else int(part) for part in (found[1], found[3]))
        if (chunk == NONE) != (kind is Kind.STEP) or not _fits(kind, number):
            raise _unreadable(text)
        return Action(kind, chunk, tie=number) if kind is Kind.TIED_REDUCE else Action(kind, chunk, number)


def parse_row(text: str) -> tuple[Action, ...]:
    """Actions that are separated by white space."""
    return tuple(Action.parse(word) for word in text.split())


def _fits(kind: Kind, number: int) -> bool:
    if kind in _WITH_MICRO_BATCH or kind is Kind.TIED_REDUCE:
        return number != NONE
    return kind is Kind.REDUCE or number == NONE


def _text(number: int) -> str:
    return "" if number == NONE else str(number)


def _unreadable(text: str) -> ConfigError:
    return ConfigError(
        "this is no action",
        where="schedule",
        got=repr(text),
        expected="chunk, kind, micro-batch, such as 2F0 or 2REDUCE",
    )
