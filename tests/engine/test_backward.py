"""``loss.backward()`` and ``engine.scale(loss).backward()`` mean ``engine.backward(loss)``: the
same bits, and what dense torch makes of the same losses."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import zero_trial
from tests.support.dense import (
    PRECISIONS,
    STAGES,
    TOLERANCE,
    Case,
    Turn,
    build_engine,
    difference,
    train_dense,
    train_ranks,
)
from tests.support.models import Tower
from tests.support.pool import Pools
from zero_trial.errors import TrialError

STEPS = 3


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
    "reentrant": (Repeated, one),
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


@pytest.mark.parametrize(
    ("script", "stage", "accumulation", "precision"),
    [
        *((script, "zero1", 2, "fp32") for script in SCRIPTS),
        *((script, "zero3-free", 1, "fp32") for script in SCRIPTS),
        *(("one", "zero0", 2, "bf16"), ("one", "zero2", 2, "fp16"), ("one", "zero3", 1, "fp16")),
    ],
)
def test_every_call_gives_the_same_bits(
    ranks: Pools, script: str, stage: str, accumulation: int, precision: str
) -> None:
    assert ranks(2).run(same, script, STAGES[stage], accumulation, precision) == [[], []]


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


@pytest.mark.parametrize("zero", [STAGES["zero0"], STAGES["zero2"], STAGES["zero3-free"], {"stage": 3}])
def test_a_gradient_that_comes_after_its_bucket_was_reduced_counts(ranks: Pools, zero: dict[str, Any]) -> None:
    """From the first step on, and where a block is used again in later steps only: on all ranks, or
    on one."""
    assert max(ranks(2).run(repeated, zero, 3, False)) <= TOLERANCE
    assert max(ranks(2).run(repeated, zero, 1, False)) <= TOLERANCE
    if zero is not STAGES["zero3-free"]:
        assert max(ranks(2).run(repeated, zero, 1, True)) <= TOLERANCE


@pytest.mark.parametrize(("stage", "accumulation"), [(0, 1), (2, 2)])
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


@pytest.mark.parametrize("stage", [0, 3])
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


LOOPS: list[tuple[str, int, int]] = [  # what a loop does, its accumulation, and after how many passes it is warned
    ("never", 1, 3),
    ("never", 4, 3),
    ("zero_grad", 1, 3),
    ("every fourth", 4, 3),
    ("four losses", 1, 3),  # a hint, which says so
    ("each", 1, 0),
    ("each", 4, 0),
    ("three losses", 2, 0),
    ("no_sync", 1, 0),
    ("own boundary", 1, 0),
    ("starts over", 4, 0),
    ("goes back", 1, 0),  # to a checkpoint of step 0, as a search for a learning rate does
]


@pytest.mark.parametrize(("what", "accumulation", "after"), LOOPS)
def test_a_loop_that_leaves_out_steps_is_warned_once(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, what: str, accumulation: int, after: int
) -> None:
    engine = build_engine(Case(Tower, loss, accumulation=accumulation), {"stage": 2})
    engine.save_checkpoint(tmp_path)
    done, warned = 0, []
    for number in range(12):
        losses = {"three losses": 3, "four losses": 4}.get(what, 1)
        fourth = number % 4 == 3
        if what == "zero_grad" or (what == "starts over" and number == 3):
            engine.zero_grad()
        elif what == "goes back" and number == 5:
            engine.load_checkpoint(tmp_path)
        elif what == "own boundary":
            engine.set_gradient_accumulation_boundary(fourth)
        for _ in range(losses):
            value = loss(engine, Turn(0, 0, 0))
            with engine.no_sync() if what == "no_sync" and not fourth else nullcontext():
                engine.backward(value)
            done += 1
            if "engine.step() was called" in caplog.text:
                warned.append(done - 1)
                caplog.clear()
        if what not in ("never", "zero_grad") and (fourth or what not in ("every fourth", "no_sync", "own boundary")):
            engine.step()
    assert warned == ([after] if after else [])
    assert bool(engine.global_steps) is (what not in ("never", "zero_grad", "every fourth"))


STEPS_PAIR, RANKS = 3, 2


def build() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(3)
    return Tower(4, 10, 6), Tower(6, 10, 1)


def engines(stages: tuple[str, str], accumulation: int = 1) -> list[zero_trial.Engine]:
    found = []
    for model, stage, lr in zip(build(), stages, (1e-3, 2e-3), strict=True):
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": accumulation,
            "gradient_clipping": 0.3,
            "comm_timeout_seconds": 30.0,
            "optimizer": {"type": "AdamW", "params": {"lr": lr, "weight_decay": 0.01}},
            "zero_optimization": STAGES[stage],
        }
        found.append(zero_trial.initialize(model=model, config=config)[0])
    return found


class Plain:
    """One model of plain torch with the engine's three calls, so that one script drives both;
    gradients are means over ranks."""

    def __init__(self, model: nn.Module, lr: float, share: float) -> None:
        self.model, self.share = model, share
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        (loss * self.share).backward(retain_graph=retain_graph)

    def step(self) -> None:
        for param in self.model.parameters():
            if param.grad is None:
                param.grad = torch.zeros_like(param)
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.3)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()


def plain_pair(accumulation: int = 1) -> list[Plain]:
    return [Plain(model, lr, 1 / (RANKS * accumulation)) for model, lr in zip(build(), (1e-3, 2e-3), strict=True)]


# Scripts: generators that yield where plain torch must let the other ranks come first (before a
# step). `pair`: (generator, discriminator).


def gan(pair: Any, step: int, rank: int, accumulation: int) -> Iterator[str]:
    """Discriminator on real and detached fake, then the generator through the discriminator, whose
    gradients are then forgotten."""
    generator, discriminator = pair
    for number in range(accumulation):
        turn = Turn(step, number, rank)
        real, noise = turn.normal(4, 6), turn.normal(4, 4)
        fake = generator(noise)
        discriminator.backward(
            F.softplus(-discriminator(real)).mean() + F.softplus(discriminator(fake.detach())).mean()
        )
        yield "micro d"
    yield "d"
    for number in range(accumulation):
        noise = Turn(step, number, rank).normal(4, 4) * 0.5
        generator.backward(F.softplus(-discriminator(generator(noise))).mean())
        yield "micro g"
    yield "g"
    yield "forget d"


def joint_pair(pair: Any, step: int, rank: int, accumulation: int) -> Iterator[str]:
    """One loss through both, called on the first; both step."""
    first, second = pair
    for number in range(accumulation):
        turn = Turn(step, number, rank)
        first.backward((second(first(turn.normal(4, 4))) - 1).square().mean())
        yield "micro g"
        yield "micro d"
    yield "g"
    yield "d"


SCRIPTS_PAIR = {"gan": gan, "joint": joint_pair}


def drive_engines(
    script: str, stages: tuple[str, str], accumulation: int, by_optimizer: bool, toggles: bool
) -> list[float]:
    """``toggles``: the discriminator's requires_grad is off while the generator trains, as in many
    GAN scripts."""
    pair = engines(stages, accumulation)
    generator, discriminator = pair
    acts = {
        "micro d": discriminator.step,
        "micro g": generator.step,
        "forget d": discriminator.optimizer.zero_grad if by_optimizer else discriminator.zero_grad,
        "d": lambda: None,  # engine.step() at the boundary was the step
        "g": lambda: None,
    }
    for step in range(STEPS_PAIR):
        for mark in SCRIPTS_PAIR[script](pair, step, generator.global_rank, accumulation):
            acts[mark]()
            if toggles and mark.startswith("micro"):
                discriminator.module.requires_grad_(mark == "micro g")
    reference = drive_plain(script, accumulation)
    return [difference(engine, plain.model) for engine, plain in zip(pair, reference, strict=True)]


def drive_plain(script: str, accumulation: int) -> list[Plain]:
    """The ranks' scripts side by side in one process, all up to a mark before any goes on."""
    pair = plain_pair(accumulation)
    generator, discriminator = pair
    acts = {"d": discriminator.step, "g": generator.step, "forget d": discriminator.zero_grad}
    for step in range(STEPS_PAIR):
        for marks in zip(*(SCRIPTS_PAIR[script](pair, step, rank, accumulation) for rank in range(RANKS)), strict=True):
            acts.get(marks[0], lambda: None)()
    return pair


