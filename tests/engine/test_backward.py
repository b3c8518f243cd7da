"""``loss.backward()`` and ``engine.scale(loss).backward()`` mean ``engine.backward(loss)``: the
same bits, and what dense torch makes of the same losses."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import zero_trial
from tests.support.dense import STAGES, TOLERANCE, Case, Turn, build_engine, difference, train_dense, train_ranks
from tests.support.models import Tower
from tests.support.pool import Pools
from zero_trial.errors import TrialError
from zero_trial.pipeline import PipelineModule

STEPS = 3
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "loss_scale": 1024.0}},
}


class Checkpointed(Tower):
    """Recomputes its blocks. ``reentrant``: each in a backward pass of its own, inside the
    outer."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        for block in self.blocks:
            x = x + checkpoint(lambda y, block=block: torch.tanh(block(y)), x, use_reentrant=self.reentrant)
        return self.last(x)


class Repeated(nn.Module):
    """Recomputes one block as often as it is used, each time in a backward pass of its own: every
    pass brings a gradient of the block's weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block, self.last = nn.Linear(5, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        self.times = 3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        for _ in range(self.times):
            x = torch.tanh(checkpoint(self.block, x, use_reentrant=True))
        return self.last(x)


class Named(Tower):
    """Returns a dict, and has a method beside forward."""

    def forward(self, x: torch.Tensor) -> Any:
        return {"out": super().forward(x), "twice": (super().forward(x * 2), 3)}


def loss(model: Any, turn: Turn) -> torch.Tensor:
    return model(turn.normal(4, 5)).square().mean()


def scaled(engine: zero_trial.Engine, value: torch.Tensor, **options: Any) -> None:
    engine.scale(value).backward(**options)


def plain(engine: zero_trial.Engine, value: torch.Tensor, **options: Any) -> None:
    value.backward(**options)


Call = Callable[..., Any]


def one(engine: Any, turn: Turn, call: Call) -> None:
    call(engine, loss(engine, turn))


def two_losses(engine: Any, turn: Turn, call: Call) -> None:
    out = engine(turn.normal(4, 5))
    call(engine, out.square().mean(), retain_graph=True)
    call(engine, (out - 1).abs().mean())


def two_forwards(engine: Any, turn: Turn, call: Call) -> None:
    call(engine, loss(engine, turn) + (engine(turn.normal(3, 5)) - 1).square().mean())


def nested_outputs(engine: Any, turn: Turn, call: Call) -> None:
    found = engine(turn.normal(4, 5))
    call(engine, found["out"].square().mean() + found["twice"][0].square().mean())


def gradient_of_the_input(engine: Any, turn: Turn, call: Call) -> None:
    """A pass by torch.autograd.grad accumulates nothing, and so it is none of the engine's."""
    x = turn.normal(4, 5).requires_grad_()
    out = engine(x)
    torch.autograd.grad(out.sum(), x, retain_graph=True)
    call(engine, out.square().mean())


SCRIPTS: dict[str, tuple[Callable[[], nn.Module], Callable[..., None]]] = {
    "one": (Tower, one),
    "two losses": (Tower, two_losses),
    "two forwards": (Tower, two_forwards),
    "nested outputs": (Named, nested_outputs),
    "checkpointed": (lambda: Checkpointed(False), one),
    "reentrant": (lambda: Checkpointed(True), one),
    "reentrant again": (Repeated, one),
    "input's gradient": (Tower, gradient_of_the_input),
}


def train(script: str, call: Call, zero: dict[str, Any], accumulation: int, config: dict[str, Any]) -> Any:
    build, act = SCRIPTS[script]
    engine = build_engine(Case(build, loss, accumulation=accumulation, clip=0.5, config=config), zero)
    for step in range(STEPS):
        for number in range(accumulation):
            act(engine, Turn(step, number, engine.global_rank), call)
            engine.step()
    state, norm = engine.module_state_dict(), engine.get_global_grad_norm()
    sent = {name: row["elements"] for name, row in engine.comms_summary().items()}
    counts = (engine.global_steps, engine.micro_steps, engine.global_samples)
    engine.destroy()
    return state, norm, sent, counts


def same(script: str, zero: dict[str, Any], accumulation: int, precision: str) -> list[str]:
    """What differs from engine.backward, by call: values, norm, traffic and counts."""
    config, wrong = PRECISIONS[precision], []
    expected = train(script, zero_trial.Engine.backward, zero, accumulation, config)
    for call in (scaled,) if precision == "fp16" else (plain, scaled):
        state, *rest = train(script, call, zero, accumulation, config)
        wrong += [
            f"{call.__name__} {name}" for name, value in state.items() if not torch.equal(value, expected[0][name])
        ]
        if rest != list(expected[1:]):
            wrong.append(f"{call.__name__} {rest} {expected[1:]}")
    return wrong


