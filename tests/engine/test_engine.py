"""The engine by itself, in a world of one rank; what it does on several ranks is in the oracle and
the behaviour tests."""

from __future__ import annotations

import contextlib
import functools
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero_trial
from tests.support.models import make_engine
from tests.support.pool import RankFailed, RankPool
from zero_trial.engine.step import NonFiniteStep, with_culprit
from zero_trial.errors import ConfigError, Diverged, TrialError
from zero_trial.sharding.guards.freed import unasked

CONFIG: dict[str, Any] = {
    "train_batch_size": 4,
    "gradient_clipping": 0.0,
    "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3, bias=False)
        nn.init.eye_(self.inner.weight)
        self.greeting = "hello"

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.inner(x) * scale

    def twice(self, x: torch.Tensor) -> torch.Tensor:
        return self(x) * 2


def engine(stage: int = 0, **config: Any) -> zero_trial.Engine:
    zero = {"stage": stage, "param_persistence_threshold": 0}
    return zero_trial.initialize(model=Net(), config=CONFIG | {"zero_optimization": zero} | config)[0]


def trained(found: zero_trial.Engine) -> None:
    """Take a step whose gradient is 1 everywhere."""
    found.backward(found(torch.ones(1, 3)).sum())
    found.step()


def test_everything_else_is_the_modules():
    found = engine(3)
    assert found.greeting == "hello" and torch.equal(found.twice(torch.ones(1, 3)), torch.full((1, 3), 2.0))
    assert torch.equal(found(torch.ones(1, 3), scale=3.0), torch.full((1, 3), 3.0))
    with pytest.raises(AttributeError, match="nothing_like_it"):
        found.nothing_like_it  # noqa: B018
    assert not found.eval().module.training and found.train().module.training


@pytest.mark.parametrize("stage", [0, 3])
def test_an_exception_in_forward_or_backward_leaves_the_engine_working(stage: int):
    """zero_grad forgets what came before it."""
    found = engine(stage)
    with pytest.raises(RuntimeError):
        found(torch.ones(1, 7))
    handle = found.module.inner.register_full_backward_hook(_explode)
    with pytest.raises(ArithmeticError):
        found.backward(found(torch.ones(1, 3).requires_grad_()).sum())
    handle.remove()
    found.zero_grad()
    trained(found)
    torch.testing.assert_close(found.module_state_dict()["inner.weight"], torch.eye(3) - 0.5)


def _explode(*_: object) -> None:
    raise ArithmeticError("in backward")


PLATEAU = functools.partial(torch.optim.lr_scheduler.ReduceLROnPlateau, patience=0)


def scheduled(made: Any) -> zero_trial.Engine:
    return zero_trial.initialize(model=Net(), config=CONFIG, lr_scheduler=made)[0]


def test_a_schedule_that_needs_a_metric_is_its_users_to_step(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    def epoch(engine: zero_trial.Engine, loss: float) -> float:
        for _ in range(2):
            trained(engine)
        engine.lr_scheduler.step(loss)
        return engine.get_lr()[0]

    with caplog.at_level("INFO", "zero_trial"):
        found = scheduled(PLATEAU)
    assert sum("engine.lr_scheduler.step(metrics)" in line for line in caplog.messages) == 1
    assert [epoch(found, loss) for loss in (1.0, 2.0, 0.5)] == [0.5, 0.05, 0.05] and found.global_steps == 6
    found.save_checkpoint(tmp_path)
    resumed = scheduled(PLATEAU)
    resumed.load_checkpoint(tmp_path)
    assert resumed.lr_scheduler.best == 0.5
    assert [epoch(engine, 0.6) for engine in (found, resumed)] == [pytest.approx(0.005)] * 2


def test_arguments_of_a_step_go_to_the_schedule_or_are_refused_before_anything_changes():
    found = scheduled(PLATEAU)
    found.backward(found(torch.ones(1, 3)).sum())
    before = {name: value.clone() for name, value in found.module_state_dict().items()}
    with pytest.raises(ConfigError, match=r"without metrics: got ReduceLROnPlateau and epoch.*'metrics': \.\.\."):
        found.step(lr_kwargs={"epoch": 1})
    assert all(torch.equal(value, before[name]) for name, value in found.module_state_dict().items())
    assert (found.global_steps, found.micro_steps) == (0, 0)
    rates = []
    for loss in (1.0, 2.0):
        found.step(lr_kwargs={"metrics": loss})
        rates.append(found.get_lr()[0])
        found.backward(found(torch.ones(1, 3)).sum())
    assert rates == [0.5, 0.05]
    seen: list[float] = []
    found.lr_scheduler.step = functools.partial(seen.append, 2.0)  # which needs nothing
    found.step()
    assert (found.global_steps, seen) == (3, [2.0])


def test_a_schedule_that_is_set_later_drives_the_engines_optimizer():
    found, optimizer, _, _ = zero_trial.initialize(model=Net(), config=CONFIG)
    other = torch.optim.SGD(Net().parameters(), lr=3.0)
    with pytest.raises(ConfigError, match=r"engine\.lr_scheduler: .*a different optimizer.*lambda optimizer: StepLR"):
        found.lr_scheduler = torch.optim.lr_scheduler.StepLR(other, 1)
    assert found.lr_scheduler is None
    for made in (
        lambda given: torch.optim.lr_scheduler.StepLR(given, 1, gamma=0.5),
        torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
        torch.optim.lr_scheduler.StepLR(found.basic_optimizer, 1, gamma=0.5),
    ):
        found.lr_scheduler = made
        before = found.get_lr()[0]
        trained(found)
        assert found.get_lr() == [before / 2]
    found.lr_scheduler = None
    assert found.lr_scheduler is None


NO_GRADIENTS = (
    r"engine\.step: step\(\) found no gradients: got no backward pass since step \d\. Call engine\.backward\(loss\)"
)


@pytest.mark.parametrize(("stage", "managed"), [(0, True), (1, False), (2, True), (3, False)])
def test_a_step_without_gradients_is_refused_and_changes_nothing(stage: int, managed: bool) -> None:
    """Weight decay and momentum would move the weights."""
    sgd = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}}
    found = engine(stage, optimizer=sgd, managed_gradient_accumulation=managed)
    with pytest.raises(TrialError, match=NO_GRADIENTS):
        found.step()
    trained(found)
    before = {name: value.clone() for name, value in found.module_state_dict().items()}
    for forget in (False, True):
        if forget:
            found.backward(found(torch.ones(1, 3)).sum())
            found.zero_grad()
        with pytest.raises(TrialError, match=NO_GRADIENTS):
            found.step()
    assert all(torch.equal(before[name], value) for name, value in found.module_state_dict().items())
    assert (found.global_steps, found.micro_steps) == (1, 1)
    trained(found)
    assert found.global_steps == 2


