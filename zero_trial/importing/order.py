"""Which parameter belongs to which place of an optimizer that knows its parameters by number only.

Stage 0 saves the optimizer so. The numbers follow the model's own order inside each group, as every usual way of making groups leaves it;
with the shapes (and, in 16 bit, the values of the masters) there is then mostly one way to deal the parameters out. Where there are two, that
is said: nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from zero_trial.errors import CheckpointError

Fits = Callable[[str, int, int], int]
"""``(name, group, place)`` -> the next place if that parameter can be there, else -1."""

MOST_STATES = 200_000


def deal(names: Sequence[str], ends: Sequence[int], fits: Fits, where: str) -> list[list[tuple[str, int]]]:
    """For each group its parameters with their places, from place 0 to ``ends[group]``; parameters that are left over were not trained.

    Raises CheckpointError where there is no way, or more than one.
    """
    start = (0,) * len(ends)
    ways: list[dict[tuple[int, ...], list[tuple[tuple[int, ...], int]]]] = []
    reached = {start: 1}
    for name in names:
        step: dict[tuple[int, ...], list[tuple[tuple[int, ...], int]]] = {}
        for state in reached:
            step.setdefault(state, []).append((state, -1))
            for group, place in enumerate(state):
                after = fits(name, group, place) if place < ends[group] else -1
                if place < after <= ends[group]:
                    target = (*state[:group], after, *state[group + 1 :])
                    step.setdefault(target, []).append((state, group))
        ways.append(step)
        reached = {state: min(2, sum(reached[origin] for origin, _ in origins)) for state, origins in step.items()}
        if len(reached) > MOST_STATES:
            raise _unclear(where, "too many ways to tell them apart")
    count = reached.get(tuple(ends), 0)
    if count != 1:
        raise _unclear(where, "more than one way to match them" if count else "no way to match them")
    return _trace(names, ways, tuple(ends))


def _trace(
    names: Sequence[str], ways: list[dict[tuple[int, ...], list[tuple[tuple[int, ...], int]]]], end: tuple[int, ...]
) -> list[list[tuple[str, int]]]:
    """The one way, backwards: a state that lies on it has one origin that lies on it, for there is one way in all."""
    found: list[list[tuple[str, int]]] = [[] for _ in end]
    state = end
    for name, step in zip(reversed(names), reversed(ways), strict=True):
        ((origin, group),) = step[state]
        if group >= 0:
            found[group].append((name, origin[group]))
        state = origin
    return [list(reversed(group)) for group in found]


def _unclear(where: str, got: str) -> CheckpointError:
    return CheckpointError(
        "the optimizer knows its parameters by number only, and which is which cannot be told from their shapes",
        where=where,
        got=got,
        fix="Give --names FILE, a JSON list of the parameters' names in each group, in the order of param_groups; or --no-optimizer.",
    )
