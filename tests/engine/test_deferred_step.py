"""A step that the device decides leaves what one that the host decides leaves, to the bit, and
nobody waits in it."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero_trial
from tests.support.dense import STAGES, Case, Turn, build_engine
from tests.support.dense import tower_loss as loss
from tests.support.late import make_late, on_device, waits
from tests.support.models import Tower
from tests.support.pipelines import batches, layers
from tests.support.pipelines import make_engine as make_pipeline
from tests.support.pool import Pools
from zero_trial.errors import Diverged, TrialError

STEPS = 8


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    weights = [param for param in model.parameters() if param.dim() > 1]
    biases = [param for param in model.parameters() if param.dim() == 1]
    return [{"params": weights, "lr": 2e-3, "weight_decay": 0.1}, {"params": biases, "lr": 1e-3, "weight_decay": 0.0}]


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def spoil(engine: zero_trial.Engine, name: str, rank: int, when: dict[str, bool], value: float) -> None:
    """While ``when["now"]``, rank ``rank``'s gradient of ``name`` has a bad element."""

    def bad(grad: torch.Tensor) -> torch.Tensor:
        if when["now"] and engine.global_rank == rank:
            grad = grad.clone()
            grad.view(-1)[-1] = value
        return grad

    dict(engine.module.named_parameters())[name].register_hook(bad)


def answers(engine: zero_trial.Engine) -> tuple[Any, ...]:
    """What a script may ask after every step."""
    scheduler = engine.lr_scheduler
    last = scheduler.get_last_lr() if scheduler is not None else None
    norm = repr(engine.get_global_grad_norm())
    return engine.was_step_applied(), engine.skipped_steps, engine.loss_scale, engine.get_lr(), last, norm


