"""Messages between two ranks that are threads."""

from __future__ import annotations

import pytest
import torch

from tests.support.memory_axis import axes
from zero_trial.comm.collective import message_tag
from zero_trial.errors import MeshError
from zero_trial.pipeline.channel import (
    HEADER_BYTES,
    KNOWN_DESCRIPTIONS,
    PeerFailed,
    ReceiveChannel,
    SendChannel,
    message_tags,
)
from zero_trial.pipeline.schedule import Action

CPU = torch.device("cpu")


def pair() -> tuple[SendChannel, ReceiveChannel]:
    first, second = axes(2)
    return SendChannel(first, 1, 5), ReceiveChannel(second, 0, 5, CPU)


def test_a_message_says_what_it_is():
    outbox, inbox = pair()
    inbox.expect(2)
    outbox.send(Action.parse("0SEND_F3"), (torch.ones(2, 3), "label"), samples=2)
    outbox.send(Action.parse("0SEND_F4"), (torch.zeros(2, 3), "label"), samples=1)
    outbox.finish()
    arrival = inbox.take(Action.parse("1RECV_F3"))
    assert arrival.samples == 2
    assert arrival.payload.value[1] == "label"
    assert torch.equal(arrival.payload.value[0], torch.ones(2, 3))
    assert inbox.take(Action.parse("1RECV_F4")).samples == 1


def test_a_description_goes_once():
    first, second = axes(2)
    outbox, inbox = SendChannel(first, 1, 5), ReceiveChannel(second, 0, 5, CPU)
    for number in range(3):
        outbox.send(Action.parse(f"0SEND_F{number}"), torch.full((4,), float(number)), samples=1)
    assert first._queues[0, 1].qsize() == 3 * 2 + 1  # header and payload, and one description
    assert [inbox.take(Action.parse(f"1RECV_F{number}")).payload.value[0].item() for number in range(3)] == [0, 1, 2]
    assert (first.counters.get("send", "pipe").calls, first.counters.get("send", "pipe").bytes) == (3, 48)
    assert first.counters.get("header", "pipe").bytes == 3 * HEADER_BYTES


def test_descriptions_that_always_change_are_not_collected():
    outbox, inbox = pair()
    for number in range(KNOWN_DESCRIPTIONS + 3):
        outbox.send(Action.parse(f"1SEND_B{number}"), [number, None], samples=1)
        assert inbox.take(Action.parse(f"0RECV_B{number}")).payload.value == [number, None]
    assert len(outbox._known) == len(inbox._known) == KNOWN_DESCRIPTIONS


def test_another_message_than_expected_is_an_error():
    outbox, inbox = pair()
    outbox.send(Action.parse("0SEND_F1"), torch.ones(1), samples=1)
    with pytest.raises(MeshError, match=r"1RECV_F0 from rank 0: .* got F of chunk 0, micro-batch 1"):
        inbox.take(Action.parse("1RECV_F0"))


def test_a_failure_comes_instead():
    outbox, inbox = pair()
    inbox.expect(1)
    outbox.fail("rank 0: it broke")
    outbox.linger()
    with pytest.raises(PeerFailed, match="rank 0: it broke"):
        inbox.take(Action.parse("1RECV_F0"))


def test_tags_are_no_collective_s():
    collectives = {message_tag(number, name) for number in range(1, 2000) for name in ("a", "b")}
    mine = {message_tags(channel, number) for channel in range(0, 2048, 97) for number in range(40)}
    assert not collectives & mine
    assert all(0 <= tag < 2**31 for tag in mine)
    assert not {message_tags(1, number) for number in range(40)} & {message_tags(2, number) for number in range(40)}
