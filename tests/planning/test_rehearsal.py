"""The rehearsed rank against real ranks that train."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.planning.measured import ROWS, batch, build, ds_config, watched_step
from tests.support.pool import Pools
from zero_trial.config import read_ds_config
from zero_trial.errors import ConfigError
from zero_trial.planning.blueprint import Blueprint
from zero_trial.planning.plan import Figures
from zero_trial.planning.rehearsal import Role, rehearse, rehearse_either, variant


def planned(folder: str, config: dict[str, Any], *, imagined: bool, ranks: int = 2) -> Figures:
    role = Role(Blueprint(build(folder)), read_ds_config(config))
    given = role.blueprint.batch(batch(), imagined=imagined)

    def micro(engines: Any, imagined: bool) -> None:
        engines[0].backward(engines[0](*given))
        engines[0].step()

    return rehearse([role], ranks, micro, calls=config["gradient_accumulation_steps"], imagined=imagined)


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("folder", ["gpt", "bert_mlm"])
def test_the_plan_is_what_real_ranks_need(ranks: Pools, folder: str, stage: int, bf16: bool) -> None:
    config = ds_config(stage, bf16=bf16)
    figures = planned(folder, config, imagined=True)
    assert figures.peak is not None and figures.activations is not None
    for real in ranks(2).run(watched_step, folder, config):
        states = real["parameters"] + real["gradients"] + real["optimizer"]
        assert figures.states == pytest.approx(states, rel=0.02)
        assert (figures.parameters, figures.gradients, figures.optimizer) == (
            real["parameters"],
            real["gradients"],
            real["optimizer"],
        )
        assert figures.peak == pytest.approx(real["peak"], rel=0.10)
        assert figures.activations == pytest.approx(real["activations"], rel=0.10)
        assert states <= real["live"] <= 1.02 * states + 8192  # the watcher misses nothing, and little else lives on
