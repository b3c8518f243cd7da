"""QLoRA: a base in 4 bits (bitsandbytes) under adapters (PEFT) at every ZeRO stage. The oracle is
the same model trained by plain torch in one process."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import zero_trial
from tests.sharding.parts import make_model
from tests.support.pool import Nursery, Pools
from zero_trial.errors import ConfigError
from zero_trial.planning.blueprint import Blueprint
from zero_trial.planning.pass_trace import give_dtypes
from zero_trial.sharding.meta import place_absent
from zero_trial.sharding.precision import DtypePolicy
from zero_trial.sharding.quantized import OpaqueParameter, PackedWeights, is_opaque, require_freeable

LIBRARIES = ("transformers", "peft", "bitsandbytes", "accelerate")
WITHIN = 2e-6  # of losses near 4.6: four units in the last place of fp32

needs_libraries = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not all(map(importlib.util.find_spec, LIBRARIES)), reason=f"{', '.join(LIBRARIES)} are in the extra 'libraries'"
    ),
]


@pytest.fixture(scope="module")
def pools(nursery: Nursery) -> Iterator[Pools]:
    """Start ranks for this file alone, which have the libraries."""
    pools = Pools(nursery, ["tests.sharding.qlora"])
    yield pools
    pools.close()


def _on_rank(name: str, *args: Any) -> Any:
    return getattr(import_module("tests.sharding.qlora"), name)(*args)


@pytest.fixture(scope="module")
def ask(pools: Pools) -> Callable[..., Any]:
    """Return what ``name`` of tests/sharding/qlora.py answers on rank 0 of ``ranks``."""

    def asked(name: str, *args: Any, ranks: int = 2) -> Any:
        return pools(ranks).run(_on_rank, name, *args, timeout=280)[0]

    return asked


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, ask: Callable[..., Any]) -> Path:
    folder = tmp_path_factory.mktemp("qlora")
    ask("write_weights", folder, ["Llama", "short", "Qwen", "Mixtral", "wide"], ranks=1)
    return folder


@pytest.fixture(scope="module")
def short(ask: Callable[..., Any], folder: Path) -> list[float]:
    """Return the losses of a Llama of one layer on two ranks, which are those of every stage."""
    losses: list[float] = ask("stages", "short", folder, [2])[0]
    return losses


def gap(ours: list[float], theirs: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("family", ["Llama", "Qwen", "Mixtral"])
class TestLosses:
    pytestmark = needs_libraries

    def test_every_stage_gives_the_losses_of_plain_torch(
        self, ask: Callable[..., Any], folder: Path, family: str
    ) -> None:
        theirs = ask("plain", family, folder, ranks=1)
        assert len(theirs) == 20 and sum(theirs[-4:]) < sum(theirs[:4]) - 0.05
        for ranks in (1, 2, 4):
            first, second, third = ask("stages", family, folder, [0, 2, 3], 20, ranks=ranks)
            assert first == second == third
            assert gap(first, theirs) <= WITHIN


class TestQlora:
    pytestmark = needs_libraries

    def test_packed_bytes_of_any_dtype_are_never_cast(self, ask: Callable[..., Any], folder: Path) -> None:
        found = ask("storages", folder)
        assert all(first == second for first, second in found)
        fp32, bf16 = found[:3], found[3:]
        assert all(row == fp32[0] for row in fp32) and all(row == bf16[0] for row in bf16) and fp32[0] != bf16[0]

    @pytest.mark.parametrize("double", [True, False])
    @pytest.mark.parametrize("ranks", [2, 4])
    def test_each_rank_has_its_part_of_the_base_and_of_its_state(
        self, ask: Callable[..., Any], folder: Path, ranks: int, double: bool
    ) -> None:
        found, weights = ask("frozen_bytes", folder, double, ranks=ranks)
        scales = (1 + 4 / 256) / 64 if double else 4 / 64
        assert found / weights == pytest.approx((0.5 + scales) / ranks, rel=0.03)

    def test_a_graph_keeps_no_packed_weight(self, ask: Callable[..., Any], folder: Path) -> None:
        """bitsandbytes keeps the weight as an attribute of its function's context."""
        live, whole = ask("kept_for_backward", folder)
        assert live < 0.7 * whole

    def test_parameters_in_files_change_no_bit(
        self, ask: Callable[..., Any], folder: Path, tmp_path: Path, short: list[float]
    ) -> None:
        assert ask("away", folder, tmp_path) == [short[:10]] * 2

    @pytest.mark.parametrize("reentrant", [True, False])
    def test_gradient_checkpointing(self, ask: Callable[..., Any], folder: Path, reentrant: bool) -> None:
        theirs, ours = ask("checkpointed", folder, reentrant)
        assert gap(ours, theirs) <= WITHIN

    @pytest.mark.parametrize("config", [{}, {"bf16": {"enabled": True}}])
    def test_a_model_loaded_in_shards(self, ask: Callable[..., Any], folder: Path, config: dict[str, Any]) -> None:
        ours, theirs, (sharded, whole) = ask("built_in_shards", folder, config)
        assert ours == theirs
        assert 3 * sharded < whole

    def test_checkpoints_resume_on_other_ranks(self, ask: Callable[..., Any], folder: Path, tmp_path: Path) -> None:
        losses = ask("saved", folder, tmp_path)
        other = tmp_path / "other"  # another base: a checkpoint of everything replaces it
        ask("write_weights", other, ["short"], 5, ranks=1)
        for what, base, ranks, stage in (
            ("all", other, 4, 3),
            ("all", other, 2, 0),
            ("adapters", folder, 1, 3),
            ("adapters", folder, 2, 3),
        ):
            resumed = ask("resumed", base, tmp_path / what, stage, ranks=ranks)
            assert gap(resumed, losses[5:]) <= (0 if ranks == 2 else WITHIN)

    def test_adapters_are_saved_and_merged(self, ask: Callable[..., Any], folder: Path, tmp_path: Path) -> None:
        found = ask("merged", folder, tmp_path)
        exact = {name: found.pop(name) for name in ("packed", "names", "left", "merged")}
        assert exact == dict.fromkeys(exact, 0)
        assert max(found.values()) < 1e-5

    def test_an_evaluation_does_not_repack_weights(
        self, ask: Callable[..., Any], folder: Path, short: list[float]
    ) -> None:
        first, second = ask("evaluated", folder)
        assert first == second == short[:3]


