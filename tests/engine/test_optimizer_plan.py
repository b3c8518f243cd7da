"""What is known of an optimizer before it trains: flat pieces or whole tensors, coupling,
closures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero_trial
from tests.support.whole_optimizers import (
    GlobalNorm,
    LateCoupling,
    LayerWise,
    MuonLike,
    Noisy,
    ScheduleFree,
    ShampooLike,
)
from zero_trial.engine.optimizer_plan import again, is_elementwise, probe, regrouped, stand_ins
from zero_trial.errors import CheckpointError, ConfigError, TrialError
from zero_trial.ops.optimizers.fused import CPUAdam, FusedLion
from zero_trial.ops.optimizers.lamb import FusedLamb


class OwnDefaults(torch.optim.AdamW):
    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.5)


class OwnStep(torch.optim.AdamW):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Another rule."""


@pytest.mark.parametrize(
    ("cls", "expected"),
    [
        (torch.optim.AdamW, True),
        (torch.optim.RMSprop, True),
        (torch.optim.Adafactor, False),
        (torch.optim.LBFGS, False),
        (FusedLion, True),
        (CPUAdam, True),
        (FusedLamb, False),
        (OwnDefaults, True),
        (OwnStep, False),
        (type("Own", (torch.optim.Optimizer,), {}), False),
        (type("Own", (torch.optim.Optimizer,), {"elementwise": True}), True),
        (type("Own", (torch.optim.Adafactor,), {"elementwise": True}), True),
        (type("Own", (torch.optim.AdamW,), {"elementwise": False}), False),
    ],
)
def test_who_may_work_on_flat_pieces(cls: type, expected: bool) -> None:
    assert is_elementwise(cls) is expected


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


PROBED: list[tuple[Any, bool]] = [
    (lambda groups: torch.optim.AdamW(groups, foreach=True), False),
    (lambda groups: torch.optim.Adafactor(groups, lr=0.1), False),
    (lambda groups: LayerWise(groups, lr=0.1), False),
    (lambda groups: ShampooLike(groups, lr=0.1), False),
    (lambda groups: MuonLike(groups, lr=0.1), False),
    (lambda groups: ScheduleFree(groups, lr=0.1), False),
    (lambda groups: GlobalNorm(groups, lr=0.1), True),
    (lambda groups: LateCoupling(groups, lr=0.1), True),
]


@pytest.mark.parametrize(("make", "couples"), PROBED)
def test_the_probe_finds_what_couples_tensors(make: Any, couples: bool) -> None:
    groups = [{"params": list(model().parameters())}]
    before = torch.get_rng_state()
    assert probe(make, groups)[0] is couples and torch.equal(before, torch.get_rng_state())


def test_the_probe_says_why_it_cannot_run() -> None:
    class Bound(torch.optim.SGD):
        def __init__(self, params: Any, rule: str) -> None:
            super().__init__(params, lr=0.1)

    groups = [{"params": list(model().parameters())}]
    couples, why = probe(again(Bound(model().parameters(), "x")), groups)
    assert couples is None and "TypeError" in why
    couples, why = probe(lambda groups: Noisy(groups, lr=0.1), groups)
    assert couples is None and "draws random numbers" in why


CONFIG: dict[str, Any] = {"train_batch_size": 2, "gradient_clipping": 0.0}


class Closure(torch.optim.SGD):
    """Calls the model again (SAM)."""

    def step(self, closure: Any) -> None:  # type: ignore[override]
        """Another rule."""


class Anchored(LayerWise):
    """Makes its state when it is built."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        for param in self.param_groups[0]["params"]:
            self.state[param]["start"] = param.detach().clone()


def changed(**attributes: Any) -> Any:
    """Our own optimizer, whose step reads no .grad, with these attributes."""

    def make(params: Any) -> torch.optim.Optimizer:
        optimizer = CPUAdam(params)
        vars(optimizer).update(attributes)
        return optimizer

    return make


REFUSED: list[tuple[Any, bool, str]] = [
    *((torch.optim.LBFGS, as_object, r"LBFGS, whose step\(\) needs a closure") for as_object in (True, False)),
    *((Closure, as_object, r"Closure, whose step\(\) needs a closure") for as_object in (True, False)),
    (changed(_optimizer_step_pre_hooks={0: print}), True, "^optimizer: .*CPUAdam"),
    (changed(step=print), False, "^optimizer: .*CPUAdam"),
    (Anchored, True, "^optimizer: .*Anchored with state"),
]


@pytest.mark.parametrize(("make", "as_object", "words"), REFUSED)
def test_what_cannot_step_pieces_is_refused_by_name(make: Any, as_object: bool, words: str) -> None:
    net = model()
    with pytest.raises(ConfigError, match=words) as error:
        zero_trial.initialize(model=net, config=CONFIG, optimizer=make(net.parameters()) if as_object else make)
    assert error.value.fix
    if make is Anchored:
        zero_trial.initialize(model=net, config=CONFIG, optimizer=make)


def test_a_callable_that_looks_at_shapes_makes_its_own_groups() -> None:
    """Flat pieces have none, so its groups are taken from stand-ins."""
    net = model()

    def make(groups: Any) -> torch.optim.Optimizer:
        params = [param for group in groups for param in group["params"]]
        decay = [param for param in params if param.dim() == 2]
        rest = [param for param in params if param.dim() != 2]
        return torch.optim.AdamW([{"params": decay, "weight_decay": 0.5}, {"params": rest, "weight_decay": 0.0}])

    given = [{"params": list(net.parameters())}]
    shapes, known = stand_ins(given)
    assert regrouped(torch.optim.AdamW(shapes), given, known) is None
    groups = regrouped(make(shapes), given, known)
    assert groups is not None and [[param.dim() for param in group["params"]] for group in groups] == [[2, 2], [1, 1]]
    engine = zero_trial.initialize(model=net, config=CONFIG, optimizer=make)[0]
    assert [group["weight_decay"] for group in engine.optimizer.param_groups] == [0.5, 0.0]
    before = [param.detach().clone() for param in net.parameters()]
    engine.backward(engine(torch.zeros(2, 3)).sum() * 0)
    engine.step()
    kept = [torch.equal(param, old) for param, old in zip(net.parameters(), before, strict=True)]
    assert kept == [False, True, False, True]


def test_a_callable_that_ignores_its_groups_is_refused() -> None:
    """It would step the model's own parameters, which get no gradients."""
    net = model()
    with pytest.raises(ConfigError, match=r"initialize\(optimizer\).*got 4 of LayerWise"):
        zero_trial.initialize(model=net, config=CONFIG, optimizer=lambda _: LayerWise(list(net.parameters())))


