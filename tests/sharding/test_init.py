"""Models that are built in shards."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

import zero_trial
from tests.sharding.parts import mesh_for
from tests.support.models import TinyLM, make_engine, train_engine
from tests.support.pool import Pools
from zero_trial.ds_config import read_ds_config
from zero_trial.errors import ConfigError, TrialError
from zero_trial.sharding.guards.freed import FreedParameter, owner_of_param
from zero_trial.sharding.init import OPEN, PreSharded
from zero_trial.zero import GatheredParameters, Init, OnDevice, safe_get_full_fp32_param

STAGE3 = {"stage": 3, "stage3_param_persistence_threshold": 0}


def presharded(params: Iterable[nn.Parameter]) -> list[PreSharded]:
    """The shards of those parameters that are cut."""
    return [owner for param in params if isinstance(owner := owner_of_param(param), PreSharded)]


class Built(nn.Module):
    """Initialises its weights in all the ways that models do, after the modules that own them are
    in place."""

    def __init__(self, width: int = 40, layers: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, width)
        self.blocks = nn.ModuleList(self.layer(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 30, bias=False)
        self.scale = nn.Parameter(torch.ones(width))
        self.head.weight = self.embed.weight
        self.apply(self.fill)
        nn.init.normal_(self.blocks[0][0].weight, std=0.3)
        self.blocks[1][0].weight.data.normal_(0.0, 0.02)
        self.blocks[2][0].weight.data = torch.full((4 * width, width), 0.25)
        with torch.no_grad():
            self.blocks[3][0].weight[0].fill_(2.0)
            self.blocks[3][2].weight.mul_(0.5)
            self.blocks[4][0].weight.copy_(self.blocks[5][0].weight)
        for name, param in self.named_parameters():
            if name.endswith("2.weight"):
                torch.nn.init.trunc_normal_(param, std=0.01)

    @staticmethod
    def layer(width: int) -> nn.Sequential:
        return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    @staticmethod
    def fill(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                module.bias.data.zero_()
        elif isinstance(module, nn.Embedding):
            module.weight.data.normal_(mean=0.0, std=0.02)


def build(how: Callable[[], Any]) -> nn.Module:
    torch.manual_seed(11)
    with how():
        return Built()


def same_bits() -> dict[str, Any]:
    plain = build(nullcontext)
    model = build(Init)
    again = build(nullcontext)
    Init(module=again)  # a module that is built already
    wrong = ["built before"] * any(not isinstance(param, FreedParameter) for param in again.parameters())
    for (name, param), (_, expected) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        holder, copied = *presharded([param]), *presharded([again.get_parameter(name)])
        if not (
            torch.equal(holder.gather(), expected)
            and torch.equal(copied.gather(), expected)
            and tuple(param.shape) == tuple(expected.shape)
            and not holder.live
        ):
            wrong.append(name)
    return {
        "wrong": wrong,
        "tied": model.head.weight is model.embed.weight,  # type: ignore[union-attr]
        "random": torch.rand(1).item(),
        "kept": sum(h.part.numel() for h in presharded(model.parameters()))
        / sum(p.numel() for p in plain.parameters()),
    }


def test_the_model_is_the_same_bit_for_bit(ranks: Pools) -> None:
    first, second = ranks(2).run(same_bits)
    torch.manual_seed(11)
    Built()
    after = torch.rand(1).item()
    for found in (first, second):
        assert found["wrong"] == [] and found["tied"]
        assert found["random"] == after, "as many random numbers as without Init"
        assert found["kept"] < 0.52


def whole_at_once() -> int:
    """The most parameters that are whole at a time."""
    made: list[nn.Parameter] = []
    counts = []

    def count() -> None:
        counts.append(sum(not isinstance(param, FreedParameter) for param in made))

    def note(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        made.extend([] if param is None else [param])
        count()

    lift = PreSharded.lift
    handle = register_module_parameter_registration_hook(note)
    with mock.patch.object(PreSharded, "lift", lambda self: (lift(self), count())), Init():
        Built(layers=12)
    handle.remove()
    return max(counts)


def test_no_rank_ever_holds_the_full_model(ranks: Pools) -> None:
    """The block under construction, its norm and embedding, and the lifted parameters are whole."""
    for most in ranks(2).run(whole_at_once):
        assert OPEN <= most <= OPEN + 4


def trained(use_init: bool, stage: int) -> list[float]:
    def model() -> nn.Module:
        with Init(enabled=use_init):
            return TinyLM()

    zero = {"stage": stage, "param_persistence_threshold": 100}
    return train_engine(make_engine(model, {"zero_optimization": zero}), range(3))


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_training_goes_on_from_the_same_model_at_every_stage(ranks: Pools, stage: int) -> None:
    assert ranks(2).run(trained, True, stage) == ranks(2).run(trained, False, stage)


def edited_while_building() -> list[bool]:
    """GatheredParameters inside Init, on parameters that were lifted just before."""
    out = []
    with Init():
        layer = nn.Sequential(nn.Linear(8, 8))
        weight = layer[0].weight
        weight.data.fill_(3.0)
        with GatheredParameters(weight):
            out.append(weight[0, 0].item())
        with GatheredParameters(weight, modifier_rank=0):
            weight.data.fill_(4.0)
        out.append(weight[0, 0].item())
        weight.data.mul_(2.0)
        for other in [nn.Sequential(nn.Linear(8, 8)) for _ in range(6)]:
            other[0].weight.data.zero_()
    with GatheredParameters(weight):
        out.append(weight[0, 0].item())
        out.append(weight.std().item())
    return [out == [3.0, 4.0, 8.0, 0.0]]


def entries() -> tuple[list[tuple[str, tuple[int, ...]]], bool, bool]:
    model = build(Init)
    state = model.state_dict()
    refused = True
    for value in state.values():
        try:
            value.clone()
            refused = False
        except TrialError:
            pass
    in_state = [(name, tuple(value.shape)) for name, value in state.items()]
    return in_state, refused, all(not entry.requires_grad for entry in state.values())


def test_a_state_dict_before_there_is_an_engine_has_names_and_shapes(ranks: Pools) -> None:
    """Loaders such as transformers' look keys, shapes and dtypes up in it; it has no values."""
    expected = [(name, tuple(value.shape)) for name, value in Built().state_dict().items()]
    assert ranks(2).run(entries) == [(expected, True, True)] * 2


