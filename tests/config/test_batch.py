"""The batch triangle against brute force, its messages, and the ways out that it offers."""

from __future__ import annotations

import itertools

import pytest

from zero_trial.config.batch import derive_triple, nearest_triples, solve_batch
from zero_trial.errors import ConfigError

NAMES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def test_two_of_three_give_the_third():
    solved = solve_batch(64, 4, None, 8)
    assert (solved.train_batch_size, solved.micro_batch_size, solved.accumulation) == (64, 4, 2)
    assert solved.how["gradient_accumulation_steps"] == "derived: 64 // 4 // 8 ranks"
    assert solved.how["train_batch_size"] == "given"


def expected(batch: int | None, micro: int | None, steps: int | None, ranks: int) -> tuple[int, int, int] | None:
    """By search: the triple that agrees with everything given; where both micro and steps are open, one step. None: there is none."""
    if batch is None and micro is None:
        return None
    if steps is None and (batch is None or micro is None):
        steps = 1
    limit = batch if batch is not None else micro * steps * ranks
    for m in [micro] if micro is not None else range(1, limit + 1):
        for s in [steps] if steps is not None else range(1, limit + 1):
            if batch is None or m * s * ranks == batch:
                return m * s * ranks, m, s
    return None


def choices(limit: int) -> list[int | None]:
    return [None, *range(1, limit + 1)]


def test_every_small_triangle_against_search():
    solved = 0
    for ranks in range(1, 6):
        for given in itertools.product(choices(9), repeat=3):
            want = expected(*given, ranks)
            if want is None:
                with pytest.raises(ConfigError):
                    solve_batch(*given, ranks)
                continue
            got = solve_batch(*given, ranks)
            assert (got.train_batch_size, got.micro_batch_size, got.accumulation) == want
            solved += 1
    assert solved > 500


def test_derived_numbers_up_to_64_on_16_ranks():
    """The arithmetic alone: what is derived agrees whenever anything can."""
    for ranks, batch, other in itertools.product(range(1, 17), range(1, 65), range(1, 65)):
        divides = batch % (other * ranks) == 0
        for given in ((batch, other, None), (batch, None, other)):
            b, m, s = derive_triple(*given, ranks)
            assert (b == m * s * ranks) == divides
        assert derive_triple(None, batch, other, ranks)[0] == batch * other * ranks


@pytest.mark.parametrize(
    "given", [(6, 4, 1), (7, None, None), (30, 4, None), (5, None, 2), (1, None, None), (10**12 + 1, 3, None)]
)
def test_offered_triples_are_legal_and_near(given: tuple[int | None, ...]):
    ranks = 2
    batch, micro, steps = derive_triple(*given, ranks)
    how = {name: "given" if value else "derived: x" for name, value in zip(NAMES, given, strict=True)}
    near = nearest_triples(batch, micro, steps, ranks, how)
    assert near and all(b == m * s * ranks and min(b, m, s) >= 1 for b, m, s in near)
    assert abs(near[0][0] - batch) <= max(batch, ranks * micro)


def test_message_of_wrong_arithmetic():
    with pytest.raises(ConfigError) as error:
        solve_batch(6, 4, 1, 2, given_by={"train_batch_size": "ds_config.json:2"})
    assert str(error.value) == (
        "train_batch_size 6 ≠ micro 4 × accumulation 1 × ranks 2 = 8. "
        "Set train_batch_size: 8, or remove it and it is derived. "
        "Values: train_batch_size 6 (ds_config.json:2), train_micro_batch_size_per_gpu 4 (given), "
        "gradient_accumulation_steps 1 (given). "
        "Nearest that fit (batch = micro x accumulation x ranks): 6 = 3 x 1 x 2; 8 = 4 x 1 x 2; 8 = 2 x 2 x 2."
    )


def test_message_says_what_was_derived():
    with pytest.raises(ConfigError, match=r"train_micro_batch_size_per_gpu 3 \(derived: 7 // 2 ranks // 1\)"):
        solve_batch(7, None, None, 2)


def test_a_batch_size_is_needed():
    with pytest.raises(ConfigError, match=r"no batch size is given.*global_batch_size"):
        solve_batch(None, None, 4, 2)


@pytest.mark.parametrize("given", [(0, 1, 1), (4, -1, None), (None, 2, 0)])
def test_sizes_are_positive(given: tuple[int | None, ...]):
    with pytest.raises(ConfigError, match="a positive integer"):
        solve_batch(*given, 2)


def test_ranks_are_positive():
    with pytest.raises(ConfigError, match="data-parallel ranks"):
        solve_batch(4, 4, 1, 0)
