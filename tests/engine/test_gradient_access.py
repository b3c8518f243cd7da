"""Gradients between the last backward pass and the step: ``param.grad``, torch's clipping, and the
safe_set_* functions, against dense torch."""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zero_trial
from tests.support.dense import STAGES, TOLERANCE, Case, Turn, adamw, build_engine, difference, tower_loss
from tests.support.models import Tower
from tests.support.pool import Pools
from tests.support.whole_optimizers import ShampooLike
from zero_trial import zero
from zero_trial.errors import TrialError
from zero_trial.zero import GatheredParameters

STEPS = 3
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "loss_scale": 1024.0}},
}
FULL = ["zero0", "zero1"]  # where full gradients live
CUT = ["zero2", "zero3", "zero3-free"]


def loss(model: Any, turn: Turn) -> torch.Tensor:
    return model(turn.normal(4, 5)).float().square().mean()


Edit = Callable[[nn.Module], Any]


def clip(module: nn.Module) -> None:
    nn.utils.clip_grad_norm_(module.parameters(), 0.05)


def clip_values(module: nn.Module) -> None:
    nn.utils.clip_grad_value_(list(module.parameters()), 0.01)


def scale_one(module: nn.Module) -> None:
    module.blocks[1].weight.grad *= 3.0  # type: ignore[index, union-attr, operator]


def through_data(module: nn.Module) -> None:
    for param in module.parameters():
        param.grad.data.add_(param.detach(), alpha=0.1)  # type: ignore[union-attr]


def drop(module: nn.Module) -> None:
    module.last.weight.grad = None  # type: ignore[union-attr]


def replace(module: nn.Module) -> None:
    module.last.bias.grad = torch.full_like(module.last.bias, 0.25)  # type: ignore[union-attr, arg-type]


def noise(module: nn.Module) -> None:
    generator = torch.Generator().manual_seed(4)
    for param in module.parameters():
        assert param.grad is not None
        param.grad.add_(torch.randn(param.shape, generator=generator).to(param.grad.dtype) * 0.01)


EDITS: dict[str, Edit] = {
    edit.__name__: edit for edit in (clip, clip_values, scale_one, through_data, drop, replace, noise)
}


def dense_steps(edit: Edit, ranks: int, accumulation: int) -> tuple[nn.Module, list[float]]:
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
        norms.append(nn.utils.get_total_norm([param.grad for param in model.parameters()]).item())  # type: ignore[misc]
        optimizer.step()
        optimizer.zero_grad()
    return model, norms


def edited(name: str, zero_section: dict[str, Any], accumulation: int, precision: str) -> tuple[float, float]:
    """(difference of the parameters to dense torch, largest relative one of the norms)"""
    case = Case(Tower, loss, accumulation=accumulation, config=PRECISIONS[precision])
    engine, norms = build_engine(case, zero_section), []
    for step in range(STEPS):
        for number in range(accumulation):
            loss(engine, Turn(step, number, engine.global_rank)).backward() if precision != "fp16" else engine.backward(
                loss(engine, Turn(step, number, engine.global_rank))
            )
            if number == accumulation - 1:
                EDITS[name](engine.module)
            engine.step()
        norms.append(engine.get_global_grad_norm())
    model, expected = dense_steps(EDITS[name], engine.dp_world_size, accumulation)
    gap = difference(engine, model)
    engine.destroy()
    return gap, max(abs(a / b - 1) for a, b in zip(norms, expected, strict=True))


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("stage", FULL)
@pytest.mark.parametrize("name", EDITS)
def test_an_edit_counts(ranks: Pools, name: str, stage: str, accumulation: int) -> None:
    for gap, norm in ranks(2).run(edited, name, STAGES[stage], accumulation, "fp32"):
        assert gap <= TOLERANCE and norm <= 1e-5


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("stage", FULL)
def test_an_edit_counts_in_16_bits(ranks: Pools, stage: str, precision: str) -> None:
    """Gradients of 16 bits differ by 2**-8 (bf16) of themselves; an AdamW step passes on at most as
    much of its lr."""
    for name in ("clip", "scale_one"):
        for gap, norm in ranks(2).run(edited, name, STAGES[stage], 2, precision):
            assert gap <= 2e-2 and norm <= 1e-2


