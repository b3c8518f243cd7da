"""A schedule as data: the actions that each pipeline rank performs in one step. Pure.

An action is a single operation of one rank. Its text form is short enough to draw: ``2F0`` is chunk
2's forward of micro-batch 0, ``2REDUCE`` the reduction of chunk 2's gradients. A chunk is a run of
consecutive layers. Chunks are numbered across the whole model: chunk c feeds chunk c + 1, whichever
ranks hold them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from zero_trial.errors import ConfigError

NONE = -1
"""The number in an action that has no chunk, micro-batch or tie."""


class ActionKind(str, Enum):
    """The kind of an action. The value is the name in the text form."""

    F = "F"  # forward
    B = "B"  # full backward: I and W together
    I = "I"  # noqa: E741  gradient of the chunk's input; the previous chunk waits for it
    W = "W"  # gradient of the chunk's weights; only the reduction needs it

    # A send is asynchronous. A receive waits for the payload (which may be requested earlier, in
    # the same order).
    SEND_F = "SEND_F"  # 1SEND_F0: the output of chunk 1, to chunk 2
    RECV_F = "RECV_F"  # 2RECV_F0: the input of chunk 2, from chunk 1
    SEND_B = "SEND_B"  # 2SEND_B0: the gradient of chunk 2's input, to chunk 1
    RECV_B = "RECV_B"  # 1RECV_B0: the gradient of chunk 1's output, from chunk 2

    UNSHARD = "UNSHARD"  # gather the chunk's parameters over the shard axis
    RESHARD = "RESHARD"  # free them again
    # 2REDUCE: all gradients that chunk 2 has accumulated; 2REDUCE1: those of micro-batch 1
    REDUCE = "REDUCE"
    # 0TIED_REDUCE1: tie 1 over the ranks that hold it; 0 is the first such chunk on this rank
    TIED_REDUCE = "TIED_REDUCE"
    STEP = "STEP"  # the optimizer step; belongs to no chunk


COMPUTE = frozenset({ActionKind.F, ActionKind.B, ActionKind.I, ActionKind.W})
RECEIVES = frozenset({ActionKind.RECV_F, ActionKind.RECV_B})
COMPLETES = frozenset({ActionKind.B, ActionKind.W})
"""After these, all gradients of a chunk and micro-batch are complete."""


# The other end of a message: its kind, and the offset of its chunk.
_OTHER_END = {
    ActionKind.SEND_F: (ActionKind.RECV_F, 1),
    ActionKind.RECV_F: (ActionKind.SEND_F, -1),
    ActionKind.SEND_B: (ActionKind.RECV_B, -1),
    ActionKind.RECV_B: (ActionKind.SEND_B, 1),
}


class Action(NamedTuple):
    """A kind with its chunk and, if any, its micro-batch (for TIED_REDUCE: the tie). A tuple,
    because simulations create and hash millions of actions."""

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
        """Place chunks down the ranks and up again: two chunks per rank."""
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
        """Return the chunks of a rank, in model order."""
        return tuple(chunk for chunk, holder in enumerate(self.ranks) if holder == rank)

    def sends_forward(self, chunk: int) -> bool:
        """Return whether the chunk's output is sent to another rank."""
        return chunk < self.last and self.ranks[chunk] != self.ranks[chunk + 1]

    def sends_backward(self, chunk: int) -> bool:
        """Return whether the gradient of the chunk's input is sent to another rank."""
        return chunk > 0 and self.ranks[chunk] != self.ranks[chunk - 1]

    def send(self, action: Action) -> Action | None:
        """Return the send of a computation's result, if another rank needs the result."""
        if action.kind is ActionKind.F and self.sends_forward(action.chunk):
            return Action(ActionKind.SEND_F, *action[1:])
        if (action.kind is ActionKind.B or action.kind is ActionKind.I) and self.sends_backward(action.chunk):
            return Action(ActionKind.SEND_B, *action[1:])
        return None

    def receive(self, action: Action) -> Action | None:
        """Return the receive that a computation needs, if its input is on another rank."""
        if action.kind is ActionKind.F and self.sends_backward(action.chunk):
            return Action(ActionKind.RECV_F, *action[1:])
        if (action.kind is ActionKind.B or action.kind is ActionKind.I) and self.sends_forward(action.chunk):
            return Action(ActionKind.RECV_B, *action[1:])
        return None