def left(engine: zero_trial.Engine) -> dict[str, Any]:
    """Everything that training has left on this rank."""
    assert engine.optimizer is not None
    state = {
        f"{view.kind} {view.name} {view.start}": view.tensor.detach().clone()
        for view in engine.optimizer.state_by_tensor.views()
    }
    weights = {name: value.clone() for name, value in engine.module_state_dict().items()}
    facts = {
        "scalars": engine.optimizer.state_by_tensor.scalars(),
        "scaler": engine.outcome.result().loss_scale,
        "schedule": engine.lr_scheduler.state_dict() if engine.lr_scheduler is not None else None,
        "groups": [{k: v for k, v in group.items() if k != "params"} for group in engine.optimizer.param_groups],
        "counts": (engine.global_steps, engine.global_samples, engine.micro_steps),
        "skipped": engine.skipped_steps,
        "culprit": engine.last_nonfinite,
        "last": answers(engine),
    }
    return state | weights | {key: repr(value) for key, value in facts.items()}


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Where two runs differ: each key with what they have."""
    found = sorted(one.keys() ^ other.keys())
    for key in one.keys() & other.keys():
        a, b = one[key], other[key]
        same = torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
        if not same:
            found.append(f"{key}: {a} | {b}")
    return found


def train(
    engine: zero_trial.Engine, steps: range, bad: tuple[int, ...], ask: str, value: float = float("inf")
) -> dict[str, Any]:
    """``ask``: "never", "always", or "rank 1" alone, which must not keep the others waiting."""
    lines, when, reported, losses = Lines(), {"now": False}, [], []
    logging.getLogger("zero_trial").addHandler(lines)
    spoil(engine, "blocks.1.weight", 1 % engine.world_size, when, value)
    rounds = engine.gradient_accumulation_steps()
    for step, number in itertools.product(steps, range(rounds)):
        when["now"] = step in bad and number == 0
        result = loss(engine, Turn(step, number, engine.global_rank))
        engine.backward(result)
        engine.step()
        losses.append(result.item())
        if ask == "always" or (ask == "rank 1" and engine.global_rank == 1):
            reported.append(answers(engine))
    when["now"] = False
    engine.outcome.finalize()
    logging.getLogger("zero_trial").removeHandler(lines)
    said = [line for line in lines.lines if "not finite" in line]
    return left(engine) | {"losses": losses, "reported": reported, "said": said}


SCHEDULE = {"scheduler": {"type": "ExponentialLR", "params": {"gamma": 0.9}}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 2, "loss_scale_window": 2}}
BF16 = {"bf16": {"enabled": True}}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
    "Adam": {"type": "Adam", "params": {"lr": 1e-2, "weight_decay": 0.1, "adam_w_mode": False}},
    "Lion": {"type": "Lion", "params": {"lr": 1e-2}},
    "Lamb": {"type": "Lamb", "params": {"lr": 1e-2, "weight_decay": 0.1}},
    "torch AdamW": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True, "fused": True}},
    "SGD": {"type": "SGD", "params": {"lr": 1e-2, "momentum": 0.9}},
    "Adagrad": {"type": "Adagrad", "params": {"lr": 1e-2, "lr_decay": 0.1}},
    "torch SGD": {"type": "SGD", "params": {"lr": 1e-2, "momentum": 0.9, "fused": True}},
    "torch Adagrad": {"type": "Adagrad", "params": {"lr": 1e-2, "fused": True}},
}


def both(
    stage: str,
    config: dict[str, Any],
    optimizer: str = "AdamW",
    bad: tuple[int, ...] = (0, 3, 4, STEPS - 1),
    accumulation: int = 1,
    clip: float = 0.3,
    ask: str = "never",
    groups: Any = None,
    value: float = float("inf"),
) -> list[str]:
    """Where the late engine differs from the other."""
    found = []
    for late in (False, True):
        case = Case(
            Tower, loss, groups, OPTIMIZERS[optimizer], config=SCHEDULE | config, accumulation=accumulation, clip=clip
        )
        engine = build_engine(case, STAGES[stage])
        if late:
            make_late(engine)
        found.append(train(engine, range(STEPS), bad, ask, value))
        engine.destroy()
    assert found[0]["skipped"] == repr(len(bad))
    return differences(*found)


# the others differ from these in no way that a stage could see
EVERYWHERE = ("AdamW", "SGD", "Lamb")


@pytest.mark.parametrize(
    ("stage", "optimizer"),
    [(stage, name) for name in OPTIMIZERS for stage in (STAGES if name in EVERYWHERE else ("zero0", "zero3"))],
)
def test_the_same_bits_for_every_optimizer_and_stage(ranks: Pools, stage: str, optimizer: str) -> None:
    """fp16 with a dynamic scale; the first and the last step overflow, and two in a row between
    them."""
    assert ranks(2).run(both, stage, FP16, optimizer) == [[], []]


@pytest.mark.parametrize("ask", ["always", "rank 1"])
@pytest.mark.parametrize("stage", ["zero0", "zero3"])
def test_every_reader_gets_the_same_answers(ranks: Pools, stage: str, ask: str) -> None:
    assert ranks(2).run(both, stage, FP16, ask=ask) == [[], []]


MORE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fp32": ({}, {}),
    "bf16": (BF16, {}),
    "static scale, no power of two": ({"fp16": {"enabled": True, "loss_scale": 100}}, {}),
    "accumulation": (FP16, {"accumulation": 3}),
    "bf16, accumulation": (BF16, {"accumulation": 2}),
    "no clipping": (FP16, {"clip": 0.0}),
    "nan": (BF16, {"value": float("nan")}),
    "groups": (FP16, {"groups": two_groups}),
    "groups of Lamb": (BF16, {"groups": two_groups, "optimizer": "Lamb"}),
    "prescaled": (FP16 | {"prescale_gradients": True}, {"optimizer": "torch AdamW"}),
    "OneCycle": (
        FP16 | {"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-2}}},
        {},
    ),
    "all is well": (BF16, {"bad": ()}),
}


@pytest.mark.parametrize("name", MORE)
def test_the_same_bits_in_every_setting(ranks: Pools, name: str) -> None:
    config, rest = MORE[name]
    assert ranks(2).run(both, "zero2", config, **rest) == [[], []]


def unchecked(late: bool) -> dict[str, Any]:
    config = {"bf16": {"enabled": True, "check_grad_overflow": False}}
    engine = build_engine(Case(Tower, loss, config=SCHEDULE | config, clip=0.3), STAGES["zero2"])
    if late:
        make_late(engine)
    found = train(engine, range(3), (1,), "always", float("nan"))
    return {key: repr(value) for key, value in found.items()}  # nan is not equal to itself


def both_unchecked() -> list[str]:
    one, other = unchecked(False), unchecked(True)
    assert one["skipped"] == "'0'"
    return differences(one, other)


def test_without_the_check_a_bad_step_is_taken(ranks: Pools) -> None:
    assert ranks(2).run(both_unchecked) == [[], []]


def replicas(late: bool) -> dict[str, Any]:
    case = Case(Tower, loss, config=SCHEDULE | FP16 | {"mesh": {"shard": 2, "replica": 2}}, clip=0.3)
    engine = build_engine(case, STAGES["zero2"])
    if late:
        make_late(engine)
    return train(engine, range(5), (2,), "never")


def both_replicas() -> list[str]:
    return differences(replicas(False), replicas(True))


def test_hybrid_sharding(ranks: Pools) -> None:
    assert ranks(4).run(both_replicas) == [[]] * 4


# --- who waits, and when --------------------------------------------------------------------------


def reads(stage: str, optimizer: str, config: dict[str, Any]) -> list[Any]:
    """Reads of the device in three steps, of which the second overflows; then how often the courier
    was waited for, before and after."""
    engine = build_engine(
        Case(Tower, loss, two_groups, OPTIMIZERS[optimizer], config=SCHEDULE | config, clip=0.3), STAGES[stage]
    )
    outcome, when, found = make_late(engine), {"now": False}, []
    spoil(engine, "last.bias", 0, when, float("inf"))
    for step in range(3):
        when["now"] = step == 1
        value = loss(engine, Turn(step, 0, engine.global_rank))
        engine.backward(value)
        before = waits(outcome)
        found.append((on_device(engine, outcome, engine.step), before, waits(outcome), outcome.open))
    return found


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("stage", ["zero0", "zero1", "zero2", "zero3"])
def test_nothing_is_read_in_a_step_and_once_after_it(ranks: Pools, stage: str, optimizer: str) -> None:
    """Of two ranks, through gloo's shared memory, which reads what it sends; so here one rank
    alone."""
    for found in ranks(1).run(reads, stage, optimizer, FP16):
        assert found == [([], step, step, True) for step in range(3)]


def test_the_proof_sees_reads():
    engine = build_engine(Case(Tower, loss), STAGES["zero1"])
    outcome = make_late(engine)

    def read(what: Any) -> list[str]:
        engine.backward(loss(engine, Turn(0, 0, 0)))
        return on_device(engine, outcome, what)

    master = engine.sharded.groups[0].master
    assert read(lambda: master.sum().item()) == ["aten::_local_scalar_dense"]
    assert read(lambda: bool((master * 2).isnan().any()))[-1:] == ["aten::_local_scalar_dense"]
    assert read(lambda: outcome._readback._here.copy_(outcome._readback.there)) == ["aten::copy_ to the host"]
    assert read(lambda: master.sum()) == []
    engine.outcome.deferred = False
    assert read(engine.step) == ["aten::_local_scalar_dense"] * 2, "the number of late groups, and the norm"


ASKERS: dict[str, Any] = {
    "norm": lambda engine: engine.get_global_grad_norm(),
    "applied": lambda engine: engine.was_step_applied(),
    "skipped": lambda engine: engine.skipped_steps,
    "culprit": lambda engine: engine.last_nonfinite,
    "scale": lambda engine: engine.cur_scale,
    "scaler": lambda engine: engine.outcome.result().loss_scale,
    "optimizer's scale": lambda engine: engine.optimizer.cur_scale,
    "lr": lambda engine: engine.get_lr(),
    "momentum": lambda engine: engine.get_mom(),
    "groups": lambda engine: engine.optimizer.param_groups,
    "state": lambda engine: engine.optimizer.state,
    "step counts": lambda engine: engine.optimizer.state_by_tensor.scalars(),
    "schedule": lambda engine: engine.lr_scheduler,
    "backward": lambda engine: engine.backward(loss(engine, Turn(1, 0, 0))),
    "step after another's loss": lambda engine: (loss(engine, Turn(1, 0, 0)).backward(), engine.step()),
    "destroy": lambda engine: engine.destroy(),
}
LEAVES_OPEN: dict[str, Any] = {
    "forward": lambda engine: loss(engine, Turn(1, 0, 0)),
    "evaluation": lambda engine: (engine.eval(), loss(engine, Turn(1, 0, 0)), engine.train()),
    "weights": lambda engine: engine.module_state_dict(),
    "zero_grad": lambda engine: engine.zero_grad(),
    "counters": lambda engine: (engine.global_steps, engine.micro_steps, engine.global_samples),
}


@pytest.mark.parametrize("name", [*ASKERS, *LEAVES_OPEN])
def test_which_calls_read_the_verdict(name: str) -> None:
    engine = build_engine(Case(Tower, loss, config=SCHEDULE), STAGES["zero1"])
    outcome = make_late(engine)
    engine.backward(loss(engine, Turn(0, 0, 0)))
    engine.step()
    assert outcome.open and waits(outcome) == 0
    (ASKERS | LEAVES_OPEN)[name](engine)
    assert waits(outcome) == (name in ASKERS)


# --- what a skipped step leaves -------------------------------------------------------------------


def resumed(folder: str, stage: str, late: bool) -> dict[str, Any]:
    """Five steps, saved right after the third, which was skipped, and gone on with in a new
    engine."""
    engines = []
    for _ in range(2):
        engines.append(build_engine(Case(Tower, loss, config=SCHEDULE | FP16, clip=0.3), STAGES[stage]))
        if late:
            make_late(engines[-1])
    train(engines[0], range(2), (0,), "never")
    train(engines[0], range(2, 3), (2,), "never")
    engines[0].save_checkpoint(Path(folder) / str(late), "here")
    engines[1].load_checkpoint(Path(folder) / str(late), "here")
    return train(engines[1], range(3, 6), (4,), "never")


def both_resumed(folder: str, stage: str) -> list[str]:
    return differences(resumed(folder, stage, False), resumed(folder, stage, True))


@pytest.mark.parametrize("stage", ["zero0", "zero2", "zero3"])
def test_a_checkpoint_right_after_a_skipped_step(ranks: Pools, stage: str, tmp_path: Path) -> None:
    assert ranks(2).run(both_resumed, str(tmp_path), stage) == [[], []]


def test_a_checkpoint_asks_before_it_is_written(tmp_path: Path) -> None:
    engine = build_engine(Case(Tower, loss, config=SCHEDULE), STAGES["zero1"])
    outcome, when = make_late(engine), {"now": True}
    spoil(engine, "last.bias", 0, when, float("inf"))
    engine.backward(loss(engine, Turn(0, 0, 0)))
    engine.step()
    assert outcome.open
    engine.save_checkpoint(tmp_path, "a")
    assert not outcome.open and engine.optimizer is not None and not engine.optimizer.base.state
    engine.backward(loss(engine, Turn(0, 0, 0)))
    engine.step()
    assert outcome.open
    engine.load_checkpoint(tmp_path, "a")
    assert not outcome.open and engine.skipped_steps == 1 and engine.global_steps == 1


def test_a_held_schedule_advances_at_once_and_goes_back_with_the_verdict():
    engine = build_engine(Case(Tower, loss, config=SCHEDULE), STAGES["zero1"])
    make_late(engine)
    schedule, when = engine.lr_scheduler, {"now": False}
    spoil(engine, "last.bias", 0, when, float("inf"))
    rates = []
    for step in range(3):
        when["now"] = step == 1
        engine.backward(loss(engine, Turn(step, 0, 0)))
        rates.append(schedule.get_last_lr()[0])
        engine.step()
        rates.append(schedule.get_last_lr()[0])
    first, second, third = (1e-3 * 0.9**power for power in range(3))
    assert rates == pytest.approx([first, second, second, third, second, third])


class Custom:
    """A schedule that nobody can put back."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.steps = optimizer, 0

    def step(self) -> None:
        self.steps += 1
        self.optimizer.param_groups[0]["lr"] *= 0.5