def shown_dtype(precision: str) -> torch.dtype:
    engine = build_engine(Case(Tower, loss, config=PRECISIONS[precision]), STAGES["zero1"])
    engine.backward(loss(engine, Turn(0, 0, engine.global_rank)))
    found = engine.module.first.weight.grad.clone().dtype
    engine.destroy()
    return found


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_gradient_has_the_dtype_of_its_parameter_unless_it_could_underflow(ranks: Pools, precision: str) -> None:
    expected = torch.bfloat16 if precision == "bf16" else torch.float32
    assert ranks(2).run(shown_dtype, precision) == [expected] * 2


def with_an_edit(edit: bool) -> list[torch.Tensor]:
    """The masters after a step on bf16 gradients that were summed in fp32."""
    engine = build_engine(Case(Tower, loss, accumulation=2, config=PRECISIONS["bf16"]), STAGES["zero1"])
    for number in range(2):
        engine.backward(loss(engine, Turn(0, number, engine.global_rank)))
        if edit and number == 1:
            engine.module.first.weight.grad[0] = 0.0
        engine.step()
    masters = [zero.safe_get_full_fp32_param(param).clone() for param in engine.module.parameters()]
    engine.destroy()
    return masters


def test_elements_that_no_edit_changes_keep_digits_that_bf16_does_not_have(ranks: Pools) -> None:
    first, *others = ranks(2).run(with_an_edit, False)[0]
    edited, *same = ranks(2).run(with_an_edit, True)[0]
    assert torch.equal(first[1:], edited[1:]) and not torch.equal(first[0], edited[0])
    assert all(map(torch.equal, others, same))


def test_hybrid_sharding(ranks: Pools) -> None:
    config = STAGES["zero1"] | {"mics_shard_size": 2}
    for gap, norm in ranks(4).run(edited, "clip", config, 1, "fp32"):
        assert gap <= TOLERANCE and norm <= 1e-5


