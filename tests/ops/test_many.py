"""Ops over several tensors of several groups, and what torch knows of the ops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.cuda_cases import randn
from zero_trial.errors import ConfigError
from zero_trial.ops import reference
from zero_trial.ops.dispatch import OPS
from zero_trial.ops.spec import SCHEMAS

ops = torch.ops.zero_trial


def test_lists_that_do_not_fit() -> None:
    p, g, m, v = ([torch.zeros(3)] for _ in range(4))
    one, two = [[0.5]] * 6, [[0.5]] * 5 + [[1.0, 2.0]]
    for numbers, out in ((two, []), (one, [torch.zeros(3, dtype=torch.bfloat16)] * 2)):
        with pytest.raises(ConfigError, match="different lengths"):
            ops.adam_(p, g, m, v, out, [], [], *numbers, 1.0, True)


def samples() -> dict[str, tuple[Any, ...]]:
    def lists(count: int) -> list[list[Tensor]]:
        return [[randn(5, seed).abs(), randn(6, seed).abs()] for seed in range(count)]

    low = [torch.zeros(5, dtype=torch.bfloat16), torch.zeros(6, dtype=torch.bfloat16)]
    two = [[x] * 2 for x in (1e-3, 0.9, 0.99, 1e-8, 0.1, 1.0)]
    p, g, m, v = lists(4)
    half = [[x.bfloat16() for x in each] for each in (m, v)]
    wide, narrow = ([], []), ([7, 8], [0, 32])
    sgd = (two[0], two[1], two[4], two[4], [True, False], True, 1.0)
    return {
        "adam_": (p, g, m, v, low, *wide, *two, 1.0, True),
        "lion_": (p, g, m, low, *wide, *two[:4], 1.0),
        "adagrad_": (p, g, m, [], *wide, two[0], two[3], two[4], 1.0),
        "sgd_": (p, g, m, low, *wide, *sgd),
        "adam_ narrow": (p, g, *half, low, *narrow, *two, 1.0, True),
        "sgd_ narrow": (p, g, half[0], [], *narrow, *sgd),
        "square_sum": (p[0],),
    }


@pytest.mark.parametrize("name", samples())
def test_opcheck(name: str) -> None:
    torch.library.opcheck(getattr(OPS, name.split()[0]).default, samples()[name])


def test_every_op_is_checked() -> None:
    assert {name.split()[0] for name in samples()} == {*SCHEMAS}


def test_the_example_of_the_guide() -> None:
    text = (Path(__file__).parents[2] / "docs" / "guide" / "kernels.md").read_text(encoding="utf-8")
    code = text.split("```python\n", 1)[1].split("```", 1)[0]
    p, g, m, v = randn(50), randn(50, 1), torch.zeros(50), torch.zeros(50)
    want = reference.adamw(p.clone(), g * (1.0 / (g.norm() + 1e-6)).clamp(max=1.0), m.clone(), v.clone(), 1)
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
