"""Interleaved 1F1B: each rank holds v chunks, so that the pipeline fills v times as fast.

The micro-batches go in groups through one chunk after the other. Groups are as even as possible and none is smaller than P (Megatron asks
for a multiple of P instead): a smaller one would leave a rank waiting for a chunk that waits for it.

Prices, P ranks, M >= P micro-batches, groups of g: bubble (P-1)/(vM+P-1); v times the messages of 1F1B; rank r holds up to
(v-1)g + 2(P-r-1) + 1 chunks' activations, each 1/v of a rank's layers. Narayanan et al. 2021, §2.2.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from zero_trial.pipeline.actions import Action, Kind


def interleaved(rank: int, stages: int, micro_batches: int, chunks: int) -> Iterator[Action]:
    """Rank ``rank``'s computations on its ``chunks`` chunks rank, rank + P, rank + 2P, ..."""
    groups = even_groups(micro_batches, stages)
    mine = [rank + stages * index for index in range(chunks)]
    forwards = [(chunk, micro_batch) for group in groups for chunk in mine for micro_batch in group]
    backwards = [(chunk, micro_batch) for group in groups for chunk in reversed(mine) for micro_batch in group]
    ahead = min((chunks - 1) * max(map(len, groups)) + 2 * (stages - rank - 1), len(forwards))
    for chunk, micro_batch in forwards[:ahead]:
        yield Action(Kind.F, chunk, micro_batch)
    for index, (chunk, micro_batch) in enumerate(backwards):
        if index + ahead < len(forwards):
            yield Action(Kind.F, *forwards[index + ahead])
        yield Action(Kind.B, chunk, micro_batch)


def even_groups(micro_batches: int, smallest: int) -> list[range]:
    """Micro-batches in as many groups of at least ``smallest`` as there can be, of sizes that differ by one at most."""
    count = max(1, micro_batches // smallest)
    size, more = divmod(micro_batches, count)
    starts = [index * size + min(index, more) for index in range(count + 1)]
    return [range(start, end) for start, end in pairwise(starts)]