class Wide(nn.Module):
    """Gradients that are copied together when their group is ready, and one that goes to its place
    at once."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(5, 140), nn.Linear(140, 140), nn.Linear(140, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


def take_away(param: nn.Parameter) -> None:
    param.grad = None


def double(param: nn.Parameter) -> None:
    if param.grad is not None:
        param.grad.mul_(2)


def set_double(param: nn.Parameter) -> None:
    if param.grad is not None:
        param.grad = param.grad * 2


def between_micro_batches(
    edit: Callable[[nn.Parameter], None], factor: float, zero_section: dict[str, Any], precision: str, passes: int
) -> bool:
    """Two micro-batches of ``passes`` backward passes each. ``edit`` after the first pass of all,
    or its loss times ``factor``: whether both end alike."""
    states = []
    for does in (True, False):
        engine = build_engine(Case(Wide, loss, accumulation=2, config=PRECISIONS[precision]), zero_section)
        for step in range(STEPS):
            for number in range(2):
                for turn in range(passes):
                    first = number == turn == 0
                    value = loss(engine, Turn(step, number + 2 * turn, engine.global_rank))
                    engine.backward(value * (factor if first and not does else 1.0))
                    for param in engine.module.parameters() if first and does else ():
                        edit(param)
                engine.step()
        states.append(engine.module_state_dict())
        engine.destroy()
    return all(torch.equal(value, states[1][name]) for name, value in states[0].items())


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("stage", STAGES)
def test_a_gradient_that_is_taken_away_between_micro_batches(
    ranks: Pools, stage: str, precision: str, passes: int
) -> None:
    assert all(ranks(2).run(between_micro_batches, take_away, 0.0, STAGES[stage], precision, passes))


@pytest.mark.parametrize("edit", [double, set_double])
@pytest.mark.parametrize("stage", ["zero0", "zero1", "zero2"])
def test_an_edit_between_micro_batches_counts(ranks: Pools, stage: str, edit: Callable[[nn.Parameter], None]) -> None:
    assert all(ranks(2).run(between_micro_batches, edit, 2.0, STAGES[stage], "fp32", 2))


@pytest.mark.parametrize(("stage", "precision"), [("zero3", "fp32"), ("zero0", "bf16"), ("zero3-free", "fp16")])
def test_a_sum_that_is_elsewhere_is_not_used_between_micro_batches(stage: str, precision: str) -> None:
    for edit in (double, set_double):
        with pytest.raises(TrialError, match="last micro-batch"):
            between_micro_batches(edit, 2.0, STAGES[stage], precision, 1)
    engine = build_engine(Case(Wide, loss, accumulation=2, config=PRECISIONS[precision]), STAGES[stage])
    engine.backward(loss(engine, Turn(0, 0, 0)))
    engine.module.last.bias.grad = torch.ones_like(engine.module.last.bias)
    with pytest.raises(TrialError, match="last micro-batch"):
        engine.backward(loss(engine, Turn(0, 0, 0)))


def hooked(zero_section: dict[str, Any], precision: str, before: bool) -> bool:
    """A hook that doubles gradients as they come; whether that is twice the loss."""
    states = []
    for factor in (1.0, 2.0):
        case = Case(Wide, loss, config=PRECISIONS[precision])
        model = engine = None
        if before:
            torch.manual_seed(1)
            model = Wide()
            case = Case(lambda model=model: model, loss, config=PRECISIONS[precision])
        handles = [param.register_post_accumulate_grad_hook(double) for param in model.parameters()] if model else []
        engine = build_engine(case, zero_section)
        if not before:
            handles = [param.register_post_accumulate_grad_hook(double) for param in engine.module.parameters()]
        for handle in handles if factor == 2.0 else ():
            handle.remove()
        for step in range(STEPS):
            engine.backward(loss(engine, Turn(step, 0, engine.global_rank)) * factor)
            engine.step()
        states.append(engine.module_state_dict())
        engine.destroy()
    return all(torch.equal(value, states[1][name]) for name, value in states[0].items())


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("stage", STAGES)
def test_hooks_that_change_gradients_as_they_come(ranks: Pools, stage: str, precision: str, before: bool) -> None:
    assert all(ranks(2).run(hooked, STAGES[stage], precision, before))


def without_sync(zero_section: dict[str, Any]) -> bool:
    """Whether .grad after a pass that reduces nothing is this rank's own sum, and edits count."""
    engine, plain = build_engine(Case(Wide, loss), zero_section), Wide()
    plain.load_state_dict(engine.module_state_dict())
    with engine.no_sync():
        engine.backward(loss(engine, Turn(0, 0, engine.global_rank)))
    loss(plain, Turn(0, 0, engine.global_rank)).backward()
    pairs = list(zip(engine.module.parameters(), plain.parameters(), strict=True))
    own = all(torch.allclose(param.grad, other.grad, atol=1e-7) for param, other in pairs)
    for param, other in pairs:
        param.grad = torch.ones_like(other)
    engine.step()
    expected = math.sqrt(sum(param.numel() for param in plain.parameters()))
    return own and engine.get_global_grad_norm() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_that_are_not_reduced_yet(ranks: Pools, stage: str) -> None:
    assert all(ranks(2).run(without_sync, STAGES[stage]))


def unused_but_set(zero_section: dict[str, Any]) -> bool:
    """Whether a gradient that user code has set after ``no_sync`` counts where the pass brought
    none: in a group with gradients, and in one without."""
    engine = build_engine(Case(Wide, loss), zero_section)
    engine.module.forward = engine.module.first.forward
    with engine.no_sync():
        engine.backward(loss(engine, Turn(0, 0, engine.global_rank)) * 0)
    for param in engine.module.middle.parameters():
        param.grad = torch.ones_like(param).requires_grad_()
    engine.step()
    expected = math.sqrt(sum(param.numel() for param in engine.module.middle.parameters()))
    return engine.get_global_grad_norm() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("stage", STAGES)
def test_a_gradient_that_is_set_where_none_came(ranks: Pools, stage: str) -> None:
    assert all(ranks(2).run(unused_but_set, STAGES[stage]))


