"""What users do wrong with an engine: one typed error that says where, what was got, what was
expected, and how to fix it."""

from __future__ import annotations

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


def engine(config: dict[str, Any] | None = None, **kwargs: Any) -> zero_trial.Engine:
    return zero_trial.initialize(model=net(), config=CONFIG | (config or {}), **kwargs)[0]


def refused(kind: type[ZeroTrialError], act: Any, *words: str) -> None:
    with pytest.raises(kind) as raised:
        act()
    text = str(raised.value)
    assert raised.value.exit_code == 2
    for word in words:
        assert word in text, text


# --- models ---------------------------------------------------------------------------------------


class Replicated(nn.parallel.DistributedDataParallel):
    """A user's subclass, without the process group that a real one needs."""

    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)
        self.module = module


@pytest.mark.parametrize(
    ("wrapped", "where"),
    [
        (lambda: Replicated(net()), "initialize(model):"),
        (lambda: nn.Sequential(nn.Identity(), nn.DataParallel(net())), "initialize(model): 1:"),
    ],
)
def test_a_model_that_torch_already_reduces(wrapped: Any, where: str) -> None:
    refused(
        ConfigError,
        lambda: zero_trial.initialize(model=wrapped(), config=CONFIG),
        "DataParallel",
        where,
        "Give model.module",
    )


@pytest.mark.parametrize(
    ("lazy", "where"),
    [(nn.LazyLinear(4), "1.weight: "), (nn.LazyBatchNorm1d(affine=False), "1.running_mean: ")],
)
def test_a_lazy_module_needs_a_forward_first(lazy: nn.Module, where: str) -> None:
    model = nn.Sequential(nn.Identity(), lazy)
    words = (f"initialize(model): {where}", "got Uninitialized", f"of {type(lazy).__name__}", "Run one forward")
    refused(ConfigError, lambda: zero_trial.initialize(model=model, config=CONFIG), *words)
    model(torch.ones(2, 3))
    model.append(net()[0] if where.startswith("1.running") else nn.Identity())
    zero_trial.initialize(model=model, config=CONFIG)[0].destroy()


# --- losses ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "got", "fix"),
    [
        (lambda out: out, "(5, 2)", "loss.mean()"),
        (lambda out: out.mean().item(), "float", "Leave .item() out"),
        (lambda out: (out.mean(), out), "tuple", "out of what the model returns"),
        (lambda out: None, "NoneType", "out of what the model returns"),
        (lambda out: {"loss": out.mean()}, "dict", "out of what the model returns"),
    ],
)
def test_a_loss_that_is_not_a_scalar(loss: Any, got: str, fix: str) -> None:
    found = engine()
    refused(
        TrialError,
        lambda: found.backward(loss(found(torch.ones(5, 3)))),
        "engine.backward",
        "not a scalar",
        got,
        fix,
    )


def test_a_loss_of_one_element_is_a_scalar() -> None:
    found = engine()
    found.backward(found(torch.ones(5, 3)).mean().reshape(1, 1))
    found.step()
    assert found.global_steps == 1


def test_a_loss_without_history() -> None:
    found = engine()
    with torch.no_grad():
        loss = found(torch.ones(5, 3)).mean()
    refused(TrialError, lambda: found.backward(loss), "does not require grad", "gradients enabled")
    refused(TrialError, lambda: found.backward(found(torch.ones(5, 3)).mean().detach()), "does not require grad")


def test_a_refused_loss_leaves_the_engine_working() -> None:
    found = engine()
    with pytest.raises(TrialError):
        found.backward(found(torch.ones(5, 3)))
    found.backward(found(torch.ones(5, 3)).mean())
    found.step()
    assert found.was_step_applied()


# --- the optimizer --------------------------------------------------------------------------------


def test_a_step_without_an_optimizer() -> None:
    found = engine({"optimizer": None})
    assert found.optimizer is None
    refused(TrialError, found.step, "there is no optimizer", '"optimizer"')


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"optimizer": {"type": "AdamX"}}, ("optimizer.type", "AdamX", "Did you mean")),
        ({"optimizer": {"type": "AdamW", "params": {"learning_rate": 1}}}, ("optimizer.params.learning_rate", "lr")),
        ({"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "max_grad_norm": 1.0}}}, ("gradient_clipping",)),
        ({"scheduler": {"type": "WarmLR"}}, ("scheduler.type", "WarmLR", "WarmupLR")),
        ({"scheduler": {"type": "WarmupLR", "params": {"steps": 3}}}, ("steps",)),
    ],
)
def test_an_optimizer_or_schedule_that_is_not_known(config: dict[str, Any], words: tuple[str, ...]) -> None:
    refused(ConfigError, lambda: engine(config), *words)


