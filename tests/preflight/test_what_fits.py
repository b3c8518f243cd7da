"""What fits where: its figures are those of plans."""

from __future__ import annotations

import pytest
import torch

from zero_trial.preflight.compare import Planner
from zero_trial.preflight.dry_run import ModelSubject
from zero_trial.preflight.what_fits import Fit, Llama, Shape, settings_of, state_bytes

SMALL = Shape(2, 256, 704, 4, 2, 1000)

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has the GPU")


@no_gpu
@pytest.mark.parametrize(
    ("way", "ranks"), [("0", 8), ("1", 64), ("2", 8), ("3", 1), ("3", 64), ("3 + O", 8), ("3 + O", 512)]
)
def test_states_are_those_of_a_plan_to_the_byte(way: str, ranks: int) -> None:
    model, words = Llama(SMALL), torch.zeros(1, 32, dtype=torch.long)
    plan = Planner(ModelSubject(model, words, device="cuda"), settings_of(way), ranks).plan()
    assert plan.how == "meta tensors"
    assert state_bytes(model, way, ranks) == plan.figures.states


def test_the_first_way_that_fits() -> None:
    fit = Fit("a", 8, {"0": 90 << 30, "2": 30 << 30, "3": 10 << 30}, {"0": 0, "2": 2 << 30, "3": 4 << 30})
    assert [fit.cheapest(gpu) for gpu in (8, 24, 40, 80)] == ["–", "3", "2", "2"]
