"""The reference formulas against torch, and the ops in plain torch, which are those formulas in
place."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from zero_trial.ops import plain, reference
from zero_trial.ops.spec import ADAGRAD, ADAM, LION, SGD, pack_floats

STEPS = 6


def gradients(like: Tensor) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(like.shape, dtype=like.dtype, generator=generator) for _ in range(STEPS)]


def torch_run(cls: type[torch.optim.Optimizer], **arguments: Any) -> Tensor:
    p = torch.nn.Parameter(start())
    optimizer: torch.optim.Optimizer = cls([p], **arguments)  # type: ignore[call-arg, arg-type]
    for g in gradients(p):
        p.grad = g
        optimizer.step()
    return p.detach()


def start() -> Tensor:
    return torch.randn(17, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def run(step: Callable[..., Any], moments: int, counted: bool, **arguments: Any) -> Tensor:
    p = start()
    state = [torch.zeros_like(p) for _ in range(moments)]
    for t, g in enumerate(gradients(p), start=1):
        p, *state = step(p, g, *state, *([t] if counted else []), **arguments)
    return p


@pytest.mark.parametrize(
    ("name", "cls", "moments", "counted", "arguments"),
    [
        ("adamw", torch.optim.AdamW, 2, True, {"lr": 0.03, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}),
        ("adam", torch.optim.Adam, 2, True, {"lr": 0.03, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}),
        ("adagrad", torch.optim.Adagrad, 1, True, {"lr": 0.1, "lr_decay": 0.2, "eps": 1e-8, "weight_decay": 0.1}),
    ],
)
def test_equals_torch(name: str, cls: Any, moments: int, counted: bool, arguments: dict[str, Any]) -> None:
    ours = run(getattr(reference, name), moments, counted, **arguments)
    torch.testing.assert_close(ours, torch_run(cls, **arguments), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    "arguments",
    [
        {"lr": 0.1},
        {"lr": 0.1, "weight_decay": 0.1},
        {"lr": 0.1, "momentum": 0.9, "dampening": 0.3},
        {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    ],
)
def test_sgd_equals_torch(arguments: dict[str, Any]) -> None:
    p, b = start(), None
    for g in gradients(p):
        p, b = reference.sgd(p, g, b, **arguments)
    torch.testing.assert_close(p, torch_run(torch.optim.SGD, **arguments), rtol=1e-12, atol=1e-13)


def test_lion_by_hand() -> None:
    p, g, m = torch.tensor([1.0, 1.0, 0.0]), torch.tensor([2.0, -2.0, 1.0]), torch.tensor([0.0, 1.0, 0.0])
    after = reference.lion(p, g, m, lr=0.1, betas=(0.5, 0.75), weight_decay=0.5)
    # c = (1, -0.5, 0.5): signs 1, -1, 1; p - 0.1 (sign + 0.5 p)
    torch.testing.assert_close(after.p, torch.tensor([0.85, 1.05, -0.1]))
    torch.testing.assert_close(after.m, torch.tensor([0.5, 0.25, 0.25]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_dtype_is_kept_and_inputs_are_not_changed(dtype: torch.dtype) -> None:
    p, g, m, v = (torch.ones(3, dtype=dtype) for _ in range(4))
    for result in (
        reference.adamw(p, g, m, v, 1),
        reference.adam(p, g, m, v, 1),
        reference.lion(p, g, m),
        reference.adagrad(p, g, v),
    ):
        assert {tensor.dtype for tensor in result} == {dtype}
    assert all(torch.equal(tensor, torch.ones(3, dtype=dtype)) for tensor in (p, g, m, v))


@pytest.mark.parametrize("chunk", [3, 1 << 20])
def test_lion_in_place(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(plain, "CHUNK", chunk)
    p, g, m = torch.randn(3, 10, generator=torch.Generator().manual_seed(0))
    out = torch.empty(10, dtype=torch.bfloat16)
    want = reference.lion(p.clone(), g * 0.5, m.clone(), lr=0.1, weight_decay=0.2)
    plain.take_step(LION, plain.TensorStep(p, g, [m], out, (0.1, 0.9, 0.99, 0.2)), (0.5,))
    assert torch.equal(p, want.p) and torch.equal(m, want.m) and torch.equal(out, p.bfloat16())


def test_adam() -> None:
    got = struct.unpack("8f", ADAM.pack(0.1, 0.9, 0.99, 1e-8, 0.5, 2.0, 3.0, True))
    want = (3.0, 0.1, 0.01, 0.1 / (1 - 0.81), 1 / (1 - 0.99**2) ** 0.5, 1e-8, 0.0, 0.05)
    assert got == pytest.approx(want, rel=1e-6)
    assert struct.unpack("8f", ADAM.pack(0.1, 0.9, 0.99, 1e-8, 0.5, 2.0, 3.0, False))[6:] == (0.5, 0.0)


def test_the_others() -> None:
    assert struct.unpack("5f", LION.pack(0.5, 0.75, 0.5, 0.25, 2.0)) == (2.0, 0.25, 0.5, 0.5, 0.125)
    assert struct.unpack("4f", ADAGRAD.pack(0.5, 0.25, 0.125, 2.0)) == (2.0, 0.5, 0.25, 0.125)


def test_sgd_starts_with_the_whole_gradient() -> None:
    first = struct.unpack("7f", SGD.pack(0.5, 0.75, 0.25, 0.125, True, True, 2.0))
    later = struct.unpack("7f", SGD.pack(0.5, 0.75, 0.25, 0.125, False, False, 2.0))
    assert first == (2.0, 0.5, 0.125, 0.0, 1.0, 0.75, 0.0) and later == (2.0, 0.5, 0.125, 0.75, 0.75, 0.75, 1.0)


def test_what_is_too_large_for_fp32_is_infinite_as_in_c() -> None:
    values = (1e39, -1e39, 3.4028235e38, 0.1)
    assert struct.unpack("4f", pack_floats(values)) == pytest.approx((float("inf"), -float("inf"), 3.4028235e38, 0.1))
