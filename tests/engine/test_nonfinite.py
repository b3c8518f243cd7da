"""How a gradient that is not finite is told. Who is named on several ranks: see test_behaviour_precision."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zero_trial
from zero_trial.engine.step import NonFiniteStep, agree_on_culprit, local_culprits, with_culprit
from zero_trial.errors import Diverged


@pytest.mark.parametrize(("rank", "who"), [(3, "on rank 3"), (0, "on rank 0"), (None, "in the sum over ranks")])
def test_one_line_says_which_step_parameter_and_rank(rank: int | None, who: str):
    assert (
        NonFiniteStep(7, rank, "head.weight").describe() == f"step 7: the gradient of head.weight is not finite {who}"
    )


def test_the_end_of_a_run_names_the_culprit():
    error = Diverged("no scale left", where="loss scale", got="scale 1", expected="more", fix="Use bf16.")
    assert with_culprit(error, None) is error
    text = str(with_culprit(error, NonFiniteStep(2, 1, "a.b")))
    assert (
        text
        == "loss scale: no scale left: got scale 1, and step 2: the gradient of a.b is not finite on rank 1, expected more. Use bf16."
    )


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ["0.bias", "2.weight"])
def test_a_single_rank_names_itself(stage: int, name: str):
    model = nn.Sequential(nn.Linear(3, 40), nn.Tanh(), nn.Linear(40, 2))
    config = {
        "train_batch_size": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "zero_optimization": {"stage": stage, "param_persistence_threshold": 0},
    }
    engine = zero_trial.initialize(model=model, config=config)[0]
    before = engine.module_state_dict()
    before = {key: value.clone() for key, value in before.items()}
    dict(model.named_parameters())[name].register_hook(lambda grad: grad * float("nan"))
    engine.backward(engine(torch.ones(2, 3)).sum())
    engine.step()
    assert engine.last_nonfinite == NonFiniteStep(0, 0, name)
    assert not engine.was_step_applied()
    assert engine.skipped_steps == engine.global_steps == 1
    assert all(torch.equal(value, before[key]) for key, value in engine.module_state_dict().items())


class Outside(nn.Module):
    """Reads the weights of blocks whose forward never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = nn.functional.linear(x, layer.weight, layer.bias)
        return x.sum()


@pytest.mark.parametrize(("threshold", "told"), [(0, True), (1000, False)])
def test_weights_read_outside_their_forward_are_told(threshold: int, told: bool):
    config = {
        "train_batch_size": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "zero_optimization": {"stage": 3, "param_persistence_threshold": threshold, "module_granularity_threshold": 1},
    }
    engine = zero_trial.initialize(model=Outside(), config=config)[0]
    engine.backward(engine(torch.ones(1, 4)))
    engine.step()
    assert engine.was_step_applied() != told
    if told:
        assert engine.last_nonfinite is not None
        text = engine.last_nonfinite.describe()
        assert "the forward of layers." in text
        assert "stage3_param_persistence_threshold" in text


@pytest.mark.parametrize("stage", [0, 2])
def test_evidence_after_something_else_has_landed(stage: int) -> None:
    """On CUDA nobody looks while gradients are reduced: the shards tell, and when they were overwritten, the sums tell the unit."""
    model = nn.Sequential(nn.Linear(3, 40), nn.Tanh(), nn.Linear(40, 2))
    config = {
        "train_batch_size": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 130},
    }
    engine = zero_trial.initialize(model=model, config=config)[0]
    model.get_parameter("2.weight").register_hook(lambda grad: grad * float("nan"))
    engine.backward(engine(torch.ones(2, 3)).sum())
    engine.sharded.reducer.reduce_missing()
    sums, sharded = dict(engine.sharded.reducer.square_sums), engine.sharded
    assert len(sharded.groups) > 1
    (row,) = local_culprits(sharded, [], sums)
    assert row == local_culprits(sharded, [])[0]
    number = row[2]
    assert row == (2, 0, number, "2.weight")
    for landing in sharded.grad_buffers:
        landing.shard.zero_()
    assert local_culprits(sharded, []) == []
    unit = sharded.groups[number]
    assert local_culprits(sharded, [], sums) == [(3, 0, number, unit.name)]
    assert agree_on_culprit(sharded, 4, [(3, 0, number, unit.name)], lambda block: True) == NonFiniteStep(
        4, None, unit.name
    )
