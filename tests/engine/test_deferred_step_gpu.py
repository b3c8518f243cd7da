"""On a GPU a step waits for nothing, whatever it finds, and leaves the bits of one that the host
decides. One rank over NCCL."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from tests.engine.test_behaviour_gpu import on_ranks
from tests.engine.test_deferred_step import FP16, OPTIMIZERS, SCHEDULE, differences, left, spoil, two_groups
from tests.support.dense import STAGES, Case, Turn, build_engine
from tests.support.models import Tower
from zero_trial.errors import TrialError

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

STEPS = 7
PRECISIONS: dict[str, dict[str, Any]] = {"fp32": {}, "bf16": {"bf16": {"enabled": True}}, "fp16": FP16}
# torch has no fused Adagrad on every CUDA version
CASES = [
    *[(stage, "fp16", "AdamW") for stage in ("zero0", "zero1", "zero2", "zero3")],
    *[("zero2", precision, "AdamW") for precision in ("fp32", "bf16")],
    *[
        ("zero2", "bf16", optimizer)
        for optimizer in ("Adam", "Lion", "SGD", "Adagrad", "Lamb", "torch AdamW", "torch SGD")
    ],
]


def loss(model: Any, turn: Turn) -> torch.Tensor:
    parameter = next(model.parameters())
    return (model(turn.normal(4, 5).to(parameter.device, parameter.dtype)) - 1).float().square().mean()


def train(stage: str, precision: str, optimizer: str, prompt: bool) -> dict[str, Any]:
    """Steps 1, 4 and 5 are not finite. Late steps run where every wait for the device is an error,
    but for the first: it makes state."""
    config = SCHEDULE | PRECISIONS[precision]
    engine = build_engine(Case(Tower, loss, two_groups, OPTIMIZERS[optimizer], config=config, clip=0.3), STAGES[stage])
    assert engine.outcome.deferred and engine.device.type == "cuda"
    if prompt:
        engine.outcome.deferred = False
    when = {"now": False}
    spoil(engine, "blocks.1.weight", 0, when, float("inf"))
    for step in range(STEPS):
        when["now"] = step in (1, 4, 5)
        value = loss(engine, Turn(step, 0, 0))
        engine.backward(value)
        if not prompt and step:
            torch.cuda.set_sync_debug_mode("error")
        try:
            engine.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert engine.outcome.open is not prompt
    engine.outcome.finalize()
    found = {key: value.cpu() if isinstance(value, torch.Tensor) else value for key, value in left(engine).items()}
    engine.destroy()
    return found


def every_case(cases: list[tuple[str, str, str]]) -> dict[tuple[str, str, str], list[str]]:
    from zero_trial.comm import init_distributed

    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    init_distributed(timeout=60.0)
    found = {}
    for case in cases:
        try:
            prompt, late = train(*case, True), train(*case, False)
            assert prompt["skipped"] == "3", prompt["skipped"]
            found[case] = differences(prompt, late)
        except Exception as trouble:
            found[case] = [f"{type(trouble).__name__}: {trouble}"]
    return found


@pytest.fixture(scope="module")
def found() -> dict[tuple[str, str, str], list[str]]:
    return dict(on_ranks(1, every_case, CASES)[0])


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_a_step_waits_for_nothing_and_leaves_the_same_bits(
    found: dict[tuple[str, str, str], list[str]], case: tuple[str, str, str]
) -> None:
    assert found[case] == []


def edited_in_place() -> str:
    """What is said of an edit through ``param.data`` that the masters overwrite."""
    from zero_trial.comm import init_distributed

    init_distributed(timeout=60.0)
    engine = build_engine(Case(Tower, loss, config=PRECISIONS["bf16"]), STAGES["zero2"])
    try:
        for step in range(3):
            engine.backward(loss(engine, Turn(step, 0, 0)))
            if step == 1:
                engine.module.get_parameter("last.weight").data.mul_(0.5)
            engine.step()
    except TrialError as error:
        return str(error)
    finally:
        engine.destroy()
    return ""


def test_an_edit_that_the_device_overwrites_is_an_error_at_the_next_backward() -> None:
    (said,) = on_ranks(1, edited_in_place)
    assert "engine.step, step 1" in said and "an edit in " in said