def coalesced(zero_section: dict[str, Any], precision: str) -> None:
    """Inside the block ``safe_get_full_grad`` returns this rank's own sum, after it the mean."""
    engine = build_engine(Case(Wide, tower_loss, config=PRECISIONS[precision]), zero_section)
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
    for param, *each in zip(engine.module.parameters(), *(plain.parameters() for plain in plains), strict=True):
        mean = torch.stack([other.grad for other in each]).float().mean(0) / engine.loss_scale
        torch.testing.assert_close(zero.safe_get_full_grad(param), mean, check_dtype=False, rtol=2e-2, atol=1e-4)
    engine.step()
    engine.destroy()


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("stage", STAGES)
def test_the_full_gradient_before_the_reduction_is_this_ranks_sum(ranks: Pools, stage: str, precision: str) -> None:
    ranks(2).run(coalesced, STAGES[stage], precision)


def without_backward(zero_section: dict[str, Any], precision: str) -> float:
    """The difference to dense torch after steps with gradients that user code has set."""
    engine = build_engine(Case(Tower, loss, config=PRECISIONS[precision]), zero_section)
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
    gap = difference(engine, model)
    engine.destroy()
    return gap


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("stage", STAGES)
def test_gradients_that_are_set_without_a_backward_pass(ranks: Pools, stage: str, precision: str) -> None:
    assert all(
        gap <= (TOLERANCE if precision == "fp32" else 2e-2)
        for gap in ranks(2).run(without_backward, STAGES[stage], precision)
    )


def test_a_hook_that_would_find_no_gradient_is_an_error() -> None:
    engine = build_engine(Case(Wide, loss, accumulation=2, config=PRECISIONS["bf16"]), STAGES["zero0"])
    engine.module.middle.weight.register_post_accumulate_grad_hook(double)
    with pytest.raises(TrialError, match="register_hook"):
        engine.backward(loss(engine, Turn(0, 0, 0)))


def test_gradients_with_a_graph_of_their_own_are_refused_in_words() -> None:
    engine = build_engine(Case(Wide, loss), STAGES["zero0"])
    with pytest.raises(TrialError, match="create_graph"):
        loss(engine, Turn(0, 0, 0)).backward(create_graph=True)


def read_by_one_rank() -> Any:
    """At stage 0 one rank alone may look; nothing changes, on three ranks neither."""
    states = []
    for look in (False, True):
        engine = build_engine(Case(Tower, loss), STAGES["zero0"])
        for step in range(STEPS):
            engine.backward(loss(engine, Turn(step, 0, engine.global_rank)))
            if look and engine.global_rank == 0:
                assert all(param.grad.norm() > 0 for param in engine.module.parameters())
            engine.step()
        states.append(engine.module_state_dict())
        engine.destroy()
    return [name for name, value in states[0].items() if not torch.equal(value, states[1][name])]


def test_one_rank_may_look_at_stage_0(ranks: Pools) -> None:
    assert ranks(3).run(read_by_one_rank) == [[]] * 3


def traffic(zero_section: dict[str, Any], look: bool) -> dict[str, int]:
    engine = build_engine(Case(Tower, loss), zero_section)
    engine.backward(loss(engine, Turn(0, 0, engine.global_rank)))
    if look:
        nn.utils.clip_grad_norm_(engine.module.parameters(), 0.05)
    engine.step()
    sent = {name: row["elements"] for name, row in engine.comms_summary().items()}
    numel = sum(group.layout.numel for group in engine.sharded.groups)
    engine.destroy()
    return sent | {"numel": numel}