# Each stage meets every precision and both numbers of micro-batches, each precision both numbers.
@pytest.mark.parametrize(
    ("stage", "accumulation", "precision"),
    [
        (stage, 1 + (row + column) % 2, precision)
        for row, stage in enumerate(STAGES)
        for column, precision in enumerate(PRECISIONS)
    ],
)
def test_every_call_gives_the_same_bits(ranks: Pools, stage: str, accumulation: int, precision: str) -> None:
    assert ranks(2).run(same, "one", STAGES[stage], accumulation, precision) == [[], []]


@pytest.mark.parametrize(("stage", "accumulation"), [("zero1", 2), ("zero3-free", 1), ("zero3-free", 2)])
@pytest.mark.parametrize("script", [name for name in SCRIPTS if name != "one"])
def test_every_kind_of_loss_gives_the_same_bits(ranks: Pools, script: str, stage: str, accumulation: int) -> None:
    assert ranks(2).run(same, script, STAGES[stage], accumulation, "fp32") == [[], []]


def used_again(model: Any, turn: Turn, first: int, alone: bool) -> torch.Tensor:
    module = getattr(model, "module", model)
    module.times = first if turn.step == 0 or (alone and turn.rank == 0) else 3
    return loss(model, turn)


def repeated(zero: dict[str, Any], first: int, alone: bool) -> float:
    """How far training ends from plain torch."""
    case = Case(Repeated, functools.partial(used_again, first=first, alone=alone), steps=3)
    engine = build_engine(case, zero | {"reduce_bucket_size": 100})
    *_, dense = train_dense(case, 2)
    *_, trained = train_ranks(case, engine)
    gap = difference(trained, dense)
    engine.destroy()
    return gap


@pytest.mark.parametrize("zero", [*STAGES.values(), {"stage": 3}], ids=[*STAGES, "zero3-live"])
def test_a_gradient_that_comes_after_its_bucket_was_reduced_counts(ranks: Pools, zero: dict[str, Any]) -> None:
    """From the first step on, and where a block is used again in later steps only: on all ranks, or
    on one."""
    assert max(ranks(2).run(repeated, zero, 3, False)) <= TOLERANCE
    assert max(ranks(2).run(repeated, zero, 1, False)) <= TOLERANCE
    if zero is not STAGES["zero3-free"]:
        assert max(ranks(2).run(repeated, zero, 1, True)) <= TOLERANCE


def against_dense(zero: dict[str, Any], accumulation: int) -> float:
    case = Case(Tower, loss, accumulation=accumulation, clip=0.5, steps=STEPS)
    engine = build_engine(case, zero)
    for step in range(STEPS):
        for number in range(accumulation):
            loss(engine, Turn(step, number, engine.global_rank)).backward()
            engine.step()
    gap = difference(engine, list(train_dense(case, engine.dp_world_size))[-1])
    engine.destroy()
    return gap


