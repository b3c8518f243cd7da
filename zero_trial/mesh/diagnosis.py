"""Turning a collective that failed or never ended into one error that names the rank, the operation, the step, and who is missing."""

from __future__ import annotations

import time

from zero_trial.errors import MeshError
from zero_trial.mesh.board import PERIOD_SECONDS, Board, Position
from zero_trial.mesh.mappings import MappingRefused
from zero_trial.mesh.peers import ELSEWHERE

_GONE_WORDS = ("closed", "reset by peer", "connection refused", "broken pipe", "socket error")


def explain(board: Board, ranks: tuple[int, ...], operation: str, error: Exception, timeout: float) -> MeshError:
    """The MeshError for ``operation`` on this rank, from what every rank last published."""
    board.give_up()
    time.sleep(2 * PERIOD_SECONDS)  # lets the other ranks' boards publish where they are now
    positions = {rank: position for rank, position in board.positions().items() if rank in ranks}
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    lost = any(word in text.lower() for word in _GONE_WORDS)
    here = f"rank {board.rank}, step {board.step}, {operation}"
    if isinstance(error, MappingRefused):
        return too_many_mapped(error, here)
    late = behind(positions, board.rank)
    gone = [rank for rank in positions if rank != board.rank and not gave_up(positions, rank, board.rank)]
    if ELSEWHERE in text:
        return MeshError(
            "another rank makes another collective call at this point",
            where=here,
            fix=f"The ranks disagree about what comes next: {listing(positions, board.rank)}. Every rank must make the same collective calls "
            "in the same order.",
        )
    if lost and not gone:
        names = ", ".join(f"rank {rank}" for rank in positions if rank != board.rank)
        return MeshError(
            f"{names} gave up before this rank came",
            where=here,
            fix=f"{listing(positions, board.rank)}. Find out why this rank was late or called another collective; "
            f"if it is only slow, raise comm_timeout_seconds in ds_config. ({text[:160]})",
        )
    if lost:
        return MeshError(
            "another rank ended while this one waited for it",
            where=here,
            fix=f"Look for that rank's own error: {listing(positions, board.rank, gone)}. If it ended without one, it never made this call, which "
            f"every rank must make. ({text[:160]})",
        )
    if late:
        names = ", ".join(f"rank {rank}" for rank in late)
        return MeshError(
            f"waited {timeout:g} s for {names}, which never reached this collective",
            where=here,
            fix=f"{listing(positions, board.rank, late)}. Every rank must run the same number of batches and collective calls; "
            "if it is only slow, raise comm_timeout_seconds in ds_config.",
        )
    if "timed out" in text.lower() and not differing(positions, board.rank):
        return MeshError(
            f"waited {timeout:g} s for a rank that came too late",
            where=here,
            fix=f"{listing(positions, board.rank)}. Find out what held it up; if ranks are only slow, raise comm_timeout_seconds in ds_config.",
        )
    if "timed out" in text.lower():
        return MeshError(
            f"waited {timeout:g} s although every rank has come this far",
            where=here,
            fix=f"The ranks disagree about what comes next: {listing(positions, board.rank)}. Every rank must make the same collective calls "
            "in the same order.",
        )
    return MeshError(
        "a collective failed",
        where=here,
        got=text[:200],
        fix=f"Ranks: {listing(positions, board.rank)}. Look for an earlier error in another rank's log.",
    )


def too_many_mapped(error: MappingRefused, here: str) -> MeshError:
    """The MeshError for a segment that may not be mapped any more."""
    return MeshError(
        "the ranks of this host share too many pieces of memory",
        where=here,
        got=f"{error.count} mapped segments",
        expected=f"fewer than three quarters of vm.max_map_count, which is {error.limit}",
        fix=f"Raise it on the host (sysctl -w vm.max_map_count={4 * error.limit}), or set comm_transport to gloo in ds_config.",
    )


def gave_up(positions: dict[int, Position | None], rank: int, own: int) -> bool:
    """Whether ``rank`` has raised an error of its own at a collective that ``own`` had not entered before."""
    at, mine = positions[rank], positions[own]
    return at is not None and at.gave_up and (mine is None or at.sequence >= mine.sequence)


def differing(positions: dict[int, Position | None], own: int) -> list[int]:
    """The ranks whose last collective has the same number as ``own``'s and another name. One that is further on has passed this one."""
    mine = positions[own]
    if mine is None:
        return []
    return [
        rank
        for rank, at in positions.items()
        if at is not None and at.sequence == mine.sequence and at.operation != mine.operation
    ]


def behind(positions: dict[int, Position | None], own: int) -> list[int]:
    """The ranks that have entered fewer collectives than ``own``, or have said nothing at all."""
    mine = positions[own]
    reached = mine.sequence if mine is not None else 0
    return [rank for rank, at in positions.items() if rank != own and (at is None or at.sequence < reached)]


def listing(positions: dict[int, Position | None], own: int, only: list[int] | None = None) -> str:
    """``rank 1 at step 17, after all_gather(block.3) ...; rank 2 ...`` for the other ranks."""
    chosen = only if only is not None else [rank for rank in positions if rank != own]
    texts = []
    for rank in chosen:
        at = positions[rank]
        texts.append(f"rank {rank} {at.describe() if at is not None else 'has reported nothing'}")
    return "; ".join(texts) or "no other rank"
