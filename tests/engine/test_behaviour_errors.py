"""What users do wrong with an engine: one typed error that says where, what was got, what was
expected, and how to fix it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import zero_trial
from tests.support.dense import STAGES
from tests.support.pool import Pools
from zero_trial.errors import ConfigError, TrialError, ZeroTrialError

CONFIG: dict[str, Any] = {"train_batch_size": 4, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def engine(config: dict[str, Any] | None = None, model: nn.Module | None = None, **kwargs: Any) -> zero_trial.Engine:
    return zero_trial.initialize(model=model or net(), config=CONFIG | (config or {}), **kwargs)[0]


def output(**kwargs: Any) -> tuple[zero_trial.Engine, torch.Tensor]:
    found = engine(**kwargs)
    return found, found(torch.ones(5, 3))


def of_loss(loss: Callable[[torch.Tensor], Any], **kwargs: Any) -> None:
    found, out = output(**kwargs)
    found.backward(loss(out))


class Replicated(nn.parallel.DistributedDataParallel):
    """A user's subclass, without the process group that a real one needs."""

    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)
        self.module = module


def in_two_groups() -> None:
    model = net()
    groups = [{"params": list(model.parameters())}, {"params": [model[0].weight], "lr": 1.0}]  # type: ignore[index]
    engine(model=model, model_parameters=groups)


def of_another_model(as_optimizer: bool) -> None:
    """Left out silently, a criterion's own parameters would never be trained."""
    model, criterion = net(), nn.Linear(2, 1)
    params = [*model.parameters(), *criterion.parameters()]
    engine(model=model, **({"optimizer": torch.optim.AdamW(params)} if as_optimizer else {"model_parameters": params}))


def optimizer_that_has_stepped() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    engine(model=model, optimizer=optimizer)


def batch_size_in_a_step() -> None:
    found = engine({"train_micro_batch_size_per_gpu": 2})
    found.backward(found(torch.ones(2, 3)).mean())
    found.step()
    found.set_train_batch_size(8)


class Complex(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 2)
        self.phase = nn.Parameter(torch.ones(2, dtype=torch.complex64))


