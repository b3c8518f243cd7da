"""The benchmark of the collectives: what it asks of whom, on one rank; and that two ranks get
through it."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import comm, record


def test_the_copy_is_what_a_rank_must_move() -> None:
    assert [comm.moved(op, 12, 3) for op in comm.OPS[:4]] == [8, 8, 16, 12]


@pytest.mark.parametrize("ranks", [2])
def test_every_way_of_every_collective_is_measured(ranks: int) -> None:
    arguments = ["--rounds", "1", "--bytes", "65536", "1048576", "--ops", *comm.OPS]
    rows: list[dict[str, Any]] = comm.in_ranks(arguments, ranks)
    sized = [op for op in comm.OPS if op not in comm.SIZELESS]
    wanted = [(op, size) for op in sized for size in (65536, 1048576)] + [(op, 0) for op in comm.SIZELESS]
    assert [(row["op"], row["bytes"]) for row in rows] == wanted
    for row in rows:
        ways = comm.WAYS if row["bytes"] else ("mapped", "direct", "gloo")
        assert all(row[way] > 0 and row[f"{way}_cpu"] >= 0 for way in ways)
        assert row["gloo_by_mapped"] == pytest.approx(row["gloo"] / row["mapped"])
    assert len(record.markdown(rows, comm.COLUMNS).splitlines()) == len(rows) + 2
