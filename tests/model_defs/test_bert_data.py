"""Masked windows: how many places, what stands there, and that the index decides everything."""

from __future__ import annotations

import torch

from tests.model_defs.folder import import_from

data = import_from("bert_mlm", "data")
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