def test_a_schedule_that_cannot_go_back_is_only_stepped_when_the_verdict_is_known():
    engine = build_engine(Case(Tower, loss), STAGES["zero1"], lr_scheduler=lambda optimizer: Custom(optimizer))
    outcome, when = make_late(engine), {"now": False}
    spoil(engine, "last.bias", 0, when, float("inf"))
    for step in range(3):
        when["now"] = step == 1
        engine.backward(loss(engine, Turn(step, 0, 0)))
        engine.step()
        assert not outcome.open
    assert engine.lr_scheduler.steps == 2 and engine.get_lr() == [1e-3 / 4]


def at_minimum(how: str) -> tuple[str, str]:
    """Where the run ends, and with what words."""
    config = {"fp16": {"enabled": True, "initial_scale_power": 0, "hysteresis": 1, "min_loss_scale": 1}}
    engine = build_engine(Case(Tower, loss, config=config), STAGES["zero1"])
    make_late(engine)
    spoil(engine, "last.bias", 1, {"now": True}, float("nan"))
    engine.backward(loss(engine, Turn(0, 0, engine.global_rank)))
    engine.step()
    if engine.global_rank == 0:
        assert engine.skipped_steps == 1  # to ask is to be told, not to end alone
        assert engine.last_nonfinite is not None and "the next backward pass names" in engine.last_nonfinite.parameter
    try:
        engine.destroy() if how == "destroy" else engine.backward(loss(engine, Turn(1, 0, engine.global_rank)))
    except Diverged as error:
        return how, str(error)
    return "not at all", ""


