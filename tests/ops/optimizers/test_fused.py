"""Fused optimizers against torch and the reference; state that torch's own optimizers can take
over, and theirs that ours can."""

from __future__ import annotations

import copy
import io
import math
from functools import partial
from typing import Any

import pytest
import torch

from zero_trial.errors import ConfigError
from zero_trial.ops import reference
from zero_trial.ops.optimizers.fused import CPUAdam, FusedAdagrad, FusedAdam, FusedLion, FusedSGD
from zero_trial.ops.optimizers.lamb import FusedLamb

ADAMW = (FusedAdam, torch.optim.AdamW, "exp_avg_sq", {"lr": 0.01, "weight_decay": 0.1})
ADAM = (partial(FusedAdam, adam_w_mode=False), torch.optim.Adam, "exp_avg_sq", {"lr": 0.01, "weight_decay": 0.1})
ADAGRAD = (FusedAdagrad, torch.optim.Adagrad, "sum", {"lr": 0.1})
SGD = (FusedSGD, torch.optim.SGD, "momentum_buffer", {"lr": 0.1, "momentum": 0.9})
CASES: list[tuple[Any, dict[str, Any]]] = [
    (ADAMW, {}),
    (ADAM, {}),
    (ADAGRAD, {}),
    (ADAGRAD, {"lr_decay": 0.1, "weight_decay": 0.1}),
    (ADAGRAD, {"initial_accumulator_value": 0.5}),
    (SGD, {}),
    (SGD, {"nesterov": True}),
    (SGD, {"dampening": 0.3}),
    (SGD, {"weight_decay": 0.1, "momentum": 0.5}),
]


def params(seed: int = 0) -> list[torch.nn.Parameter]:
    g = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=g)) for shape in ((5, 3), (70,), ())]


def give_gradients(seed: int, *lists: list[torch.nn.Parameter]) -> None:
    g = torch.Generator().manual_seed(seed)
    for same in zip(*lists, strict=True):
        gradient = torch.randn(same[0].shape, generator=g)
        for p in same:
            p.grad = gradient.clone()


