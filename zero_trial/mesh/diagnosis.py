"""Turning a collective that failed or never ended into one error that names the rank, the operation, the step, and who is missing."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from zero_trial.errors import MeshError
from zero_trial.mesh.board import PERIOD_SECONDS, Board, Position
from zero_trial.mesh.mappings import MappingRefused
from zero_trial.mesh.peers import ELSEWHERE

Positions = Mapping[int, Position | None]
_SLOW = "if it is only slow, raise comm_timeout_seconds in ds_config"
_GONE_WORDS = ("closed", "reset by peer", "connection refused", "broken pipe", "socket error")


def explain(board: Board, ranks: tuple[int, ...], operation: str, error: Exception, timeout: float) -> MeshError:
    """The MeshError for ``operation`` on this rank, from what every rank last published."""
    board.give_up()
    time.sleep(2 * PERIOD_SECONDS)  # lets the other ranks' boards publish where they are now
    positions = {rank: position for rank, position in board.positions().items() if rank in ranks}
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    here = f"rank {board.rank}, step {board.step}, {operation}"
    if isinstance(error, MappingRefused):
        return too_many_mapped(error, here)
    lost = any(word in text.lower() for word in _GONE_WORDS)
    known = lost_peer(positions, board.rank, text) if lost else absent_peer(positions, board.rank, text, timeout)
    if known is not None:
        return MeshError(known[0], where=here, fix=known[1])
    return MeshError(
        "a collective failed",
        where=here,
        got=text[:200],
        fix=f"Ranks: {listing(positions, board.rank)}. Look for an earlier error in another rank's log.",
    )


def lost_peer(positions: Positions, own: int, text: str) -> tuple[str, str]:
    """What a broken connection means, and what to do: the peer ended, or had given up before this rank came."""
    gone = [rank for rank in positions if rank != own and not gave_up(positions, rank, own)]
    if gone:
        return (
            "another rank ended while this one waited for it",
            f"Look for that rank's own error: {listing(positions, own, gone)}. If it ended without one, it never made this call, which "
            f"every rank must make. ({text[:160]})",
        )
    return (
        f"{names(rank for rank in positions if rank != own)} gave up before this rank came",
        f"{listing(positions, own)}. Find out why this rank was late or called another collective; {_SLOW}. ({text[:160]})",
    )


def absent_peer(positions: Positions, own: int, text: str, timeout: float) -> tuple[str, str] | None:
    """What silence, or another call than this one, means, and what to do; None for an error of another kind."""
    others = listing(positions, own)
    order = f"The ranks disagree about what comes next: {others}. Every rank must make the same collective calls in the same order."
    if ELSEWHERE in text:
        return "another rank makes another collective call at this point", order
    if late := behind(positions, own):
        return (
            f"waited {timeout:g} s for {names(late)}, which never reached this collective",
            f"{listing(positions, own, late)}. Every rank must run the same number of batches and collective calls; {_SLOW}.",
        )
    if "timed out" not in text.lower():
        return None
    if differing(positions, own):
        return f"waited {timeout:g} s although every rank has come this far", order
    return f"waited {timeout:g} s for a rank that came too late", f"{others}. Find out what held it up; {_SLOW}."


def too_many_mapped(error: MappingRefused, here: str) -> MeshError:
    """The MeshError for a segment that may not be mapped any more."""
    return MeshError(
        "the ranks of this host share too many pieces of memory",
        where=here,
        got=f"{error.count} mapped segments",
        expected=f"fewer than three quarters of vm.max_map_count, which is {error.limit}",
        fix=f"Raise it on the host (sysctl -w vm.max_map_count={4 * error.limit}), or set comm_transport to gloo in ds_config.",
    )


def gave_up(positions: Positions, rank: int, own: int) -> bool:
    """Whether ``rank`` has raised an error of its own at a collective that ``own`` had not entered before."""
    at, mine = positions[rank], positions[own]
    return at is not None and at.gave_up and (mine is None or at.sequence >= mine.sequence)


def differing(positions: Positions, own: int) -> list[int]:
    """The ranks whose last collective has the same number as ``own``'s and another name. One that is further on has passed this one."""
    mine = positions[own]
    if mine is None:
        return []
    return [
        rank
        for rank, at in positions.items()
        if at is not None and at.sequence == mine.sequence and at.operation != mine.operation
    ]


def behind(positions: Positions, own: int) -> list[int]:
    """The ranks that have entered fewer collectives than ``own``, or have said nothing at all."""
    mine = positions[own]
    reached = mine.sequence if mine is not None else 0
    return [rank for rank, at in positions.items() if rank != own and (at is None or at.sequence < reached)]


def names(ranks: Iterable[int]) -> str:
    """``rank 1, rank 2``."""
    return ", ".join(f"rank {rank}" for rank in ranks)


def listing(positions: Positions, own: int, only: list[int] | None = None) -> str:
    """``rank 1 at step 17, after all_gather(block.3) ...; rank 2 ...`` for the other ranks."""
    chosen = only if only is not None else [rank for rank in positions if rank != own]
    texts = []
    for rank in chosen:
        at = positions[rank]
        texts.append(f"rank {rank} {at.describe() if at is not None else 'has reported nothing'}")
    return "; ".join(texts) or "no other rank"