@pytest.mark.parametrize("stage", FULL)
def test_what_looking_moves(ranks: Pools, stage: str) -> None:
    """Nothing at stage 0; n (N-1)/N at stage 1."""
    without, with_look = (ranks(2).run(traffic, STAGES[stage], look)[0] for look in (False, True))
    more = with_look.get("all_gather/shard", 0) - without.get("all_gather/shard", 0)
    assert more == (without["numel"] // 2 if stage == "zero1" else 0)
    with_look["all_gather/shard"] = without["all_gather/shard"] = 0
    assert with_look == without


# --- where full gradients do not live -------------------------------------------------------------

USES: dict[str, Callable[[nn.Module], Any]] = {
    "clip_grad_norm_": clip,
    "clip_grad_value_": clip_values,
    "get_total_norm": lambda module: nn.utils.get_total_norm([param.grad for param in module.parameters()]),
    "norm": lambda module: module.last.weight.grad.norm(),
    "edit": scale_one,
    "optimizer": lambda module: torch.optim.AdamW(module.parameters(), foreach=True).step(),
    "print": lambda module: str(module.last.weight.grad),
    "numpy": lambda module: module.last.weight.grad.numpy(),
}


@pytest.mark.parametrize("stage", CUT)
@pytest.mark.parametrize("use", USES)
def test_where_gradients_are_cut_every_use_says_so(use: str, stage: str) -> None:
    engine = build_engine(Case(Tower, loss, accumulation=2), STAGES[stage])
    for number in range(2):
        engine.backward(loss(engine, Turn(0, number, 0)))
        if number == 0:
            engine.step()
    # an optimizer needs the values too: where they are freed, that is what it meets first
    freed = use == "optimizer" and stage.startswith("zero3")
    with pytest.raises(TrialError, match="freed" if freed else r"gradient_clipping.*safe_get_full_grad"):
        USES[use](engine.module)
    engine.step()
    engine.backward(loss(engine, Turn(1, 0, 0)))  # gradients come as before
    engine.step()


def test_metadata_needs_no_values() -> None:
    engine = build_engine(Case(Tower, loss), STAGES["zero3-free"])
    engine.backward(loss(engine, Turn(0, 0, 0)))
    grad = engine.module.last.weight.grad
    assert isinstance(grad, torch.Tensor) and grad.shape == (4, 11) and grad.dtype == torch.float32
    assert grad.is_leaf and grad.grad is None and not grad.requires_grad and grad.numel() == 44 and len(grad) == 4
    assert grad.device == torch.device("cpu") and grad.untyped_storage().nbytes() == 0


def test_a_gradient_that_was_kept_beyond_its_step_says_so() -> None:
    engine = build_engine(Case(Tower, loss), STAGES["zero0"])
    engine.backward(loss(engine, Turn(0, 0, 0)))
    kept = engine.module.last.weight.grad
    engine.step()
    assert engine.module.last.weight.grad is None
    with pytest.raises(TrialError, match="clone"):
        kept.norm()


@pytest.mark.parametrize("stage", STAGES)
def test_copies_of_the_module_have_no_gradients(stage: str) -> None:
    engine = build_engine(Case(Tower, loss), STAGES[stage])
    engine.backward(loss(engine, Turn(0, 0, 0)))
    with GatheredParameters(engine.module):
        assert all(param.grad is None for param in copy.deepcopy(engine.module).parameters())
    engine.module.zero_grad()  # as torch: the gradients are dropped
    engine.step()
    assert engine.get_global_grad_norm() == 0.0


def unscale(params: list[nn.Parameter], optimizer: Any) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1))
    scaler.unscale_(optimizer)


OPTIMIZERS: dict[str, Any] = {
    "of ds_config": None,
    "a client's object": lambda params: torch.optim.SGD(params, lr=0.1),
    "whole tensors": lambda params: ShampooLike(params),
}
THROUGH_GROUPS: dict[str, Callable[[list[nn.Parameter], Any], Any]] = {
    "clip_grad_norm_": lambda params, _: nn.utils.clip_grad_norm_(params, 0.05),
    "GradScaler.unscale_": unscale,
    "if grad is not None": lambda params, _: [p.grad.mul_(2.0) for p in params if p.grad is not None],
}


@pytest.mark.parametrize("use", THROUGH_GROUPS)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("stage", ["zero0", "zero3"])
def test_gradients_of_an_optimizers_groups_are_no_silent_none(stage: str, name: str, use: str) -> None:
    """Many loops clip or unscale what ``optimizer.param_groups`` has."""
    options = {} if OPTIMIZERS[name] is None else {"optimizer": OPTIMIZERS[name]}
    engine = build_engine(Case(Tower, loss), STAGES[stage], **options)
    for step in range(2):
        engine.backward(loss(engine, Turn(step, 0, 0)))
        params = [param for group in engine.optimizer.param_groups for param in group["params"]]
        with pytest.raises(TrialError, match="gradient_clipping"):
            THROUGH_GROUPS[use](params, engine.optimizer)
        engine.step()
        assert engine.was_step_applied()
    engine.backward(loss(engine, Turn(2, 0, 0)))
    params[0].grad = torch.zeros_like(params[0])
    with pytest.raises(TrialError, match="set between steps"):
        engine.step()