def test_a_run_without_a_way_out_ends_with_the_next_backward_on_all_ranks(ranks: Pools) -> None:
    first, second = ranks(2).run(at_minimum, "backward")
    assert first == second and first[0] == "backward"
    assert "already at its minimum" in first[1] and "last.bias is not finite on rank 1" in first[1]


def test_an_engine_that_is_destroyed_says_so_without_the_others(ranks: Pools) -> None:
    for how, words in ranks(2).run(at_minimum, "destroy"):
        assert how == "destroy" and "already at its minimum" in words and "step 0" in words


# --- edits that have no version -------------------------------------------------------------------


def edited(stage: str, rank: int, how: str, name: str) -> list[str]:
    """What is said after three steps, before the second of which rank ``rank`` has edited the
    parameters that ``name`` begins; what the host has read in that step comes first."""
    engine = build_engine(Case(Tower, loss, config=SCHEDULE | BF16), STAGES[stage])
    outcome, found = make_late(engine), []
    for step in range(3):
        if step == 1 and engine.global_rank == rank:
            with torch.no_grad():
                for key, param in engine.module.named_parameters():
                    if key.startswith(name):
                        EDITS[how](param)
        try:
            engine.backward(loss(engine, Turn(step, 0, engine.global_rank)))
            if step == 1 and engine.mesh.data.size == 1:  # for others see the test of reads
                found += on_device(engine, outcome, engine.step)
            else:
                engine.step()
        except TrialError as error:
            return [*found, error.where, error.got]
    engine.outcome.finalize()
    return found


