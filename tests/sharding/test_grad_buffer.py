"""Gradients are collected in one buffer per group; which memory it has, and when peers may read
it."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

from tests.sharding.parts import address, make_grad_buffer, make_group, parameters
from zero_trial.sharding.grad_buffer import SMALL, GradBuffer

LARGE = (SMALL // 64, 64)
BELOW = (SMALL // 64, 63)


def loss_of(params: list[nn.Parameter], factor: float = 1.0) -> torch.Tensor:
    """Its gradient is ``factor`` times 1, 2, 3 ... for the first, second, third parameter."""
    return torch.stack([factor * (index + 1) * param.sum() for index, param in enumerate(params)]).sum()


def gather(grad_buffer: GradBuffer) -> None:
    grad_buffer.group.unshard_async()
    grad_buffer.group.finish_unshard()


def backward(grad_buffer: GradBuffer, params: list[nn.Parameter], factor: float = 1.0) -> None:
    gather(grad_buffer)
    grad_buffer.begin_pass()
    loss_of(params, factor).backward()
    grad_buffer.end_pass()


@pytest.mark.parametrize(("stage", "shape"), [(0, LARGE), (1, BELOW), (2, LARGE), (3, BELOW)])
def test_gradients_land_and_are_added_up_in_views_of_one_buffer(stage: int, shape: tuple[int, ...]) -> None:
    """The claim of the design: ``.grad`` and the buffer that is reduced are the same storage."""
    params = parameters([shape, (3,), shape])
    grad_buffer, done = make_grad_buffer(make_group(params, stage, reduce_every="boundary"))
    for turn, value in enumerate((1.0, 11.0, 111.0)):
        backward(grad_buffer, params, factor=10.0**turn)
        assert {address(param.grad) for param in params} == {address(grad_buffer.full)}  # type: ignore[arg-type]
        for index, (param, slot) in enumerate(zip(params, grad_buffer.group.layout.slots, strict=True)):
            assert grad_buffer.full[slot.offset : slot.offset + slot.numel].eq(value * (index + 1)).all()
            assert param.grad is grad_buffer.views[index]
        assert done == [grad_buffer] * (turn + 1)
    grad_buffer.seal()
    assert all(param.grad is None for param in params)


def test_padding_and_parameters_without_a_gradient_are_zeros() -> None:
    params = parameters([(5,), LARGE, (7,)])
    grad_buffer, done = make_grad_buffer(make_group(params, 2))
    grad_buffer.allocate()
    grad_buffer.full.fill_(float("nan"))  # whatever an earlier step left
    grad_buffer.begin_pass()
    params[0].sum().backward()
    grad_buffer.end_pass()
    full = grad_buffer.seal()
    assert done == [], "the group never became complete"
    assert full[:5].eq(1).all() and full[5:].eq(0).all()


def test_complete_means_every_parameter_once_per_pass() -> None:
    params = parameters([(5,), (6,), LARGE])
    grad_buffer, done = make_grad_buffer(make_group(params))
    grad_buffer.begin_pass()
    params[0].sum().backward()
    params[0].sum().backward()
    params[1].sum().backward()
    assert done == []
    params[2].sum().backward()
    assert done == [grad_buffer] and not grad_buffer.late
    params[0].sum().backward()
    assert grad_buffer.late and len(done) == 1
    grad_buffer.begin_pass()
    params[2].sum().backward()
    assert len(done) == 1 and grad_buffer.seal()[:5].eq(3).all()


@pytest.mark.parametrize(("stage", "shape"), [(1, BELOW), (2, BELOW), (2, LARGE)])
def test_a_sealed_buffer_is_not_written_and_late_gradients_wait(stage: int, shape: tuple[int, ...]) -> None:
    params = parameters([shape])
    grad_buffer, _ = make_grad_buffer(make_group(params, stage))
    backward(grad_buffer, params)
    full = grad_buffer.seal()
    assert not grad_buffer.has_gradients
    params[0].sum().backward()
    params[0].sum().backward()
    assert full[: params[0].numel()].eq(1).all(), "being reduced: hands off"
    assert grad_buffer.has_gradients and params[0].grad is not None and address(params[0].grad) != address(full)
    again = grad_buffer.seal()
    assert again[: params[0].numel()].eq(2).all() and not grad_buffer.has_gradients


@pytest.mark.parametrize("shared", [True, False])
def test_a_freed_buffer_has_no_memory(shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the package keeps what peers read; other memory comes back under the same
    views."""
    group = make_group(parameters([(3, 5), (7,)]), 2)
    monkeypatch.setattr(group.comm, "shares_memory", lambda device: shared)
    grad_buffer, _ = make_grad_buffer(group)
    grad_buffer.allocate()
    gone, view = weakref.ref(grad_buffer.full), grad_buffer.views[0]
    grad_buffer.seal()
    grad_buffer.end_reduction()
    if shared:
        del view
        assert grad_buffer.full.numel() == 0 and gone() is None
    else:
        assert grad_buffer.full.untyped_storage().nbytes() == 0
        grad_buffer.allocate()
        assert grad_buffer.views[0] is view and grad_buffer.full.untyped_storage().nbytes() == 4 * group.layout.numel