def with_autograd_grad(stage: str, accumulation: int) -> float:
    """Another loss's gradients are taken by torch.autograd.grad after a backward, and added."""
    engine = build_engine(Case(Tower, loss, accumulation=accumulation), STAGES[stage])
    torch.manual_seed(1)
    plain = Tower()
    optimizer = adamw(plain.parameters())
    for step in range(STEPS):
        for number in range(accumulation):
            for rank in range(2):
                (loss(plain, Turn(step, number, rank)) / 2 / accumulation).backward()
            engine.backward(loss(engine, Turn(step, number, engine.global_rank)))
            for model in (plain, engine):
                last = number == accumulation - 1
                params = list(getattr(model, "module", model).parameters())
                more = torch.autograd.grad(model(Turn(step, 7, 0).normal(4, 5)).abs().mean(), params)
                for param, grad in zip(params, more, strict=True) if last else ():
                    param.grad = grad.clone() if param.grad is None else param.grad + grad
            engine.step()
        optimizer.step()
        optimizer.zero_grad()
    return difference(engine, plain)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("stage", FULL)
def test_autograd_grad_leaves_the_gradients_that_are_shown(ranks: Pools, stage: str, accumulation: int) -> None:
    for gap in ranks(2).run(with_autograd_grad, stage, accumulation):
        assert gap < TOLERANCE


def with_autograd_grad_on_one_rank(stage: str) -> list[str]:
    """What differs from a run in which no rank calls it. Where full gradients live, every rank uses
    them before it and after it: those that are shown, edited and set."""
    states = []
    for alone in (False, True):
        engine = build_engine(Case(Tower, loss), STAGES[stage])
        module, params = engine.module, list(engine.module.parameters())
        for step in range(STEPS):
            engine.backward(loss(engine, Turn(step, 0, engine.global_rank)))
            if stage in FULL:
                before = nn.utils.get_total_norm([param.grad for param in params])
                module.blocks[0].weight.grad.mul_(2.0)
                module.last.weight.grad = torch.ones_like(module.last.weight)
            if alone and engine.global_rank == 0:
                shown = [param.grad for param in params]
                torch.autograd.grad(engine(Turn(step, 7, 0).normal(4, 5)).sum(), params)
                assert all(param.grad is grad for param, grad in zip(params, shown, strict=True))
            if stage in FULL:
                assert nn.utils.get_total_norm([param.grad for param in params]) > before + 1
                module.blocks[1].weight.grad.add_(module.blocks[0].weight.grad)
            engine.step()
        states.append(engine.module_state_dict())
        engine.destroy()
    return [name for name, value in states[0].items() if not torch.equal(value, states[1][name])]


@pytest.mark.parametrize("stage", [*FULL, "zero2"])
def test_one_rank_alone_may_call_autograd_grad(ranks: Pools, stage: str) -> None:
    """What was gathered for ``param.grad`` is not gathered again."""
    assert ranks(2).run(with_autograd_grad_on_one_rank, stage) == [[]] * 2


@pytest.mark.parametrize("stage", CUT)
def test_autograd_grad_leaves_the_error_where_gradients_are_cut(stage: str) -> None:
    engine = build_engine(Case(Tower, loss), STAGES[stage])
    engine.backward(loss(engine, Turn(0, 0, 0)))
    torch.autograd.grad(loss(engine, Turn(1, 0, 0)), list(engine.module.parameters()))
    with pytest.raises(TrialError, match="safe_get_full_grad"):
        engine.module.last.weight.grad.norm()


@pytest.mark.parametrize("stage", STAGES)
def test_a_second_pass_after_the_gradients_were_shown(stage: str) -> None:
    """Its gradients are added to what was edited."""
    norms = []
    for late in (False, True):
        engine = build_engine(Case(Tower, loss), STAGES[stage])
        value = loss(engine, Turn(0, 0, 0))
        if late:
            engine.backward(value, retain_graph=True)
            if stage in FULL:
                scale_one(engine.module)
                engine.module.blocks[1].weight.grad /= 3.0
            value.backward()
        else:
            engine.backward(value * 2)
        engine.step()
        norms.append(engine.get_global_grad_norm())
    assert norms[1] == pytest.approx(norms[0], rel=1e-6)