def loaded() -> list[bool]:
    """Load a state dict, which differs on rank 1, before there is an engine, and copy a parameter
    that is freed into another."""
    rank = mesh_for(3).rank
    torch.manual_seed(21)
    dense = Built()
    model = build(Init)
    model.load_state_dict({name: value + rank for name, value in dense.state_dict().items()})
    with torch.no_grad():
        model.blocks[0][2].bias.copy_(model.norm.weight)  # type: ignore[index, union-attr]
        dense.blocks[0][2].bias.copy_(dense.norm.weight)  # type: ignore[index]
    assert all(isinstance(param, FreedParameter) for param in model.parameters())
    engine = zero_trial.initialize(
        model=model, config={"train_micro_batch_size_per_gpu": 1, "zero_optimization": STAGE3}
    )[0]
    state = engine.module_state_dict()
    engine.destroy()
    return [torch.equal(state[name], value) for name, value in dense.state_dict().items()]


def with_other_shapes() -> list[bool]:
    """Give parameters other shapes and dtypes inside Init, after it, and inside
    GatheredParameters."""
    with Init():
        model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3), nn.Linear(3, 2))
        model[0].weight.data = torch.full((90, 5), 2.0)
        model[2].half()
    bias = model[0].bias
    bias.data = nn.functional.pad(bias.data, (0, 0))  # as transformers ties weights
    with GatheredParameters(bias):
        before = bias.detach().clone()
    bias.data = nn.functional.pad(bias.data, (0, 83), "constant", 0.5)
    with GatheredParameters([model[1].weight], modifier_rank=1):
        model[1].weight.data = torch.full((3, 90), float(mesh_for(3).rank))
    found = [isinstance(param, FreedParameter) for param in model.parameters()]
    engine = zero_trial.initialize(
        model=model, config={"train_micro_batch_size_per_gpu": 1, "zero_optimization": STAGE3}
    )[0]
    state = engine.module_state_dict()
    engine.destroy()
    return [
        *found,
        torch.equal(state["0.weight"], torch.full((90, 5), 2.0)),
        torch.equal(state["0.bias"], torch.cat([before, torch.full((83,), 0.5)])),
        torch.equal(state["1.weight"], torch.ones(3, 90)),
        state["2.weight"].dtype == torch.float16,
    ]


