"""The random numbers of a search: hyperparameters, request id and seed of each of its trials.

`Stream` draws what a Determined 0.38.1 master draws from the same seed. `EarlierStreams` is what
this master drew before: an experiment that began with it goes on with it.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Mapping
from typing import Any, Final, Protocol, TypeAlias

from zero_trial.errors import ZeroTrialError
from zero_trial.experiment import space as space_
from zero_trial.experiment.space import sample

TrialDraw: TypeAlias = tuple[str, Mapping[str, Any], int]
"""Request id, hyperparameters and seed of a trial."""

_SEEDS = 2**31  # of trials: 0 to 2^31 - 1


class Draws(Protocol):
    """What a search draws, trial by trial, in the order of their creation."""

    def trial(self, space: Mapping[str, Any], hparams: Mapping[str, Any] | None = None) -> TrialDraw:
        """Draw the next trial.

        Args:
            space: the hyperparameters of the experiment.
            hparams: those of the trial; None for a sample of ``space``.
        """

    def power(self, base: float, exponent: float) -> float:
        """Return base to the power of exponent, as for the values of log hyperparameters."""

    def as_json(self) -> dict[str, Any]:
        """Return the state, for `restored`."""


class Stream:
    """One Mersenne Twister for all trials of a search, as in Determined.

    A trial draws its hyperparameters, then 16 bytes of request id, then its seed. numpy's
    ``RandomState(seed)`` is seeded in the same way and gives the same integers and doubles.

    The state is the seed and the number of 32-bit words that were taken: 64 KB per 16 384 words
    are drawn again when a search is restored.
    """

    VERSION: Final = 2

    def __init__(self, seed: int, words: int = 0) -> None:
        key = [seed % 2**32]
        for number in range(1, 624):
            key.append((1812433253 * (key[-1] ^ key[-1] >> 30) + number) % 2**32)
        self._twister = random.Random()
        self._twister.setstate((3, (*key, 624), None))
        if words:
            self._twister.getrandbits(32 * words)
        self._seed, self._words = seed, words

    def trial(self, space: Mapping[str, Any], hparams: Mapping[str, Any] | None = None) -> TrialDraw:
        drawn = sample(space, self) if hparams is None else hparams
        name = b"".join(self._word().to_bytes(4, "little") for _ in range(4))
        return str(uuid.UUID(bytes=name, version=4)), drawn, self.below(_SEEDS)

    def as_json(self) -> dict[str, Any]:
        return {"version": self.VERSION, "seed": self._seed, "words": self._words}

    def below(self, count: int) -> int:
        """Return an integer, 0 to count - 1: the lowest bits of a draw, again while it is too
        large; nothing is drawn for a count of 1.
        """
        bits = (count - 1).bit_length()
        while bits:
            drawn = self._word() if bits <= 32 else self._word() << 32 | self._word()
            drawn %= 1 << bits
            if drawn < count:
                return drawn
        return 0

    def unit(self) -> float:
        """Return a number from 0 to below 1: 27 bits of one word and 26 of the next."""
        return ((self._word() >> 5) * 2.0**26 + (self._word() >> 6)) / 2.0**53

    def power(self, base: float, exponent: float) -> float:
        return space_.power(base, exponent)

    def _word(self) -> int:
        self._words += 1
        return self._twister.getrandbits(32)


class EarlierStreams:
    """A stream for each trial, seeded with the seed of the search and the trial's number.

    A trial draws its request id, its seed, then its hyperparameters.
    """

    def __init__(self, seed: int, drawn: int = 0) -> None:
        self._seed, self._drawn = seed, drawn
        self._numbers = random.Random()

    def trial(self, space: Mapping[str, Any], hparams: Mapping[str, Any] | None = None) -> TrialDraw:
        self._drawn += 1
        self._numbers = random.Random(f"{self._seed}/{self._drawn}")
        name = str(uuid.UUID(int=self._numbers.getrandbits(128), version=4))
        seed = self._numbers.randrange(_SEEDS)
        return name, sample(space, self) if hparams is None else hparams, seed

    def as_json(self) -> dict[str, Any]:
        return {"seed": self._seed, "drawn": self._drawn}

    def below(self, count: int) -> int:
        """Return an integer, 0 to count - 1."""
        return self._numbers.randrange(count)

    def unit(self) -> float:
        """Return a number from 0 to below 1."""
        return self._numbers.random()

    def power(self, base: float, exponent: float) -> float:
        return float(base**exponent)


def restored(state: Mapping[str, Any], *, from_start: bool = False) -> Draws:
    """Return the draws of a search in the state of ``as_json``.

    Args:
        state: what ``as_json`` gave, by this version or an earlier one.
        from_start: begin with the first trial again.
    """
    seed = int(state["seed"])
    if "version" not in state:
        return EarlierStreams(seed, 0 if from_start else int(state["drawn"]))
    if state["version"] == Stream.VERSION:
        return Stream(seed, 0 if from_start else int(state["words"]))
    raise ZeroTrialError(
        "the search was begun by a newer master",
        got=f"draws of version {state['version']}",
        expected=f"{Stream.VERSION} or none",
    )
