"""Gradients between the last backward pass and the step: ``param.grad``, torch's clipping, and the
safe_set_* functions, against dense torch."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.dense import PRECISIONS, STAGES, TOLERANCE, Case, Turn, adamw, build_engine, difference, tower_loss
from tests.support.models import Tower
from tests.support.pool import Pools
from zero_trial import zero
from zero_trial.errors import TrialError

STEPS = 3
FULL = ["zero0", "zero1"]  # where full gradients live
EACH = list(zip(STAGES, ["fp32", "bf16", "fp16", "bf16", "fp32"], strict=True))
BOTH = [*EACH, ("zero1", "fp32"), ("zero3", "fp32")]


class Wide(nn.Module):
    """Gradients that are copied together when their group is ready, and one that goes to its place
    at once."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(5, 140), nn.Linear(140, 140), nn.Linear(140, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


def loss(model: Any, turn: Turn) -> torch.Tensor:
    return model(turn.normal(4, 5)).float().square().mean()


def made(stage: str, precision: str = "fp32", build: Callable[[], nn.Module] = Tower, accumulation: int = 1) -> Any:
    return build_engine(Case(build, loss, accumulation=accumulation, config=PRECISIONS[precision]), STAGES[stage])


def after_backward(stage: str, build: Callable[[], nn.Module] = Tower) -> Any:
    engine = made(stage, build=build)
    engine.backward(loss(engine, Turn(0, 0, engine.global_rank)))
    return engine


def clip(module: Any) -> None:
    nn.utils.clip_grad_norm_(module.parameters(), 0.05)


def scale_one(module: Any) -> None:
    module.blocks[1].weight.grad *= 3.0


def changed(grad: torch.Tensor, param: nn.Parameter) -> torch.Tensor:
    return (grad * 3).clamp(-0.05, 0.05)


def set_full(module: Any) -> None:
    for param in module.parameters():
        zero.safe_set_full_grad(param, changed(zero.safe_get_full_grad(param), param))


def set_parts(module: Any) -> None:
    for param in module.parameters():
        new = changed(zero.safe_get_local_grad(param), param)
        zero.safe_set_local_grad(param, new)
        torch.testing.assert_close(zero.safe_get_local_grad(param), new, rtol=2e-2, atol=2e-3)


def set_vectorized(module: Any) -> None:
    zero.safe_update_full_grad_vectorized(list(module.parameters()), changed)


def set_plain(module: Any) -> None:
    for param in module.parameters():
        param.grad.copy_(changed(param.grad, param))


EDITS = {edit.__name__: edit for edit in (clip, scale_one)}
SETS = {edit.__name__: edit for edit in (set_full, set_parts, set_vectorized)}


def dense_steps(edit: Callable[[Any], None], ranks: int, accumulation: int) -> tuple[nn.Module, list[float]]:
    """Plain torch with the mean of all ranks; the norm after each edit."""
    torch.manual_seed(1)
    model, norms = Tower(), []
    optimizer = adamw(model.parameters())
    for step in range(STEPS):
        for number in range(accumulation):
            for rank in range(ranks):
                (loss(model, Turn(step, number, rank)) / (ranks * accumulation)).backward()
        edit(model)
        for param in model.parameters():
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
        norms.append(nn.utils.get_total_norm([param.grad for param in model.parameters()]).item())
        optimizer.step()
        optimizer.zero_grad()
    return model, norms


def edited(name: str, config: dict[str, Any], accumulation: int, precision: str) -> tuple[float, float]:
    """(difference of the parameters to dense torch, largest relative one of the norms)"""
    engine = build_engine(Case(Tower, loss, accumulation=accumulation, config=PRECISIONS[precision]), config)
    edit, norms = (EDITS | SETS)[name], []
    for step in range(STEPS):
        for number in range(accumulation):
            engine.backward(loss(engine, Turn(step, number, engine.global_rank)))
            if number == accumulation - 1:
                edit(engine.module)
            engine.step()
        norms.append(engine.get_global_grad_norm())
    model, expected = dense_steps(edit if name in EDITS else set_plain, engine.dp_world_size, accumulation)
    gap = difference(engine, model)
    return gap, max(abs(a / b - 1) for a, b in zip(norms, expected, strict=True))


