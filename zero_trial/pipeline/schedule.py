"""A schedule as data: for each pipeline rank the actions that it performs in one step. Pure.

An action is one thing that one rank does. Its text form is short enough to draw: ``2F0`` is chunk
2's forward of micro-batch 0, ``2REDUCE`` the reduction of chunk 2's gradients. A chunk is a run of
layers; chunks are numbered through the whole model, so that chunk c feeds chunk c + 1 on whichever
ranks the two are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import NamedTuple

from zero_trial.errors import ConfigError

NONE = -1
"""The number of a chunk, micro-batch or tie in an action that has none."""


class ActionKind(str, Enum):
    """What is done. A kind's value is its name in the text form."""

    F = "F"  # forward
    B = "B"  # whole backward: I and W at once
    I = "I"  # noqa: E741  gradient of the chunk's input, which the chunk before waits for
    W = "W"  # gradient of the chunk's weights, needed only by the reduction

    # A send is asynchronous; a receive is where the payload has to be there (it may be asked for
    # earlier, in the same order).
    SEND_F = "SEND_F"  # 1SEND_F0: the output of chunk 1, to chunk 2
    RECV_F = "RECV_F"  # 2RECV_F0: the input of chunk 2, from chunk 1
    SEND_B = "SEND_B"  # 2SEND_B0: the gradient of chunk 2's input, to chunk 1
    RECV_B = "RECV_B"  # 1RECV_B0: the gradient of chunk 1's output, from chunk 2

    UNSHARD = "UNSHARD"  # gather the chunk's parameters over the shard axis
    RESHARD = "RESHARD"  # free them again
    # 2REDUCE: all that chunk 2 has gathered up; 2REDUCE1: micro-batch 1's gradients
    REDUCE = "REDUCE"
    # 0TIED_REDUCE1: tie 1 over the ranks that hold it; 0 is the first chunk here that does
    TIED_REDUCE = "TIED_REDUCE"
    STEP = "STEP"  # the optimizer's; it belongs to no chunk


COMPUTE = frozenset({ActionKind.F, ActionKind.B, ActionKind.I, ActionKind.W})
RECEIVES = frozenset({ActionKind.RECV_F, ActionKind.RECV_B})
COMPLETES = frozenset({ActionKind.B, ActionKind.W})
"""After these, all gradients of a chunk and micro-batch are there."""


# The other end of a message: its kind, and how many chunks further on it is.
_OTHER_END = {
    ActionKind.SEND_F: (ActionKind.RECV_F, 1),
    ActionKind.RECV_F: (ActionKind.SEND_F, -1),
    ActionKind.SEND_B: (ActionKind.RECV_B, -1),
    ActionKind.RECV_B: (ActionKind.SEND_B, 1),
}


class Action(NamedTuple):
    """A kind with its chunk and, where it has one, its micro-batch (of TIED_REDUCE the tie). A
    tuple, because simulations make and hash millions."""

    kind: ActionKind
    chunk: int = NONE
    micro_batch: int = NONE

    def __str__(self) -> str:
        parts = (self.chunk, self.kind.value, self.micro_batch)
        return "".join(str(part) for part in parts if part != NONE)

    @property
    def other_end(self) -> Action:
        """Return the receive of a send, or the send of a receive."""
        kind, distance = _OTHER_END[self.kind]
        return Action(kind, self.chunk + distance, self.micro_batch)


# --- placement: which pipeline rank holds which chunk of the model --------------------------------
#
# loop, 3 ranks, 2 chunks each        V, 3 ranks, always 2 chunks each
# rank 0   chunks 0 3                 rank 0   chunks 0 5    both ends: data in, loss out
# rank 1   chunks 1 4                 rank 1   chunks 1 4
# rank 2   chunks 2 5                 rank 2   chunks 2 3    the turn: no message between them


