"""Messages between two ranks that are threads: values become a description and bytes, and the same
values again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.pipeline.lowered import parse
from tests.support.memory_axis import axes
from zero_trial.comm.waits import CallOrder
from zero_trial.errors import MeshError, TrialError
from zero_trial.pipeline.channel import (
    HEADER,
    PeerFailed,
    ReceiveChannel,
    SendChannel,
    WithLabel,
    local_payload,
    message_tags,
    pack,
    to_payload,
    unpack,
)

CPU = torch.device("cpu")


def travel(value: Any) -> Any:
    text, parcel = to_payload(value)
    payload = pack(parcel.tensors)
    return unpack(text, None if payload is None else payload.clone(), CPU)


def alike(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        same = isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.shape == b.shape
        return same and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
    if isinstance(a, (tuple, list)):
        return type(a) is type(b) and len(a) == len(b) and all(alike(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(alike(a[key], b[key]) for key in a)
    return type(a) is type(b) and a == b


DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int8,
    torch.bool,
    torch.complex64,
]
SHAPES = st.lists(st.integers(0, 3), max_size=3).map(tuple)
TENSORS = st.builds(lambda shape, dtype: torch.randn(shape).to(dtype), SHAPES, st.sampled_from(DTYPES))
PLAIN = st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | st.text(max_size=5)
VALUES = st.recursive(
    TENSORS | PLAIN,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=150)
@given(VALUES)
def test_any_value_comes_back(value: Any):
    assert alike(travel(value).value, value)


def test_gradients_are_wanted_where_the_sender_has_a_history():
    weight = torch.ones(3, requires_grad=True)
    parcel = travel((weight * 2, torch.ones(2), {"y": weight + 1}))
    assert parcel.differentiable == [True, False, True]
    assert [tuple(tensor.shape) for tensor in parcel.wanted()] == [(3,), (3,)]
    assert not any(tensor.requires_grad for tensor in parcel.tensors)


def test_one_contiguous_tensor_is_sent_where_it_lies():
    tensor = torch.arange(4.0)
    payload = pack([tensor])
    assert payload is not None and payload.data_ptr() == tensor.data_ptr()
    assert pack([torch.ones(0), torch.ones(2, 0)]) is None


def test_what_cannot_travel_is_named_with_its_place():
    with pytest.raises(TrialError, match=r"a layer's output\[1\]\['k'\]: this value cannot be sent .*: got set"):
        to_payload((torch.ones(1), {"k": {1, 2}}))
    with pytest.raises(TrialError, match=r"the label, which is sent with the output\['k'\]: .*: got set"):
        to_payload(WithLabel(torch.ones(1), {"k": {1, 2}}))


@settings(max_examples=50)
@given(VALUES)
def test_a_rank_hands_itself_what_others_would_receive(value: Any):
    kept, sent = local_payload(value), travel(value)
    assert alike(kept.value, sent.value) and kept.differentiable == sent.differentiable


def test_a_tensor_that_is_handed_on_is_not_copied():
    weight = torch.ones(2, requires_grad=True)
    output = weight * 2
    kept = local_payload(WithLabel({"x": output}, 5))
    assert kept.differentiable == [True] and kept.value == ({"x": kept.tensors[0]}, 5)
    assert kept.tensors[0].data_ptr() == output.data_ptr() and not kept.tensors[0].requires_grad


def pair() -> tuple[SendChannel, ReceiveChannel]:
    first, second = axes(2)
    return SendChannel(first, 1, 5), ReceiveChannel(second, 0, 5, CPU)


def test_a_message_is_a_header_and_its_bytes():
    first, second = axes(2)
    outbox, inbox = SendChannel(first, 1, 5), ReceiveChannel(second, 0, 5, CPU)
    for number in range(3):
        outbox.send(parse(f"0SEND_F{number}"), torch.full((4,), float(number)), samples=1)
    assert first._queues[0, 1].qsize() == 3 * 2
    assert [inbox.take(parse(f"1RECV_F{number}"))[0].value[0].item() for number in range(3)] == [0, 1, 2]
    assert (first.counters.get("send", "pipe").calls, first.counters.get("send", "pipe").bytes) == (3, 48)
    assert first.counters.get("header", "pipe").bytes == 3 * HEADER


def test_another_message_than_expected_is_an_error():
    outbox, inbox = pair()
    outbox.send(parse("0SEND_F1"), torch.ones(1), samples=1)
    with pytest.raises(MeshError, match=r"1RECV_F0 from rank 0: .* got 0SEND_F1"):
        inbox.take(parse("1RECV_F0"))


def test_a_failure_comes_instead():
    outbox, inbox = pair()
    inbox.prepare(1)
    outbox.fail("rank 0: it broke")
    outbox.linger()
    with pytest.raises(PeerFailed, match="rank 0: it broke"):
        inbox.take(parse("1RECV_F0"))


def test_tags_are_no_collective_s():
    order = CallOrder()
    collectives = {order.note("a") for _ in range(4000)}
    mine = {message_tags(channel, number) for channel in range(0, 2048, 97) for number in range(40)}
    assert not collectives & mine and all(0 <= tag < 2**31 for tag in mine)
    assert not {message_tags(1, number) for number in range(40)} & {message_tags(2, number) for number in range(40)}