def after_a_penalty(stage: str) -> tuple[list[str], list[str]]:
    """The parameters whose ``.grad`` cannot be read, and those that show another gradient than
    before."""
    engine = build_engine(Case(Tower, loss), STAGES[stage] | {"reduce_bucket_size": 1})
    engine.backward(loss(engine, Turn(0, 0, engine.global_rank)))
    params, unknown, wrong = dict(engine.module.named_parameters()), [], []
    before = {name: param.grad.clone() for name, param in params.items()}
    (params["last.weight"].sum() * 100).backward()
    for name, param in params.items():
        try:
            wrong += [] if param.grad is not None and torch.equal(param.grad, before[name]) else [name]
        except TrialError as error:
            unknown += [name] if "not known" in str(error) else []
    engine.step()
    return unknown, wrong


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("stage", FULL)
def test_a_gradient_that_a_later_loss_adds_to_cannot_be_read(ranks: Pools, stage: str, world: int) -> None:
    """It is the sum of a reduced gradient and one that is not; all others are what they were."""
    for unknown, wrong in ranks(world).run(after_a_penalty, stage):
        assert (unknown, wrong) == (["last.weight"], [])


@pytest.mark.parametrize("stage", FULL)
def test_what_was_gathered_does_not_stay_through_a_second_pass(stage: str) -> None:
    engine = build_engine(Case(Tower, loss), STAGES[stage])
    engine.backward(loss(engine, Turn(0, 0, 0)))
    engine.module.last.weight.grad.norm()
    (flat,) = {
        id(shown._flat): weakref.ref(shown._flat)
        for shown in engine.sharded.param_grads._shown
        if shown._flat is not None
    }.values()
    assert flat() is not None
    inputs, alive = Turn(1, 0, 0).normal(4, 5).requires_grad_(), []
    inputs.register_hook(lambda grad: alive.append(flat() is not None))  # the last one of the pass
    engine(inputs).float().square().mean().backward()
    assert alive == [False]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_gradient_that_comes_around_the_engine_after_the_last_pass_is_added(stage: str, accumulation: int) -> None:
    norms = []
    for late in (False, True):
        engine = build_engine(Case(Tower, loss, accumulation=accumulation), STAGES[stage])
        for number in range(accumulation):
            value = loss(engine, Turn(0, number, 0))
            if late:
                engine.backward(value)
                if number == accumulation - 1:
                    loss(engine.module, Turn(0, number, 0)).backward()
            else:
                engine.backward(value * (2 if number == accumulation - 1 else 1))
            engine.step()
        norms.append(engine.get_global_grad_norm())
    assert norms[1] == pytest.approx(norms[0], rel=1e-6)


# --- safe_set_* -----------------------------------------------------------------------------------


def full_set(zero_section: dict[str, Any], how: str, precision: str) -> tuple[float, float]:
    """Each gradient is multiplied by 3 and clamped; (gap to dense torch, gap of the norms)."""

    def changed(grad: torch.Tensor, param: nn.Parameter) -> torch.Tensor:
        return (grad * 3).clamp(-0.05, 0.05)

    def at_plain(module: nn.Module) -> None:
        for param in module.parameters():
            assert param.grad is not None
            param.grad.copy_(changed(param.grad, param))

    engine, norms = build_engine(Case(Tower, loss, config=PRECISIONS[precision]), zero_section), []
    for step in range(STEPS):
        engine.backward(loss(engine, Turn(step, 0, engine.global_rank)))
        params = list(engine.module.parameters())
        if how == "vectorized":
            zero.safe_update_full_grad_vectorized(params, changed)
        for param in params if how != "vectorized" else []:
            read, write = (
                (zero.safe_get_full_grad, zero.safe_set_full_grad)
                if how == "full"
                else (zero.safe_get_local_grad, zero.safe_set_local_grad)
            )
            write(param, changed(read(param), param))  # type: ignore[arg-type]
            torch.testing.assert_close(read(param), changed(read(param) / 3, param), rtol=2e-2, atol=2e-3)
        engine.step()
        norms.append(engine.get_global_grad_norm())
    model, expected = dense_steps(at_plain, engine.dp_world_size, 1)
    gap = difference(engine, model)
    engine.destroy()
    return gap, max(abs(a / b - 1) for a, b in zip(norms, expected, strict=True))


