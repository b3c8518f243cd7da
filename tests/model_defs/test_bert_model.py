"""The masked-language model alone: shapes, sight in both directions, seeds, gradients, and a loss that goes down."""

from __future__ import annotations

import math

import pytest
import torch

from tests.model_defs.folder import import_from

bert = import_from("bert_mlm", "model")
SMALL = bert.EncoderConfig(vocabulary=32, sequence=16, layers=2, heads=2, width=16, dropout=0.0)


def tokens(seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 32, (4, 16), generator=torch.Generator().manual_seed(seed))


def masked() -> torch.Tensor:
    targets = torch.full((4, 16), bert.IGNORED)
    targets[:, ::5] = tokens(seed=1)[:, ::5]
    return targets


@torch.no_grad()
def test_the_loss_is_over_masked_places_only() -> None:
    model = bert.MaskedLanguageModel(SMALL, seed=1)
    logits = model(tokens())
    assert logits.shape == (4, 16, 32)
    places = masked() != bert.IGNORED
    picked = logits.log_softmax(-1)[places].gather(1, masked()[places].unsqueeze(1))
    assert float(model(tokens(), masked())) == pytest.approx(-float(picked.mean()), rel=1e-5)


@torch.no_grad()
def test_every_position_sees_every_other() -> None:
    model = bert.MaskedLanguageModel(SMALL, seed=1)
    changed = tokens()
    changed[:, 9] = (changed[:, 9] + 1) % 32
    assert ((model(tokens()) - model(changed)).abs().amax(-1) > 0).all()


def test_input_and_output_share_one_matrix() -> None:
    model = bert.MaskedLanguageModel(SMALL, seed=1)
    assert model.decoder.weight is model.tokens.weight


def test_a_seed_decides_the_weights() -> None:
    state = torch.get_rng_state()
    first, again = (bert.MaskedLanguageModel(SMALL, seed=1).state_dict() for _ in range(2))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_every_parameter_has_a_gradient_that_is_not_zero_in_theory() -> None:
    model = bert.MaskedLanguageModel(SMALL, seed=1).double()
    model(tokens(), masked()).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.abs().max() > 1e-8, name


def test_the_loss_goes_down() -> None:
    model = bert.MaskedLanguageModel(SMALL, seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        loss = model(tokens(), masked())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.5 * math.log(32)
