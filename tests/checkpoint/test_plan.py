"""Copies for any cut into any other cut, against filling element by element."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zero_trial.checkpoint.format import StoredPiece, TensorEntry
from zero_trial.checkpoint.reader import ReadCopy, ReadRequest, plan_copies
from zero_trial.errors import CheckpointError


def entry(numel: int, *cuts: int) -> TensorEntry:
    ends = [0, *sorted(cuts), numel]
    pieces = [StoredPiece(f"f{i}", "k", a, b) for i, (a, b) in enumerate(itertools.pairwise(ends)) if a < b]
    return TensorEntry("float32", (numel,), tuple(pieces))


def test_a_range_over_three_pieces() -> None:
    assert plan_copies({"w": entry(10, 3, 5)}, [ReadRequest("w", 2, 8, target=1)]) == [
        ReadCopy("f0", "k", 2, 3, target=1, offset=0),
        ReadCopy("f1", "k", 0, 2, target=1, offset=1),
        ReadCopy("f2", "k", 0, 3, target=1, offset=3),
    ]


def test_in_the_order_of_files() -> None:
    tensors = {"a": entry(4, 2), "b": entry(4, 2)}
    copies = plan_copies(tensors, [ReadRequest("a", 0, 4, 0), ReadRequest("b", 0, 4, 1)])
    assert [copy.file for copy in copies] == ["f0", "f0", "f1", "f1"]


def test_nothing_wanted() -> None:
    assert plan_copies({"w": entry(4)}, []) == []
    assert plan_copies({"w": entry(4)}, [ReadRequest("w", 2, 2, 0)]) == []


@pytest.mark.parametrize("want", [ReadRequest("x", 0, 1, 0), ReadRequest("w", 0, 5, 0), ReadRequest("w", -1, 2, 0)])
def test_what_is_not_there(want: ReadRequest) -> None:
    with pytest.raises(CheckpointError, match="not in the checkpoint"):
        plan_copies({"w": entry(4)}, [want])


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 30), st.lists(st.integers(0, 30), max_size=6), st.lists(st.integers(0, 30), max_size=6))
def test_any_cut_into_any_cut(numel: int, stored: list[int], wanted: list[int]) -> None:
    tensor = entry(numel, *(min(cut, numel) for cut in stored))
    files = {piece.file: list(range(piece.start, piece.stop)) for piece in tensor.pieces}
    ends = [0, *sorted(min(cut, numel) for cut in wanted), numel]
    wants = [ReadRequest("w", a, b, i) for i, (a, b) in enumerate(itertools.pairwise(ends))]
    filled: list[list[int | None]] = [[None] * (want.stop - want.start) for want in wants]
    for copy in plan_copies({"w": tensor}, wants):
        for i in range(copy.source_stop - copy.source_start):
            assert filled[copy.target][copy.offset + i] is None
            filled[copy.target][copy.offset + i] = files[copy.file][copy.source_start + i]
    assert filled == [list(range(want.start, want.stop)) for want in wants]
