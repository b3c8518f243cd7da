"""How long or how often: {batches: n}, {records: n} or {epochs: n}; for a search also a bare number."""

from __future__ import annotations

from zero_trial.master.expconf.rules import Either, Key, Section, Whole

_WORDS = 'a length object must have one attribute named "batches", "records", or "epochs"'


def _length(low: int) -> tuple[Section, ...]:
    return tuple(Section({unit: Key(Whole(low), required=True)}) for unit in ("batches", "records", "epochs"))


PERIOD = Either(_length(0), _WORDS)
SEARCHER_LENGTH = Either((*_length(1), Whole(1)), f"{_WORDS}, with a positive integer")
TIMED_LENGTH = Either(_length(1), f"{_WORDS}, with a positive integer")