@pytest.mark.parametrize("how", ["full", "local", "vectorized"])
@pytest.mark.parametrize("stage", STAGES)
def test_gradients_that_are_set(ranks: Pools, stage: str, how: str) -> None:
    for gap, norm in ranks(2).run(full_set, STAGES[stage], how, "fp32"):
        assert gap <= TOLERANCE and norm <= 1e-5


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_gradients_that_are_set_in_16_bits(ranks: Pools, precision: str) -> None:
    for gap, norm in ranks(2).run(full_set, STAGES["zero3"], "full", precision):
        assert gap <= 2e-2 and norm <= 1e-2


def parts_set(zero_section: dict[str, Any]) -> None:
    engine = build_engine(Case(Tower, loss, config=PRECISIONS["bf16"]), zero_section)
    engine.backward(loss(engine, Turn(0, 0, engine.global_rank)))
    engine.step()
    weight = engine.module.blocks[0].weight
    zero.safe_set_local_fp32_param(weight, zero.safe_get_local_fp32_param(weight) * 2 + 1)
    local = zero.safe_get_local_optimizer_state(weight, "exp_avg")
    assert local is not None
    zero.safe_set_local_optimizer_state(weight, torch.full_like(local, 0.5), "exp_avg")
    master, state = zero.safe_get_full_fp32_param(weight), zero.safe_get_full_optimizer_state(weight, "exp_avg")
    with zero.GatheredParameters(weight):
        assert torch.equal(weight.float(), master.bfloat16().float()) and master.mean() > 0.9
    assert state is not None and bool((state == 0.5).all())
    with pytest.raises(TrialError, match="size of this rank's part"):
        zero.safe_set_local_fp32_param(weight, torch.ones(3000))
    engine.destroy()


@pytest.mark.parametrize("stage", STAGES)
def test_parts_of_masters_and_states_that_are_set(ranks: Pools, stage: str) -> None:
    ranks(2).run(parts_set, STAGES[stage])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_frozen_parameter_has_no_master_no_state_and_no_gradient(stage: str, precision: str) -> None:
    def build() -> nn.Module:
        model = Tower()
        model.blocks[0].requires_grad_(False)
        return model

    engine = build_engine(Case(build, tower_loss, config=PRECISIONS[precision]), STAGES[stage])
    for step in range(2):
        engine.backward(tower_loss(engine, Turn(step, 0, 0)))
        found = {
            param.requires_grad: [zero.safe_get_full_grad(param), zero.safe_get_local_grad(param)]
            for param in engine.module.parameters()
        }
        engine.step()
    for param in engine.module.parameters():
        found[param.requires_grad] += [
            *(zero.safe_get_full_fp32_param(param), zero.safe_get_local_fp32_param(param)),
            *(
                zero.safe_get_full_optimizer_state(param, "exp_avg"),
                zero.safe_get_local_optimizer_state(param, "exp_avg"),
            ),
        ]
    assert all(each is None for each in found[False]) and all(each is not None for each in found[True])


def test_gradients_cannot_be_set_before_there_are_any() -> None:
    engine = build_engine(Case(Tower, loss), STAGES["zero3"])
    weight = engine.module.last.weight
    for act in (
        lambda: zero.safe_set_full_grad(weight, torch.zeros(4, 11)),
        lambda: zero.safe_set_local_grad(weight, torch.zeros(44)),
        lambda: zero.safe_update_full_grad_vectorized([weight], lambda grad, param: grad),
    ):
        with pytest.raises(TrialError, match=r"last engine\.backward\(\)"):
            act()
    engine.backward(loss(engine, Turn(0, 0, 0)))
    with pytest.raises(TrialError, match="shape"):
        zero.safe_set_full_grad(weight, torch.zeros(3))
    assert isinstance(engine, zero_trial.Engine)
