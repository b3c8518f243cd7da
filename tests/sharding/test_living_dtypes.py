"""Which modules stay fp32 in 16-bit training. tests/engine/test_precision.py trains with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.models import TinyLM
from zero_trial.errors import ConfigError
from zero_trial.sharding.living_dtypes import LivingDtypes
from zero_trial.sharding.precision import DtypePolicy

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16


class Model(nn.Module):
    """A list of blocks, a bare parameter and a buffer, and a weight that a head shares."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.blocks = nn.ModuleList([nn.ModuleDict({"norm": nn.LayerNorm(4), "norm1": nn.Linear(4, 4)})])
        self.gate = nn.Linear(4, 4)
        self.gate.bias_correction = nn.Parameter(torch.zeros(4))
        self.gate.register_buffer("table", torch.ones(3, dtype=BF16))
        self.head = nn.Linear(4, 5)
        self.head.weight = self.embed.weight


def living(patterns: Sequence[str] = (), dtype: torch.dtype = BF16, model: Any = None) -> tuple[Any, LivingDtypes]:
    model = Model() if model is None else model
    return model, LivingDtypes(model, DtypePolicy(dtype, dtype, dtype, fp32_modules=tuple(patterns)))


@pytest.mark.parametrize(
    ("patterns", "modules", "kept"),
    [
        (["norm"], ["blocks.0.norm"], {"blocks.0.norm.weight", "blocks.0.norm.bias"}),
        (["norm*"], ["blocks.0.norm", "blocks.0.norm1"], {f"blocks.0.{n}" for n in
         ("norm.weight", "norm.bias", "norm1.weight", "norm1.bias")}),
        (["blocks.0.norm1"], ["blocks.0.norm1"], {"blocks.0.norm1.weight", "blocks.0.norm1.bias"}),
        (["blocks"], ["blocks.0.norm", "blocks.0.norm1"], {f"blocks.0.{n}" for n in
         ("norm.weight", "norm.bias", "norm1.weight", "norm1.bias")}),
        (["bias_correction"], [], {"gate.bias_correction"}),
        (["gate"], ["gate"], {"gate.weight", "gate.bias", "gate.bias_correction", "gate.table"}),
        (["embed"], ["embed", "head"], {"embed.weight", "head.bias"}),
    ],
)  # fmt: skip
def test_a_name_matches_whole_components(patterns: list[str], modules: list[str], kept: set[str]) -> None:
    """A list of modules is never called, but its children are. A head that shares a kept weight
    computes in fp32, too."""
    model, dtypes = living(patterns)
    assert list(dtypes.modules) == modules and dtypes.unmatched == []
    named = [*model.named_parameters(), *model.named_buffers()]
    assert {name for name, tensor in named if dtypes.keeps(tensor)} == kept
    assert all(dtypes.of(tensor) == (FP32 if name in kept else BF16) for name, tensor in named)
    _, unasked = living(patterns, FP32)
    assert unasked.modules == {} and unasked.of(model.gate.weight) == FP32


def test_a_name_that_matches_nothing_is_an_error_with_the_nearest_one() -> None:
    with pytest.raises(ConfigError) as error:
        living(["norm", "gaet"])[1].require_matches()
    message = str(error.value)
    assert message.startswith("data_types.keep_in_fp32_modules: the model has no module, parameter or buffer of this")
    assert 'got "gaet"' in message and "Did you mean gate?" in message


@pytest.mark.parametrize(("dtype", "found"), [(BF16, ["body.gate"]), (FP16, ["body.embed", "body.gate", "body.head"])])
def test_a_model_of_transformers_names_its_own(dtype: torch.dtype, found: list[str]) -> None:
    """As transformers does: one of its lists is for fp16 alone."""
    outer = nn.Module()
    outer.body, outer.gate = Model(), nn.Linear(4, 4)
    outer.body._keep_in_fp32_modules_strict, outer.body._keep_in_fp32_modules = {"gate"}, ["embed"]  # type: ignore[assignment]
    assert list(living((), dtype, outer)[1].modules) == found


def test_what_enters_and_leaves_is_cast() -> None:
    model, dtypes = living(["norm"], model=TinyLM())
    seen = []
    model.norm.forward = lambda x: seen.append(x.dtype) or (x, {"deep": x, "tokens": torch.arange(2)})
    handles = dtypes.cast_at_borders()
    given = torch.ones(2, 4, dtype=BF16, requires_grad=True)
    out, rest = model.norm(given)
    assert seen == [FP32] and out.dtype == rest["deep"].dtype == BF16 and rest["tokens"].dtype == torch.int64
    out.float().sum().backward()
    assert given.grad is not None and given.grad.eq(1).all()
    for handle in handles:
        handle.remove()
    assert model.norm(given)[0].dtype == BF16 and seen == [FP32, BF16]