EDITS: dict[str, Any] = {
    "scaled": lambda param: param.data.mul_(0.5),
    "one element": lambda param: param.data[0, 0].fill_(3.0),
    "in another order": lambda param: param.data.copy_(param.data.flip(0)),
    "the same values": lambda param: param.data.copy_(param.data.clone()),
    "counted": lambda param: param.mul_(0.5),
}
LOST = ("scaled", "one element", "in another order")


@pytest.mark.parametrize("how", EDITS)
@pytest.mark.parametrize("stage", ["zero0", "zero1", "zero2"])
def test_an_edit_that_the_device_overwrites_is_an_error_at_the_next_backward(stage: str, how: str) -> None:
    """Parameters in bf16, whose fp32 masters do not have the edit. The step reads nothing."""
    found = edited(stage, 0, how, "last.weight")
    if how in LOST:
        where, got = found
        assert where == "engine.step, step 1" and got.startswith("an edit in first.weight or ")
    else:
        assert found == []


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("stage", ["zero0", "zero2"])
def test_all_ranks_say_so(ranks: Pools, stage: str, rank: int) -> None:
    """Also where only one has edited its part."""
    for where, got in ranks(2).run(edited, stage, rank, "scaled", ""):
        assert where == "engine.step, step 1" and got


# --- other engines --------------------------------------------------------------------------------


