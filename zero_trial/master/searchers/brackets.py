"""How adaptive_asha cuts its trials into brackets: how many rungs, how many trials and how many at a time each gets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from zero_trial.errors import ConfigError


@dataclass(frozen=True)
class Budget:
    """The numbers of ``searcher`` that the brackets follow from; ``max_time`` in units of the time metric."""

    max_trials: int
    max_time: int
    mode: str = "standard"
    divisor: float = 4.0
    max_rungs: int = 5
    max_concurrent_trials: int = 16
    bracket_rungs: tuple[int, ...] = ()


@dataclass(frozen=True)
class Share:
    """One bracket's part."""

    rungs: int
    max_trials: int
    max_concurrent: int


def divide(budget: Budget) -> tuple[Share, ...]:
    """The brackets, those with most rungs, that is with most early stopping, first. Pure."""
    rungs = sorted(budget.bracket_rungs or rungs_by_mode(budget.mode, _most_rungs(budget)), reverse=True)
    trials = _trials(budget.max_trials, budget.divisor, rungs)
    concurrent = _concurrent(budget.max_concurrent_trials, budget.divisor, trials)
    return tuple(Share(*part) for part in zip(rungs, trials, concurrent, strict=True))


def rungs_by_mode(mode: str, most: int) -> list[int]:
    """Aggressive: one bracket with all rungs. Conservative: one of each height. Standard: the upper half of those."""
    lowest = {"aggressive": most, "standard": (most - 1) // 2 + 1, "conservative": 1}.get(mode)
    if lowest is None:
        raise ConfigError(
            "no such mode", where="searcher.mode", got=mode, expected="aggressive, standard, conservative"
        )
    return list(range(lowest, most + 1))


def _most_rungs(budget: Budget) -> int:
    """No more rungs than max_time can be divided into, and than max_trials can be thinned by."""
    by_time, by_trials = (
        int(math.log(number) / math.log(budget.divisor)) + 1 for number in (budget.max_time, budget.max_trials)
    )
    return min(budget.max_rungs, by_time, by_trials)


def _trials(max_trials: int, divisor: float, rungs: Sequence[int]) -> list[int]:
    """A bracket of r rungs spends about r / divisor^(r-1) of a whole training per trial; all brackets are to spend about as much."""
    weights = [divisor ** (number - 1) / number for number in rungs]
    total = sum(weights)
    shares = [max(int(weight / total * max_trials), 1) for weight in weights]
    shares[0] += max(max_trials - sum(shares), 0)
    return shares


def _concurrent(max_concurrent: int, divisor: float, trials: Sequence[int]) -> list[int]:
    number = len(trials)
    if max_concurrent == 0:
        return [max(trials[-1], int(divisor))] * number
    each, left = divmod(max(max_concurrent, number), number)
    return [each + (1 if index < left else 0) for index in range(number)]
