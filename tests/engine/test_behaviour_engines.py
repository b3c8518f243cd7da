"""Several engines in one process: a GAN that alternates, one loss through two engines, and two
engines that know nothing of each other.

Each against plain torch with the same losses; two ranks, every stage, 0 included.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import zero_trial
from tests.support.dense import STAGES, TOLERANCE, Turn, difference
from tests.support.models import Tower
from tests.support.pool import Pools
from zero_trial.errors import TrialError

STEPS, RANKS = 4, 2


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


def gan_two_losses(pair: Any, step: int, rank: int, accumulation: int) -> Iterator[str]:
    """Real and fake in two backward passes of the discriminator, as DCGAN's tutorial does; the same
    fake graph serves the generator."""
    generator, discriminator = pair
    turn = Turn(step, 0, rank)
    fake = generator(turn.normal(4, 4))
    discriminator.backward(F.softplus(-discriminator(turn.normal(4, 6))).mean())
    discriminator.backward(F.softplus(discriminator(fake.detach())).mean())
    yield "micro d"
    yield "d"
    generator.backward(F.softplus(-discriminator(fake)).mean())
    yield "micro g"
    yield "g"
    yield "forget d"


def joint(pair: Any, step: int, rank: int, accumulation: int) -> Iterator[str]:
    """One loss through both, called on the first; both step."""
    first, second = pair
    for number in range(accumulation):
        turn = Turn(step, number, rank)
        first.backward((second(first(turn.normal(4, 4))) - 1).square().mean())
        yield "micro g"
        yield "micro d"
    yield "g"
    yield "d"


def joint_and_own(pair: Any, step: int, rank: int, accumulation: int) -> Iterator[str]:
    """Both have a loss of their own besides the common one."""
    first, second = pair
    turn = Turn(step, 0, rank)
    middle = first(turn.normal(4, 4))
    first.backward((second(middle) - 1).square().mean(), retain_graph=True)
    second.backward(second(turn.normal(4, 6)).square().mean())
    yield "micro g"
    yield "micro d"
    yield "g"
    yield "d"


SCRIPTS = {"gan": gan, "gan two losses": gan_two_losses, "joint": joint, "joint and own": joint_and_own}


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
    for step in range(STEPS):
        for mark in SCRIPTS[script](pair, step, generator.global_rank, accumulation):
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
    for step in range(STEPS):
        for marks in zip(*(SCRIPTS[script](pair, step, rank, accumulation) for rank in range(RANKS)), strict=True):
            acts.get(marks[0], lambda: None)()
    return pair


# Every stage with one and two micro-batches, with both ways to drop gradients, and with toggles;
# every script with engines of different stages.
CASES: list[tuple[str, tuple[str, str], int, bool, bool]] = [
    *(("gan", (stage, stage), 1, row % 2 == 0, True) for row, stage in enumerate(STAGES)),
    *(("gan", (stage, stage), 2, row % 2 == 1, False) for row, stage in enumerate(STAGES)),
    *(("joint", (stage, stage), 1 + row % 2, False, False) for row, stage in enumerate(STAGES)),
    *((script, ("zero0", "zero3"), 1, False, False) for script in SCRIPTS),
    *((script, ("zero3-free", "zero1"), 1, False, False) for script in SCRIPTS),
]


@pytest.mark.parametrize(("script", "stages", "accumulation", "by_optimizer", "toggles"), CASES)
def test_two_engines_train_as_plain_torch_does(
    ranks: Pools, script: str, stages: tuple[str, str], accumulation: int, by_optimizer: bool, toggles: bool
) -> None:
    for gaps in ranks(2).run(drive_engines, script, stages, accumulation, by_optimizer, toggles):
        assert max(gaps) <= TOLERANCE


def test_an_optimizer_drops_nothing_between_micro_batches(caplog: pytest.LogCaptureFixture) -> None:
    states = []
    for drops in (False, True):
        engine = engines(("zero1", "zero1"), 2)[0]
        with caplog.at_level("WARNING", "zero_trial"):
            for number in range(4):
                if drops:
                    engine.optimizer.zero_grad()
                engine.backward(engine(Turn(0, number, 0).normal(4, 4)).square().mean())
                engine.step()
        states.append(engine.module_state_dict())
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    assert sum("optimizer.zero_grad()" in line for line in caplog.messages) == 1


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


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_of_another_loss_are_not_used_before_they_are_reduced(ranks: Pools, stage: str) -> None:
    for clipped, said, same in ranks(2).run(joint_gradients, stage):
        assert said and not clipped and all(same)
