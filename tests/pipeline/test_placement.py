"""Which rank holds which chunk."""

from __future__ import annotations

from zero_trial.pipeline.schedule import ChunkPlacement


def test_a_loop():
    place = ChunkPlacement.loop(3, 2)
    assert [place.of(rank) for rank in range(3)] == [(0, 3), (1, 4), (2, 5)]
    assert (place.stages, place.chunks, place.last) == (3, 6, 5)
    assert [place.sends_forward(chunk) for chunk in range(6)] == [True] * 5 + [False]
    assert [place.sends_backward(chunk) for chunk in range(6)] == [False] + [True] * 5


def test_a_v_turns_without_a_message():
    place = ChunkPlacement.v(3)
    assert [place.of(rank) for rank in range(3)] == [(0, 5), (1, 4), (2, 3)]
    assert [place.sends_forward(chunk) for chunk in range(6)] == [True, True, False, True, True, False]
    assert [place.sends_backward(chunk) for chunk in range(6)] == [False, True, True, False, True, True]


def test_one_rank_sends_nothing():
    place = ChunkPlacement.loop(1, 3)
    assert not any(place.sends_forward(chunk) or place.sends_backward(chunk) for chunk in range(3))
