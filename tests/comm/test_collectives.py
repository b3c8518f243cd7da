"""Tests for zero_trial/comm/collective.py: ranks that mean different collectives never exchange numbers."""

from __future__ import annotations

from zero_trial.comm.collective import message_tag


def test_tags_tell_collectives_apart() -> None:
    tags = {
        message_tag(number, name)
        for number in range(50)
        for name in ("all_gather(h0)", "all_gather(h1)", "reduce_scatter(h0)")
    }
    assert len(tags) == 150
    assert all(0 <= message_tag(number, "x") < 1 << 31 for number in (0, 1, (1 << 20) - 1, 1 << 20, 1 << 40))
