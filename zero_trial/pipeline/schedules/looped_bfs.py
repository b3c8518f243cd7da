"""Looped breadth-first: each rank takes all micro-batches through one chunk before it turns to its next.

A chunk's parameters are needed in two runs only, one of forwards and one of backwards, and its gradients are complete at the end of a run:
the schedule that suits ZeRO 2 and 3.

Prices, P ranks of v chunks, M >= P micro-batches: bubble (P-1)/(vM+P-1); v times the messages of 1F1B; vM chunks' activations live on every
rank; with ``Parameters.CHUNK`` 2v-1 gathers per rank (the last chunk's two runs meet); full gradients of one chunk at a time.
Lamy-Poirier 2023.
"""

from __future__ import annotations

from collections.abc import Iterator

from zero_trial.pipeline.actions import Action, Kind


def looped_bfs(rank: int, stages: int, micro_batches: int, chunks: int) -> Iterator[Action]:
    """Rank ``rank``'s computations on its ``chunks`` chunks rank, rank + P, rank + 2P, ..."""
    mine = [rank + stages * index for index in range(chunks)]
    for chunk in mine:
        for micro_batch in range(micro_batches):
            yield Action(Kind.F, chunk, micro_batch)
    for chunk in reversed(mine):
        for micro_batch in range(micro_batches):
            yield Action(Kind.B, chunk, micro_batch)
