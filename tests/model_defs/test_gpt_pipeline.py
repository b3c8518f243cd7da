"""The GPT of model_defs/gpt as a pipeline: the same weights and the same loss on any number of
stages."""

from __future__ import annotations

import pytest
import torch

import zero_trial
from tests.model_defs.folder import import_from
from tests.support.pool import Pools
from zero_trial.pipeline.module import PipelineModule
from zero_trial.pipeline.schedule import ChunkPlacement

gpt = import_from("gpt", "model")
layers = import_from("gpt", "layers")


def config(tied: bool = True) -> object:
    return gpt.GPTConfig(vocabulary=32, sequence=16, layers=3, heads=2, width=16, tied=tied)


def tokens(seed: int) -> torch.Tensor:
    return torch.randint(0, 32, (3, 16), generator=torch.Generator().manual_seed(seed))


def stage(number: int, of: int, tied: bool = True) -> PipelineModule:
    module = PipelineModule(layers.gpt_layers(config(tied), seed=5), loss_fn=layers.next_byte_loss)
    module.build(ChunkPlacement.loop(of), number)
    return module


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("stages", [1, 2, 4])
@torch.no_grad()
def test_the_same_loss_from_the_same_seed_however_it_is_cut(stages: int, tied: bool) -> None:
    dense = gpt.GPT(config(tied), seed=5)
    parts = [stage(number, stages, tied) for number in range(stages)]
    value = tokens(1)
    for part in parts:
        value = part(value)
    assert torch.equal(value, dense(tokens(1)))
    assert torch.equal(parts[-1].loss_fn(value, tokens(2)), dense(tokens(1), tokens(2)))


@pytest.mark.parametrize("tied", [True, False])
def test_a_stage_builds_its_own_layers_and_the_whole_is_counted_anywhere(tied: bool) -> None:
    whole = sum(parameter.numel() for parameter in gpt.GPT(config(tied)).parameters())
    sizes = [sum(parameter.numel() for parameter in stage(number, 2, tied).parameters()) for number in range(2)]
    assert sum(sizes) - whole == (32 * 16 if tied else 0)  # the tied matrix is on both
    assert max(sizes) < whole
    unbuilt = PipelineModule(layers.gpt_layers(config(tied), seed=5))
    assert unbuilt.total_parameters == stage(0, 2, tied).total_parameters == whole


def test_building_leaves_the_random_state_alone() -> None:
    state = torch.get_rng_state()
    stage(1, 2)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_matrix_of_both_ends_is_one_on_one_rank() -> None:
    whole = stage(0, 1)
    assert [name for name, _ in whole.named_parameters() if "tied" in name] == ["tied_modules.embedding.weight"]
    whole.loss_fn(whole(tokens(1)), tokens(2)).backward()
    assert whole.tied_modules["embedding"].weight.grad is not None


def train_gpt(sizes: dict[str, object], pipe: int, stage: int) -> list[float]:
    """Losses of five steps of one rank: of the GPT (pipe 1) or of its pipeline, on the same
    batches."""
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage, "param_persistence_threshold": 0},
        "mesh": {"pipe": pipe},
        "comm_timeout_seconds": 30.0,
    }
    module = import_from("gpt", "model")
    made = import_from("gpt", "layers")
    settings = module.GPTConfig(**sizes)
    if pipe == 1:
        model: torch.nn.Module = module.GPT(settings, seed=5)
    else:
        model = PipelineModule(made.gpt_layers(settings, seed=5), loss_fn=made.next_byte_loss)
    engine = zero_trial.initialize(model=model, config=config)[0]
    losses = []
    for step in range(5):
        batches = [(tokens(8 * step + part)[:2], tokens(8 * step + part + 4)[:2]) for part in range(4)]
        if pipe > 1:
            losses.append(engine.train_batch(iter(batches)).item())
            continue
        parts = []
        for inputs, targets in batches:
            loss = engine(inputs, targets)
            engine.backward(loss)
            engine.step()
            parts.append(loss.item())
        losses.append(sum(parts) / len(parts))
    engine.destroy()
    return losses


@pytest.mark.parametrize("tied", [True, False])
def test_it_learns_what_the_other_learns(ranks: Pools, tied: bool) -> None:
    sizes = {"vocabulary": 32, "sequence": 16, "layers": 3, "heads": 2, "width": 16, "tied": tied}
    (alone,) = ranks(1).run(train_gpt, sizes, 1, 0)
    for stage in (0, 3):
        for losses in ranks(2).run(train_gpt, sizes, 2, stage):
            assert losses == pytest.approx(alone, rel=1e-5)
    assert len(set(alone)) == 5
