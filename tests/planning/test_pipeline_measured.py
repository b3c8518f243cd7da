"""What a plan says of each stage, and what real ranks of a pipeline hold."""

from __future__ import annotations

from typing import Any

import pytest

from tests.planning.pipelines import batch, ds_config, pipeline, settings, watched_step
from tests.support.pool import Pools
from zero_trial.planning.pipeline_plan import PipelinePlanner

CASES: list[tuple[int, int, str, dict[str, Any]]] = [
    # ranks, ZeRO stage, schedule, further keys
    (2, 0, "1f1b", {}),
    (2, 1, "zb_h1", {}),
    (2, 2, "zb_v", {}),
    (4, 2, "gpipe", {}),
    (4, 3, "1f1b", {}),
    (4, 3, "looped_bfs", {"pipeline": {"zero_policy": "chunk"}}),
    (4, 1, "interleaved", {"bf16": {"enabled": True}}),
]


@pytest.mark.parametrize(("ranks_", "stage", "schedule", "more"), CASES)
def test_the_plan_is_met_within_a_tenth(
    ranks: Pools, ranks_: int, stage: int, schedule: str, more: dict[str, Any]
) -> None:
    held = ranks(ranks_).run(watched_step, ds_config(stage, schedule, **more))
    plan = PipelinePlanner(pipeline(), settings(stage, schedule, **more), ranks_, batch()).plan()
    for number, figures in enumerate(row.figures for row in plan.stages):
        measured = held[number * ranks_ // 2]
        assert figures.states == pytest.approx(measured["states"], rel=0.02)
        assert figures.activations == pytest.approx(measured["activations"], rel=0.05)
        assert figures.peak == pytest.approx(measured["peak"], rel=0.1)