# --- without the libraries ------------------------------------------------------------------------


class State:
    """What PackedWeights uses of bitsandbytes' QuantState."""

    def __init__(self, *, packed: bool = False) -> None:
        self.absmax, self.code = torch.ones(2), torch.arange(16.0)
        self.nested, self.quant_type, self.packing_format_for_cpu = False, "nf4", packed


class Packed(nn.Parameter):
    """A parameter that looks like bitsandbytes' Params4bit."""

    def __init__(self, *_: object, **__: object) -> None:
        self.quant_state: State | None = State()
        self.bnb_quantized = True


def layer() -> nn.Linear:
    module = nn.Linear(8, 8, bias=False)
    module.weight = Packed(torch.zeros(32, 1, dtype=torch.uint8), requires_grad=False)
    module.support_avx512bf16_for_cpu = True
    return module


def test_scales_are_parameters_until_they_are_released() -> None:
    model = nn.Sequential(layer(), layer())
    names = [name for name, _ in model.named_parameters()]
    first, second = (PackedWeights(model, torch.device("cpu")) for _ in range(2))
    assert [name for name, _ in model.named_parameters() if name not in names] == ["0.weight.absmax", "1.weight.absmax"]
    state = model[0].weight.quant_state
    assert isinstance(state.absmax, OpaqueParameter) and state.code is model[1].weight.quant_state.code
    assert not model[0].support_avx512bf16_for_cpu
    for each in (second, first):
        each.release()
    assert [name for name, _ in model.named_parameters()] == names
    assert type(state.absmax) is torch.Tensor and model[0].support_avx512bf16_for_cpu


