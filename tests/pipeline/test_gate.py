"""Where received tensors enter a graph."""

from __future__ import annotations

import torch

from zero_trial.pipeline.channel import Payload
from zero_trial.pipeline.stage import StageBoundary, detached, local_payload


def anchor() -> torch.Tensor:
    return torch.zeros((), requires_grad=True)


def test_gradients_come_out_where_tensors_went_in():
    first, second, index = torch.ones(3), torch.full((3,), 2.0), torch.tensor([0, 2])
    gate = StageBoundary(
        Payload({"a": first, "i": index, "b": [second]}, [first, index, second], [True, False, True]), anchor()
    )
    value = gate.open()
    assert value["i"] is index
    (value["a"] * value["b"][0] * 5).sum().backward()
    a, b = gate.take()
    assert torch.equal(a, torch.full((3,), 10.0))
    assert torch.equal(b, torch.full((3,), 5.0))


def test_a_tensor_that_is_not_used_has_no_gradient():
    used, unused = torch.ones(2), torch.ones(2)
    gate = StageBoundary(Payload((used, unused), [used, unused], [True, True]), anchor())
    value = gate.open()
    (value[0] * 3).sum().backward()
    found = gate.take()
    assert torch.equal(found[0], torch.full((2,), 3.0))
    assert found[1] is None


def test_a_layer_may_work_in_place_on_it():
    received = torch.tensor([-1.0, 2.0])
    gate = StageBoundary(Payload(received, [received], [True]), anchor())
    torch.relu_(gate.open()).sum().backward()
    assert torch.equal(gate.take()[0], torch.tensor([0.0, 1.0]))


def test_nothing_is_copied():
    received = torch.ones(4)
    gate = StageBoundary(Payload(received, [received], [True]), anchor())
    inside = gate.open()
    assert inside.data_ptr() == received.data_ptr()
    assert not inside.is_leaf
    assert not inside._is_view()


def test_without_gradients_the_value_goes_through():
    tokens = torch.tensor([1, 2])
    gate = StageBoundary(Payload((tokens, None), [tokens], [False]), anchor())
    assert gate.open()[0] is tokens
    assert gate.node is None
    assert gate.take() == []


def test_handing_over_is_as_good_as_sending():
    weight = torch.ones(2, requires_grad=True)
    parcel = local_payload((weight * 2, {"k": torch.ones(1)}, 5))
    assert parcel.differentiable == [True, False]
    assert parcel.value[2] == 5
    assert not any(tensor.requires_grad for tensor in parcel.tensors)
    assert not detached([weight * 2])[0].requires_grad