@pytest.mark.parametrize(
    ("name", "stage", "precision", "accumulation"),
    [(name, FULL[i % 2], "fp32", 1 + i // 2) for i, name in enumerate(EDITS)]
    + [("clip", "zero0", "bf16", 2), ("scale_one", "zero1", "bf16", 2), ("clip", "zero1", "fp16", 2)]
    + [("set_full", stage, "fp32", 1) for stage in ("zero1", "zero2", "zero3-free")]
    + [("set_parts", stage, "fp32", 1) for stage in ("zero0", "zero2", "zero3")]
    + [("set_vectorized", "zero3", "fp32", 1), ("set_full", "zero3", "bf16", 1), ("set_full", "zero3", "fp16", 1)],
)
def test_an_edit_counts(ranks: Pools, name: str, stage: str, precision: str, accumulation: int) -> None:
    """Gradients of 16 bits differ by 2**-8 (bf16) of themselves; an AdamW step passes on at most as
    much of its lr."""
    limits = (TOLERANCE, 1e-5) if precision == "fp32" else (2e-2, 1e-2)
    for found in ranks(2).run(edited, name, STAGES[stage], accumulation, precision):
        assert found <= limits and found[1] <= limits[1]


def with_an_edit(edit: bool) -> list[torch.Tensor]:
    """The masters after a step on bf16 gradients that were summed in fp32."""
    engine = made("zero1", "bf16", accumulation=2)
    for number in range(2):
        engine.backward(loss(engine, Turn(0, number, engine.global_rank)))
        if edit and number == 1:
            engine.module.first.weight.grad[0] = 0.0
        engine.step()
    return [zero.safe_get_full_fp32_param(param).clone() for param in engine.module.parameters()]


def test_elements_that_no_edit_changes_keep_digits_that_bf16_does_not_have(ranks: Pools) -> None:
    first, *others = ranks(2).run(with_an_edit, False)[0]
    edited, *same = ranks(2).run(with_an_edit, True)[0]
    assert torch.equal(first[1:], edited[1:]) and not torch.equal(first[0], edited[0])
    assert all(map(torch.equal, others, same))


def drop_it(param: nn.Parameter) -> None:
    param.grad = None


def double(param: nn.Parameter) -> None:
    if param.grad is not None:
        param.grad.mul_(2)


def set_ones(param: nn.Parameter) -> None:
    param.grad = torch.ones_like(param)


def as_loss(
    edit: Callable[[nn.Parameter], None], factor: float, hooks: str, stage: str, precision: str, passes: int
) -> bool:
    """``edit`` of gradients, or its loss times ``factor``: whether both end alike. After the first
    backward pass of two micro-batches; or with ``hooks`` (added "before" or "after" initialize)."""
    states, turns = [], 1 if hooks else 2
    for edits in (True, False):
        torch.manual_seed(1)
        module: Any = Wide()
        if edits and hooks == "before":
            add_hooks(module, edit)
        case = Case(lambda module=module: module, loss, accumulation=turns, config=PRECISIONS[precision])
        engine: Any = build_engine(case, STAGES[stage])
        if edits and hooks == "after":
            add_hooks(module, edit)
        for step in range(STEPS):
            for number in range(turns * passes):
                value = loss(engine, Turn(step, number, engine.global_rank))
                engine.backward(value if edits or number else value * factor)
                for param in module.parameters() if edits and number == 0 and not hooks else ():
                    edit(param)
                if number % passes == passes - 1:
                    engine.step()
        states.append(engine.module_state_dict())
    return all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def add_hooks(module: nn.Module, edit: Callable[[nn.Parameter], None]) -> None:
    for param in module.parameters():
        param.register_post_accumulate_grad_hook(edit)


@pytest.mark.parametrize(("stage", "precision"), BOTH)
def test_gradients_that_are_dropped_or_edited_between_micro_batches_or_by_hooks(
    ranks: Pools, stage: str, precision: str
) -> None:
    for passes in (1, 2):
        assert all(ranks(2).run(as_loss, drop_it, 0.0, "", stage, precision, passes))
    for hooks in ("before", "after") if precision == "fp32" else ():
        assert all(ranks(2).run(as_loss, double, 2.0, hooks, stage, "fp32", 1))
    if precision == "fp32" and not stage.startswith("zero3"):
        assert all(ranks(2).run(as_loss, double, 2.0, "", stage, "fp32", 2))


def own_sums(stage: str, precision: str) -> None:
    """Inside a block that reduces nothing ``safe_get_full_grad`` and ``.grad`` return this rank's
    own sum, after it the former returns the mean."""
    engine = build_engine(Case(Wide, tower_loss, config=PRECISIONS[precision]), STAGES[stage])
    plains = [Wide().to(next(engine.module.parameters()).dtype) for _ in range(engine.dp_world_size)]
    state = engine.module_state_dict()
    with engine.coalesce_grad_reduction():
        for number in range(2):
            engine.backward(tower_loss(engine, Turn(0, number, engine.global_rank)))
            for rank, plain in enumerate(plains):
                plain.load_state_dict(state)
                (tower_loss(plain, Turn(0, number, rank)) * engine.loss_scale).backward()
        for param, own in zip(engine.module.parameters(), plains[engine.global_rank].parameters(), strict=True):
            torch.testing.assert_close(zero.safe_get_full_grad(param), own.grad, check_dtype=False)
            if precision == "fp32":
                torch.testing.assert_close(param.grad, own.grad)
    for param, *each in zip(engine.module.parameters(), *(plain.parameters() for plain in plains), strict=True):
        mean = torch.stack([other.grad for other in each]).float().mean(0) / engine.loss_scale
        torch.testing.assert_close(zero.safe_get_full_grad(param), mean, check_dtype=False, rtol=2e-2, atol=1e-4)
    engine.step()


@pytest.mark.parametrize(("stage", "precision"), BOTH)
def test_before_the_reduction_a_gradient_is_this_ranks_sum(ranks: Pools, stage: str, precision: str) -> None:
    ranks(2).run(own_sums, stage, precision)


def without_backward(stage: str, precision: str) -> float:
    """The difference to dense torch after steps with gradients that user code has set."""
    engine = made(stage, precision)
    torch.manual_seed(1)
    model = Tower()
    optimizer = adamw(model.parameters())
    for step in range(STEPS):
        for number, (param, dense) in enumerate(zip(engine.module.parameters(), model.parameters(), strict=True)):
            each = [Turn(step, number, rank).normal(*dense.shape) for rank in range(engine.dp_world_size)]
            param.grad = (each[engine.global_rank] * engine.loss_scale).to(param.dtype)
            dense.grad = torch.stack(each).mean(0)
        engine.step()
        optimizer.step()
    return difference(engine, model)


@pytest.mark.parametrize(("stage", "precision"), EACH)
def test_gradients_that_are_set_without_a_backward_pass(ranks: Pools, stage: str, precision: str) -> None:
    assert max(ranks(2).run(without_backward, stage, precision)) <= (TOLERANCE if precision == "fp32" else 2e-2)


def alone(stage: str) -> list[str]:
    """What differs from a run in which no rank calls torch.autograd.grad. Where full gradients
    live, all ranks edit them before and after."""
    states = []
    for calls in (False, True):
        engine = made(stage)
        module, params = engine.module, list(engine.module.parameters())
        for step in range(STEPS):
            engine.backward(loss(engine, Turn(step, 0, engine.global_rank)))
            if stage in FULL:
                module.blocks[0].weight.grad.mul_(2.0)
                module.last.weight.grad = torch.ones_like(module.last.weight)
            if calls and engine.global_rank == 0:
                shown = [param.grad for param in params]
                torch.autograd.grad(engine(Turn(step, 7, 0).normal(4, 5)).sum(), params)
                assert all(param.grad is grad for param, grad in zip(params, shown, strict=True))
            if stage in FULL:
                module.blocks[1].weight.grad.add_(module.blocks[0].weight.grad)
            engine.step()
        states.append(engine.module_state_dict())
    return [name for name, value in states[0].items() if not torch.equal(value, states[1][name])]


@pytest.mark.parametrize("stage", [*FULL, "zero2"])
def test_one_rank_alone_may_call_autograd_grad(ranks: Pools, stage: str) -> None:
    assert ranks(2).run(alone, stage) == [[]] * 2


@pytest.mark.parametrize(("stage", "around"), list(zip(STAGES, [False, True, True, False, True], strict=True)))
def test_a_second_pass_after_the_gradients_were_shown_is_added(stage: str, around: bool) -> None:
    """To what was edited; also one that comes around the engine."""
    norms = []
    for late in (False, True):
        engine = made(stage, accumulation=2)
        engine.backward(loss(engine, Turn(0, 0, 0)))
        engine.step()
        engine.backward(loss(engine, Turn(0, 1, 0)) * (1 if late else 2))
        if late:
            if stage in FULL:
                scale_one(engine.module)
                engine.module.blocks[1].weight.grad /= 3.0
            loss(engine.module if around else engine, Turn(0, 1, 0)).backward()
        engine.step()
        norms.append(engine.get_global_grad_norm())
    assert norms[1] == pytest.approx(norms[0], rel=1e-6)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_metadata_needs_no_values(precision: str) -> None:
    """A gradient has its parameter's dtype, unless it could underflow."""
    engine = made("zero1", precision)
    engine.backward(loss(engine, Turn(0, 0, 0)))
    grad = engine.module.last.weight.grad
    assert isinstance(grad, torch.Tensor) and grad.shape == (4, 11) and grad.dtype == engine.module.last.weight.dtype
    assert grad.is_leaf and grad.grad is None and not grad.requires_grad and grad.numel() == 44 and len(grad) == 4
    assert grad.device == torch.device("cpu") and grad.untyped_storage().nbytes() == 0
    assert grad.clone().dtype == (torch.bfloat16 if precision == "bf16" else torch.float32)


def set_by_part(stage: str) -> None:
    engine = made(stage, "bf16")
    engine.backward(loss(engine, Turn(0, 0, engine.global_rank)))
    engine.step()
    weight = engine.module.blocks[0].weight
    before = zero.safe_get_full_fp32_param(weight), zero.safe_get_full_optimizer_state(weight, "exp_avg")
    local = zero.safe_get_local_fp32_param(weight), zero.safe_get_local_optimizer_state(weight, "exp_avg")
    sizes = engine.mesh.shard.gather_json([part.numel() for part in local], "sizes")
    assert all(sum(each) == before[0].numel() for each in zip(*sizes, strict=True))
    zero.safe_set_local_fp32_param(weight, local[0] * 2 + 1)
    zero.safe_set_local_optimizer_state(weight, local[1] * 2 + 1, "exp_avg")
    assert zero.safe_get_local_grad(weight) is None
    master, state = zero.safe_get_full_fp32_param(weight), zero.safe_get_full_optimizer_state(weight, "exp_avg")
    with zero.GatheredParameters(weight):
        assert torch.equal(weight.float(), master.bfloat16().float())
    assert torch.equal(master, before[0] * 2 + 1) and torch.equal(state, before[1] * 2 + 1)
    with pytest.raises(TrialError, match="size of this rank's part"):
        zero.safe_set_local_fp32_param(weight, torch.ones(3000))


@pytest.mark.parametrize("stage", ["zero0", "zero2", "zero3-free"])
def test_parts_of_masters_and_states_that_are_set(ranks: Pools, stage: str) -> None:
    ranks(2).run(set_by_part, stage)


@pytest.mark.parametrize(("stage", "precision"), EACH)
def test_a_frozen_parameter_has_no_master_no_state_and_no_gradient(stage: str, precision: str) -> None:
    def build() -> nn.Module:
        model = Tower()
        model.blocks[0].requires_grad_(False)
        return model

    engine = build_engine(Case(build, tower_loss, config=PRECISIONS[precision]), STAGES[stage])
    engine.backward(tower_loss(engine, Turn(0, 0, 0)))
    gradients = (zero.safe_get_full_grad, zero.safe_get_local_grad)
    masters = (zero.safe_get_full_fp32_param, zero.safe_get_local_fp32_param)
    states = (zero.safe_get_full_optimizer_state, zero.safe_get_local_optimizer_state)
    for param in engine.module.parameters():
        assert all((read(param) is None) != param.requires_grad for read in gradients)
    engine.step()
    for param in engine.module.parameters():
        found = [*(read(param) for read in masters), *(read(param, "exp_avg") for read in states)]
        assert all((each is None) != param.requires_grad for each in found)


USES: dict[str, Callable[[Any], Any]] = {
    "clip_grad_norm_": clip,
    "get_total_norm": lambda module: nn.utils.get_total_norm([param.grad for param in module.parameters()]),
    "edit": scale_one,
    "optimizer": lambda module: torch.optim.AdamW(module.parameters(), foreach=True).step(),
    "print": lambda module: str(module.last.weight.grad),
    "numpy": lambda module: module.last.weight.grad.numpy(),
}


@pytest.mark.parametrize("stage", ["zero2", "zero3", "zero3-free"])
def test_if_gradients_are_cut_every_use_is_an_error(stage: str) -> None:
    engine = after_backward(stage)
    torch.autograd.grad(loss(engine, Turn(1, 0, 0)), list(engine.module.parameters()))
    for use, act in USES.items():
        # an optimizer needs the values too: if they are freed, that is the first error
        freed = use == "optimizer" and stage.startswith("zero3")
        with pytest.raises(TrialError, match="freed" if freed else r"gradient_clipping.*safe_get_full_grad"):
            act(engine.module)
    engine.step()
    engine.backward(loss(engine, Turn(1, 0, 0)))  # gradients come as before
    engine.step()


def sum_elsewhere(stage: str, precision: str, edit: Callable[[nn.Parameter], None]) -> None:
    engine = made(stage, precision, Wide, accumulation=2)
    engine.backward(loss(engine, Turn(0, 0, 0)))
    for param in engine.module.parameters():
        edit(param)
    engine.backward(loss(engine, Turn(0, 0, 0)))


def kept_beyond_its_step() -> None:
    engine = after_backward("zero0")
    kept = engine.module.last.weight.grad
    engine.step()
    assert engine.module.last.weight.grad is None
    kept.norm()


def hook_without_a_gradient() -> None:
    engine = made("zero0", "bf16", Wide, accumulation=2)
    engine.module.middle.weight.register_post_accumulate_grad_hook(double)
    engine.backward(loss(engine, Turn(0, 0, 0)))


def with_a_graph() -> None:
    engine = made("zero0")
    loss(engine, Turn(0, 0, 0)).backward(create_graph=True)


def before_a_step(act: Callable[[nn.Parameter], Any]) -> None:
    """There are no gradients and no states yet."""
    engine = made("zero1")
    weight = engine.module.last.weight
    assert zero.safe_get_full_grad(weight) is None and zero.safe_get_full_optimizer_state(weight, "exp_avg") is None
    act(weight)


def set_state(weight: nn.Parameter) -> None:
    zero.safe_set_full_optimizer_state(weight, torch.zeros_like(weight), "exp_avg")


def collected(module: Any) -> Any:
    """Return the module of an engine to which nothing refers any more."""
    gc.collect()
    return module


REFUSALS: dict[str, tuple[str, Callable[[], Any]]] = {
    "master": (
        r"last.weight: the value has another shape: got \(3,\), expected \(4, 11\)",
        lambda: before_a_step(lambda weight: zero.safe_set_full_fp32_param(weight, torch.zeros(3))),
    ),
    "state": ("exp_avg: the optimizer does not have this state yet", lambda: before_a_step(set_state)),
    "collected": ("engine is gone.*Keep a reference", lambda: set_state(collected(made("zero1").module).last.weight)),
    "stranger": ("belongs to no engine", lambda: zero.safe_get_full_fp32_param(nn.Parameter(torch.zeros(2, 2)))),
    "kept": ("clone", kept_beyond_its_step),
    "hook": ("register_hook", hook_without_a_gradient),
    "graph": ("create_graph", with_a_graph),
    "full": ("last engine", lambda: zero.safe_set_full_grad(made("zero3").module.last.weight, torch.zeros(4, 11))),
    "local": ("last engine", lambda: zero.safe_set_local_grad(made("zero3").module.last.weight, torch.zeros(44))),
    "shape": ("shape", lambda: zero.safe_set_full_grad(after_backward("zero3").module.last.weight, torch.zeros(3))),
    "reduced": ("last micro-batch", lambda: sum_elsewhere("zero3", "fp32", double)),
    "summed in fp32": ("last micro-batch", lambda: sum_elsewhere("zero0", "bf16", double)),
    "set": ("last micro-batch", lambda: sum_elsewhere("zero3-free", "fp16", set_ones)),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name: str) -> None:
    words, act = REFUSALS[name]
    with pytest.raises(TrialError, match=words):
        act()
