"""A run's plan, its measurement, and that neither changes the run."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import zero_trial
from tests.planning.measured import batch, build, ds_config
from tests.planning.pipelines import batch as pipeline_batch
from tests.planning.pipelines import ds_config as pipeline_config
from tests.planning.pipelines import pipeline
from tests.support.pool import Pools
from zero_trial.planning.memory_watch import MemoryWatch


def train(config: dict[str, Any], watched: bool, spoil: bool = False, resume: Path | None = None) -> dict[str, Any]:
    """Losses, events and summary of one rank; dropout is on, so a random state that is touched
    shows."""
    torch.manual_seed(5)
    random.seed(5)
    events: list[dict[str, Any]] = []
    watch = MemoryWatch(events.append, 2)
    model = build("bert_mlm")
    if spoil:
        model.lock = threading.Lock()
    initialize = watch.around(zero_trial.initialize) if watched else zero_trial.initialize
    engine = initialize(model=model, config=config)[0]
    if resume is not None:
        engine.load_checkpoint(resume)
    losses = []
    for _ in range(3):
        for _ in range(engine.gradient_accumulation_steps()):
            loss = engine(*batch())
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    watch.close()
    engine.destroy()
    return {"losses": losses, "events": events, "summary": watch.summary(), "random": random.random()}


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_plan_is_met_and_the_run_is_bit_equal(ranks: Pools, stage: int) -> None:
    config = ds_config(stage, bf16=True, accumulation=2)
    plain, watched = (ranks(2).run(train, config, is_watched) for is_watched in (False, True))
    assert [rank["losses"] for rank in plain] == [rank["losses"] for rank in watched]
    assert [rank["random"] for rank in plain] == [rank["random"] for rank in watched]
    for rank in watched:
        summary = rank["summary"]
        assert abs(summary["memory_plan_error_percent"]) <= 10
        assert summary["memory_planned_states_bytes"] == summary["memory_measured_states_bytes"]
        assert summary["memory_measured_peak_bytes"] > summary["memory_measured_states_bytes"]
        event, measured = rank["events"]
        assert measured == {"kind": "memory", "memory_measured_peak_bytes": summary["memory_measured_peak_bytes"]}
        assert event["kind"] == "plan" and event["stage"] == stage and event["message"].endswith("fits")
        assert summary["memory_planned_bytes"] == event["figures"]["peak"]
        assert event["processes"] > 2**27 and ", processes " in event["message"], "torch alone has more"


def test_a_model_that_cannot_be_copied_trains_without_a_plan() -> None:
    result = train(ds_config(1), True, spoil=True)
    event, _ = result["events"]
    assert event["kind"] == "note" and event["message"].startswith(
        "no memory plan: MaskedLanguageModel: the model cannot be copied"
    )
    assert "memory_planned_bytes" not in result["summary"] and result["summary"]["memory_measured_peak_bytes"]


def test_what_has_no_plan_or_no_part_in_it() -> None:
    """Evaluation is no micro-batch; several engines and pipelines are planned by zero-trial plan;
    and engines of others are left alone."""
    events: list[dict[str, Any]] = []
    engine = MemoryWatch(events.append).around(zero_trial.initialize)(model=build("gpt"), config=ds_config(1))[0]
    with torch.no_grad():
        engine.eval()
        engine(*batch())
    assert events == []
    engine.train()
    engine.backward(engine(*batch()))
    engine.destroy()
    assert [event["kind"] for event in events] == ["plan"]
    events.clear()
    initialize = MemoryWatch(events.append).around(zero_trial.initialize)
    for _ in range(2):
        initialize(model=build("gpt"), config=ds_config(1))[0].destroy()
    made = MemoryWatch(events.append).around(zero_trial.initialize)(model=pipeline(), config=pipeline_config(pipe=1))
    assert made[0].train_batch(iter([pipeline_batch()] * 4)).item() > 0
    made[0].destroy()
    assert [event["message"] for event in events] == [
        "no memory plan: several engines; use zero-trial plan, which adds them up",
        "no memory plan: use zero-trial plan for pipelines, stage by stage",
    ]
    events.clear()
    watch = MemoryWatch(events.append)
    made = watch.around(lambda **_: ("engine", None, None, None))(model=torch.nn.Linear(1, 1), config={})
    assert made[0] == "engine" and events == [] and watch.summary() == {}
    watch.close()


def test_a_run_that_goes_on_is_measured_again(tmp_path: Path) -> None:
    first = zero_trial.initialize(model=build("bert_mlm"), config=ds_config(1))[0]
    for _ in range(4):
        first.backward(first(*batch()))
        first.step()
    first.save_checkpoint(tmp_path)
    first.destroy()
    assert abs(train(ds_config(1), True, resume=tmp_path)["summary"]["memory_plan_error_percent"]) <= 10
