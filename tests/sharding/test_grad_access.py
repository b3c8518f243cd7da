"""What ``param.grad`` shows of a sharded model's gradients between a backward pass and the step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.sharding.parts import make_model
from zero_trial.errors import TrialError
from zero_trial.sharding.grad_access import LazyGradient
from zero_trial.sharding.model import ShardedModel


def after_backward(stage: int = 1, *, last: bool = True) -> tuple[ShardedModel, nn.Linear, torch.Tensor]:
    """A model after one backward pass, its module, and the gradient of the weight."""
    torch.manual_seed(0)
    module = nn.Linear(3, 2)
    model = make_model(module, stage, plan={} if last else {"reduce_every": "micro"})
    x = torch.randn(4, 3)
    expected = torch.autograd.grad((module(x) ** 2).sum(), module.weight)[0]
    model.begin_backward(reduce=True, last=last)
    (module(x) ** 2).sum().backward()
    model.end_backward(show=last)
    return model, module, expected


def square_sum(model: ShardedModel) -> float:
    return sum(float(total) for total in model.owned_square_sums())


def test_a_gradient_is_made_when_it_is_used() -> None:
    model, module, expected = after_backward()
    assert model.param_grads.complete and isinstance(module.weight.grad, LazyGradient)
    assert torch.equal(module.weight.grad + 0, expected)


def test_an_edit_counts_in_the_norm() -> None:
    model, module, _ = after_backward()
    before = square_sum(model)
    assert module.weight.grad is not None and module.bias.grad is not None
    module.weight.grad.mul_(2)
    module.bias.grad.mul_(2)
    model.param_grads.take_edits()
    assert square_sum(model) == pytest.approx(4 * before)


def test_what_was_hidden_is_shown_again() -> None:
    model, module, expected = after_backward()
    shown = module.weight.grad
    before = model.param_grads.rescale(0.5)
    assert module.weight.grad is None and not model.param_grads.complete
    model.param_grads.show_again(before)
    assert module.weight.grad is shown and torch.equal(shown + 0, expected)


def test_a_use_before_the_last_micro_batch_is_an_error() -> None:
    model, module, _ = after_backward(stage=2, last=False)
    assert not model.param_grads.complete and isinstance(module.weight.grad, LazyGradient)
    with pytest.raises(TrialError, match="before its last micro-batch"):
        module.weight.grad + 0


def test_gradients_that_are_cut_cannot_be_read() -> None:
    _, module, _ = after_backward(stage=2)
    with pytest.raises(TrialError, match="full gradients do not live at this ZeRO stage"):
        module.weight.grad + 0  # type: ignore[operator]
