"""Parameters whose values are in the shards: what can be asked of them, what is an error, and who
owns them."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrize
from torch.optim.swa_utils import AveragedModel
from torch.utils._pytree import tree_leaves

import zero_trial
from tests.sharding.parts import make_group, parameters
from tests.support.dense import STAGES
from tests.support.models import TinyLM, Tower, largest_difference, make_engine, train_dense, train_engine
from tests.support.pool import Pools
from zero_trial.errors import TrialError
from zero_trial.sharding.guards.freed import FreedParameter, ShardedParameter, ZeroParamStatus, forget_owner
from zero_trial.zero import GatheredParameters, Init

NAME = "blocks.1.up.weight"
SHAPE = (192, 48)


@pytest.fixture(scope="module")
def engine() -> zero_trial.Engine:
    """One at ZeRO stage 3 on one rank; a forward and a step have run."""
    made = make_engine(TinyLM, {"zero_optimization": STAGES["zero3"]})
    train_engine(made, range(1))
    return made


# Uses that need values; each gets the parameter and its model.
USES: dict[str, Callable[[Any, nn.Module], object]] = {
    "clone": lambda p, _: p.clone(),
    "detach": lambda p, _: p.detach().sum(),
    "data": lambda p, _: p.data.clone(),
    "with a format": lambda p, _: f"{p:.2f}",
    "sum": lambda p, _: p.sum(),
    "arithmetic": lambda p, _: 0.9 * torch.ones(SHAPE) + p,
    "index": lambda p, _: p[0],
    "view": lambda p, _: p.view(-1),
    "comparison": lambda p, _: p == torch.ones(SHAPE),
    "an average": lambda p, _: torch.ones(SHAPE).lerp_(p, 0.1),
    "foreach": lambda p, _: torch._foreach_add([torch.ones(SHAPE)], [p]),
    "tolist": lambda p, _: p.tolist(),
    "linear": lambda p, _: functional.linear(torch.ones(2, SHAPE[1]), p),
    "to another dtype": lambda p, _: p.to(torch.float64),
    "copy_ from it": lambda p, _: torch.empty(SHAPE).copy_(p),
    "copy_ into it": lambda p, _: p.copy_(torch.ones(SHAPE)),
    "mul_": lambda p, _: p.mul_(2.0),
    "data.copy_": lambda p, _: p.data.copy_(torch.ones(SHAPE)),
    "data =": lambda p, _: setattr(p, "data", torch.ones(SHAPE)),
    "init": lambda p, _: nn.init.normal_(p),
    "deepcopy": lambda p, _: copy.deepcopy(p),
    "deepcopy of the model": lambda _, model: copy.deepcopy(model),
    "AveragedModel": lambda _, model: AveragedModel(model),
    "torch.save of the model": lambda _, model: torch.save(model, io.BytesIO()),
    "half of the model": lambda _, model: model.half(),
    "parameters_to_vector": lambda _, model: nn.utils.parameters_to_vector(model.parameters()),
}
WITHOUT_NAME = (
    "detach",  # its result is no parameter of the model
    "deepcopy of the model",
    "AveragedModel",
    "torch.save of the model",
    "half of the model",
    "parameters_to_vector",
)
EDITS = ("copy_ into it", "mul_", "data.copy_", "data =", "init", "half of the model")


@pytest.mark.parametrize("use", USES)
def test_a_use_that_needs_values_is_an_error_that_names_parameter_and_line(engine: zero_trial.Engine, use: str) -> None:
    model = engine.module
    with torch.no_grad(), pytest.raises(TrialError) as caught:
        USES[use](dict(model.named_parameters())[NAME], model)
    found = str(caught.value)
    assert Path(__file__).name in found.split(": ")[0] and "GatheredParameters" in found
    assert NAME in found or use in WITHOUT_NAME
    with GatheredParameters(model):
        if use not in (*EDITS, "with a format"):
            USES[use](model.get_parameter(NAME), model)


def test_the_error_names_offload_where_that_has_the_values(tmp_path: Path) -> None:
    """They are away at every ZeRO stage then, and not in shards at stages 0 to 2."""
    away = {"offload_param": {"device": "nvme", "nvme_path": str(tmp_path), "max_in_cpu": 0}}
    made = make_engine(TinyLM, {"zero_optimization": STAGES["zero1"] | {"param_persistence_threshold": 0} | away})
    train_engine(made, range(1))
    with pytest.raises(TrialError, match=r"or where offload_param keeps them"):
        made.module.get_parameter(NAME).clone()
    made.destroy()


def test_metadata_can_be_asked(engine: zero_trial.Engine) -> None:
    model = engine.module
    param = model.get_parameter(NAME)
    assert isinstance(param, FreedParameter) and isinstance(param, nn.Parameter)
    assert (tuple(param.shape), param.numel(), param.ndim, len(param), param.size(0)) == (SHAPE, 9216, 2, 192, 192)
    assert (param.dtype, param.device.type, param.is_floating_point(), param.element_size()) == (
        torch.float32,
        "cpu",
        True,
        4,
    )
    assert param.is_leaf and param.requires_grad and param.requires_grad_(True) is param
    assert (param.data.shape, param.data.dtype, param.data.numel()) == (SHAPE, torch.float32, 9216)
    assert (param.is_pinned(), param.is_shared(), param.is_inference(), param._base) == (False, False, False, None)
    assert "shape" in dir(param) and not hasattr(param, "__cuda_array_interface__") and NAME in repr(param)
    assert NAME in f"{param}"
    assert param != None  # noqa: E711
    assert torch.zeros_like(param).shape == SHAPE and torch.ones(9216).view_as(param).shape == SHAPE
    assert torch.ones(2, dtype=torch.float64).to(param).dtype == torch.float32
    assert param.to("cpu", torch.float32) is param and model.to("cpu") is model and model.float() is model
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in TinyLM().parameters())
    assert {param: 1}[param] == 1 and torch.optim.SGD(model.parameters(), lr=0.1).param_groups
    handle = param.register_hook(lambda grad: grad)
    handle.remove()
    param.grad = None
    assert param.grad is None


@pytest.mark.parametrize("stage", ["zero0", "zero2", "zero3"])
def test_a_model_that_its_engine_trains_can_be_saved_whole(stage: str) -> None:
    """``torch.save(engine.module)``: at stage 3 inside GatheredParameters. What is loaded is an
    ordinary model."""
    made = make_engine(TinyLM, {"zero_optimization": STAGES[stage]})
    train_engine(made, range(1))
    file = io.BytesIO()
    with GatheredParameters(made.module):
        torch.save(made.module, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    expected = made.module_state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in loaded.state_dict().items())
    loaded(torch.zeros(1, 8, dtype=torch.long)).backward()
    assert all(type(param) is nn.Parameter for param in loaded.parameters())


class Special(nn.Parameter):
    """A user's own class of parameters."""