@dataclass(frozen=True)
class ChunkPlacement:
    """``ranks[c]`` is the pipeline rank of chunk c."""

    ranks: tuple[int, ...]

    @classmethod
    def loop(cls, stages: int, chunks_per_rank: int = 1) -> ChunkPlacement:
        """Place chunk c on rank c mod ``stages``."""
        return cls(tuple(range(stages)) * chunks_per_rank)

    @classmethod
    def v(cls, stages: int) -> ChunkPlacement:
        """Place chunks down the ranks and up again: two on each."""
        return cls((*range(stages), *reversed(range(stages))))

    @cached_property
    def stages(self) -> int:
        """Return the number of pipeline ranks."""
        return max(self.ranks) + 1

    @property
    def chunks(self) -> int:
        """Return the number of chunks of the model."""
        return len(self.ranks)

    @property
    def last(self) -> int:
        """Return the chunk that computes the loss."""
        return len(self.ranks) - 1

    def of(self, rank: int) -> tuple[int, ...]:
        """Return the chunks of a rank, in the model's order."""
        return tuple(chunk for chunk, holder in enumerate(self.ranks) if holder == rank)

    def sends_forward(self, chunk: int) -> bool:
        """Return whether the chunk's output goes to another rank."""
        return chunk < self.last and self.ranks[chunk] != self.ranks[chunk + 1]

    def sends_backward(self, chunk: int) -> bool:
        """Return whether the gradient of the chunk's input goes to another rank."""
        return chunk > 0 and self.ranks[chunk] != self.ranks[chunk - 1]

    def send(self, action: Action) -> Action | None:
        """Return the message with a computation's result, if another rank waits for it."""
        if action.kind is ActionKind.F and self.sends_forward(action.chunk):
            return Action(ActionKind.SEND_F, *action[1:])
        if (action.kind is ActionKind.B or action.kind is ActionKind.I) and self.sends_backward(action.chunk):
            return Action(ActionKind.SEND_B, *action[1:])
        return None

    def receive(self, action: Action) -> Action | None:
        """Return the message that a computation needs, if another rank has what it needs."""
        if action.kind is ActionKind.F and self.sends_backward(action.chunk):
            return Action(ActionKind.RECV_F, *action[1:])
        if (action.kind is ActionKind.B or action.kind is ActionKind.I) and self.sends_forward(action.chunk):
            return Action(ActionKind.RECV_B, *action[1:])
        return None


# --- the schedule ---------------------------------------------------------------------------------

Row = tuple[Action, ...]


class ScheduleError(ConfigError):
    """A schedule that would hang, or compute something else than the model's gradients."""


class ParameterLifetime(str, Enum):
    """How long a chunk's full parameters live at ZeRO stage 3."""

    HOLD = "hold"  # from the chunk's first use in a step to its last: 1 gather per chunk
    # while the rank stays with the chunk: as many gathers as the schedule has runs of it
    CHUNK = "chunk"
    # for one computation: 2 gathers per chunk and micro-batch, 3 where input and weight gradients
    # are apart
    FREE = "free"


class ReductionTiming(str, Enum):
    """When a chunk's gradients are reduced."""

    # after its last backward: 1 reduction per chunk, the full gradients live until then
    BOUNDARY = "boundary"
    # after each backward: 1 reduction per chunk and micro-batch, only shards live in between
    MICRO = "micro"


@dataclass(frozen=True)
class Schedule:
    """``rows[r]`` are rank r's actions. The other fields say what lowering has added, so that the
    validator notices when an action is absent.

    ``parameters`` is None if parameters are never freed (ZeRO stages 0, 1 and 2); ``reduction``
    is None before lowering and without backwards; ``ties`` are groups of chunks that share a
    weight.
    """

    name: str
    placement: ChunkPlacement
    micro_batches: int
    rows: tuple[Row, ...]
    training: bool = True
    parameters: ParameterLifetime | None = None
    reduction: ReductionTiming | None = None
    ties: tuple[tuple[int, ...], ...] = ()

    @property
    def stages(self) -> int:
        return self.placement.stages


def tie_holders(tie: Sequence[int], place: ChunkPlacement) -> dict[int, int]:
    """Return the ranks that hold a tied weight, each with its first chunk that does."""
    return {place.ranks[chunk]: chunk for chunk in sorted(tie, reverse=True)}