def largest(a: list[torch.nn.Parameter], b: list[torch.nn.Parameter]) -> float:
    return max(float((x - y).detach().abs().max()) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(
    ("kind", "how"), CASES, ids=lambda value: value[1].__name__ if isinstance(value, tuple) else None
)
def test_twelve_steps_as_torch_and_through_its_state(kind: Any, how: dict[str, Any]) -> None:
    """Each goes on as what the other was, groups included. Tolerance: twelve steps of a few
    roundings, on numbers of about 1."""
    fused, torchs, moment, settings = kind
    ours, theirs = params(), params()
    mine, other = fused(ours, **(settings | how)), torchs(theirs, **(settings | how))
    for step in range(12):
        give_gradients(step, ours, theirs)
        mine.step(), other.step()
        if step == 5:
            kept, taken = mine.state_dict(), other.state_dict()
            if torchs in (torch.optim.AdamW, torch.optim.Adam):  # torch before 2.7 does not say it
                taken["param_groups"][0].setdefault("decoupled_weight_decay", torchs is torch.optim.AdamW)
            mine, other = type(mine)(ours), torchs(theirs)
            mine.load_state_dict(taken), other.load_state_dict(kept)
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(mine.state[x][moment], other.state[y][moment], rtol=1e-5, atol=1e-6)
        assert mine.state[x].keys() == other.state[y].keys()
        assert float(mine.state[x].get("step", 12)) == 12


def test_pieces_of_any_cut_get_the_same_bits() -> None:
    whole = torch.nn.Parameter(torch.randn(1001, generator=torch.Generator().manual_seed(0)))
    parts = [torch.nn.Parameter(part.clone()) for part in whole.detach().split([3, 64, 500, 434])]
    a, b = FusedAdam([whole], weight_decay=0.1), FusedAdam(parts, weight_decay=0.1)
    for step in range(3):
        whole.grad = torch.randn(1001, generator=torch.Generator().manual_seed(step))
        for part, gradient in zip(parts, whole.grad.split([3, 64, 500, 434]), strict=True):
            part.grad = gradient
        a.step(), b.step()
    assert torch.equal(whole, torch.cat(list(parts)))


def test_groups_and_missing_gradients() -> None:
    a, b, c = params()
    optimizer = FusedAdam([{"params": [a], "lr": 0.5}, {"params": [b, c], "weight_decay": 0.3}], lr=0.1)
    want = reference.adamw(a.detach(), torch.ones_like(a), torch.zeros_like(a), torch.zeros_like(a), 1, lr=0.5)
    before = c.detach().clone()
    a.grad, b.grad = torch.ones_like(a), torch.zeros_like(b)
    small = b.detach() * (1 - 0.1 * 0.3)
    optimizer.step()
    torch.testing.assert_close(a.detach(), want.p)
    torch.testing.assert_close(b.detach(), small)
    assert torch.equal(c, before) and c not in optimizer.state


@pytest.mark.parametrize(
    ("kind", "bad"),
    [
        *(
            (kind, bad)
            for kind in (FusedAdam, FusedLion)
            for bad in ({"lr": -1.0}, {"betas": (0.9, 1.0)}, {"weight_decay": -0.1})
        ),
        (FusedAdagrad, {"lr_decay": -1.0}),
        (FusedSGD, {"momentum": 0.0}),
        (FusedSGD, {"lr": -1.0}),
        (FusedSGD, {"nesterov": True, "dampening": 0.1}),
    ],
)
def test_numbers_that_cannot_be_used(kind: Any, bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="does not accept these values"):
        kind(params(), **bad)


def test_cpu_adam_refuses_other_devices() -> None:
    CPUAdam(params())
    with pytest.raises(ConfigError, match=r"got meta, expected cpu"):
        CPUAdam([torch.nn.Parameter(torch.zeros(2, device="meta"))])


EVERY: list[Any] = [FusedAdam, CPUAdam, FusedLamb, FusedLion, FusedSGD, FusedAdagrad]
every = pytest.mark.parametrize("kind", EVERY)


def step_once(optimizer: torch.optim.Optimizer) -> None:
    give_gradients(7, [p for group in optimizer.param_groups for p in group["params"]])
    optimizer.step()


def test_deepspeeds_arguments() -> None:
    common: dict[str, Any] = {"lr": 1e-3, "bias_correction": True, "betas": (0.9, 0.99), "weight_decay": 0.0}
    FusedAdam(params(), **common, eps=1e-8, adam_w_mode=True, amsgrad=False, set_grad_none=True)
    CPUAdam(params(), **common, eps=1e-8, adamw_mode=True, amsgrad=False, fp32_optimizer_states=True)
    FusedLamb(params(), **common, eps_inside_sqrt=False, max_grad_norm=0.0, max_coeff=10.0, amsgrad=False)
    FusedLion(params(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.0, set_grad_none=True)
    assert CPUAdam(params(), fp32_optimizer_states=False).states == "bf16"
    l2 = CPUAdam(params(), adamw_mode=False)
    assert (l2.adam_w_mode, l2.param_groups[0]["decoupled_weight_decay"]) == (False, False)
    refused: list[tuple[Any, dict[str, Any]]] = [
        (FusedAdam, {"amsgrad": True}),
        (FusedAdam, {"set_grad_none": False}),
        (FusedLion, {"set_grad_none": False}),
        (FusedLamb, {"max_grad_norm": 1.0}),
    ]
    for kind, given in refused:
        with pytest.raises(ConfigError, match=r"optimizer\.params"):
            kind(params(), **given)


@every
def test_a_real_model_learns_as_with_a_scheduler_and_a_scaler(kind: Any) -> None:
    """Overflow is skipped by torch's GradScaler, the rate is a tensor that a scheduler changes, a
    closure gives the loss."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    x, y = torch.randn(32, 8), torch.randn(32, 1)
    optimizer = kind(model.parameters(), lr=torch.tensor(0.01))
    scheduler, scaler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5), torch.amp.GradScaler("cpu", init_scale=8.0)

    def loss() -> torch.Tensor:
        return (model(x) - y).square().mean()

    first = loss().item()
    for step in range(15):
        optimizer.zero_grad()
        before = model[0].weight.detach().clone()
        scaler.scale(loss() * (math.inf if step == 3 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(before, model[0].weight) == (step == 3)
        scheduler.step()
    assert loss().item() < 0.95 * first and float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.01 / 8)
    assert float(optimizer.step(lambda: loss().detach())) == pytest.approx(loss().item(), rel=0.5)


@every
def test_copies_and_saved_state_go_on(kind: Any) -> None:
    optimizer = kind(params())
    step_once(optimizer)
    step_once(copy.deepcopy(optimizer))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    other = kind([torch.nn.Parameter(p.detach().clone()) for p in optimizer.param_groups[0]["params"]])
    other.load_state_dict(torch.load(file, weights_only=True))
    step_once(optimizer), step_once(other)
    assert largest(optimizer.param_groups[0]["params"], other.param_groups[0]["params"]) == 0.0


@every
def test_sparse_gradients_are_refused_in_words(kind: Any) -> None:
    table = torch.nn.Embedding(4, 3, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ConfigError, match=rf"{kind.__name__} does not support sparse gradients.*\(4, 3\).*SparseAdam"):
        kind(table.parameters()).step()


@every
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_parameters_of_other_dtypes_are_stepped_in_theirs(kind: Any, dtype: torch.dtype) -> None:
    p = torch.nn.Parameter(torch.ones(40, dtype=dtype))
    optimizer = kind([p], lr=0.25)
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert p.dtype == dtype and bool((p < 1).all())


@every
def test_a_graph_that_still_needs_an_old_weight_fails(kind: Any) -> None:
    """As with torch's own optimizers: the gradients would be those of another function."""
    p = torch.nn.Parameter(torch.ones(3))
    late = (p * torch.ones(3, requires_grad=True)).sum()
    optimizer = kind([p])
    p.grad = torch.ones(3)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        late.backward()


def test_torchs_state_with_a_variant_of_the_formula_is_refused() -> None:
    theirs = params()
    other = torch.optim.AdamW(theirs, amsgrad=True)
    step_once(other)
    with pytest.raises(ConfigError, match="got amsgrad True"):
        FusedAdam(params()).load_state_dict(other.state_dict())


@pytest.mark.parametrize("key", ["maximize", "amsgrad"])
def test_a_variant_that_a_group_is_given_later_is_refused(key: str) -> None:
    mine = params()
    optimizer = FusedAdam(mine)
    give_gradients(1, mine)
    optimizer.param_groups[0][key] = False
    optimizer.step()
    optimizer.param_groups[0][key] = True
    with pytest.raises(ConfigError, match=rf"FusedAdam does not support {key}"):
        optimizer.step()