def gathered_inside() -> list[bool]:
    rank = mesh_for(3).rank
    with Init():
        weight = nn.Sequential(nn.Linear(4, 4))[0].weight
    with torch.no_grad(), GatheredParameters(weight, modifier_rank=0):
        weight.fill_(1.0 + rank)
        with GatheredParameters(weight):
            found = [bool(weight.eq(1.0 + rank).all())]
        with GatheredParameters(weight, modifier_rank=1):
            weight.fill_(5.0 + rank)
        found.append(bool(weight.eq(6.0).all()))
        weight[0] = 3.0 + rank
    with GatheredParameters(weight):
        found += [bool(weight[0].eq(3.0).all()), bool(weight[1:].eq(6.0).all())]
    found.append(isinstance(weight, FreedParameter))
    params = list(build(Init).parameters())
    chosen = [*params, None] if rank == 0 else [None, *params[::-1]]  # None: a bias that is not there
    with torch.no_grad(), GatheredParameters(chosen, modifier_rank=0):  # as the order of a set differs
        for place, param in enumerate(params):
            param.fill_(place if rank == 0 else -1)
    return [*found, *(bool(holder.gather().eq(place).all()) for place, holder in enumerate(presharded(params)))]


def weight_norm() -> list[bool]:
    """As Wav2Vec2 builds its position embedding at stage 3."""
    torch.manual_seed(2)
    plain = nn.utils.parametrizations.weight_norm(nn.Linear(6, 5))
    torch.manual_seed(2)
    with Init():
        model = nn.Sequential(nn.Linear(6, 5))
        with GatheredParameters(model[0].weight, modifier_rank=0):
            nn.utils.parametrizations.weight_norm(model[0])
    found = [torch.equal(model[0].weight, plain.weight)]
    for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
        with GatheredParameters(param):
            found.append(torch.equal(param, expected))
    return found


def copied_in_shards() -> list[bool]:
    """Copy a tied module that is cut, as PEFT does for ``modules_to_save``, and edit the copy."""
    torch.manual_seed(0)
    plain = Built()
    torch.manual_seed(0)
    with Init():
        model = Built()
    model.head.requires_grad_(False)
    twin = copy.deepcopy(model)
    param, other = model.head.weight, twin.head.weight
    found = [isinstance(other, FreedParameter), len(presharded([other])) == 1, not other.requires_grad]
    found += [twin.embed.weight is other, param.ds_id != other.ds_id]  # type: ignore[attr-defined]
    with GatheredParameters([other], modifier_rank=0):
        found.append(torch.equal(other, plain.head.weight))
        other.data.add_(1.0)
    with GatheredParameters([param, other]):
        found += [torch.equal(param, plain.head.weight), torch.equal(other, plain.head.weight + 1.0)]
    return found


IN_SHARDS = [edited_while_building, loaded, with_other_shapes, gathered_inside, weight_norm, copied_in_shards]


@pytest.mark.parametrize("act", IN_SHARDS)
def test_what_libraries_do_before_there_is_an_engine(ranks: Pools, act: Callable[[], list[bool]]) -> None:
    """As PEFT does for ``modules_to_save``, where rank 0's values count, and transformers when
    embeddings are resized."""
    assert all(found and all(found) for found in ranks(2).run(act))


KEPT = {"data_types": {"keep_in_fp32_modules": ["blocks.1", "embed"]}}  # the head is tied to the embedding
DTYPES: dict[str, tuple[dict[str, Any], torch.dtype]] = {
    "bf16 in the config": ({"config": {"bf16": {"enabled": True}}}, torch.bfloat16),
    "fp16 in the config": ({"config_dict_or_path": {"fp16": {"enabled": True}}}, torch.float16),
    "dtype": ({"dtype": torch.bfloat16}, torch.bfloat16),
    "dtype wins": ({"dtype": torch.float32, "config": {"bf16": {"enabled": True}}}, torch.float32),
    "neither": ({"config": {"zero_optimization": {"stage": 3}}}, torch.float32),
    "auto": ({"config": {"bf16": {"enabled": "auto"}}}, torch.float32),
    "bf16, kept by the config": ({"config": {"bf16": {"enabled": True}} | KEPT}, torch.bfloat16),
    "dtype, kept by the config": ({"dtype": torch.bfloat16, "config": KEPT}, torch.bfloat16),
    "dtype, kept by the model": ({"dtype": torch.bfloat16, "module": True}, torch.bfloat16),
}