@pytest.mark.parametrize("accumulation", [1, 2, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_equals_dense_training(ranks: Pools, stage: str, accumulation: int) -> None:
    assert max(ranks(2).run(against_dense, STAGES[stage], accumulation)) <= TOLERANCE


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_gradient_that_does_not_pass_the_output_is_scaled_too(stage: int, accumulation: int) -> None:
    """A penalty on a weight that the forward does not use arrives before any output is reached."""

    class Penalized(Tower):
        def __init__(self) -> None:
            super().__init__()
            self.aside = nn.Parameter(torch.ones(3))

    def penalized(model: Any, turn: Turn) -> torch.Tensor:
        module = getattr(model, "module", model)
        return loss(model, turn) + 0.1 * sum(param.square().sum() for param in module.parameters())

    case = Case(Penalized, penalized, accumulation=accumulation, steps=STEPS)
    engine = build_engine(case, {"stage": stage})
    for step in range(STEPS):
        for number in range(accumulation):
            value = penalized(engine, Turn(step, number, 0))
            if number == 0:
                value.backward()
            else:  # the unused weight has an earlier gradient, which could not be told apart
                engine.scale(value).backward()
            engine.step()
    assert difference(engine, list(train_dense(case, 1))[-1]) <= TOLERANCE


def test_a_gradient_around_the_forward_that_cannot_be_scaled_is_refused() -> None:
    engine = build_engine(Case(Tower, loss, accumulation=2), {"stage": 0})
    x = torch.ones(4, 5)
    engine.module(x).sum().backward()
    engine.step()
    with pytest.raises(TrialError, match=r"engine\.backward\(loss\)"):
        engine.module(x).sum().backward()


@pytest.mark.parametrize("call", [zero_trial.Engine.backward, plain, scaled])
def test_that_the_engine_divides_is_logged_once(call: Call, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "zero_trial"):
        for accumulation in (1, 4):
            engine = build_engine(Case(Tower, loss, accumulation=accumulation), {"stage": 0})
            for number in range(8):
                call(engine, loss(engine, Turn(0, number, 0)))
                engine.step()
    (line,) = [line for line in caplog.messages if "times too small" in line]
    assert "divides each loss by 4 " in line and "scale_wrt_gas=False" in line


@pytest.mark.parametrize("accumulation", [1, 2])
def test_what_another_engine_has_scaled_is_not_divided(accumulation: int, caplog: pytest.LogCaptureFixture) -> None:
    scaling = build_engine(Case(Tower, loss, config={"fp16": {"enabled": True}}), {"stage": 0})
    other = build_engine(Case(Tower, loss, accumulation=accumulation), {"stage": 0})
    both = scaling(Turn(0, 0, 0).normal(4, 5)).float().mean() + other(Turn(0, 0, 0).normal(4, 5)).mean()
    with caplog.at_level("INFO", "zero_trial"):
        scaling.scale(both).backward()
    assert "too small" not in caplog.text


def test_a_loss_that_the_engine_does_not_divide_may_be_divided(caplog: pytest.LogCaptureFixture) -> None:
    engine = build_engine(Case(Tower, loss, accumulation=4), {"stage": 0})
    with caplog.at_level("INFO", "zero_trial"):
        engine.backward(engine(Turn(0, 0, 0).normal(4, 5)).mean() / 4, scale_wrt_gas=False)
        engine.zero_grad()
        engine.backward(engine(Turn(0, 0, 0).normal(4, 5)).mean() / 4, weight=2)
    assert "times too small" not in caplog.text


@pytest.mark.parametrize(("every", "warned"), [(1, False), (100, True)])
def test_a_loop_that_never_reaches_a_step_is_warned(every: int, warned: bool, caplog: pytest.LogCaptureFixture) -> None:
    engine = build_engine(Case(Tower, loss, accumulation=2), {"stage": 0})
    for number in range(1, 2 * 33):
        engine.backward(loss(engine, Turn(0, number, 0)))
        if number % every == 0:
            engine.step()
    assert caplog.text.count("every 2. call of engine.step() updates the weights") == warned


@pytest.mark.parametrize("managed", [True, False])
def test_a_caller_who_owns_the_boundary_may_step_rarely(managed: bool, caplog: pytest.LogCaptureFixture) -> None:
    config = {"managed_gradient_accumulation": managed}
    engine = build_engine(Case(Tower, loss, accumulation=2, config=config), {"stage": 0})
    if managed:
        engine.set_gradient_accumulation_boundary(False)
    for number in range(2 * 33):
        engine.backward(loss(engine, Turn(0, number, 0)))
    assert "updates the weights" not in caplog.text


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_step_whose_gradients_were_dropped_is_told(stage: int, caplog: pytest.LogCaptureFixture) -> None:
    engine = build_engine(Case(Tower, loss), {"stage": stage})
    for number in range(2):
        engine.backward(loss(engine, Turn(0, number, 0)))
        engine.module.zero_grad()
        engine.step()
    (line,) = [line for line in caplog.messages if "no gradient has reached any of the" in line]
    assert "on this rank in step 1:" in line


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_vector_of_outputs_with_its_gradient(stage: int) -> None:
    states = []
    for vector in (False, True):
        engine = build_engine(Case(Tower, loss, accumulation=2), {"stage": stage})
        for number in range(4):
            out, weights = engine(Turn(0, number, 0).normal(4, 5)), Turn(1, number, 0).normal(4, 4)
            if vector:
                out.backward(weights)
            else:
                engine.backward((out * weights).sum())
            engine.step()
        states.append(engine.module_state_dict())
    assert all(torch.equal(states[0][name], value) for name, value in states[1].items())


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_an_unscaled_fp16_loss_is_refused(stage: int) -> None:
    engine = build_engine(Case(Tower, loss, config=PRECISIONS["fp16"]), {"stage": stage})
    with pytest.raises(TrialError, match=r"engine\.backward\(loss\), or engine\.scale\(loss\)\.backward\(\)"):
        loss(engine, Turn(0, 0, 0)).backward()
    engine.zero_grad()
    out = engine(torch.ones(4, 5).requires_grad_())
    torch.autograd.grad(out.sum(), [out])  # no gradient is accumulated
    engine.backward(loss(engine, Turn(0, 0, 0)))
    engine.step()
    assert engine.was_step_applied()


def test_an_fp16_loss_with_a_scale_of_one_needs_none() -> None:
    config = {"fp16": {"enabled": True, "loss_scale": 1.0}}
    engine = build_engine(Case(Tower, loss, config=config), {"stage": 1})
    loss(engine, Turn(0, 0, 0)).backward()
    engine.step()
    assert engine.was_step_applied()


# --- two engines under one loss -------------------------------------------------------------------


def joint(zero: dict[str, Any], scales: tuple[float, float], call: str) -> list[float]:
    """Two fp16 engines whose scales differ, and the same two with a scale of 1, in the gradients
    that a step sees."""
    norms = []
    for pair in (scales, (1.0, 1.0)):
        engines = []
        for scale, sizes in zip(pair, ((5, 11, 6), (6, 11, 4)), strict=True):
            config = {"fp16": {"enabled": True, "loss_scale": scale}}
            engines.append(build_engine(Case(lambda sizes=sizes: Tower(*sizes), loss, config=config), zero))
        first, second = engines
        value = (second(first(Turn(0, 0, first.global_rank).normal(4, 5))).float() - 1).square().mean()
        if call == "backward":
            first.backward(value)
        else:
            second.scale(value).backward()
        for engine in engines:
            engine.step()
            norms.append(engine.get_global_grad_norm())
            engine.destroy()
    return norms


@pytest.mark.parametrize("call", ["backward", "scale"])
@pytest.mark.parametrize("stage", ["zero0", "zero2", "zero3-free"])
def test_engines_with_different_loss_scales_under_one_loss(ranks: Pools, stage: str, call: str) -> None:
    for norms in ranks(2).run(joint, STAGES[stage], (256.0, 4.0), call):
        assert norms[:2] == pytest.approx(norms[2:], rel=2e-3)  # fp16 without a scale underflows a little


def joint_plain(zero: dict[str, Any]) -> list[bool]:
    """One loss.backward() through two engines, against first.backward(loss)."""
    states = []
    for own in (True, False):
        first, second = (
            build_engine(Case(lambda sizes=sizes: Tower(*sizes), loss), zero) for sizes in ((5, 11, 6), (6, 11, 4))
        )
        for step in range(STEPS):
            value = second(first(Turn(step, 0, first.global_rank).normal(4, 5))).square().mean()
            if own:
                first.backward(value)
            else:
                value.backward()
            first.step()
            second.step()
        states.append([*first.module_state_dict().values(), *second.module_state_dict().values()])
        first.destroy()
        second.destroy()
    return [torch.equal(a, b) for a, b in zip(*states, strict=True)]


@pytest.mark.parametrize("stage", ["zero0", "zero2", "zero3-free"])
def test_one_loss_through_two_engines(ranks: Pools, stage: str) -> None:
    assert all(all(found) for found in ranks(2).run(joint_plain, STAGES[stage]))


# --- what else a pass does ------------------------------------------------------------------------


@pytest.mark.parametrize("accumulation", [1, 2])
def test_after_a_pass_that_raised(accumulation: int) -> None:
    states = []
    for spoil in (False, True):
        engine = build_engine(Case(Tower, loss, accumulation=accumulation), {"stage": 2})
        for number in range(2 * accumulation):
            value = loss(engine, Turn(number, 0, 0))
            if spoil and number == accumulation - 1:
                bad = engine(torch.ones(4, 5)) * 1
                bad.register_hook(_fail)
                with pytest.raises(ArithmeticError):
                    (bad + engine(torch.ones(4, 5))).sum().backward()
            value.backward()
            engine.step()
        states.append(engine.module_state_dict())
    assert all(torch.equal(states[0][name], value) for name, value in states[1].items())


def _fail(grad: torch.Tensor) -> None:
    raise ArithmeticError


def test_no_sync_holds_for_every_call() -> None:
    engine = build_engine(Case(Tower, loss), {"stage": 2})
    with engine.no_sync():
        loss(engine, Turn(0, 0, 0)).backward()
        with pytest.raises(
            AssertionError, match=r"illegal to call Engine.step\(\) inside no_sync"
        ):  # as with DeepSpeed
            engine.step()
        with pytest.raises(TrialError, match="reentry is unsupported"), engine.no_sync():
            pass
        with pytest.raises(TrialError, match="nested"), engine.coalesce_grad_reduction():
            pass
    assert not any(buffer.shard_filled for buffer in engine.sharded.grad_buffers)
    engine.step()
    assert engine.global_steps == 1


def test_a_pipeline_refuses_to_scale() -> None:
    config = {"train_batch_size": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    model = PipelineModule([nn.Linear(2, 2)], loss_fn=lambda out, label: out.sum())
    engine = zero_trial.initialize(model=model, config=config)[0]
    with pytest.raises(TrialError, match="train_batch"):
        engine.scale(torch.ones(1))
