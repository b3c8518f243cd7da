"""Optimizers by ds_config's name, and their parameter groups."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.engine.offloaded import two_groups
from tests.support.dense import STAGES, TOLERANCE, Case, build_engine, compare, difference, train_dense, train_ranks
from tests.support.dense import tower_loss as loss
from tests.support.models import Tower
from tests.support.pool import Pools
from zero_trial.engine import optimizers
from zero_trial.engine.optimizers import muon_groups, parameter_groups, resolve_optimizer, torch_optimizer_names
from zero_trial.errors import ConfigError
from zero_trial.ops import backend
from zero_trial.ops.optimizers.fused import FusedAdam, FusedLion
from zero_trial.ops.optimizers.lamb import FusedLamb


def params(*sizes: int) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.randn(size)) for size in sizes or (4,)]


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """No native kernels."""
    monkeypatch.setattr(optimizers, "native_on", lambda device: False)


@pytest.mark.usefixtures("plain")
def test_adam_means_adamw() -> None:
    spec = resolve_optimizer("Adam", {"lr": 3e-4, "betas": [0.9, 0.95]})
    optimizer = spec.build(params())
    assert type(optimizer) is torch.optim.AdamW and optimizer.param_groups[0]["betas"] == (0.9, 0.95)
    assert optimizer.param_groups[0]["weight_decay"] == 0.0 and spec.note is not None and "AdamW" in spec.note


@pytest.mark.parametrize(
    ("name", "given", "cls", "weight_decay"),
    [
        ("adam", {"adam_w_mode": False}, torch.optim.Adam, 0.0),
        ("Adam", {"torch_adam": True}, torch.optim.AdamW, 0.01),
        ("Adam", {"torch_adam": True, "adam_w_mode": False}, torch.optim.Adam, 0.0),
        ("ADAMW", {}, torch.optim.AdamW, 0.0),
        ("AdamW", {"weight_decay": 0.1, "bias_correction": True, "set_grad_none": True}, torch.optim.AdamW, 0.1),
        ("SGD", {"lr": 0.1}, torch.optim.SGD, 0.0),
        ("adagrad", {}, torch.optim.Adagrad, 0.0),
        ("lion", {}, FusedLion, 0.0),
        ("Lamb", {"max_coeff": 0.3}, FusedLamb, 0.0),
        ("OneBitAdam", {"freeze_step": 100, "lr": 0.1}, torch.optim.AdamW, 0.0),
        ("ZeroOneAdam", {"var_freeze_step": 3}, torch.optim.AdamW, 0.0),
        ("OneBitLamb", {"coeff_beta": 0.9}, FusedLamb, 0.0),
        ("RMSprop", {}, torch.optim.RMSprop, 0.0),
        ("NAdam", {}, torch.optim.NAdam, 0.0),
    ],
)
@pytest.mark.usefixtures("plain")
def test_names(name: str, given: dict[str, Any], cls: type, weight_decay: float) -> None:
    before = dict(given)
    optimizer = resolve_optimizer(name, given).build(params())
    assert type(optimizer) is cls and optimizer.param_groups[0]["weight_decay"] == weight_decay and given == before


@pytest.mark.skipif(backend().native is None, reason=f"no native kernels: {backend().why}")
@pytest.mark.parametrize(
    ("name", "given", "cls", "weight_decay", "decoupled"),
    [
        ("Adam", {}, FusedAdam, 0.0, True),
        ("adam", {"adam_w_mode": False, "weight_decay": 0.2}, FusedAdam, 0.2, False),
        ("AdamW", {"amsgrad": False, "betas": [0.8, 0.9]}, FusedAdam, 0.0, True),
        ("OneBitAdam", {"lr": 0.1}, FusedAdam, 0.0, True),
        ("Lion", {"weight_decay": 0.1}, FusedLion, 0.1, None),
        ("Adam", {"torch_adam": True}, torch.optim.AdamW, 0.01, True),
        ("AdamW", {"amsgrad": True}, torch.optim.AdamW, 0.0, True),
        ("AdamW", {"fused": True}, torch.optim.AdamW, 0.0, True),
        ("AdamW", {"maximize": True}, torch.optim.AdamW, 0.0, True),
    ],
)
def test_native_kernels_do_what_they_can(
    name: str, given: dict[str, Any], cls: type, weight_decay: float, decoupled: bool | None
) -> None:
    optimizer = resolve_optimizer(name, given).build(params())
    assert type(optimizer) is cls
    group = optimizer.param_groups[0]
    assert group["weight_decay"] == weight_decay and group.get("decoupled_weight_decay", decoupled) == decoupled
    assert group["betas"] == tuple(given.get("betas", group["betas"]))


@pytest.mark.skipif(backend().native is None, reason=f"no native kernels: {backend().why}")
def test_native_kernels_leave_other_tensors_to_torch() -> None:
    p = torch.nn.Parameter(torch.zeros(3))
    assert type(resolve_optimizer("AdamW").build([{"params": [p], "amsgrad": True}])) is torch.optim.AdamW
    wide = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    assert type(resolve_optimizer("AdamW").build([p, wide])) is torch.optim.AdamW


@pytest.mark.parametrize("name", torch_optimizer_names())
def test_every_torch_optimizer_that_is_offered_takes_a_step(name: str) -> None:
    p = torch.nn.Parameter(torch.ones(2, 2))
    optimizer = resolve_optimizer(name).build([p])
    p.grad = torch.ones(2, 2)
    optimizer.step()
    assert not torch.equal(p, torch.ones(2, 2))


@pytest.mark.parametrize(
    ("name", "given", "where", "words"),
    [
        ("AdamW", {"max_grad_norm": 1.0}, "optimizer.params.max_grad_norm", '"gradient_clipping": 1.0'),
        ("AdamW", {"weigth_decay": 0.1}, "optimizer.params.weigth_decay", "Did you mean weight_decay?"),
        ("Adam", {"bias_correction": False, "torch_adam": True}, "optimizer.params.bias_correction", "bias"),
        ("Lamb", {"eps_inside_sqrt": True}, "optimizer.params.eps_inside_sqrt", "square root"),
        ("AdamW", {"lr": "1e-4"}, "optimizer.params.lr", "'1e-4'"),
        ("AdmaW", {}, "optimizer.type", "Did you mean AdamW?"),
        ("sgd", {}, "optimizer.type", "Did you mean SGD?"),
        ("LBFGS", {}, "optimizer.type", "several times"),
        ("SparseAdam", {}, "optimizer.type", "sparse"),
        ("MuAdam", {}, "optimizer.type", "mup"),
        ("Muon", {"moon_lr": 0.1}, "optimizer.params.moon_lr", "Did you mean muon_lr?"),
        ("Muon", {"muon_lr": "0.1"}, "optimizer.params.muon_lr", "not a number"),
        ("Tensor", {}, "optimizer.type", "no such optimizer"),
    ],
)
def test_refusals_say_where_and_what_to_do(name: str, given: dict[str, Any], where: str, words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        resolve_optimizer(name, given)
    assert raised.value.where == where and words in str(raised.value)


@pytest.mark.parametrize(("name", "decoupled"), [("Adam", True), ("OneBitAdam", True), ("Adam L2", False)])
def test_adam_without_bias_correction(name: str, decoupled: bool) -> None:
    """The first step of the published BERT recipes is lr * m / sqrt(v) with m = 0.1 g and v = 0.001
    g²."""
    given = {"lr": 0.5, "betas": (0.9, 0.999), "eps": 0.0, "bias_correction": False}
    more = {} if decoupled else {"adam_w_mode": False}
    spec = resolve_optimizer(name.split()[0], given | more)
    assert spec.optimizer_class is FusedAdam
    weight = torch.nn.Parameter(torch.zeros(1))
    weight.grad = torch.ones(1)
    built = spec.build([weight])
    built.step()
    assert weight.item() == pytest.approx(-0.5 * 0.1 / 0.001**0.5, rel=1e-5)
    assert built.param_groups[0]["decoupled_weight_decay"] is decoupled


def test_muon_takes_hidden_matrices_and_adamw_the_rest() -> None:
    """DeepSpeed's rule by names and dimensions; a parameter's use_muon wins; each kind has its own
    settings, and a group's own win over them."""
    model = nn.ModuleDict({"embed": nn.Embedding(5, 4), "up": nn.Linear(4, 4), "LM_Head": nn.Linear(4, 5)})
    model["up"].bias.use_muon = True  # of one dimension all the same
    given = {"lr": 0.5, "adam_lr": 0.25, "weight_decay": 0.1, "betas": [0.8, 0.9], "momentum": 0.7}
    named = dict(model.named_parameters())
    groups = muon_groups(model, [{"params": list(named.values())}], given)
    found = [[name for name, param in named.items() if any(param is each for each in g["params"])] for g in groups]
    assert found == [["up.weight"], ["embed.weight", "up.bias", "LM_Head.weight", "LM_Head.bias"]]
    settings = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    assert settings == [
        {"lr": 0.5, "weight_decay": 0.1, "momentum": 0.7, "use_muon": True},
        {"lr": 0.25, "weight_decay": 0.1, "betas": (0.8, 0.9), "use_muon": False},
    ]
    model["up"].weight.use_muon, model["LM_Head"].weight.use_muon = False, True
    (muon, _) = muon_groups(model, [{"params": list(named.values()), "lr": 2.0}], given)
    assert muon["params"][0] is model["LM_Head"].weight and muon["lr"] == 2.0


