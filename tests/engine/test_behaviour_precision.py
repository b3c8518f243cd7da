"""16-bit training against a plain loop of 16-bit parameters with fp32 masters, and what happens
when a gradient is not finite."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zero_trial
from tests.support.dense import STAGES, TOLERANCE, Case, Turn, build_engine
from tests.support.dense import tower_loss as loss
from tests.support.models import Tower, adamw
from tests.support.pool import Pools, logged_lines
from zero_trial import zero
from zero_trial.errors import Diverged

STEPS = 4


def masters(engine: zero_trial.Engine) -> dict[str, torch.Tensor]:
    return {name: zero.safe_get_full_fp32_param(param) for name, param in engine.module.named_parameters()}


def train_mixed(
    dtype: torch.dtype, scale: float, accumulation: int, clip: float, wide: bool = False
) -> dict[str, torch.Tensor]:
    """fp32 masters of a plain loop: gradients of 16-bit parameters, added up in 16 bits for one
    micro-batch and in fp32 for several."""
    torch.manual_seed(1)
    model = Tower()
    master = {name: param.detach().clone() for name, param in model.named_parameters()}
    model.to(dtype)
    optimizer = adamw(master.values())
    buffer = torch.float32 if accumulation > 1 or wide else dtype
    for step in range(STEPS):
        total = {name: torch.zeros_like(value, dtype=buffer) for name, value in master.items()}
        for rank in range(2):
            own = {name: torch.zeros_like(value, dtype=buffer) for name, value in master.items()}
            for number in range(accumulation):
                (loss(model, Turn(step, number, rank)) * (scale / accumulation)).backward()
                for name, param in model.named_parameters():
                    own[name] += param.grad.to(buffer)
                    param.grad = None
            for name in total:
                total[name] += own[name]
        for name, value in master.items():
            value.grad = total[name].float() / (2 * scale)
        if clip:
            nn.utils.clip_grad_norm_(master.values(), clip)
        optimizer.step()
        with torch.no_grad():
            for name, param in model.named_parameters():
                param.copy_(master[name])
    return master


PRECISIONS: dict[str, tuple[torch.dtype, float, dict[str, Any]]] = {
    "bf16": (torch.bfloat16, 1.0, {"bf16": {"enabled": True}}),
    "fp16 static": (torch.float16, 128.0, {"fp16": {"enabled": True, "loss_scale": 128}}),
    "fp16 dynamic": (torch.float16, 256.0, {"fp16": {"enabled": True, "initial_scale_power": 8}}),
}


def against_plain(precision: str, stage: str, accumulation: int, extra: dict[str, Any]) -> tuple[float, bool]:
    """(largest difference of masters, every parameter is its rounded master)."""
    dtype, scale, config = PRECISIONS[precision]
    engine = build_engine(Case(Tower, loss, accumulation=accumulation, clip=0.3, config=config | extra), STAGES[stage])
    for step in range(STEPS):
        for number in range(accumulation):
            engine.backward(loss(engine, Turn(step, number, engine.global_rank)))
            engine.step()
    assert engine.skipped_steps == 0
    reference = train_mixed(dtype, scale, accumulation, 0.3, wide=bool(extra))
    ours, state = masters(engine), engine.module_state_dict()
    rounded = all(
        state[name].dtype == dtype and torch.equal(state[name], value.to(dtype)) for name, value in ours.items()
    )
    return max((ours[name] - value).abs().max().item() for name, value in reference.items()), rounded


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_masters_follow_a_plain_mixed_precision_loop(
    ranks: Pools, precision: str, stage: str, accumulation: int
) -> None:
    """Tolerance 2e-6: the sums are made in the same dtypes and order; only the norm's order of
    summation differs."""
    for gap, rounded in ranks(2).run(against_plain, precision, stage, accumulation, {}):
        assert gap <= TOLERANCE
        assert rounded


@pytest.mark.parametrize("stage", ["zero1", "zero2", "zero3"])
def test_gradients_may_be_kept_in_fp32(ranks: Pools, stage: str) -> None:
    wide = {"data_types": {"grad_accum_dtype": "fp32"}}
    for gap, rounded in ranks(2).run(against_plain, "bf16", stage, 1, wide):
        assert gap <= TOLERANCE
        assert rounded


# --- gradients that are not finite ----------------------------------------------------------------


def inject(engine: zero_trial.Engine, name: str, rank: int, when: dict[str, Any], value: float) -> None:
    """From now on rank ``rank``'s gradient of ``name`` gets one bad element while
    ``when["now"]``."""
    if engine.global_rank != rank:
        return

    def spoil(grad: torch.Tensor) -> torch.Tensor:
        if when["now"]:
            grad = grad.clone()
            grad.view(-1)[-1] = value
        return grad

    dict(engine.module.named_parameters())[name].register_hook(spoil)


def overflows(
    stage: str, precision: dict[str, Any], name: str, rank: int, bad: tuple[int, ...], accumulation: int
) -> dict[str, Any]:
    """Trains eight steps; the gradient of ``name`` is bad on ``rank`` in the first micro-batch of
    the steps ``bad``."""
    schedule = {"type": "ExponentialLR", "params": {"gamma": 0.9}}
    engine = build_engine(
        Case(Tower, loss, accumulation=accumulation, config=precision | {"scheduler": schedule}), STAGES[stage]
    )
    lines, when = logged_lines(), {"now": False}
    inject(engine, name, rank, when, float("inf"))
    seen: dict[str, Any] = {"applied": [], "scale": [], "lr": [], "changed": [], "culprit": None}
    for step in range(8):
        before = masters(engine)
        for number in range(accumulation):
            when["now"] = step in bad and number == 0
            engine.backward(loss(engine, Turn(step, number, engine.global_rank)))
            engine.step()
        after = masters(engine)
        seen["applied"].append(engine.was_step_applied())
        seen["scale"].append(engine.loss_scale)
        seen["lr"].append(engine.get_lr()[0])
        seen["changed"].append(any(not torch.equal(before[key], after[key]) for key in before))
        if not engine.was_step_applied():
            assert engine.last_nonfinite is not None
            seen["culprit"] = (engine.last_nonfinite.step, engine.last_nonfinite.rank, engine.last_nonfinite.parameter)
    finite = all(torch.isfinite(value).all() for value in masters(engine).values())
    warnings = [line for line in lines if "not finite" in line]
    return seen | {
        "skipped": engine.skipped_steps,
        "steps": engine.global_steps,
        "finite": finite,
        "warnings": warnings,
    }


FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 2, "loss_scale_window": 2}}


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_an_overflow_on_one_rank_acts_on_all(ranks: Pools, stage: str, accumulation: int) -> None:
    """Steps 2 and 3 overflow: the first eats the hysteresis, the second halves the scale; after two
    clean steps it doubles."""
    name = "blocks.1.weight"
    answers = ranks(2).run(overflows, stage, FP16, name, 1, (2, 3), accumulation)
    for seen in answers:
        assert seen["applied"] == [True, True, False, False, True, True, True, True]
        assert seen["changed"] == seen["applied"]
        assert seen["lr"][0] > seen["lr"][1] == seen["lr"][2] == seen["lr"][3] > seen["lr"][4]
        assert seen["scale"] == [256.0, 256.0, 256.0, 128.0, 128.0, 128.0, 256.0, 256.0]
        assert (seen["skipped"], seen["steps"], seen["finite"]) == (2, 8, True)
        assert seen["culprit"] == (3, 1, name)
    first, second = (seen["warnings"] for seen in answers)
    assert not second, "rank 0 alone speaks"
    assert [line.split(";")[0] for line in first] == [
        f"step {step}: the gradient of {name} is not finite on rank 1" for step in (2, 3)
    ]
    assert "loss scale 256 -> 128" in first[1]
    assert "loss scale" not in first[0]


@pytest.mark.parametrize(
    ("rank", "name"),
    [(0, "first.weight"), (1, "last.weight"), (2, "blocks.1.bias"), (3, "first.weight"), (2, "last.weight")],
)
@pytest.mark.parametrize("stage", ["zero1", "zero3-free"])
def test_the_culprit_is_named_in_hybrid_sharding(ranks: Pools, stage: str, name: str, rank: int) -> None:
    mesh: dict[str, Any] = {"mesh": {"shard": 2, "replica": 2}}
    for seen in ranks(4).run(overflows, stage, mesh, name, rank, (1,), 2):
        assert seen["culprit"] == (1, rank, name)
        assert seen["skipped"] == 1


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", ["first.bias", "last.weight", "blocks.2.bias"])
@pytest.mark.parametrize("stage", STAGES)
def test_the_culprit_is_named_in_every_precision(ranks: Pools, stage: str, name: str, rank: int) -> None:
    precision: dict[str, Any] = {"bf16": {"enabled": True}} if rank else {}
    for seen in ranks(2).run(overflows, stage, precision, name, rank, (1,), 1):
        assert seen["culprit"] == (1, rank, name)
        assert seen["skipped"] == 1
        assert seen["finite"]


def at_minimum(stage: str) -> tuple[str, int, bool]:
    config = {"fp16": {"enabled": True, "initial_scale_power": 1, "hysteresis": 1, "min_loss_scale": 1}}
    engine = build_engine(Case(Tower, loss, config=config), STAGES[stage])
    inject(engine, "last.bias", 1, {"now": True}, float("nan"))
    before = masters(engine)
    try:
        for step in range(3):
            engine.backward(loss(engine, Turn(step, 0, engine.global_rank)))
            engine.step()
    except Diverged as error:
        return str(error), error.exit_code, all(torch.equal(before[k], v) for k, v in masters(engine).items())
    return "", 0, False


@pytest.mark.parametrize("stage", ["zero0", "zero3"])
def test_at_the_smallest_scale_all_ranks_end_with_one_message(ranks: Pools, stage: str) -> None:
    first, second = ranks(2).run(at_minimum, stage)
    assert first == second
    message, code, untouched = first
    assert "already at its minimum" in message
    assert "last.bias" in message
    assert "rank 1" in message
    assert code == 4
    assert untouched


def unchecked(stage: str) -> tuple[bool, bool]:
    config = {"bf16": {"enabled": True, "check_grad_overflow": False}}
    engine = build_engine(Case(Tower, loss, config=config), STAGES[stage])
    inject(engine, "last.bias", 0, {"now": True}, float("nan"))
    engine.backward(loss(engine, Turn(0, 0, engine.global_rank)))
    engine.step()
    return engine.was_step_applied(), bool(torch.isfinite(masters(engine)["last.bias"]).all())


def test_without_the_check_the_step_is_taken(ranks: Pools) -> None:
    assert ranks(2).run(unchecked, "zero2") == [(True, False)] * 2