def built_in(case: str, ranks: int) -> list[bool]:
    """Compare with the model that is converted after it was built without Init, before and after
    initialize."""
    options, dtype = copy.deepcopy(DTYPES[case])
    for name in {"config", "config_dict_or_path"} & {*options}:
        options[name]["train_micro_batch_size_per_gpu"] = 1
    plain, mesh = build(nullcontext), mesh_for(3) if ranks == 2 else None
    whole = {name: param.detach().clone() for name, param in plain.named_parameters()}
    plain.to(dtype)
    if "kept" in case:
        for name in ("embed.weight", "blocks.1.0.weight", "blocks.1.0.bias", "blocks.1.2.weight", "blocks.1.2.bias"):
            plain.get_parameter(name).data = whole[name]
    if options.pop("module", False):
        model = build(nullcontext)
        model._keep_in_fp32_modules_strict = set(KEPT["data_types"]["keep_in_fp32_modules"])  # type: ignore[assignment]
        Init(model, mesh=mesh, **options)
    else:
        model = build(lambda: Init(mesh=mesh, **options))
    found = []
    for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
        found += [param.dtype == expected.dtype, hasattr(param, "ds_id"), isinstance(param, FreedParameter)]
        with GatheredParameters(param):
            found.append(param.dtype == expected.dtype and torch.equal(param, expected))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": STAGE3,
        "bf16": {"enabled": dtype == torch.bfloat16},
    }
    engine = zero_trial.initialize(model=model, config=config | (KEPT if "kept by the config" in case else {}))[0]
    for name, param in model.named_parameters():
        master = safe_get_full_fp32_param(param)  # None of a frozen one
        found.append(master is None or torch.equal(master, plain.get_parameter(name).float()))
    engine.destroy()
    return found


@pytest.mark.parametrize("case", DTYPES)
def test_parameters_have_the_dtype_of_the_config_on_one_rank_and_on_two(ranks: Pools, case: str) -> None:
    """Masters start from the rounded values, but for those of modules that stay fp32."""
    assert all(built_in(case, 1)) and all(all(found) for found in ranks(2).run(built_in, case, 2))


@pytest.mark.parametrize(
    "argument",
    [
        *("zero_param_parallel_group", "zero_quantized_weights", "zero_quantized_nontrainable_weights"),
        *("param_swapper", "remote_device"),
    ],
)
def test_what_is_done_otherwise_is_refused_by_name(argument: str) -> None:
    with pytest.raises(ConfigError, match=rf"zero.Init\({argument}\)"):
        Init(**{argument: "nvme"})  # type: ignore[arg-type]


def test_rounded_values_of_what_stays_fp32_are_refused_unless_files_have_others(tmp_path: Path) -> None:
    """zero.Init cannot know names that it is not told, or that begin outside its block."""
    config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": STAGE3}
    for how, kept in (({"dtype": torch.bfloat16}, "inner"), ({}, "0.inner")):
        given = config | {"data_types": {"keep_in_fp32_modules": [kept]}}
        with Init(**(how or {"config": given})):  # type: ignore[arg-type]
            inner = nn.ModuleDict({"inner": nn.Linear(13, 11), "other": nn.Linear(2, 2)})
        model = nn.Sequential(inner)
        with pytest.raises(
            ConfigError, match=r"0.inner.weight: zero.Init has rounded .* Pass this ds_config to zero.Init"
        ):
            zero_trial.initialize(model=model, config=given)
        state = nn.Sequential(nn.ModuleDict({"inner": nn.Linear(13, 11), "other": nn.Linear(2, 2)})).state_dict()
        save_file(state, tmp_path / "model.safetensors")
        engine = zero_trial.initialize(model=model, config=given, weights=tmp_path)[0]
        assert torch.equal(engine.module_state_dict()["0.inner.weight"], state["0.inner.weight"])
        engine.destroy()


def test_only_parameters_are_cut_and_only_if_enabled() -> None:
    with Init(dtype=torch.bfloat16):
        with torch.device("meta"):
            meta = nn.Sequential(nn.Linear(4, 4))
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    assert meta[0].weight.is_meta and not presharded(meta.parameters()) and model[0].weight.dtype == torch.bfloat16
    assert model[1].running_mean.dtype == torch.float32  # type: ignore[union-attr]
    with Init(enabled=False, dtype=torch.bfloat16):
        layer = nn.Sequential(nn.Linear(4, 4))
    assert not presharded(layer.parameters()) and layer[0].weight.dtype == torch.float32  # type: ignore[union-attr]


