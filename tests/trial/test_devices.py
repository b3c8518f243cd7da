"""Nested batches on their way to a device."""

from __future__ import annotations

from collections import namedtuple

import torch

from zero_trial.trial.context import DeviceMover

Pair = namedtuple("Pair", "x y")


def test_tensors_inside_containers_are_moved_and_the_containers_kept() -> None:
    notes: list[str] = []
    meta = torch.device("meta")
    one = torch.ones(2)
    moved = DeviceMover(notes.append).move({"a": [one, (one, 3)], "p": Pair(one, "text"), "n": None}, meta)
    assert moved["a"][0].device == meta and moved["a"][1][0].device == meta and moved["a"][1][1] == 3
    assert isinstance(moved["p"], Pair) and moved["p"].x.device == meta and moved["p"].y == "text"
    assert moved["n"] is None and notes == []


def test_an_unknown_type_is_said_once() -> None:
    notes: list[str] = []
    mover = DeviceMover(notes.append)
    for thing in (object(), object(), range(3)):
        assert mover.move(thing, torch.device("cpu")) is thing
    assert len(notes) == 2 and "object" in notes[0] and "range" in notes[1]
