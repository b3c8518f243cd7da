"""Names of stored tensors, and what they say."""

from __future__ import annotations

import pytest

from zero_trial.checkpoint.format import StoredName, TensorKind, natural_order, parse_stored_name


@pytest.mark.parametrize(
    ("stored", "meaning"),
    [
        ("param/blocks.0.weight", StoredName(TensorKind.PARAM, "blocks.0.weight")),
        ("buffer/norm.running_mean", StoredName(TensorKind.BUFFER, "norm.running_mean")),
        ("state/exp_avg/head.weight", StoredName(TensorKind.STATE, "head.weight", "exp_avg")),
        ("part1of4/param/head.weight", StoredName(TensorKind.PARAM, "head.weight", "", 1, 4)),
        ("part0of2/state/exp_avg_sq/w", StoredName(TensorKind.STATE, "w", "exp_avg_sq", 0, 2)),
        ("param/odd/name", StoredName(TensorKind.PARAM, "odd/name")),
        ("rank0/rng/torch", StoredName(TensorKind.RUN, "rank0/rng/torch")),
        ("engine/client/t", StoredName(TensorKind.RUN, "engine/client/t")),
        ("param/", StoredName(TensorKind.RUN, "param/")),
        ("state/exp_avg", StoredName(TensorKind.RUN, "state/exp_avg")),
        ("partitioned/param/x", StoredName(TensorKind.RUN, "partitioned/param/x")),
    ],
)
def test_a_name_says_what_it_is(stored: str, meaning: StoredName) -> None:
    assert parse_stored_name(stored) == meaning


def test_numbers_count_as_numbers() -> None:
    names = ["blocks.10.w", "blocks.2.w", "head", "blocks.2.b", "10", "9"]
    assert sorted(names, key=natural_order) == ["9", "10", "blocks.2.b", "blocks.2.w", "blocks.10.w", "head"]
