"""Names of stored tensors, and what they say."""

from __future__ import annotations

import pytest

from zero_trial.checkpoint.names import Kind, Stored, natural, parse


@pytest.mark.parametrize(
    ("stored", "meaning"),
    [
        ("param/blocks.0.weight", Stored(Kind.PARAM, "blocks.0.weight")),
        ("buffer/norm.running_mean", Stored(Kind.BUFFER, "norm.running_mean")),
        ("state/exp_avg/head.weight", Stored(Kind.STATE, "head.weight", "exp_avg")),
        ("part1of4/param/head.weight", Stored(Kind.PARAM, "head.weight", "", 1, 4)),
        ("part0of2/state/exp_avg_sq/w", Stored(Kind.STATE, "w", "exp_avg_sq", 0, 2)),
        ("param/odd/name", Stored(Kind.PARAM, "odd/name")),
        ("rank0/rng/torch", Stored(Kind.RUN, "rank0/rng/torch")),
        ("engine/client/t", Stored(Kind.RUN, "engine/client/t")),
        ("param/", Stored(Kind.RUN, "param/")),
        ("state/exp_avg", Stored(Kind.RUN, "state/exp_avg")),
        ("partitioned/param/x", Stored(Kind.RUN, "partitioned/param/x")),
    ],
)
def test_a_name_says_what_it_is(stored: str, meaning: Stored) -> None:
    assert parse(stored) == meaning


def test_numbers_count_as_numbers() -> None:
    names = ["blocks.10.w", "blocks.2.w", "head", "blocks.2.b", "10", "9"]
    assert sorted(names, key=natural) == ["9", "10", "blocks.2.b", "blocks.2.w", "blocks.10.w", "head"]