def test_a_class_of_its_own_comes_back() -> None:
    (weight,) = parameters([(2, 3)])
    weight.__class__ = Special
    group = make_group([weight], stage=3)
    assert isinstance(weight, FreedParameter) and isinstance(weight, Special)
    with pytest.raises(TrialError):
        weight.clone()
    group.unshard()
    assert isinstance(weight, Special) and not isinstance(weight, FreedParameter)
    weight.clone()
    assert type(copy.deepcopy(weight)) is Special
    forget_owner([weight])
    assert type(weight) is Special


NAMES = ("ds_id", "ds_shape", "ds_numel", "ds_status", "ds_tensor")


def test_deepspeeds_names_on_every_parameter_of_an_engine_at_stage_3() -> None:
    made = make_engine(TinyLM, {"zero_optimization": STAGES["zero3"]})
    model = made.module
    param, small = model.get_parameter(NAME), model.get_parameter("blocks.1.norm.weight")
    assert (param.ds_shape, param.ds_numel) == (SHAPE, 9216) and param.ds_status is ZeroParamStatus.NOT_AVAILABLE
    with GatheredParameters(param):
        assert param.ds_status is ZeroParamStatus.AVAILABLE and torch.equal(param.ds_tensor, param.flatten())
        assert type(copy.deepcopy(param)) is nn.Parameter
    assert all(isinstance(each, ShardedParameter) for each in model.parameters()) and small.ds_numel == 48
    ids = [each.ds_id for each in model.parameters()]
    assert len(set(ids)) == len(ids)
    made.destroy()
    assert all(type(each) is nn.Parameter for each in model.parameters())


@pytest.mark.parametrize("stage", ["zero0", "zero1", "zero2"])
def test_no_other_parameter_has_deepspeeds_names(stage: str) -> None:
    made = make_engine(TinyLM, {"zero_optimization": STAGES[stage]})
    for param in (made.module.get_parameter(NAME), nn.Parameter(torch.ones(1))):
        assert not any(hasattr(param, name) for name in NAMES)
    assert type(copy.deepcopy(param)) is nn.Parameter
    made.destroy()
    assert all(type(param) is nn.Parameter for param in made.module.parameters())


def named_before_and_after_the_engine() -> list[Any]:
    with Init():
        model = TinyLM()
    param = model.get_parameter(NAME)
    earlier = min(each.ds_id for each in model.parameters())  # earlier tests may leave ranks apart
    before = (param.ds_id - earlier, param.ds_numel, param.ds_status.name, param.ds_tensor.numel())
    made = make_engine(lambda: model, {"zero_optimization": STAGES["zero3"]})
    part = param.ds_tensor
    with GatheredParameters(param):
        whole = param.detach().flatten().clone()
    return [before, (param.ds_id - earlier, part.tolist()), whole.tolist(), made.mesh.shard.index]


