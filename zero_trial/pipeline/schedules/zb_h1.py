"""ZB-H1: 1F1B whose backward is cut in two, so that weight gradients fill what was idle.

    rank 0  F0 F1 F2 .  .  I0 W0 I1 W1 I2 W2
    rank 1  .  F0 F1 .  I0 F2 I1 W0 I2 W1 W2
    rank 2  .  .  F0 I0 F1 I1 F2 I2 W0 W1 W2

Rank r puts its weight gradients off by r micro-batches: so many activations fewer than rank 0 does it hold for the forwards ahead.

Prices, P ranks, M >= P micro-batches, costs F, I, W: idle (P-1)(F+I-W) per rank, a third of 1F1B's where the costs are alike; at most
min(P, M) micro-batches' activations on every rank, which is 1F1B's maximum. Qi et al. 2023, §2.2.
"""

from __future__ import annotations

from collections.abc import Iterator

from zero_trial.pipeline.actions import Action, Kind


def zb_h1(rank: int, stages: int, micro_batches: int) -> Iterator[Action]:
    """Rank ``rank``'s computations; chunk and rank have the same number."""
    ahead = min(stages - rank - 1, micro_batches)
    for micro_batch in range(ahead):
        yield Action(Kind.F, rank, micro_batch)
    for micro_batch in range(micro_batches):
        if micro_batch + ahead < micro_batches:
            yield Action(Kind.F, rank, micro_batch + ahead)
        yield Action(Kind.I, rank, micro_batch)
        if micro_batch >= rank:
            yield Action(Kind.W, rank, micro_batch - rank)
    for micro_batch in range(max(0, micro_batches - rank), micro_batches):
        yield Action(Kind.W, rank, micro_batch)