def test_gradients_from_elsewhere_and_without_sync_are_enough_for_a_step() -> None:
    config = {"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    generator, *_ = zero_trial.initialize(model=nn.Linear(3, 3), config=config)
    critic, *_ = zero_trial.initialize(model=nn.Linear(3, 1), config=config)
    critic.backward(critic(generator(torch.ones(2, 3))).sum())  # the critic's loss reaches both
    generator.step()
    with pytest.raises(TrialError, match=NO_GRADIENTS):
        generator.step()
    critic.step()
    with generator.no_sync():
        generator.backward(generator(torch.ones(2, 3)).sum())
    generator.step()
    generator(torch.ones(2, 3)).sum().backward()  # by autograd itself
    generator.step()
    assert (generator.global_steps, critic.global_steps) == (3, 1)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_zero_grad_in_mid_accumulation_starts_it_again_but_not_twice(stage: int) -> None:
    """Else the next boundary would divide the gradient of one micro-batch by two; and no step would
    ever be taken where a loop calls it before every micro-batch."""
    found = engine(stage, gradient_accumulation_steps=2)

    def micro_batch(value: float) -> None:
        found.backward(found(torch.full((1, 3), value)).sum())
        found.step()

    found.zero_grad()  # between steps there is nothing to drop
    micro_batch(9.0)
    found.zero_grad()
    assert found.pending_micro_batches() == 0
    for value in (1.0, 2.0):
        micro_batch(value)
    assert found.global_steps == 1
    torch.testing.assert_close(found.module_state_dict()["inner.weight"], torch.eye(3) - 0.5 * 1.5)
    micro_batch(9.0)
    found.zero_grad()
    micro_batch(9.0)
    with pytest.raises(TrialError, match=r"engine\.zero_grad: .*got 1 of 2 micro-batches since step 1") as caught:
        found.zero_grad()
    assert "Remove the call" in str(caught.value)
    assert found.pending_micro_batches() == 1, "a refused call drops nothing"
    micro_batch(9.0)
    assert found.global_steps == 2


def skipped_backward(stage: int, transport: str) -> None:
    """Rank 1 leaves its backward out in the second step, and ends as a script with an exception
    does; rank 0 is in the reduction."""
    config = CONFIG | {"train_batch_size": 2, "zero_optimization": {"stage": stage}, "comm_transport": transport}
    found = zero_trial.initialize(model=Net(), config=config)[0]
    for count in range(2):
        output = found(torch.ones(1, 3)).sum()
        if found.global_rank == 0 or count == 0:
            found.backward(output)
        try:
            found.step()
        except TrialError:
            os._exit(1)


@pytest.mark.parametrize(("stage", "transport"), [(3, "auto"), (1, "gloo")])
def test_other_ranks_name_the_rank_that_had_no_gradients_and_why(stage: int, transport: str) -> None:
    pool = RankPool(2)
    try:
        with pytest.raises(RankFailed) as caught:
            pool.run(skipped_backward, stage, transport)
    finally:
        pool.close()
    last = str(caught.value).strip().splitlines()
    error = next(line for line in last if "MeshError: rank 0, step 1" in line)
    assert "another rank ended" in error, "rank 0 need not wait for the time limit"
    assert "rank 1 at step 1" in error and "found no gradients" in error, error


def surface_engine(**config: Any) -> zero_trial.Engine:
    base = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.25, "betas": [0.5, 0.75]}},
    }
    return zero_trial.initialize(model=nn.Linear(3, 2), config=base | config)[0]