def test_muon_has_deepspeeds_defaults() -> None:
    weights = params(4, 4)
    groups = [{"params": weights[:1], "use_muon": True}, {"params": weights[1:], "use_muon": False}]
    matrices, others = resolve_optimizer("muon", {"ns_method": "gram"}).build(groups).param_groups
    assert (matrices["lr"], matrices["momentum"], matrices["weight_decay"]) == (0.02, 0.95, 0.0)
    assert (others["lr"], others["betas"], others["eps"], others["weight_decay"]) == (3e-4, (0.9, 0.95), 1e-10, 0.0)


def test_a_clients_groups_keep_their_settings() -> None:
    model = nn.Linear(3, 2)
    given = [{"params": model.weight, "lr": 0.5}, {"params": [("bias", model.bias)]}]
    first, second = parameter_groups(model, None, given)
    assert (first["lr"], id(first["params"][0])) == (0.5, id(model.weight))
    assert id(second["params"][0]) == id(model.bias)
    base = torch.optim.SGD(model.parameters(), lr=0.25)
    (group,) = parameter_groups(model, base, None)
    assert group["lr"] == 0.25 and group is not base.param_groups[0]


OPTIMIZERS: dict[str, tuple[str, dict[str, Any], Any]] = {
    "Adam": ("Adam", {"lr": 2e-3, "weight_decay": 0.1, "betas": [0.8, 0.95], "eps": 1e-6}, torch.optim.AdamW),
    "Adam L2": ("Adam", {"lr": 2e-3, "weight_decay": 0.1, "adam_w_mode": False}, torch.optim.Adam),
    "AdamW amsgrad": ("AdamW", {"lr": 2e-3, "amsgrad": True, "torch_adam": True}, torch.optim.AdamW),
    "SGD": ("SGD", {"lr": 0.05}, torch.optim.SGD),
    "SGD nesterov": ("SGD", {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, torch.optim.SGD),
    "SGD dampening": ("SGD", {"lr": 0.05, "momentum": 0.9, "dampening": 0.5}, torch.optim.SGD),
    "Adagrad": ("Adagrad", {"lr": 0.02, "lr_decay": 0.1, "initial_accumulator_value": 0.2}, torch.optim.Adagrad),
    "RMSprop": ("RMSprop", {"lr": 0.002, "momentum": 0.5, "centered": True}, torch.optim.RMSprop),
    "NAdam": ("NAdam", {"lr": 0.002}, torch.optim.NAdam),
    "RAdam": ("RAdam", {"lr": 0.002}, torch.optim.RAdam),
    "Adamax": ("Adamax", {"lr": 0.002}, torch.optim.Adamax),
    "Adadelta": ("Adadelta", {"lr": 0.5}, torch.optim.Adadelta),
    "ASGD": ("ASGD", {"lr": 0.02, "t0": 2}, torch.optim.ASGD),
    "Lion": ("Lion", {"lr": 3e-4, "weight_decay": 0.1}, FusedLion),
    "Lamb": ("Lamb", {"lr": 3e-3, "weight_decay": 0.01}, FusedLamb),
}


def by_name(name: str) -> Case:
    kind, params, cls = OPTIMIZERS[name]
    own = {"adam_w_mode", "torch_adam"}
    theirs = {
        key: tuple(value) if isinstance(value, list) else value for key, value in params.items() if key not in own
    }
    if kind == "AdamW" and "torch_adam" not in params:
        theirs.setdefault("weight_decay", 0.0)
    optimizer = {"type": kind, "params": params}
    return Case(
        Tower, loss, groups=two_groups, optimizer=optimizer, dense_optimizer=lambda g: cls(g, **theirs), clip=0.2
    )


def train_named(name: str, stage: str) -> float:
    return compare(by_name(name), STAGES[stage])


STAGE_OF = dict(zip(OPTIMIZERS, ["zero0", "zero1", "zero3"] * 5, strict=True))


@pytest.mark.parametrize(("name", "stage"), STAGE_OF.items())
def test_optimizer_by_name(ranks: Pools, name: str, stage: str) -> None:
    for gap in ranks(2).run(train_named, name, stage):
        assert gap <= TOLERANCE


class Mine(torch.optim.SGD):
    """A client's own class; elementwise like its base."""

    elementwise = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad.sign() * param.grad.abs().log1p(), alpha=group["lr"])


