"""The GPT, also as a pipeline with the same weights and the same loss on any number of stages, and
the masked-language model with its data: shapes, causality, seeds, gradients that mean something."""

from __future__ import annotations

import pytest
import torch

from tests.model_defs.folder import import_from
from zero_trial.pipeline.module import PipelineModule
from zero_trial.pipeline.schedule import ChunkPlacement

gpt = import_from("gpt", "model")
SMALL = gpt.GPTConfig(vocabulary=32, sequence=16, layers=2, heads=2, width=16)


def text(batch: int = 3, sequence: int = 16, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 32, (batch, sequence), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def test_no_position_sees_a_later_one() -> None:
    model = gpt.GPT(SMALL, seed=1)
    changed = text()
    changed[:, 9] = (changed[:, 9] + 1) % 32
    before, after = model(text()), model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.allclose(before[:, 9:], after[:, 9:])


layers = import_from("gpt", "layers")


def config(tied: bool = True) -> object:
    return gpt.GPTConfig(vocabulary=32, sequence=16, layers=3, heads=2, width=16, tied=tied)


def stage(number: int, of: int, tied: bool = True) -> PipelineModule:
    module = PipelineModule(layers.gpt_layers(config(tied), seed=5), loss_fn=layers.next_byte_loss)
    module.build(ChunkPlacement.loop(of), number)
    return module


@pytest.mark.parametrize(("stages", "tied"), [(1, False), (2, True), (4, True)])
@torch.no_grad()
def test_the_same_loss_from_the_same_seed_however_it_is_cut(stages: int, tied: bool) -> None:
    dense = gpt.GPT(config(tied), seed=5)
    parts = [stage(number, stages, tied) for number in range(stages)]
    value = text(seed=1)
    for part in parts:
        value = part(value)
    assert torch.equal(value, dense(text(seed=1)))
    assert torch.equal(parts[-1].loss_fn(value, text(seed=2)), dense(text(seed=1), text(seed=2)))


bert, data = import_from("bert_mlm", "model"), import_from("bert_mlm", "data")
BERT = bert.EncoderConfig(vocabulary=32, sequence=16, layers=2, heads=2, width=16, dropout=0.0)


def masked() -> torch.Tensor:
    targets = torch.full((4, 16), bert.IGNORED)
    targets[:, ::5] = text(4, seed=1)[:, ::5]
    return targets


@torch.no_grad()
def test_the_loss_is_over_masked_places_only() -> None:
    model = bert.MaskedLanguageModel(BERT, seed=1)
    logits = model(text(4))
    assert logits.shape == (4, 16, 32)
    chosen = masked() != bert.IGNORED
    picked = logits.log_softmax(-1)[chosen].gather(1, masked()[chosen].unsqueeze(1))
    assert float(model(text(4), masked())) == pytest.approx(-float(picked.mean()), rel=1e-5)


@pytest.mark.parametrize("kind", ["GPT", "BERT"])
def test_a_seed_decides_the_weights_and_every_parameter_learns(kind: str) -> None:
    state = torch.get_rng_state()
    model, again, other = (
        gpt.GPT(SMALL, seed=seed) if kind == "GPT" else bert.MaskedLanguageModel(BERT, seed=seed) for seed in (1, 1, 2)
    )
    assert torch.equal(torch.get_rng_state(), state)
    weights, others = again.state_dict(), other.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert any(not torch.equal(value, others[name]) for name, value in weights.items())
    assert kind == "GPT" or model.decoder.weight is model.tokens.weight
    # in float64 a gradient that is zero in theory comes out near 1e-17
    model.double()(text(4), text(4, seed=1) if kind == "GPT" else masked()).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.abs().max() > 1e-8, name


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
