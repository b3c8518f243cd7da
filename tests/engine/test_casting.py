"""Floating inputs get the parameters' dtype, whatever they are packed in."""

from __future__ import annotations

import torch

from zero_trial.precision import cast_floats


def test_floats_are_cast_and_all_else_stays():
    tokens, mask, wide = torch.arange(3), torch.tensor([True]), torch.ones(2, dtype=torch.float64)
    args, kwargs = cast_floats(
        ((torch.ones(2), tokens, "text", None), {"mask": mask, "deep": [{"x": torch.ones(1)}], "wide": wide}),
        torch.bfloat16,
    )
    assert args[0].dtype == torch.bfloat16
    assert args[1] is tokens
    assert args[2:] == ("text", None)
    assert kwargs["mask"] is mask
    assert kwargs["wide"] is wide, "64-bit inputs are meant"
    assert kwargs["deep"][0]["x"].dtype == torch.bfloat16


def test_nothing_is_copied_that_has_the_dtype():
    x = torch.ones(2, dtype=torch.float16)
    assert cast_floats([x], torch.float16)[0] is x


def test_gradients_go_through_the_cast():
    x = torch.ones(2, requires_grad=True)
    cast_floats(x, torch.bfloat16).sum().backward()
    assert torch.equal(x.grad, torch.ones(2))
