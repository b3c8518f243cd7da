"""Schedules as data: the text of actions, and the placement of chunks."""

from __future__ import annotations

import pytest

from tests.pipeline.lowered import parse
from zero_trial.pipeline.schedule import Action, ActionKind, ChunkPlacement

TEXTS = {
    "2F0": Action(ActionKind.F, 2, 0),
    "10I3": Action(ActionKind.I, 10, 3),
    "2SEND_B7": Action(ActionKind.SEND_B, 2, 7),
    "3UNSHARD": Action(ActionKind.UNSHARD, 3),
    "3REDUCE": Action(ActionKind.REDUCE, 3),
    "3REDUCE1": Action(ActionKind.REDUCE, 3, 1),
    "0TIED_REDUCE1": Action(ActionKind.TIED_REDUCE, 0, 1),
    "STEP": Action(ActionKind.STEP),
}


@pytest.mark.parametrize("text", TEXTS)
def test_the_text_of_an_action(text: str):
    assert str(TEXTS[text]) == text and parse(text) == TEXTS[text]


@pytest.mark.parametrize(("send", "receive"), [("1SEND_F0", "2RECV_F0"), ("2SEND_B7", "1RECV_B7")])
def test_the_ends_of_a_message(send: str, receive: str):
    assert parse(send).other_end == parse(receive) and parse(receive).other_end == parse(send)


PLACEMENTS = {
    "a loop": (ChunkPlacement.loop(3, 2), [(0, 3), (1, 4), (2, 5)], [True] * 5 + [False], [False] + [True] * 5),
    "a V turns without a message": (
        ChunkPlacement.v(3),
        [(0, 5), (1, 4), (2, 3)],
        [True, True, False, True, True, False],
        [False, True, True, False, True, True],
    ),
    "one rank sends nothing": (ChunkPlacement.loop(1, 3), [(0, 1, 2)], [False] * 3, [False] * 3),
}


@pytest.mark.parametrize("name", PLACEMENTS)
def test_placements(name: str):
    place, of, forward, backward = PLACEMENTS[name]
    assert [place.of(rank) for rank in range(place.stages)] == of
    assert (place.chunks, place.last) == (len(forward), len(forward) - 1)
    assert [place.sends_forward(chunk) for chunk in range(place.chunks)] == forward
    assert [place.sends_backward(chunk) for chunk in range(place.chunks)] == backward