def test_the_names_between_init_and_initialize(ranks: Pools) -> None:
    """Ranks agree in ids, and their parts together are the whole."""
    (first, (id_0, part_0), whole, index_0), (second, (id_1, part_1), _, index_1) = ranks(2).run(
        named_before_and_after_the_engine
    )
    assert first == second == (id_0, 9216, "NOT_AVAILABLE", 4608) and id_0 == id_1 and (index_0, index_1) == (0, 1)
    assert part_0 + part_1 == whole


def test_an_edit_of_a_parameter_that_is_still_whole_is_an_error_at_the_step() -> None:
    """After a forward, say: the next gather would bring the old values back."""
    made = make_engine(TinyLM, {"zero_optimization": STAGES["zero3"]})
    weight = made.module.get_parameter("embed.weight")
    loss = made(torch.zeros(1, 8, dtype=torch.long))
    assert not isinstance(weight, FreedParameter)
    with torch.no_grad():
        weight.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):  # torch's own
        made.backward(loss)
    made.zero_grad()
    made.backward(made(torch.zeros(1, 8, dtype=torch.long)))
    with pytest.raises(TrialError, match=r"embed.weight: .*lost"):
        made.step()


@pytest.mark.parametrize("before", ["forward", "backward"])
def test_values_put_elsewhere_while_a_parameter_is_whole_are_an_error_at_the_step(before: str) -> None:
    made = make_engine(TinyLM, {"zero_optimization": STAGES["zero3"]})
    weight, tokens = made.module.get_parameter("embed.weight"), torch.zeros(1, 8, dtype=torch.long)

    def edit(now: str) -> None:
        if now == before:
            assert not isinstance(weight, FreedParameter)
            weight.data = weight.detach() * 2.0

    made(tokens)  # keeps the parameters whole for what follows
    edit("forward")
    loss = made(tokens)
    edit("backward")
    made.backward(loss)
    with pytest.raises(TrialError, match=r"embed.weight: .*lost"):
        made.step()


class Twice(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2


class Adapted(nn.Linear):
    """Has a parametrization in its forward alone, as PEFT's adapters of parameters do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parametrize.register_parametrization(self, "weight", Twice())
        y = functional.linear(x, self.weight, self.bias)
        parametrize.remove_parametrizations(self, "weight", leave_parametrized=False)
        return y


@pytest.mark.parametrize("stage", ["zero0", "zero3", "zero3-free"])
def test_a_parametrization_inside_a_forward_is_no_edit(stage: str) -> None:
    def build() -> nn.Module:
        model = TinyLM()
        for block in model.blocks:
            block.up = Adapted(48, 192)
        return model

    reference, expected = train_dense(build, 4, 8, 0.0)
    made = make_engine(build, {"zero_optimization": STAGES[stage]})
    assert train_engine(made, range(4)) == pytest.approx(expected, abs=2e-6)
    assert largest_difference(made, reference) <= 2e-6


DIFFERENTIATE: dict[str, Callable[[nn.Module], Any]] = {
    "grad": lambda model: torch.func.grad(lambda x: model(x).sum())(torch.ones(2, 5)),
    "grad of parameters": lambda model: torch.func.grad(
        lambda params: torch.func.functional_call(model, params, (torch.ones(2, 5),)).sum()
    )(dict(model.named_parameters())),
    "jvp": lambda model: torch.func.jvp(model, (torch.ones(2, 5),), (torch.ones(2, 5),)),
}


@pytest.mark.parametrize("how", DIFFERENTIATE)
def test_torch_func_differentiates_gathered_parameters_alone(how: str) -> None:
    torch.manual_seed(0)
    plain = Tower()
    made = make_engine(Tower, {"zero_optimization": STAGES["zero3"]}, seed=0)
    with pytest.raises(TrialError, match=r"torch.func .*GatheredParameters"):
        DIFFERENTIATE[how](made.module)
    with GatheredParameters(made.module):
        found, expected = tree_leaves(DIFFERENTIATE[how](made.module)), tree_leaves(DIFFERENTIATE[how](plain))
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_a_numpy_array_of_a_gathered_parameter_is_an_error_that_says_so() -> None:
    """Its memory belongs to the array, too, and could not be freed."""
    made = make_engine(TinyLM, {"zero_optimization": STAGES["zero3"]})
    param = made.module.get_parameter(NAME)
    with GatheredParameters(param):
        array = param.detach().clone().numpy()
    assert array.shape == SHAPE
    with pytest.raises(TrialError, match=r"numpy.*clone"), GatheredParameters(param):
        param.detach().numpy()