def by_hook(params: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(params, lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: None)
    return optimizer


def by_own_step(params: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(params, lr=0.1)
    optimizer.step = lambda closure=None: None  # type: ignore[method-assign,assignment,misc]
    return optimizer


@pytest.mark.parametrize("make", [by_hook, by_own_step])
@pytest.mark.parametrize("as_object", [True, False], ids=["object", "callable"])
def test_what_was_added_to_a_step_gets_whole_tensors(make: Any, as_object: bool) -> None:
    """It may look at whole tensors, and at all of them."""
    net = model()
    engine = zero_trial.initialize(
        model=net, config=CONFIG, optimizer=make(net.parameters()) if as_object else lambda groups: make(groups)
    )[0]
    assert {tensor.weight.dim() for tensor in engine.optimizer.whole.own} == {1, 2}
    if as_object:
        couples, why = probe(again(make(model().parameters())), [{"params": list(model().parameters())}])
        assert couples is None and "hooks" in why


@pytest.mark.parametrize(("name", "fused"), [("register_step_pre_hook", False), ("register_step_post_hook", True)])
def test_a_hook_that_comes_after_initialize_is_refused(name: str, fused: bool) -> None:
    """It would see flat pieces; one that came before sees whole tensors, as another one does."""
    for before in (False, True):
        net = model()
        optimizer = torch.optim.AdamW(net.parameters(), fused=fused)
        if before:
            optimizer.register_step_pre_hook(lambda *_: None)
        engine = zero_trial.initialize(model=net, config=CONFIG, optimizer=optimizer)[0]
        seen: list[int] = []
        getattr(optimizer, name)(lambda *_, seen=seen: seen.append(1))
        engine.backward(engine(torch.ones(2, 3)).sum())
        if not before:
            with pytest.raises(ConfigError, match="after initialize"):
                engine.step()
            continue
        engine.step()
        assert seen == [1]


@pytest.mark.parametrize(("kind", "before"), [("state_dict_pre_hook", False), ("load_state_dict_post_hook", True)])
def test_hooks_on_state_dicts_are_refused(kind: str, before: bool) -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    register = getattr(optimizer, f"register_{kind}")
    with pytest.raises(ConfigError, match="state_dict hooks on AdamW"):
        if before:
            register(lambda *_: None)
        engine = zero_trial.initialize(model=net, config=CONFIG, optimizer=optimizer)[0]
        register(lambda *_: None)
        engine.backward(engine(torch.ones(2, 3)).sum())
        engine.step()


@pytest.mark.parametrize("name", ["AdamW", "CPUAdam"])
def test_a_step_of_the_clients_object_is_refused(name: str) -> None:
    net = model()
    optimizer = (CPUAdam if name == "CPUAdam" else torch.optim.AdamW)(net.parameters())
    engine = zero_trial.initialize(model=net, config=CONFIG, optimizer=optimizer)[0]
    engine.backward(engine(torch.ones(2, 3)).sum())
    with pytest.raises(TrialError, match=r"engine\.step"):
        optimizer.step()
    engine.step()
    assert engine.was_step_applied()


class Counts(LayerWise):
    """Counts its steps beside its tensors' states."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        state: Any = self.state
        state["shared"] = state.get("shared", 0) + 1
        super().step()


def test_state_that_belongs_to_no_parameter_is_not_lost_in_silence(tmp_path: Path) -> None:
    engine = zero_trial.initialize(model=model(), config=CONFIG, optimizer=Counts)[0]
    engine.backward(engine(torch.ones(2, 3)).sum())
    engine.step()
    with pytest.raises(CheckpointError, match=r"Counts\.state.*'shared'"):
        engine.save_checkpoint(str(tmp_path))


@pytest.mark.parametrize("into", ["a new group", "an old group"])
def test_parameters_that_are_added_later_are_refused(into: str) -> None:
    """They would not train."""
    net = model()
    client = torch.optim.SGD(net[0].parameters(), lr=0.1)
    engine = zero_trial.initialize(model=net, config=CONFIG, optimizer=client)[0]
    with pytest.raises(ConfigError, match="add_param_group"):
        engine.optimizer.add_param_group({"params": list(net[1].parameters())})
    if into == "a new group":
        client.add_param_group({"params": list(net[1].parameters())})
    else:
        client.param_groups[0]["params"].append(net[1].weight)
    engine.backward(engine(torch.ones(2, 3)).sum())
    with pytest.raises(ConfigError, match="SGD") as error:
        engine.step()
    assert error.value.where == "optimizer.param_groups" and error.value.fix
