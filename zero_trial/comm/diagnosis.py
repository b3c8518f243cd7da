"""Diagnosis of slow or failed collectives: what each rank records about its collectives, and pure
functions of these records."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from zero_trial.comm.shared_memory import ELSEWHERE
from zero_trial.errors import MeshError

MOST_NAMED = 8  # ranks in one message

_SLOW = "if it is only slow, raise comm_timeout_seconds in ds_config"
_LOST = ("closed", "reset by peer", "connection refused", "broken pipe", "socket error")


# One collective of an axis: the axis, how many calls this rank has made on it, and the digest of
# all of them. All ranks must make it before any can leave it. Plain: a class would cost a call.
Call = tuple[str, int, int]


class RankPosition(NamedTuple):
    """One rank's place in the sequence of collectives.

    A tuple: the hot path makes four of them per collective.
    """

    step: int = 0
    sequence: int = 0
    operation: str = "start"
    since: float = 0.0  # time.time() of entering it
    inside: bool = False  # still waiting in it
    gave_up: bool = False  # it raised a MeshError there and no longer waits
    # The collective that it waits for. Set only on a rank that waits long: how many calls it
    # has made on each axis, and its line of user code.
    call: Call | None = None
    calls: Mapping[str, int] | None = None
    line: str = ""

    def describe(self) -> str:
        verb = "gave up in" if self.gave_up else "in" if self.inside else "after"
        age = max(time.time() - self.since, 0)
        return f"at step {self.step}, {verb} {self.operation} (collective {self.sequence}, {age:.0f} s ago{f', at {self.line}' if self.line else ''})"


Positions = Mapping[int, RankPosition | None]


def disagreement(rows: Mapping[int, tuple[int, Sequence[Sequence[int | str]]]], here: str) -> MeshError:
    """Return the MeshError that names the first collectives in which ranks differ.

    Args:
        rows: for each rank, how many it has called, and the last ones (``CallOrder.recent``).
    """
    known = {rank: dict(enumerate(calls, count - len(calls))) for rank, (count, calls) in rows.items()}
    first = max(min(calls, default=0) for calls in known.values())
    end = max(count for count, _ in rows.values())
    for place in range(first, end):
        at = {rank: calls.get(place, (0, "nothing more")) for rank, calls in known.items()}
        if len({digest for digest, _ in at.values()}) > 1:
            break
    called = {rank: str(name) for rank, (_, name) in at.items()}
    listed = _first_ones([f"rank {rank} {name}" for rank, name in called.items()], ", ")
    return MeshError(
        "collective mismatch: the ranks have called different collectives, and may have received each other's data",
        where=here,
        got=f"at call {place + 1}: {listed}",
        expected="the same collective calls in the same order on every rank",
        fix=way_out(called) or "Do not call the model, or parts of it, on only some of the ranks.",
    )


_GATHER = re.compile(r"all_gather\(parameters of (.+)\) over ")
_LEAF = (
    "If ranks take different branches (experts, a block that only some ranks run), list the module around the branch, which every rank calls, in "
    "zero_optimization.leaf_module, or pass its class to zero_trial.zero.set_z3_leaf_modules before initialize."
)
_UNEVEN = (
    "If ranks differ in batches or generated tokens, use engine.evenly(batches) and engine.generate(...) "
    "(generate(synced_gpus=True) of Hugging Face), or run them inside zero_trial.zero.GatheredParameters(model)."
)
_ALONE = (
    "If it is for a state dict (model.state_dict(), save_pretrained() on one rank), every rank must call "
    "engine.save_16bit_model(folder), or accelerator.get_state_dict(model) for save_pretrained(state_dict=...)."
)


def way_out(operations: Mapping[int, str]) -> str:
    """Return advice for ranks that are in these operations at the same time; empty unless one of
    the operations gathers parameters (ZeRO stage 3)."""
    blocks = {rank: found[1] for rank, operation in operations.items() if (found := _GATHER.match(operation))}
    if not blocks:
        return ""
    doing = _first_ones([f"rank {rank} gathers {block}" for rank, block in sorted(blocks.items())], ", ")
    ways = _UNEVEN if len(blocks) > len(set(blocks.values())) == 1 else f"{_LEAF} {_UNEVEN}"
    if len(blocks) == 1:
        ways = f"{ways} {_ALONE}"
    return f"ZeRO stage 3: {doing}. {ways}"


def with_way_out(text: str, positions: Positions) -> str:
    """Return ``text``, followed by advice for these positions if there is any."""
    way = way_out({rank: at.operation for rank, at in positions.items() if at is not None})
    return f"{text.rstrip('.')}. {way}" if way else text


def diagnose(positions: Positions, own: int, here: str, error: Exception, timeout: float) -> MeshError:
    """Return the MeshError that ``error`` means on rank ``own``.

    Args:
        positions: of all ranks of the collective.
        here: this rank, its step and the operation, in the error.
        timeout: seconds that a wait may take.
    """
    text = printable(error)
    if waiting := crossed(positions, own):
        return _crossing(positions, own, waiting, here)
    lost = any(part in text.lower() for part in _LOST)
    known = _lost_peer(positions, own, text) if lost else _absent_peer(positions, own, text, timeout)
    if known is not None:
        return MeshError(known[0], where=here, fix=known[1])
    return MeshError(
        "a collective failed",
        where=here,
        got=text[:200],
        fix=f"Ranks: {listing(positions, own)}. Look for an earlier error in another rank's log.",
    )


def crossed(positions: Positions, own: int) -> list[int]:
    """Return the ranks that wait for ``own`` in a collective that it has not called, while it waits
    for them in one that they have not called: a deadlock. Ranks that are only slow are excluded."""
    mine = positions.get(own)
    if mine is None or mine.call is None or not mine.inside:
        return []
    others = {rank: at for rank, at in positions.items() if at is not None and rank != own}
    return [rank for rank, at in others.items() if at.inside and at.call is not None and _never_meet(mine, at)]


def _never_meet(mine: RankPosition, at: RankPosition) -> bool:
    """Return whether two waiting ranks are in different calls with the same number on one axis, or
    each in a call that the other has not made."""
    if mine.call is None or at.call is None:
        return False
    if mine.call[:2] == at.call[:2]:
        return mine.call[2] != at.call[2]
    return _lacks(at, mine.call) and _lacks(mine, at.call)


def _lacks(at: RankPosition, call: Call) -> bool:
    """Return whether a waiting rank is on the axis of ``call`` and has not made that call."""
    axis, number, _ = call
    return (at.calls or {}).get(axis, number) < number


def _crossing(positions: Positions, own: int, waiting: list[int], here: str) -> MeshError:
    """Return the MeshError for ranks that wait for each other in different collectives."""
    mine = positions[own]
    both = {rank: at.operation for rank, at in positions.items() if at is not None and rank in (own, *waiting)}
    return MeshError(
        f"this rank and {names(waiting)} wait for each other in different collectives, forever",
        where=here,
        got=f"this rank {f'at {mine.line}' if mine is not None and mine.line else 'here'}, "
        f"{listing(positions, own, waiting)}",
        expected="the same collective calls in the same order on every rank",
        fix="Every rank must make both calls: look for a call that only some ranks reach, e.g. under `if rank == 0:`. engine.save_checkpoint is "
        f"collective. {way_out(both)}".rstrip(),
    )


def printable(error: Exception) -> str:
    """Return the first line of an error's text, or its type's name, without control characters."""
    text = str(error).strip()
    first = text.splitlines()[0] if text else type(error).__name__
    return "".join(char if char.isprintable() else "?" for char in first)


def _lost_peer(positions: Positions, own: int, text: str) -> tuple[str, str]:
    """Return why a connection broke and what to do: the peer ended, or had given up."""
    gone = [rank for rank in positions if rank != own and not gave_up(positions, rank, own)]
    if gone:
        fix = (
            f"Look for that rank's own error: {listing(positions, own, gone)}. If the rank ended without an error, it never made this call, "
            f"which every rank must make. ({text[:160]})"
        )
        return "another rank ended while this one waited for it", with_way_out(fix, positions)
    fix = f"{listing(positions, own)}. Find out why this rank was late or called a different collective; {_SLOW}. ({text[:160]})"
    late = names(rank for rank in positions if rank != own)
    return f"{late} timed out before this rank arrived", with_way_out(fix, positions)


def _absent_peer(positions: Positions, own: int, text: str, timeout: float) -> tuple[str, str] | None:
    """Return cause and fix for a timeout or mismatched collectives; None for other errors."""
    others = listing(positions, own)
    order = f"The ranks disagree about the next collective: {others}. Every rank must make the same collective calls in the same order."
    if ELSEWHERE in text:
        return (
            "collective mismatch: another rank calls a different collective at this point",
            with_way_out(order, positions),
        )
    if late := behind(positions, own):
        return (
            f"waited {timeout:g} s for {names(late)}, which never reached this collective",
            with_way_out(
                f"{listing(positions, own, late)}. Every rank must run the same number of batches and collective calls; {_SLOW}.",
                positions,
            ),
        )
    if "timed out" not in text.lower():
        return None
    mine = positions[own]
    # another name under the same number; a rank that is further ahead has left this call
    if mine and any(
        at and at.sequence == mine.sequence and at.operation != mine.operation for at in positions.values()
    ):
        return f"collective mismatch: waited {timeout:g} s although every rank has arrived here", with_way_out(
            order, positions
        )
    return f"waited {timeout:g} s for a rank that arrived too late", with_way_out(
        f"{others}. Find out what delayed it; {_SLOW}.", positions
    )


def gave_up(positions: Positions, rank: int, own: int) -> bool:
    """Return whether ``rank`` failed at a collective that ``own`` had not entered before."""
    at, mine = positions[rank], positions[own]
    return at is not None and at.gave_up and (mine is None or at.sequence >= mine.sequence)


def behind(positions: Positions, own: int) -> list[int]:
    """Return the ranks that entered fewer collectives than ``own``, or published nothing."""
    mine = positions.get(own)
    reached = mine.sequence if mine is not None else 0
    return [rank for rank, at in positions.items() if rank != own and (at is None or at.sequence < reached)]


def names(ranks: Iterable[int]) -> str:
    """Return ``rank 1, rank 2``; if there are many, the first ones and a count of the rest."""
    return _first_ones([f"rank {rank}" for rank in ranks], ", ")


def listing(positions: Positions, own: int, only: list[int] | None = None) -> str:
    """Return ``rank 1 at step 17, after all_gather(block.3) ...; rank 2 ...`` for the others."""
    chosen = only if only is not None else [rank for rank in positions if rank != own]
    texts = []
    for rank in chosen:
        at = positions[rank]
        texts.append(f"rank {rank} {at.describe() if at is not None else 'has reported nothing'}")
    return _first_ones(texts, "; ") or "no other rank"


def _first_ones(texts: list[str], separator: str) -> str:
    more = len(texts) - MOST_NAMED
    return separator.join(texts[:MOST_NAMED]) + (f"{separator}and {more} more ranks" if more > 0 else "")
