"""ZB-V: two chunks per rank, down the ranks and up again, with input and weight gradients apart.

The last chunk is on rank 0, so the first gradient arrives where the first forward began, and from then on a rank always has one of
F, I, W of one of its chunks to do. The phases of rank r, with `a` its chunk on the way down and `b` on the way up:

    1. 2(P-r)-1 times    Fa              fill the way down
    2. r times           Fb Fa           what comes up again
    3. P-r times         Fb Ib Wb        the first gradients
    4. while forwards    Fa Ia Wa Fb Ib Wb
    5. r times           Ia Ib           others wait for these; their weight gradients can wait
    6. P-r times         Ia Wa
    7. the weight gradients that were put off

Prices, P ranks, M >= 2P micro-batches, F = I = W: makespan 6M + P - 1 chunk computations, so bubble (P-1)/(6M+P-1), a sixth of 1F1B's idle
time; at most 2P chunks' activations on every rank, which is 1F1B's maximum; twice the messages of 1F1B, less those of the turn.
Fewer micro-batches run as the first M of 2P. Qi et al. 2024, "Pipeline Parallelism with Controllable Memory".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from zero_trial.pipeline.actions import Action, Kind


def zb_v(rank: int, stages: int, micro_batches: int) -> Iterator[Action]:
    """Rank ``rank``'s computations on its chunks ``rank`` and ``2 * stages - 1 - rank``."""
    chunks = {"a": rank, "b": 2 * stages - 1 - rank}
    counts: Counter[str] = Counter()
    for step in _steps(rank, stages, max(2 * stages, micro_batches)):
        action = Action(Kind(step[0]), chunks[step[1]], counts[step])
        counts[step] += 1
        if action.micro_batch < micro_batches:
            yield action


def _steps(rank: int, stages: int, micro_batches: int) -> Iterator[str]:
    """Kind and chunk of each computation; its micro-batch is how often the two came before."""
    down = rank + 2 * (stages - rank) - 1  # forwards on the way down in phases 1 and 2
    gradients = {"a": 0, "b": stages - rank}
    yield from ("Fa",) * (2 * (stages - rank) - 1)
    yield from ("Fb", "Fa") * rank
    yield from ("Fb", "Ib", "Wb") * (stages - rank)
    for _ in range(stages, micro_batches):
        if down < micro_batches:
            down += 1
            yield "Fa"
        yield from ("Ia", "Wa", "Fb", "Ib", "Wb")
        gradients = {name: count + 1 for name, count in gradients.items()}
    left = {name: micro_batches - count for name, count in gradients.items()}
    yield from ("Ia", "Ib") * rank
    yield from ("Ia", "Wa") * (stages - rank)
    yield from ("Wb",) * left["b"]
    yield from ("Wa",) * (left["a"] - (stages - rank))