# A GAN at every stage, alternately with one micro-batch, toggles and zero_grad of the optimizer,
# and with two; every script with engines of different stages.
CASES: list[tuple[str, tuple[str, str], int, bool, bool]] = [
    *(("gan", (stage, stage), 1 + row % 2, row % 2 == 0, row % 2 == 0) for row, stage in enumerate(STAGES)),
    ("joint", ("zero2", "zero2"), 2, False, False),
    *((script, ("zero3-free", "zero1"), 1, False, False) for script in SCRIPTS_PAIR),
]


@pytest.mark.parametrize(("script", "stages", "accumulation", "by_optimizer", "toggles"), CASES)
def test_two_engines_train_as_plain_torch_does(
    ranks: Pools, script: str, stages: tuple[str, str], accumulation: int, by_optimizer: bool, toggles: bool
) -> None:
    for gaps in ranks(2).run(drive_engines, script, stages, accumulation, by_optimizer, toggles):
        assert max(gaps) <= TOLERANCE


def joint_gradients(stage: str) -> tuple[bool, bool, list[bool]]:
    """Gradients that came through the other engine's loss: their use is an error before they are
    reduced; taken away, they are gone; and they are added to."""
    clipped = False
    first, second = engines((stage, stage))
    x = Turn(0, 0, first.global_rank).normal(4, 4)
    second.backward(second(first(x)).square().mean())
    try:
        nn.utils.clip_grad_norm_(first.module.parameters(), 1e-3)
        clipped = True
    except TrialError as error:
        said = "another engine's loss" in str(error)
    for param in first.module.parameters():
        param.grad = None
    first.backward(first(x).square().mean())
    first.step()
    alone = engines((stage, stage))[0]
    alone.backward(alone(x).square().mean())
    alone.step()
    states = first.module_state_dict(), alone.module_state_dict()
    return clipped, said, [torch.equal(value, states[1][name]) for name, value in states[0].items()]


@pytest.mark.parametrize("stage", ["zero0", "zero3-free"])
def test_gradients_of_another_loss_are_not_used_before_they_are_reduced(ranks: Pools, stage: str) -> None:
    for clipped, said, same in ranks(2).run(joint_gradients, stage):
        assert said and not clipped and all(same)
