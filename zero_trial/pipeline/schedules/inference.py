"""Inference: forwards only.

Prices, P ranks of v chunks, M >= P micro-batches: bubble (P-1)/(vM+P-1); nothing is kept for a backward.
"""

from __future__ import annotations

from collections.abc import Iterator

from zero_trial.pipeline.actions import Action, Kind
from zero_trial.pipeline.schedules.interleaved import even_groups


def inference(rank: int, stages: int, micro_batches: int, chunks: int) -> Iterator[Action]:
    """Rank ``rank``'s computations on its ``chunks`` chunks rank, rank + P, rank + 2P, ..."""
    for group in even_groups(micro_batches, stages):
        for index in range(chunks):
            for micro_batch in group:
                yield Action(Kind.F, rank + stages * index, micro_batch)
