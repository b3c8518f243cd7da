"""GPipe: all forwards, then all backwards.

    rank 0  F0 F1 F2 .  .  .  B0 -  B1 -  B2 -
    rank 1  .  F0 F1 F2 B0 -  B1 -  B2 -  .  .

Prices, P ranks, M micro-batches: bubble (P-1)/(M+P-1); M micro-batches' activations live on every rank. Huang et al. 2019.
"""

from __future__ import annotations

from collections.abc import Iterator

from zero_trial.pipeline.actions import Action, Kind


def gpipe(rank: int, stages: int, micro_batches: int) -> Iterator[Action]:
    """Rank ``rank``'s computations; chunk and rank have the same number."""
    for kind in (Kind.F, Kind.B):
        for micro_batch in range(micro_batches):
            yield Action(kind, rank, micro_batch)