def gan(late: bool) -> list[dict[str, Any]]:
    """A discriminator whose gradients the generator's loss overwrites before the verdict on them is
    asked for."""
    engines = []
    case = Case(lambda: nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5)), loss, config=FP16, clip=0.3)
    for stage in ("zero0", "zero1"):
        engines.append(build_engine(case, STAGES[stage]))
        if late:
            make_late(engines[-1])
    critic, maker = engines
    when = {"now": False}
    spoil(critic, "2.bias", 1, when, float("inf"))
    half = torch.float16
    for step in range(5):
        noise = Turn(step, 0, critic.global_rank).normal(4, 5).to(half)
        when["now"] = step in (0, 2)
        critic.backward((critic(maker(noise).detach()) - 1).float().square().mean())
        critic.step()
        when["now"] = False
        maker.backward(critic(maker(noise)).float().square().mean())
        maker.step()
        critic.zero_grad()
    for engine in engines:
        engine.outcome.finalize()
    return [left(engine) for engine in engines]


def both_gans() -> list[str]:
    pairs = list(zip(gan(False), gan(True), strict=True))
    assert pairs[0][0]["skipped"] == "2"
    return [line for one, other in pairs for line in differences(one, other)]


def test_two_engines_in_turn(ranks: Pools) -> None:
    assert ranks(2).run(both_gans) == [[], []]


def pipeline(late: bool, stage: int, config: dict[str, Any]) -> dict[str, Any]:
    """Two pipeline ranks with a tied embedding; the first stage's gradient is bad in steps 0 and 2.
    ``pending``: was the verdict open."""
    engine = make_pipeline(layers(2), 2, {"stage": stage}, 2, gradient_clipping=0.5, **SCHEDULE, **config)
    if late:
        make_late(engine)
    when, pending, losses = {"now": False}, [], []
    name = next(name for name, _ in engine.module.named_parameters() if name.endswith("up.bias"))
    spoil(engine, name, 0, when, float("inf"))
    data = batches(0, 2, 5) if engine.is_first_stage() else None
    for step in range(5):
        when["now"] = step in (0, 2)
        losses.append(engine.train_batch(data).item())
        pending.append(engine.outcome.open)
    engine.outcome.finalize()
    found = left(engine) | {"losses": losses}
    engine.destroy()
    assert pending == [late] * 5 and found["skipped"] == "2"
    return found


def both_pipelines(stage: int, config: dict[str, Any]) -> list[str]:
    return differences(pipeline(False, stage, config), pipeline(True, stage, config))


@pytest.mark.parametrize(("stage", "config"), [(0, {}), (3, FP16)], ids=["fp32", "fp16"])
def test_a_pipeline(ranks: Pools, stage: int, config: dict[str, Any]) -> None:
    assert ranks(2).run(both_pipelines, stage, config) == [[], []]


# --- the choice -----------------------------------------------------------------------------------


def test_the_device_decides_on_cuda_for_optimizers_that_support_it():
    def supported(device: torch.device, **optimizer: Any) -> bool:
        engine = build_engine(Case(Tower, loss, optimizer=optimizer), STAGES["zero1"])
        assert not engine.outcome.deferred, "a CPU reads at no cost"
        assert engine.optimizer is not None
        return engine.optimizer.takes_device_scalars(device)

    cuda = torch.device("cuda", 0)
    assert not supported(cuda, type="RMSprop", params={"lr": 0.1})
    assert not supported(cuda, type="AdamW", params={"lr": 0.1, "foreach": True, "torch_adam": True})
    assert supported(torch.device("cpu"), **OPTIMIZERS["AdamW"])


def test_an_optimizer_reads_device_scalars_where_its_weights_and_gradients_are_together():
    engine = build_engine(Case(Tower, loss), STAGES["zero1"])
    optimizer = engine.optimizer
    assert optimizer is not None and optimizer.takes_device_scalars(engine.device)
    optimizer.store = object()  # type: ignore[assignment]
    assert not optimizer.takes_device_scalars(engine.device)
