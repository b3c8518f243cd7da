"""The batch triangle: train_batch_size = micro batch size x accumulation steps x data-parallel
ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from zero_trial.errors import ConfigError
from zero_trial.schema.document import GIVEN, Provenance, ValueSource

_NAMES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


@dataclass(frozen=True)
class BatchTriple:
    """A solved triangle; ``how``: where the value of each ds_config key came from."""

    train_batch_size: int
    micro_batch_size: int
    accumulation: int
    how: Mapping[str, ValueSource]


def solve_batch(
    train_batch_size: int | None,
    micro_batch_size: int | None,
    accumulation: int | None,
    dp_world: int,
    *,
    given_by: Mapping[str, ValueSource] | None = None,
) -> BatchTriple:
    """Return the triple that agrees with what is given, for ``dp_world`` data-parallel ranks (world
    size divided by pipeline and model axes).

    ``given_by`` names where given values stand ("ds_config.json:3"), by ds_config key. Pure. Raises
    ConfigError when the given values contradict each other, do not divide, or say nothing about a
    batch; the message lists the nearest legal triples.
    """
    given = (train_batch_size, micro_batch_size, accumulation)
    places = given_by or {}
    _check_positive(*given, dp_world, places)
    if train_batch_size is None and micro_batch_size is None:
        raise ConfigError(
            "no batch size is given",
            where="train_batch_size",
            expected="train_batch_size or train_micro_batch_size_per_gpu",
            fix="Set train_micro_batch_size_per_gpu: 1, or train_batch_size (global_batch_size in a trial).",
        )
    batch, micro, steps = derive_triple(*given, dp_world)
    derived = (
        f"derived: {micro} x {steps} x {dp_world} ranks",
        f"derived: {batch} // {dp_world} ranks // {steps}",
        f"derived: {batch} // {micro} // {dp_world} ranks"
        if None not in given[:2]
        else "derived: 1, because only one batch size is given",
    )
    how = {
        name: ValueSource(derived[number], Provenance.DERIVED) if given[number] is None else places.get(name, GIVEN)
        for number, name in enumerate(_NAMES)
    }
    if batch != micro * steps * dp_world:
        raise _contradiction(batch, micro, steps, dp_world, how)
    return BatchTriple(batch, micro, steps, how)


def derive_triple(batch: int | None, micro: int | None, steps: int | None, dp_world: int) -> tuple[int, int, int]:
    """Derive the missing numbers as DeepSpeed does, by integer division and at least 1 each; the
    caller checks that the product agrees. Pure.
    """
    if steps is None:
        steps = max(batch // (micro * dp_world), 1) if batch is not None and micro is not None else 1
    if micro is None:
        micro = max((batch or 1) // (dp_world * steps), 1)
    return micro * steps * dp_world if batch is None else batch, micro, steps


def _check_positive(
    batch: int | None, micro: int | None, steps: int | None, dp_world: int, places: Mapping[str, str]
) -> None:
    for name, value in zip((*_NAMES, "data-parallel ranks"), (batch, micro, steps, dp_world), strict=True):
        if value is not None and value < 1:
            place = places.get(name)
            raise ConfigError(
                "not a batch size", where=f"{place} {name}" if place else name, got=value, expected="a positive integer"
            )


def _contradiction(batch: int, micro: int, steps: int, dp_world: int, how: Mapping[str, ValueSource]) -> ConfigError:
    """Return the refusal, in the form ``train_batch_size 6 != micro 4 x accumulation 1 x ranks 2 =
    8``, with each value's origin and ways out.
    """
    product = micro * steps * dp_world
    if any(how[name].provenance is Provenance.DERIVED for name in _NAMES[1:]):
        first = ""
    else:
        whole, left = divmod(batch, micro * steps)
        ranks = f", or start {whole} data-parallel ranks" if not left else ""
        first = f"Set train_batch_size: {product}, or remove it and it is derived{ranks}. "
    near = nearest_triples(batch, micro, steps, dp_world, how)
    listed = "; ".join(f"{b} = {m} x {s} x {dp_world}" for b, m, s in near)
    origins = ", ".join(
        f"{name} {value} ({how[name]})" for name, value in zip(_NAMES, (batch, micro, steps), strict=True)
    )
    return ConfigError(
        f"train_batch_size {batch} ≠ micro {micro} × accumulation {steps} × ranks {dp_world} = {product}",
        fix=f"{first}Values: {origins}. Nearest that fit (batch = micro x accumulation x ranks): {listed}.",
    )


def nearest_triples(
    batch: int, micro: int, steps: int, dp_world: int, how: Mapping[str, ValueSource], count: int = 3
) -> tuple[tuple[int, int, int], ...]:
    """Return the legal (batch, micro, accumulation) closest to what was asked.

    Near means little relative change, the batch counting twice and the accumulation a quarter,
    because it changes only speed and memory; a value that was derived may change freely.
    """
    found: set[tuple[int, int, int]] = {(micro * steps * dp_world, micro, steps)}
    share = max(batch // dp_world, 1)  # samples of one rank per step
    for per_rank in {share, share + 1}:
        found.update((per_rank * dp_world, per_rank // s, s) for s in _divisors_near(per_rank, steps))
        found.update((per_rank * dp_world, m, per_rank // m) for m in _divisors_near(per_rank, micro))
    for s in {max(share // micro, 1), share // micro + 1}:
        found.add((micro * s * dp_world, micro, s))
    micro_free, steps_free = (how.get(name, GIVEN).provenance is Provenance.DERIVED for name in _NAMES[1:])

    def distance(triple: tuple[int, int, int]) -> float:
        micro_change = 0.0 if micro_free else _change(triple[1], micro)
        steps_change = 0.0 if steps_free else _change(triple[2], steps)
        return 2 * _change(triple[0], batch) + micro_change + 0.25 * steps_change

    return tuple(sorted(found, key=lambda triple: (distance(triple), triple[2], triple))[:count])


def _change(new: int, old: int) -> float:
    return max(new, old) / min(new, old) - 1


def _divisors_near(number: int, wanted: int, reach: int = 64) -> list[int]:
    """Return up to two divisors of ``number`` around ``wanted``; looks ``reach`` to both sides, so
    that a huge batch costs nothing.
    """
    candidates = [d for d in range(max(wanted - reach, 1), wanted + reach + 1) if number % d == 0]
    return sorted(candidates, key=lambda d: abs(d - wanted))[:2] or [1]