def test_opaque_tensors_keep_their_dtype_in_16_bits() -> None:
    model = nn.Sequential(nn.Linear(8, 8), layer())
    PackedWeights(model, torch.device("cpu"))
    for stage in (0, 3):
        made = make_model(copy.deepcopy(model), stage, precision="bf16").module
        dtypes = {name: param.dtype for name, param in made.named_parameters()}
        assert dtypes["0.weight"] == torch.bfloat16 and dtypes["1.weight"] == torch.uint8
        assert dtypes["1.weight.absmax"] == torch.float32


def test_opaque_tensors_on_the_meta_device_stay_opaque() -> None:
    """Scales are read as fp32 also where initialize(weights=) gives them their values."""
    module = layer()
    module.weight.quant_state.absmax = torch.ones(2, device="meta")
    PackedWeights(module)
    place_absent(module, torch.device("cpu"))
    assert is_opaque(module._parameters["weight.absmax"]) and not module.weight.quant_state.absmax.is_meta


def test_a_plan_counts_packed_bytes_and_scales() -> None:
    model = nn.Sequential(nn.Linear(8, 8), layer())
    model[1].quant_state = model[1].weight.quant_state
    copied = Blueprint(model).model(fake=False, device=torch.device("meta"))
    # bitsandbytes makes a Params4bit of a weight without it, which no fake tensor can become
    assert copied[1].weight.quant_state is copied[1].quant_state is not model[1].quant_state
    assert {name: (param.dtype, param.is_meta, is_opaque(param)) for name, param in copied[1].named_parameters()} == {
        "weight": (torch.uint8, True, True),
        "weight.absmax": (torch.float32, True, True),
    }


def test_a_plan_of_fake_tensors_casts_no_scales() -> None:
    """A fake tensor cannot have the class of its original."""
    plan = Blueprint(nn.Sequential(nn.Linear(8, 8), layer()))
    bf16 = DtypePolicy(torch.bfloat16, torch.bfloat16, torch.bfloat16)
    with FakeTensorMode(allow_non_fake_inputs=True):
        copied = plan.model(fake=True, device=torch.device("cpu"))
        give_dtypes(copied, plan.given["model"], bf16)
    assert [param.dtype for param in copied.parameters()] == [torch.bfloat16] * 2 + [torch.uint8, torch.float32]


def broken(change: str) -> nn.Module:
    module = layer()
    if change == "packed":
        module.weight.quant_state = State(packed=True)
    else:
        module.weight.quant_state, module.weight.bnb_quantized = None, False
    return module


@pytest.mark.parametrize(
    ("change", "text"), [("packed", "packed this weight for inference"), ("raw", "has not quantized this weight yet")]
)
def test_weights_that_cannot_be_trained_on_are_refused(change: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        PackedWeights(nn.Sequential(broken(change)), torch.device("cpu"))
    assert "0.weight" in str(caught.value)


class AffineQuantizedTensor(torch.Tensor):
    """Numbers in two tensors, as torchao's classes have them."""

    @staticmethod
    def __new__(cls, data: torch.Tensor, scale: torch.Tensor) -> AffineQuantizedTensor:
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=scale.dtype, device=data.device)

    def __init__(self, data: torch.Tensor, scale: torch.Tensor) -> None:
        self.data_, self.scale = data, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["data_", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls(args[0].data_, args[0].scale)
        raise NotImplementedError(f"{func} of a quantized tensor")


@pytest.mark.parametrize("kind", ["bitsandbytes, 8 bits", "torchao"])
def test_weights_of_several_tensors_cannot_be_freed(kind: str) -> None:
    module = layer()
    require_freeable(module)
    if kind == "torchao":
        quantized = AffineQuantizedTensor(torch.zeros(8, 8, dtype=torch.int8), torch.ones(8))
        module.weight = nn.Parameter(quantized, requires_grad=False)
    else:
        module.weight.CB = None
    config = {"train_batch_size": 1, "zero_optimization": {"stage": 3}}
    with pytest.raises(ConfigError, match=r"1.weight: .*cannot be freed.*load_in_4bit") as caught:
        zero_trial.initialize(model=nn.Sequential(nn.Linear(8, 8), module), config=config)
    assert type(module.weight).__name__ in str(caught.value)