def test_a_parameter_in_two_groups() -> None:
    model = net()
    groups = [{"params": list(model.parameters())}, {"params": [model[0].weight], "lr": 1.0}]
    act = lambda: zero_trial.initialize(model=model, config=CONFIG, model_parameters=groups)  # noqa: E731
    refused(ConfigError, act, "two optimizer groups", "model_parameters")


@pytest.mark.parametrize("as_optimizer", [True, False])
def test_parameters_of_another_model(as_optimizer: bool) -> None:
    """Left out silently, a criterion's own parameters would never be trained."""
    model, criterion = net(), nn.Linear(2, 1)
    params = [*model.parameters(), *criterion.parameters()]
    given = {"optimizer": torch.optim.AdamW(params)} if as_optimizer else {"model_parameters": params}
    act = lambda: zero_trial.initialize(model=model, config=CONFIG, **given)  # noqa: E731
    refused(ConfigError, act, "2 trainable ones", "optimizer" if as_optimizer else "model_parameters")


def test_a_client_optimizer_that_has_stepped() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    refused(ConfigError, lambda: zero_trial.initialize(model=model, config=CONFIG, optimizer=optimizer), "has stepped")


def test_a_model_with_nothing_to_train() -> None:
    model = net().requires_grad_(False)
    found = zero_trial.initialize(model=model, config=CONFIG)[0]
    refused(TrialError, lambda: found.backward(found(torch.ones(5, 3)).mean()), "does not require grad")


# --- the configuration ----------------------------------------------------------------------------


class Args:
    deepspeed_config = CONFIG


def test_the_configuration_is_given_once() -> None:
    refused(ConfigError, lambda: zero_trial.initialize(model=net()), "no ds_config", "args.deepspeed_config")
    act = lambda: zero_trial.initialize(model=net(), config=CONFIG, config_params=CONFIG)  # noqa: E731
    refused(ConfigError, act, "config and config_params")
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
    refused(ConfigError, lambda: zero_trial.initialize(model=net(), net=net(), config=CONFIG), "model and net")
    act = lambda: zero_trial.initialize(model=net(), config=CONFIG, training_data=data, dataset=data)  # noqa: E731
    refused(ConfigError, act, "training_data and dataset")


def test_there_is_a_model() -> None:
    refused(ConfigError, lambda: zero_trial.initialize(config=CONFIG), "needs a model")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"train_micro_batch_size_per_gpu": 3}, ("4", "3", "train_batch_size")),
        (
            {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4},
            ("train_batch_size 4", "micro 2", "accumulation 4"),
        ),
        (
            {"train_batch_size": None, "gradient_accumulation_steps": 4},
            ("train_batch_size", "train_micro_batch_size_per_gpu"),
        ),
        ({"train_batch_size": 0}, ("train_batch_size",)),
        ({"zero_optimization": {"stage": 4}}, ("zero_optimization.stage", "4")),
        ({"zero_optimisation": {"stage": 2}}, ("zero_optimisation", "zero_optimization")),
        (
            {"zero_optimization": {"stage": 3, "reshard_after": "never"}},
            ("zero_optimization.reshard_after", "never", "forward"),
        ),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, ("bf16", "fp16")),
        ({"gradient_clipping": -1.0}, ("gradient_clipping", "-1")),
        ({"mesh": {"shard": 3}}, ("mesh", "3")),
    ],
)
def test_a_configuration_that_cannot_be(config: dict[str, Any], words: tuple[str, ...]) -> None:
    merged = {key: value for key, value in (CONFIG | config).items() if value is not None}
    with pytest.raises(ZeroTrialError) as raised:
        zero_trial.initialize(model=net(), config=merged)
    assert raised.value.exit_code in (2, 5)
    for word in words:
        assert word in str(raised.value), str(raised.value)


def test_a_custom_loader_is_refused_with_another_way() -> None:
    refused(
        TrialError, lambda: engine().load_checkpoint("x", custom_load_fn=print), "custom_load_fn", "GatheredParameters"
    )


def test_the_batch_size_changes_only_between_steps() -> None:
    found = engine({"train_micro_batch_size_per_gpu": 2})
    found.backward(found(torch.ones(2, 3)).mean())
    found.step()
    refused(TrialError, lambda: found.set_train_batch_size(8), "between steps")


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


def test_the_mend_for_max_norm_bounds_as_it_does() -> None:
    tokens, own = torch.tensor([[0, 1], [2, 0]]), nn.Embedding(3, 4)
    out = own(tokens)
    fixed = torch.renorm(out.flatten(0, -2), 2, 0, 0.5).view_as(out)
    own.max_norm = 0.5
    torch.testing.assert_close(fixed, own(tokens))
    assert torch.autograd.grad(fixed.sum(), own.weight)[0].abs().sum() > 0