def two_in_one_memory() -> None:
    found = engine(model=nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    found.backward(found(torch.ones(2, 3)).mean())
    found.module[0].weight.data = found.module[1].weight.data
    found.step()


def edit_through_data_in_a_stage_3_forward() -> None:
    """torch counts no version for it, and the values are freed."""
    found = engine(FREED)

    def clamp(module: nn.Module, _: Any) -> None:
        module.weight.data.clamp_(-0.1, 0.1)  # type: ignore[operator, union-attr]

    found.module[0].register_forward_pre_hook(clamp)
    found.backward(found(torch.ones(2, 3)).mean())
    found.step()


def second_engine(held: bool) -> None:
    """A notebook's cell that runs again."""
    model = net()
    first = engine(FREED, model)
    if not held:
        del first
    engine(FREED, model)


FREED = {"zero_optimization": STAGES["zero3-free"]}
NO_SCALAR = ("engine.backward", "not a scalar")
GIVEN = {"training_data": [torch.ones(3)] * 8, "dataset": [torch.ones(3)] * 8}
REFUSALS: list[tuple[type[ZeroTrialError], Callable[[], Any], tuple[str, ...]]] = [
    (
        ConfigError,
        lambda: engine(model=Replicated(net())),
        ("DataParallel", "initialize(model):", "Give model.module"),
    ),
    (
        ConfigError,
        lambda: engine(model=nn.Sequential(nn.Identity(), nn.DataParallel(net()))),
        ("initialize(model): 1:",),
    ),
    (TrialError, lambda: of_loss(lambda out: out), (*NO_SCALAR, "(5, 2)", "loss.mean()")),
    (TrialError, lambda: of_loss(lambda out: out.mean().item()), (*NO_SCALAR, "float", "Leave .item() out")),
    (
        TrialError,
        lambda: of_loss(lambda out: (out.mean(), out)),
        (*NO_SCALAR, "tuple", "out of what the model returns"),
    ),
    (TrialError, lambda: of_loss(lambda out: None), (*NO_SCALAR, "NoneType", "out of what the model returns")),
    (TrialError, lambda: of_loss(lambda out: out.mean().detach()), ("does not require grad", "gradients enabled")),
    (TrialError, lambda: of_loss(torch.mean, model=net().requires_grad_(False)), ("does not require grad",)),
    (TrialError, lambda: engine({"optimizer": None}).step(), ("there is no optimizer", '"optimizer"')),
    (
        ConfigError,
        lambda: engine({"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "max_grad_norm": 1.0}}}),
        ("gradient_clipping",),
    ),
    (ConfigError, lambda: engine({"scheduler": {"type": "WarmupLR", "params": {"steps": 3}}}), ("steps",)),
    (ConfigError, in_two_groups, ("two optimizer groups", "model_parameters")),
    (ConfigError, lambda: of_another_model(True), ("2 trainable ones", "optimizer")),
    (ConfigError, lambda: of_another_model(False), ("2 trainable ones", "model_parameters")),
    (ConfigError, optimizer_that_has_stepped, ("has stepped",)),
    (ConfigError, lambda: zero_trial.initialize(model=net()), ("no ds_config", "args.deepspeed_config")),
    (ConfigError, lambda: engine(config_params=CONFIG), ("config and config_params",)),
    (ConfigError, lambda: engine(net=net()), ("model and net",)),
    (ConfigError, lambda: engine(**GIVEN), ("training_data and dataset",)),
    (ConfigError, lambda: zero_trial.initialize(config=CONFIG), ("needs a model",)),
    (
        TrialError,
        lambda: engine().load_checkpoint("x", custom_load_fn=print),
        ("custom_load_fn", "GatheredParameters"),
    ),
    (TrialError, batch_size_in_a_step, ("between steps",)),
    (ConfigError, lambda: engine(model=Complex()), ("phase: a complex parameter", "view_as_real")),
    (TrialError, two_in_one_memory, ("1.weight", "memory of 0.weight")),
    (TrialError, edit_through_data_in_a_stage_3_forward, ("0.weight", "GatheredParameters")),
    (ConfigError, lambda: second_engine(True), ("belongs to another engine", "destroy()")),
    (ConfigError, lambda: second_engine(False), ("belongs to another engine", "destroy()")),
]


@pytest.mark.parametrize(("kind", "act", "words"), REFUSALS)
def test_what_is_refused(kind: type[ZeroTrialError], act: Callable[[], Any], words: tuple[str, ...]) -> None:
    with pytest.raises(kind) as raised:
        act()
    assert raised.value.exit_code == 2
    assert all(word in str(raised.value) for word in words), str(raised.value)


@pytest.mark.parametrize(
    ("lazy", "where"),
    [(nn.LazyLinear(4), "1.weight: "), (nn.LazyBatchNorm1d(affine=False), "1.running_mean: ")],
)
def test_a_lazy_module_needs_a_forward_first(lazy: nn.Module, where: str) -> None:
    model = nn.Sequential(nn.Identity(), lazy)
    with pytest.raises(ConfigError, match=rf"{where}.*got Uninitialized.* of {type(lazy).__name__}.*Run one forward"):
        engine(model=model)
    model(torch.ones(2, 3))
    model.append(net()[0] if where.startswith("1.running") else nn.Identity())  # type: ignore[index]
    engine(model=model).destroy()


def test_a_refused_loss_leaves_the_engine_working() -> None:
    """A loss of one element is a scalar."""
    found, out = output()
    with pytest.raises(TrialError):
        found.backward(out)
    found.backward(out.mean().reshape(1, 1))
    found.step()
    assert found.was_step_applied()


# --- the configuration ----------------------------------------------------------------------------


class Args:
    deepspeed_config = CONFIG


def test_where_the_configuration_may_be_given() -> None:
    for args in (Args(), SimpleNamespace(deepspeed_config=None, deepscale_config=CONFIG)):
        assert zero_trial.initialize(args=args, model=net())[0].train_batch_size() == 4
    assert zero_trial.initialize(model=net(), config_params=CONFIG)[0].train_batch_size() == 4


def test_a_config_beside_that_of_the_arguments_counts_and_it_is_said() -> None:
    """Determined's pipeline example reads the file of its arguments, changes it, and passes
    both."""
    changed = zero_trial.initialize(args=Args(), model=net(), config={**CONFIG, "train_batch_size": 8})[0]
    assert changed.train_batch_size() == 8 and "args.deepspeed_config" in changed.config.warnings[-1]
    same = zero_trial.initialize(args=Args(), model=net(), config=dict(CONFIG))[0]
    assert same.config.warnings == zero_trial.initialize(model=net(), config=CONFIG)[0].config.warnings


def test_the_names_of_determineds_documentation() -> None:
    """``initialize(net=..., dataset=...)``."""
    data = [(torch.ones(3), torch.ones(1))] * 8
    made, _, loader, _ = zero_trial.initialize(net=net(), config=CONFIG, dataset=data)
    assert made.train_batch_size() == 4 and len(loader) == 2


# --- weights that forward edits -------------------------------------------------------------------


def bounded(kind: str, stage: str) -> str:
    """Take a step with other tokens on each rank; return the error, or weights that differ."""
    torch.manual_seed(0)
    layer = {"embedding": nn.Embedding, "bag": nn.EmbeddingBag}[kind.removeprefix("frozen ")](6, 4, max_norm=0.5)
    model = nn.Sequential(layer, nn.Linear(4, 2))
    model[0].requires_grad_(not kind.startswith("frozen"))
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    try:
        found = zero_trial.initialize(model=model, config=CONFIG | {"zero_optimization": STAGES[stage]})[0]
    except ConfigError as error:
        return str(error)
    tokens = torch.full((4 // world, 1), rank)
    found.backward(found(tokens).mean())
    found.step()
    trained = [param.flatten().tolist() for param in model.parameters() if param.requires_grad]
    rows = found.mesh.data.gather_json(trained, "weights")
    found.destroy()
    return "" if all(row == rows[0] for row in rows) else f"the ranks are apart: {rows}"


@pytest.mark.parametrize("kind", ["embedding", "bag", "frozen embedding"])
@pytest.mark.parametrize("stage", ["zero0", "zero2", "zero3"])
@pytest.mark.parametrize("size", [1, 2])
def test_max_norm_edits_weights_of_one_rank(ranks: Pools, size: int, stage: str, kind: str) -> None:
    """Each rank would edit the rows of its own tokens; frozen rows come to the same everywhere."""
    for text in ranks(size).run(bounded, kind, stage):
        if stage == "zero3":
            words = ("freed after use", "0.max_norm", "(max_norm=0.5)", "Leave max_norm out")
        elif size == 2 and not kind.startswith("frozen"):
            words = ("drift apart", "0.max_norm", "2 data-parallel ranks", "Leave max_norm out")
        else:
            assert text == ""
            continue
        assert all(word in text for word in words), text
