"""1F1B: after a few forwards, one backward for each further forward.

    rank 0  F0 F1 .  .  B0 -  F2 B1 -  .  B2 -
    rank 1  .  F0 B0 -  F1 B1 -  F2 B2 -  .  .

Prices, P ranks, M micro-batches: bubble (P-1)/(M+P-1), as GPipe; but rank r holds the activations of min(P-r, M) micro-batches only.
Narayanan et al. 2021 (PipeDream-flush); DeepSpeed's TrainSchedule, which gives it max(2, min(P-r, M)) buffers.
"""

from __future__ import annotations

from collections.abc import Iterator

from zero_trial.pipeline.actions import Action, Kind


def one_f_one_b(rank: int, stages: int, micro_batches: int) -> Iterator[Action]:
    """Rank ``rank``'s computations; chunk and rank have the same number."""
    ahead = min(stages - rank - 1, micro_batches)  # forwards that are under way on the ranks behind
    for micro_batch in range(ahead):
        yield Action(Kind.F, rank, micro_batch)
    for micro_batch in range(micro_batches):
        if micro_batch + ahead < micro_batches:
            yield Action(Kind.F, rank, micro_batch + ahead)
        yield Action(Kind.B, rank, micro_batch)