# --- the schedule ---------------------------------------------------------------------------------

Row = tuple[Action, ...]


class ScheduleError(ConfigError):
    """A schedule that would hang, or not compute the model's gradients."""


class ParameterLifetime(str, Enum):
    """The lifetime of a chunk's full parameters at ZeRO stage 3."""

    HOLD = "hold"  # from the chunk's first use in a step to its last: 1 gather per chunk
    # for a run of consecutive actions of the chunk: 1 gather per run
    CHUNK = "chunk"
    # for one computation: 2 gathers per chunk and micro-batch, 3 if input and weight gradients are
    # computed separately
    FREE = "free"


class ReductionTiming(str, Enum):
    """The time at which a chunk's gradients are reduced."""

    # after its last backward: 1 reduction per chunk; full gradients exist until then
    BOUNDARY = "boundary"
    # after each backward: 1 reduction per chunk and micro-batch; only shards exist in between
    MICRO = "micro"


@dataclass(frozen=True)
class Schedule:
    """``rows[r]`` are rank r's actions. The other fields record what lowering has added, so that
    the validator can detect missing actions.

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
    """Return the ranks that hold a tied weight, each with its first chunk that holds the weight."""
    return {place.ranks[chunk]: chunk for chunk in sorted(tie, reverse=True)}


# --- the schedules by name: each is a generator of a rank's computations --------------------------
#
# In the diagrams, rows are ranks, columns are units of time, and F0 is the forward of micro-batch
# 0. B is a backward (two units); I and W are its halves for inputs and weights. Costs are for P
# ranks and M micro-batches.


def one_f_one_b(rank: int, stages: int, micro_batches: int, chunks: int) -> Iterator[Action]:
    """1F1B: after a few warmup forwards, alternate one forward and one backward.

        rank 0  F0 F1 .  .  B0 -  F2 B1 -  .  B2 -
        rank 1  .  F0 B0 -  F1 B1 -  F2 B2 -  .  .

    Costs, P ranks, M micro-batches: bubble (P-1)/(M+P-1), like GPipe; but rank r holds the
    activations of only min(P-r, M) micro-batches. Narayanan et al. 2021 (PipeDream-flush);
    DeepSpeed's TrainSchedule, which allocates max(2, min(P-r, M)) buffers.

    Yields rank ``rank``'s computations; chunk and rank have the same number.
    """
    ahead = min(stages - rank - 1, micro_batches)  # forwards in flight on later ranks
    for micro_batch in range(ahead):
        yield Action(ActionKind.F, rank, micro_batch)
    for micro_batch in range(micro_batches):
        if micro_batch + ahead < micro_batches:
            yield Action(ActionKind.F, rank, micro_batch + ahead)
        yield Action(ActionKind.B, rank, micro_batch)


def interleaved(rank: int, stages: int, micro_batches: int, chunks: int) -> Iterator[Action]:
    """Interleaved 1F1B: each rank holds v chunks, so the pipeline fills v times as fast.

    Groups of micro-batches run through one chunk after the other. Groups are as even as possible
    and contain at least P micro-batches (Megatron requires a multiple of P instead): with a smaller
    group, a rank would wait for a chunk that waits for this rank.

    Costs, P ranks, M >= P micro-batches, groups of g: bubble (P-1)/(vM+P-1); v times the messages
    of 1F1B; rank r holds up to (v-1)g + 2(P-r-1) + 1 chunks' activations, each 1/v of a rank's
    layers. Narayanan et al. 2021, §2.2.

    Yields rank ``rank``'s computations on its ``chunks`` chunks rank, rank + P, rank + 2P, ...
    """
    groups = even_groups(micro_batches, stages)
    mine = [rank + stages * index for index in range(chunks)]
    forwards = [(chunk, micro_batch) for group in groups for chunk in mine for micro_batch in group]
    backwards = [(chunk, micro_batch) for group in groups for chunk in reversed(mine) for micro_batch in group]
    ahead = min((chunks - 1) * max(map(len, groups)) + 2 * (stages - rank - 1), len(forwards))
    for chunk, micro_batch in forwards[:ahead]:
        yield Action(ActionKind.F, chunk, micro_batch)
    for index, (chunk, micro_batch) in enumerate(backwards):
        if index + ahead < len(forwards):
            yield Action(ActionKind.F, *forwards[index + ahead])
        yield Action(ActionKind.B, chunk, micro_batch)


def even_groups(micro_batches: int, smallest: int) -> list[range]:
    """Divide micro-batches evenly into the largest number of groups of at least ``smallest``."""
    count = max(1, micro_batches // smallest)
    size, more = divmod(micro_batches, count)
    starts = [index * size + min(index, more) for index in range(count + 1)]
    return [range(start, end) for start, end in pairwise(starts)]


def looped_bfs(rank: int, stages: int, micro_batches: int, chunks: int) -> Iterator[Action]:
    """Looped breadth-first: each rank runs all micro-batches through one chunk before its next
    chunk. With one chunk per rank this is GPipe (Huang et al. 2019):

        rank 0  F0 F1 F2 .  .  .  B0 -  B1 -  B2 -
        rank 1  .  F0 F1 F2 B0 -  B1 -  B2 -  .  .

    A chunk's parameters are needed in only two runs, one of forwards and one of backwards, and its
    gradients are complete at the end of a run. This suits ZeRO 2 and 3.

    Costs, P ranks of v chunks, M micro-batches (M >= P if v > 1): bubble (P-1)/(vM+P-1); v times
    the messages of 1F1B; activations of vM chunks on every rank; 2v-1 gathers per rank with
    ``ParameterLifetime.CHUNK`` (the last chunk's two runs are adjacent); full gradients of one
    chunk at a time. Lamy-Poirier 2023.

    Yields rank ``rank``'s computations on its ``chunks`` chunks rank, rank + P, rank + 2P, ...
    """
    mine = [rank + stages * index for index in range(chunks)]
    for kind, order in ((ActionKind.F, mine), (ActionKind.B, mine[::-1])):
        for chunk in order:
            for micro_batch in range(micro_batches):
                yield Action(kind, chunk, micro_batch)


def zb_h1(rank: int, stages: int, micro_batches: int, chunks: int) -> Iterator[Action]:
    """ZB-H1: 1F1B with the backward split in two, so that weight gradients fill idle time.

        rank 0  F0 F1 F2 .  .  I0 W0 I1 W1 I2 W2
        rank 1  .  F0 F1 .  I0 F2 I1 W0 I2 W1 W2
        rank 2  .  .  F0 I0 F1 I1 F2 I2 W0 W1 W2

    Rank r delays its weight gradients by r micro-batches: its warmup forwards hold r activations
    fewer than those of rank 0.

    Costs, P ranks, M >= P micro-batches, times F, I, W: idle (P-1)(F+I-W) per rank, a third of
    1F1B's if the times are equal; at most min(P, M) micro-batches' activations on every rank, the
    maximum of 1F1B. Qi et al. 2023, §2.2.

    Yields rank ``rank``'s computations; chunk and rank have the same number.
    """
    ahead = min(stages - rank - 1, micro_batches)
    for micro_batch in range(ahead):
        yield Action(ActionKind.F, rank, micro_batch)
    for micro_batch in range(micro_batches):
        if micro_batch + ahead < micro_batches:
            yield Action(ActionKind.F, rank, micro_batch + ahead)
        yield Action(ActionKind.I, rank, micro_batch)
        if micro_batch >= rank:
            yield Action(ActionKind.W, rank, micro_batch - rank)
    for micro_batch in range(max(0, micro_batches - rank), micro_batches):
        yield Action(ActionKind.W, rank, micro_batch)


def zb_v(rank: int, stages: int, micro_batches: int, chunks: int) -> Iterator[Action]:
    """ZB-V: two chunks per rank, down the ranks and up again, with input and weight gradients
    computed separately.

    The last chunk is on rank 0, so the first gradient arrives where the first forward began. From
    then on every rank always has an F, I or W of one of its chunks to run. The phases of rank r,
    with chunk `a` on the way down and chunk `b` on the way up:

        1. 2(P-r)-1 times    Fa              fill the way down
        2. r times           Fb Fa           forwards on the way up
        3. P-r times         Fb Ib Wb        the first gradients
        4. while forwards    Fa Ia Wa Fb Ib Wb
        5. r times           Ia Ib           other ranks wait for Ia and Ib; W can wait
        6. P-r times         Ia Wa
        7. the delayed weight gradients

    Costs, P ranks, M >= 2P micro-batches, F = I = W: makespan 6M + P - 1 chunk computations, so
    bubble (P-1)/(6M+P-1), a sixth of 1F1B's idle time; at most 2P chunks' activations on every
    rank, the maximum of 1F1B; twice the messages of 1F1B, minus those at the turn. Fewer
    micro-batches run as the first M of 2P. Qi et al. 2024, "Pipeline Parallelism with Controllable
    Memory".

    Yields rank ``rank``'s computations on its chunks ``rank`` and ``2 * stages - 1 - rank``.
    """
    places = {"a": rank, "b": 2 * stages - 1 - rank}
    counts: Counter[str] = Counter()
    for step in _steps(rank, stages, max(2 * stages, micro_batches)):
        action = Action(ActionKind(step[0]), places[step[1]], counts[step])
        counts[step] += 1
        if action.micro_batch < micro_batches:
            yield action


def _steps(rank: int, stages: int, micro_batches: int) -> Iterator[str]:
    """Yield each computation's kind and chunk; its micro-batch is the number of earlier ones."""
    down = rank + 2 * (stages - rank) - 1  # forwards on the way down in phases 1 and 2
    yield from ("Fa",) * (2 * (stages - rank) - 1)
    yield from ("Fb", "Fa") * rank
    yield from ("Fb", "Ib", "Wb") * (stages - rank)
    for _ in range(stages, micro_batches):
        if down < micro_batches:
            down += 1
            yield "Fa"
        yield from ("Ia", "Wa", "Fb", "Ib", "Wb")
    yield from ("Ia", "Ib") * rank
    yield from ("Ia", "Wa") * (stages - rank)
    yield from ("Wb",) * rank
    yield from ("Wa",) * rank


# A recipe: a schedule's name, its generator, and its chunk placement.


Generate = Callable[[int, int, int, int], Iterator[Action]]
"""(rank, pipeline stages, micro-batches, chunks per rank) -> the rank's computations."""


@dataclass(frozen=True)
class Recipe:
    """``chunks``: the default number per rank; ``fixed``: no other number is allowed."""

    generate: Generate
    chunks: int = 1
    fixed: bool = True
    place: Callable[[int, int], ChunkPlacement] = ChunkPlacement.loop


RECIPES: Mapping[str, Recipe] = {
    "gpipe": Recipe(looped_bfs),
    "1f1b": Recipe(one_f_one_b),
    "interleaved": Recipe(interleaved, chunks=2, fixed=False),
    "looped_bfs": Recipe(looped_bfs, chunks=2, fixed=False),
    "zb_h1": Recipe(zb_h1),
    "zb_v": Recipe(zb_v, chunks=2, place=lambda stages, _: ChunkPlacement.v(stages)),
}


def build(name: str, stages: int, micro_batches: int, chunks: int | None = None) -> Schedule:
    """Return the computations of the schedule ``name``; ``chunks`` is per rank. Raises ConfigError
    if the recipe does not support the arguments."""
    recipe = RECIPES.get(name)
    if recipe is None:
        raise ConfigError(
            "unknown schedule", where="pipeline.schedule", got=repr(name), expected="one of " + ", ".join(RECIPES)
        )
    for what, number in (("pipeline stages", stages), ("micro-batches", micro_batches), ("chunks per rank", chunks)):
        if number is not None and number < 1:
            raise ConfigError(f"a schedule needs {what}", where=f"schedule {name}", got=number, expected="1 or more")
    count = recipe.chunks if chunks is None else chunks
    if recipe.fixed and count != recipe.chunks:
        several = ", ".join(other for other, row in RECIPES.items() if not row.fixed)
        raise ConfigError(
            "this schedule has a fixed number of chunks per rank",
            where=f"schedule {name}",
            got=count,
            expected=recipe.chunks,
            fix=f"Only these schedules accept a number: {several}.",
        )
    rows = tuple(tuple(recipe.generate(rank, stages, micro_batches, count)) for rank in range(stages))
    return Schedule(name, recipe.place(stages, count), micro_batches, rows)
