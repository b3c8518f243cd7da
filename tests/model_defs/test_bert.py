"""The masked-language model alone (shapes, both directions, seeds, gradients, a falling loss) and
its data."""

from __future__ import annotations

import math

import pytest
import torch

from tests.model_defs.folder import import_from

bert, data = import_from("bert_mlm", "model"), import_from("bert_mlm", "data")
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


TEXT = torch.randint(0, 256, (20_001,), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))


def test_a_window_is_framed_and_15_percent_of_its_bytes_are_targets() -> None:
    dataset = data.MaskedBytes(TEXT, sequence=102, seed=1)
    tokens, targets = dataset[4]
    assert tokens.shape == targets.shape == (102,)
    assert (tokens[0], tokens[-1]) == (data.CLS, data.SEP)
    chosen = targets != data.IGNORED
    assert int(chosen.sum()) == 15
    window = TEXT[400:500].long()
    assert torch.equal(targets[1:-1][chosen[1:-1]], window[chosen[1:-1]])
    assert torch.equal(tokens[1:-1][~chosen[1:-1]], window[~chosen[1:-1]])


def test_of_the_masked_places_80_percent_are_hidden_10_random_10_kept() -> None:
    dataset = data.MaskedBytes(TEXT, sequence=102, seed=1)
    shown, truth = (torch.cat([dataset[i][side] for i in range(len(dataset))]) for side in (0, 1))
    shown, truth = shown[truth != data.IGNORED], truth[truth != data.IGNORED]
    hidden, kept = (shown == data.MASK).float().mean(), (shown == truth).float().mean()
    assert len(truth) == 200 * 15
    assert abs(hidden - 0.8) < 0.03
    assert abs(kept - 0.1) < 0.03
    assert bool((shown <= data.MASK).all())


def test_masks_depend_on_seed_and_index_only() -> None:
    first, again, other = (data.MaskedBytes(TEXT, 102, seed=seed) for seed in (1, 1, 2))
    state = torch.get_rng_state()
    assert torch.equal(first[7][0], again[7][0])
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(first[7][0], other[7][0])
    assert not torch.equal(first[7][1] != data.IGNORED, first[8][1] != data.IGNORED)


def test_predicted_bytes_are_the_masked_ones() -> None:
    dataset = data.MaskedBytes(TEXT, 102, seed=1, windows=3)
    expected = torch.cat([dataset[i][1][dataset[i][1] != data.IGNORED] for i in range(3)])
    assert torch.equal(dataset.predicted_bytes().long(), expected)
    assert dataset.predicted_bytes().dtype == torch.uint8
