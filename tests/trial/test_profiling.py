"""torch's profiler: entered once, stepped once per optimizer step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.trial.harness import LineTrial, run_rank, steps


def test_it_is_stepped_per_optimizer_step_and_not_per_micro_batch(tmp_path: Path) -> None:
    ready: list[int] = []

    class Profiled(LineTrial):
        def __init__(self, context: Any) -> None:
            super().__init__(context)
            context.set_profiler(
                activities=[torch.profiler.ProfilerActivity.CPU],
                schedule=torch.profiler.schedule(wait=1, warmup=1, active=1, repeat=1),
                on_trace_ready=lambda profile: ready.append(profile.step_num),
            )

    run_rank(Profiled, steps(4), ds_config={"gradient_accumulation_steps": 2}, tensorboard_path=tmp_path)
    assert ready == [3]