def test_values_of_one_step():
    found = surface_engine(train_batch_size=2)
    assert found.get_global_grad_norm() is None and not found.was_step_applied()
    loss = found(torch.ones(1, 3)).sum()
    found.backward(loss)
    assert found.get_global_grad_norm() is None
    found.step()
    # six weights with gradient 1, two biases
    assert found.get_global_grad_norm() == pytest.approx(8**0.5)
    assert (found.get_lr(), found.get_mom()) == ([0.25], [(0.5, 0.75)])
    assert ["Adam" in name for name in found.get_type()] == [True]
    assert (found.global_steps, found.global_samples, found.micro_steps, found.skipped_steps) == (1, 2, 1, 0)
    assert found.was_step_applied()


def test_the_batch_triangle():
    found = surface_engine()
    sizes = found.train_batch_size(), found.train_micro_batch_size_per_gpu(), found.gradient_accumulation_steps()
    assert sizes == (8, 2, 4)
    boundaries = []
    for _ in range(8):
        boundaries.append(found.is_gradient_accumulation_boundary())
        returned = found.backward(found(torch.ones(1, 3)).sum() * 0 + 1)
        found.step()
        assert returned.item() == 0.25
    assert boundaries == [False, False, False, True] * 2 and (found.global_steps, found.global_samples) == (2, 16)
    found.set_train_batch_size(4)
    assert (found.gradient_accumulation_steps(), found.train_micro_batch_size_per_gpu()) == (2, 2)
    found.set_train_micro_batch_size(3)
    assert (found.train_batch_size(), found.gradient_accumulation_steps()) == (6, 2)
    config = found._config  # ``context.reconcile_ds_config(engine._config)``, as Determined's documentation writes it
    sizes = config.train_batch_size, config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps
    assert sizes == (6, 3, 2)


def test_without_an_optimizer_there_are_no_values():
    found = surface_engine(optimizer=None)
    assert (found.get_lr(), found.get_mom(), found.get_type(), found.optimizer) == ([], [], [], None)
    assert found(torch.ones(1, 3)).shape == (1, 2)


def one_weight(value: float = 3.0, **config: object) -> zero_trial.Engine:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.tensor([value]))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.weight * x).sum()

    defaults = {"train_batch_size": 1, "optimizer": {"type": "SGD", "params": {"lr": 1.0}}}
    return make_engine(Model, defaults | config)


def step(engine: zero_trial.Engine, gradient: float) -> float:
    engine.backward(engine(torch.tensor([gradient])))
    engine.step()
    return float(engine.module.weight.detach())


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_step_without_a_finite_norm_is_skipped(bad: float) -> None:
    engine = one_weight()
    assert step(engine, bad) == 3.0
    result = engine.outcome.result
    assert not result.applied and result.skipped == 1 and not math.isfinite(result.norm or 0.0)
    assert result.nonfinite is not None and result.nonfinite.parameter == "weight"
    assert step(engine, 1.0) == 2.0 and result.applied and result.skipped == 1


def test_which_steps_were_skipped():
    engine = one_weight()
    for gradient in (math.inf, 1.0, math.nan, 1.0):
        step(engine, gradient)
    ranges = ((0, 4), (0, 1), (1, 2), (2, 3), (3, 4), (0, 0))
    assert [engine.skipped_between(first, end) for first, end in ranges] == [2, 1, 0, 1, 0, 0]


def test_the_end_of_a_run_names_the_culprit():
    error = Diverged("no scale left", where="loss scale", got="scale 1", expected="more", fix="Use bf16.")
    assert with_culprit(error, None) is error
    text = str(with_culprit(error, NonFiniteStep(2, 1, "a.b")))
    assert (
        text
        == "loss scale: no scale left: got scale 1, and step 2: the gradient of a.b is not finite on rank 1, expected more. Use bf16."
    )


class Outside(nn.Module):
    """Reads the weights of blocks whose forward never runs; ``unasked``: as the functions of a C++
    extension do it."""

    def __init__(self, unasked: bool) -> None:
        super().__init__()
        self.unasked = unasked
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with unasked() if self.unasked else contextlib.nullcontext():
            for layer in self.layers:
                x = nn.functional.linear(x, layer.weight, layer.bias)
        return x.sum()


@pytest.mark.parametrize("asked", [True, False])
@pytest.mark.parametrize(("threshold", "reported"), [(0, True), (1000, False)])
def test_weights_read_outside_their_forward_train_nothing(threshold: int, reported: bool, asked: bool):
    config = {
        "train_batch_size": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "zero_optimization": {"stage": 3, "param_persistence_threshold": threshold, "module_granularity_threshold": 1},
    }
    engine = zero_trial.initialize(model=Outside(not asked), config=config)[0]
    if reported and asked:
        with pytest.raises(TrialError, match=r"linear: .*got layers.0.weight"):
            engine(torch.ones(1, 4))
        return
    engine.backward(engine(torch.ones(1, 4)))
    engine.step()
    assert engine.was_step_applied() != reported  # what torch does not ask about reads NaN
