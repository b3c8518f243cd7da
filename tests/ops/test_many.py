"""Ops over many tensors are the single ops in turn, on CPU; and what torch knows of them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops import test_library
from zero_trial.errors import ConfigError
from zero_trial.ops import plain, reference
from zero_trial.ops.dispatch import OPS
from zero_trial.ops.spec import SCHEMAS

ops = torch.ops.zero_trial


def randn(n: int, seed: int = 0) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def test_two_groups_in_one_call() -> None:
    p, g, m = ([randn(n, n + k) for n in (5, 7)] for k in (0, 1, 2))
    want = [
        reference.lion(x.clone(), y * 0.5, z.clone(), lr=lr, weight_decay=decay)
        for x, y, z, lr, decay in zip(p, g, m, (0.1, 0.2), (0.0, 0.3), strict=True)
    ]
    ops.lion_many_(p, g, m, [], None, torch.tensor([0.25]), [0.1, 0.2], [0.9] * 2, [0.99] * 2, [0.0, 0.3], 2.0)
    for x, z, (right, moment) in zip(p, m, want, strict=True):
        torch.testing.assert_close(x, right)
        torch.testing.assert_close(z, moment)


def test_lamb_is_the_papers() -> None:
    p, g = [randn(5), randn(9, 1)], [randn(5, 2), randn(9, 3)]
    m, v = ([torch.zeros(5), torch.zeros(9)] for _ in range(2))
    want = [
        reference.lamb(x, y * 2, z, w, 1, lr=0.1, eps=1e-6, weight_decay=0.1)
        for x, y, z, w in zip(p, g, m, v, strict=True)
    ]
    columns = [[x] * 2 for x in (0.9, 0.999, 1e-6, 0.1, 1.0)]
    squares = ops.lamb_moments_(p, g, m, v, None, torch.tensor(2.0), *columns, 1.0, True)
    ratio = (squares[0] / squares[1]).sqrt().clamp(0.01, 10.0).float()
    out = [torch.zeros(n, dtype=torch.bfloat16) for n in (5, 9)]
    ops.lamb_apply_(p, m, v, out, None, ratio, [0.1] * 2, *columns, True)
    for x, low, right in zip(p, out, want, strict=True):
        torch.testing.assert_close(x, right.p)
        assert torch.equal(low, x.bfloat16())


def test_the_flag_skips_lamb() -> None:
    p, m, v = [torch.ones(3)], [torch.zeros(3)], [torch.zeros(3)]
    columns = [[0.9], [0.99], [1e-8], [0.1], [1.0]]
    assert not ops.lamb_moments_(p, p, m, v, torch.ones(()), None, *columns, 1.0, True).any()
    ops.lamb_apply_(p, m, v, [], torch.ones(()), torch.ones(1), [0.1], *columns, True)
    assert torch.equal(p[0], torch.ones(3)) and not m[0].any()


def test_the_scalars_of_a_step() -> None:
    control = torch.zeros(3)
    ops.step_control_(torch.tensor(16.0, dtype=torch.float64), torch.tensor([8.0]), control, 4.0, 1.0)
    assert control.tolist() == pytest.approx([2.0, 0.25, 0.0])  # norm 4 * 4 / 8, factor 0.5 * 1 / 2
    ops.step_control_(torch.tensor(math.inf, dtype=torch.float64), None, control, 1.0, 0.0)
    assert control[2] == 1.0
    with pytest.raises(ConfigError, match=r"expected \(\) and \(3,\)"):
        ops.step_control_(torch.zeros(2), None, control, 1.0, 0.0)


def test_sums_are_rounded_once() -> None:
    """1 + 2^-9 rounds to 1 in bf16; added to 1 in fp32 the half of it counts."""
    into, source = torch.ones(1, dtype=torch.bfloat16), torch.full((1,), 0.006, dtype=torch.float32)
    ops.add_many_([into], [source])
    assert into.item() == torch.tensor(1.006).bfloat16().item()


def test_lists_that_do_not_fit() -> None:
    with pytest.raises(ConfigError, match="number 1 have different sizes"):
        ops.copy_many_([torch.zeros(3), torch.zeros(3)], [torch.zeros(3), torch.zeros(4)])
    with pytest.raises(ConfigError, match="different lengths"):
        plain.same_sizes([torch.zeros(3)], [])
    p, g, m, v = ([torch.zeros(3)] for _ in range(4))
    one, two = [[0.5]] * 6, [[0.5]] * 5 + [[1.0, 2.0]]
    for numbers, out in ((two, []), (one, [torch.zeros(3, dtype=torch.bfloat16)] * 2)):
        with pytest.raises(ConfigError, match="different lengths"):
            ops.adam_many_(p, g, m, v, out, None, None, *numbers, 1.0, True)
    with pytest.raises(ConfigError, match="different lengths"):
        ops.lamb_moments_(p, g, m, v, None, None, *two[1:], 1.0, True)
    with pytest.raises(ConfigError, match="different lengths"):
        ops.lamb_apply_(p, m, v, [], None, torch.ones(2), *one, True)


def samples() -> dict[str, tuple[Any, ...]]:
    def lists(count: int) -> list[list[Tensor]]:
        return [[randn(5, seed).abs(), randn(6, seed).abs()] for seed in range(count)]

    low = [torch.zeros(5, dtype=torch.bfloat16), torch.zeros(6, dtype=torch.bfloat16)]
    two = [[x] * 2 for x in (1e-3, 0.9, 0.99, 1e-8, 0.1, 1.0)]
    p, g, m, v = lists(4)
    half = [[x.bfloat16() for x in each] for each in (m, v)]
    place = ([7, 8], [0, 32])
    return {
        "adam_narrow_": (p, g, *half, low, None, torch.ones(()), *place, *two, 1.0, True),
        "lion_narrow_": (p, g, half[0], low, None, None, *place, *two[:4], 1.0),
        "adagrad_narrow_": (p, g, half[1], [], torch.zeros(()), None, *place, two[0], two[3], two[4], 1.0),
        "sgd_narrow_": (
            *(p, g, half[0], [], None, None, *place),
            *(two[0], two[1], two[4], two[4], [True, False], True, 1.0),
        ),
        "adam_many_": (p, g, m, v, low, None, torch.ones(()), *two, 1.0, True),
        "lion_many_": (p, g, m, low, None, None, *two[:4], 1.0),
        "adagrad_many_": (p, g, m, [], torch.zeros(()), None, two[0], two[3], two[4], 1.0),
        "sgd_many_": (p, g, m, low, None, None, two[0], two[1], two[4], two[4], [True, False], True, 1.0),
        "lamb_moments_": (p, g, m, v, None, None, *two[1:], 1.0, True),
        "lamb_apply_": (p, m, v, low, None, torch.ones(2), *two, True),
        "step_control_": (torch.ones((), dtype=torch.float64), None, torch.zeros(3), 1.0, 1.0),
        "copy_many_": (low, p),
        "add_many_": (low, p),
    }


@pytest.mark.parametrize("name", samples())
def test_opcheck(name: str) -> None:
    torch.library.opcheck(getattr(OPS, name).default, samples()[name])


def test_every_op_is_checked() -> None:
    assert {*samples(), *test_library.samples()} == {*SCHEMAS}


def test_the_example_of_the_guide() -> None:
    text = (Path(__file__).parents[2] / "docs" / "guide" / "kernels.md").read_text(encoding="utf-8")
    code = text.split("```python\n", 1)[1].split("```", 1)[0]
    p, g, m, v = randn(50), randn(50, 1), torch.zeros(50), torch.zeros(50)
    want = reference.adamw(p.clone(), g / (g.norm() + 1e-6), m.clone(), v.clone(), 1)
    exec(code, {"torch": torch, "p": p, "g": g, "m": m, "v": v})
    torch.testing.assert_close(v, want.v)
    torch.testing.assert_close(m, want.m)


def test_the_optimizer_of_the_guide() -> None:
    text = (Path(__file__).parents[2] / "docs" / "guide" / "kernels.md").read_text(encoding="utf-8")
    given: dict[str, Any] = {"model": torch.nn.Linear(2, 2)}
    exec(text.split("```python\n", 2)[2].split("```", 1)[0], given)
    assert given["optimizer"].param_groups[0]["lr"] == 3e-4


def test_the_guide_names_every_op() -> None:
    text = (Path(__file__).parents[2] / "docs" / "guide" / "kernels.md").read_text(encoding="utf-8")
    assert [name for name in SCHEMAS if f"`{name}`" not in text] == []