def test_a_ds_config_is_read_as_initialize_reads_it(tmp_path: Path) -> None:
    """But for "auto", as transformers gives it to Init before there is a model."""
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps({"train_batch_size": 2, "zero_optimization": {"stagee": 3}}))
    with pytest.raises(ConfigError, match="stagee") as expected:
        zero_trial.initialize(model=nn.Linear(2, 2), config=path)
    for argument in ("config_dict_or_path", "config"):
        with pytest.raises(ConfigError) as error:
            Init(**{argument: path})  # type: ignore[arg-type]
        assert str(error.value) == str(expected.value)
    Init(config={"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"reduce_bucket_size": "auto"}})
    Init(config=read_ds_config({"train_batch_size": 2}), enabled=False)


class TwoParts:
    def get_model_parallel_world_size(self) -> int:
        return 2


def groups_refused() -> list[bool]:
    """All of DeepSpeed's arguments that mean nothing here, then those that name other ranks."""
    one = [torch.distributed.new_group([rank]) for rank in range(2)][mesh_for(0).rank]
    whole = torch.distributed.group.WORLD
    found = []
    for arguments in (
        {"data_parallel_group": whole, "mem_efficient_linear": False, "remote_device": "cpu", "pin_memory": True},
        {"config_dict_or_path": {"train_batch_size": 2}, "config": {"bf16": {"enabled": True}}},
        {"data_parallel_group": one},
        {"sequence_data_parallel_group": one},
        {"mpu": TwoParts()},
    ):
        try:
            with Init(**arguments):  # type: ignore[arg-type]
                layer = nn.Sequential(nn.Linear(4, 4))
            found.append(len(presharded(layer.parameters())) == 2)
        except ConfigError as error:
            found.append(next(iter(arguments)).removeprefix("sequence_") in str(error))
    return found


def test_other_ranks_than_all_are_refused(ranks: Pools) -> None:
    assert ranks(2).run(groups_refused) == [[True] * 5] * 2


def test_a_model_on_the_meta_device() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.gain = nn.Parameter(torch.randn(3))
            self.old = nn.Parameter(torch.Tensor(2, 2))
            self.tied = self.gain
            self.register_buffer("scale", torch.ones(2, dtype=torch.float32))
            self.register_buffer("order", torch.arange(3.0))

    with OnDevice(torch.bfloat16, device="meta"):
        model = Model()
    assert {param.dtype for param in model.parameters()} == {torch.bfloat16}
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())) and model.tied is model.gain
    assert (model.scale.dtype, model.order.dtype) == (torch.bfloat16, torch.float32)
    with OnDevice(torch.float16, device="cpu"):
        assert nn.Linear(2, 2).weight.dtype == torch.float16
    with OnDevice(torch.float16, enabled=False):
        assert nn.Linear(2, 2).weight.dtype == torch.float32
    outside = nn.Linear(2, 2).weight
    assert (outside.dtype, outside.device.type) == (torch.float32, "cpu")


def built_after_a_failure() -> list[str]:
    """What a second build gives, after one that has failed in its first group, and in the next."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 0},
    }
    found = []
    for good in (0, 1):
        torch.manual_seed(3)
        with Init():
            model = nn.Sequential(nn.Linear(13, 11), nn.Linear(11, 2, dtype=torch.float64))
        results = [*([torch.ones(2, 11), torch.ones(2)] * good), MemoryError("none left")]
        with mock.patch.object(PreSharded, "gather", side_effect=results), pytest.raises(MemoryError):
            zero_trial.initialize(model=model, config=config)
        try:
            engine = zero_trial.initialize(model=model, config=config)[0]
        except TrialError as error:
            found.append(error.what)
            continue
        torch.manual_seed(3)
        whole = nn.Sequential(nn.Linear(13, 11), nn.Linear(11, 2, dtype=torch.float64)).state_dict()
        found.append(str(all(torch.equal(value, whole[name]) for name, value in engine.module_state_dict().items())))
        engine.destroy()
    return found


def test_a_second_build_has_the_values_or_names_the_failed_one(ranks: Pools) -> None:
    """Never parameters without values, which would begin again in silence."""
    failed = "the parameter's values were passed to an engine whose build failed"
    assert ranks(2).run(built_after_a_failure) == [["True", failed]] * 2