# Each passes the rounding of a gradient on at no more than its own size: see
# tests/support/models.py.
CLIENTS: dict[str, Any] = {
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=2e-3, weight_decay=0.1, eps=1e-3),
    "AdamW fused": lambda groups: torch.optim.AdamW(groups, lr=2e-3, weight_decay=0.1, eps=1e-3, fused=True),
    "own class": lambda groups: Mine(groups, lr=0.01),
}


def train_client(name: str, stage: str, as_object: bool) -> float:
    make = CLIENTS[name]
    case = Case(Tower, loss, groups=two_groups, dense_optimizer=make, clip=0.2)
    torch.manual_seed(1)
    model = Tower()
    case_here = Case(lambda: model, loss, clip=0.2, config={"optimizer": None})
    given = (
        {"optimizer": make(two_groups(model))}
        if as_object
        else {"optimizer": make, "model_parameters": two_groups(model)}
    )
    engine = build_engine(case_here, STAGES[stage], **given)
    assert not as_object or engine.optimizer.base is given["optimizer"]
    steps = list(zip(train_dense(case, 2), train_ranks(case, engine), strict=True))
    return difference(engine, steps[-1][0])


@pytest.mark.parametrize(
    ("name", "stage", "as_object"),
    [(name, ("zero0", "zero2", "zero3")[row], row != 1) for row, name in enumerate(CLIENTS)],
)
def test_client_optimizer(ranks: Pools, name: str, stage: str, as_object: bool) -> None:
    for gap in ranks(2).run(train_client, name, stage, as_object):
        assert gap <= TOLERANCE
