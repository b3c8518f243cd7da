"""The GPT alone: shapes, causality, seeds, gradients that mean something, and a loss that goes
down."""

from __future__ import annotations

import math

import pytest
import torch

from tests.model_defs.folder import import_from

gpt = import_from("gpt", "model")
SMALL = gpt.GPTConfig(vocabulary=32, sequence=16, layers=2, heads=2, width=16)


def tokens(batch: int = 3, sequence: int = 16, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 32, (batch, sequence), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def test_tokens_give_logits_and_targets_give_a_loss() -> None:
    model = gpt.GPT(SMALL, seed=1)
    assert model(tokens()).shape == (3, 16, 32)
    # it knows nothing yet
    assert float(model(tokens(), tokens(seed=1))) == pytest.approx(math.log(32), abs=0.1)
    assert model(tokens(sequence=5)).shape == (3, 5, 32)


@torch.no_grad()
def test_no_position_sees_a_later_one() -> None:
    model = gpt.GPT(SMALL, seed=1)
    changed = tokens()
    changed[:, 9] = (changed[:, 9] + 1) % 32
    before, after = model(tokens()), model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.allclose(before[:, 9:], after[:, 9:])


def test_a_seed_decides_the_weights_and_leaves_the_random_state_alone() -> None:
    state = torch.get_rng_state()
    first, again, other = (gpt.GPT(SMALL, seed=seed).state_dict() for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["blocks.0.up.weight"], other["blocks.0.up.weight"])


def test_a_tied_model_has_one_matrix_for_input_and_output() -> None:
    model = gpt.GPT(gpt.GPTConfig(vocabulary=32, sequence=16, layers=1, heads=2, width=16, tied=True), seed=1)
    assert model.head.weight is model.tokens.weight
    assert "head.weight" not in dict(model.named_parameters())


def test_every_parameter_has_a_gradient_that_is_not_zero_in_theory() -> None:
    # In float64 a gradient that is zero in theory comes out near 1e-17; real ones are many orders
    # above.
    model = gpt.GPT(SMALL, seed=1).double()
    model(tokens(), tokens(seed=1)).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.abs().max() > 1e-8, name


def test_heads_must_divide_the_width() -> None:
    with pytest.raises(ValueError, match="width 16 must be a multiple of heads 3"):
        gpt.GPT(gpt.GPTConfig(width=16, heads=3))


def test_the_loss_goes_down() -> None:
    model = gpt.GPT(SMALL, seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    text = tokens(batch=8, sequence=17)
    for _ in range(60):
        loss = model(text[:, :-1], text[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.5 * math.log(32)
