"""Schedules as data: actions and their text form, the placement of chunks, and the schedule as a
value."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest

from zero_trial.errors import ConfigError
from zero_trial.pipeline.schedule import Action, ActionKind, ChunkPlacement, Schedule, ScheduleError, parse_row

TEXTS = {
    "2F0": Action(ActionKind.F, 2, 0),
    "0B11": Action(ActionKind.B, 0, 11),
    "10I3": Action(ActionKind.I, 10, 3),
    "1W2": Action(ActionKind.W, 1, 2),
    "1SEND_F0": Action(ActionKind.SEND_F, 1, 0),
    "2RECV_F0": Action(ActionKind.RECV_F, 2, 0),
    "2SEND_B7": Action(ActionKind.SEND_B, 2, 7),
    "1RECV_B7": Action(ActionKind.RECV_B, 1, 7),
    "3UNSHARD": Action(ActionKind.UNSHARD, 3),
    "3RESHARD": Action(ActionKind.RESHARD, 3),
    "3REDUCE": Action(ActionKind.REDUCE, 3),
    "3REDUCE1": Action(ActionKind.REDUCE, 3, 1),
    "0TIED_REDUCE1": Action(ActionKind.TIED_REDUCE, 0, tie=1),
    "STEP": Action(ActionKind.STEP),
}


@pytest.mark.parametrize("text", TEXTS)
def test_text_and_back(text: str):
    assert Action.parse(text) == TEXTS[text] and str(TEXTS[text]) == text


def test_every_kind_has_a_text():
    assert {action.kind for action in TEXTS.values()} == set(ActionKind)


def test_a_row():
    assert parse_row(" 0F0\n0B0 STEP ") == (
        Action(ActionKind.F, 0, 0),
        Action(ActionKind.B, 0, 0),
        Action(ActionKind.STEP),
    )


@pytest.mark.parametrize("text", ["", "F0", "0F", "0G0", "0STEP", "STEP1", "0UNSHARD1", "0TIED_REDUCE", "0F-1", "0f0"])
def test_what_is_no_action(text: str):
    with pytest.raises(ConfigError, match="this is not an action"):
        Action.parse(text)


def test_actions_do_not_change():
    with pytest.raises(AttributeError):
        Action(ActionKind.F, 0, 0).chunk = 1  # type: ignore[misc]


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


def test_it_knows_its_ranks_and_does_not_change():
    schedule = Schedule("mine", ChunkPlacement.loop(2), 1, (parse_row("0F0"), parse_row("1F0")))
    assert schedule.stages == 2
    with pytest.raises(FrozenInstanceError):
        schedule.micro_batches = 2  # type: ignore[misc]


def test_its_error_is_the_user_s():
    """Only a schedule that someone wrote by hand can be wrong."""
    assert issubclass(ScheduleError, ConfigError) and ScheduleError.exit_code == 2
