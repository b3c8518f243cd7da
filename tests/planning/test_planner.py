"""Plans of one subject, each made once."""

from __future__ import annotations

import pytest
import torch

from tests.planning.measured import ROWS, batch, build, ds_config
from tests.planning.test_changes import Formula, planner
from tests.support.memory_plans import memory_plan, planner_of
from zero_trial.errors import ConfigError


def test_a_plan_for_a_model() -> None:
    plan = memory_plan(build("gpt"), ds_config(2), 2, batch())
    assert (plan.stage, plan.ranks, plan.micro_batch, plan.precision) == (2, 2, ROWS, "fp32")
    states = plan.figures.parameters + plan.figures.gradients + plan.figures.optimizer
    # fp32 AdamW at stage 2 on two ranks: 4 whole, and (4 + 8) / 2 bytes per parameter, and some
    # padding
    assert states == pytest.approx(10 * plan.parameter_count, rel=0.01)
    assert plan.figures.peak is not None and plan.figures.activations is not None
    assert plan.figures.peak > states + plan.figures.activations * 0.9


def test_without_a_batch_the_states_are_planned() -> None:
    whole, states = memory_plan(build("gpt"), ds_config(3), 2, batch()), memory_plan(build("gpt"), ds_config(3), 2)
    assert states.figures.states == whole.figures.states and states.figures.peak is None and states.how == "none"


def test_a_model_on_the_meta_device_is_planned_without_being_built() -> None:
    with torch.device("meta"):
        model = torch.nn.Sequential(*(torch.nn.Linear(4096, 4096, bias=False) for _ in range(24)))
    # 0.4 G parameters: 6 GiB if it were real
    plan = memory_plan(model, ds_config(3, bf16=True), 64)
    assert plan.figures.states == pytest.approx(16 * plan.parameter_count / 64, rel=0.01)


def test_smaller_micro_batches_hold_smaller_activations() -> None:
    own = planner_of(build("gpt"), ds_config(1), 2, batch())
    whole, half = own.plan(), own.plan(micro_batch=ROWS // 2)
    assert half.accumulation == 2 and whole.figures.activations is not None and half.figures.activations is not None
    assert half.figures.activations == pytest.approx(whole.figures.activations / 2, rel=0.05)
    assert half.figures.states == whole.figures.states


def test_each_plan_is_made_once() -> None:
    chosen = planner(micro=4)
    chosen.compare()
    chosen.compare()
    subject = chosen._subject
    assert isinstance(subject, Formula) and sorted(subject.asked) == [
        (0, 4),
        (1, 4),
        (2, 1),
        (2, 2),
        (2, 4),
        (2, 4),
        (3, 4),
    ]


def test_halvings() -> None:
    assert planner(micro=12, accumulation=3).halvings() == [6, 3]
    assert planner(micro=12, accumulation=3).plan(micro_batch=3).accumulation == 12
    assert planner(micro=5).halvings() == []


def test_what_is_configured_must_be_possible() -> None:
    with pytest.raises(ConfigError, match="this stage cannot be"):
        planner(refused=(2,)).compare()
