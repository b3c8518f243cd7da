"""Optimizer states in bf16: what is stored, that its mean is right, and that kernels
on CPU and CUDA store what plain torch says, bit for bit."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.test_library import native, use
from tests.support.cuda_cases import TILE, at, randn, same
from tests.support.emulated_cuda import Emulator
from zero_trial.errors import ConfigError
from zero_trial.ops import plain
from zero_trial.ops.dispatch import CPU, CUDA, OPS
from zero_trial.ops.spec import ADAM, LION, OPTIMIZERS, OptimizerOp

NUMBERS: dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]] = {  # a tensor's own, and what all share
    "adam": ((1e-3, 0.9, 0.999, 1e-8, 0.1, 3.0), (0.7, True)),
    "lion": ((1e-3, 0.9, 0.99, 0.1), (0.7,)),
    "adagrad": ((1e-2, 1e-10, 0.1), (0.7,)),
    "sgd": ((1e-2, 0.9, 0.1, 0.1, False), (False, 0.7)),
}
SIZES = (1, 31, 32, 33, 63, 64, 65, 2047, TILE, 3 * TILE + 5)
KEY, FIRST = 0xDEADBEEF, 96


def stored(op: OptimizerOp, n: int, shift: int = 0) -> list[Tensor]:
    """States of several magnitudes in bf16."""
    kept = []
    for which, name in enumerate(op.states):
        wide = randn(n, 20 + which) * 10 ** randn(n, 30 + which)
        kept.append(torch.zeros(n + shift + 3, dtype=torch.bfloat16)[shift : shift + n])
        kept[-1].copy_(wide.abs() if name in "vs" else wide)
    return kept


def expected(op: OptimizerOp, p: Tensor, g: Tensor, kept: list[Tensor], low: torch.dtype) -> list[Tensor]:
    """Read into fp32, the CPU's kernel for fp32 states, stored as plain torch says: p, copy,
    plain."""
    n, out = p.numel(), torch.zeros(p.numel(), dtype=low)
    own, shared = NUMBERS[op.name]
    p, wide = p.clone(), [x.float() for x in kept]
    CPU[f"{op.name}_"]([p], [g], *([x] for x in wide), [out], [], [], *([x] for x in own), *shared)
    noise = plain.noise_of(KEY, FIRST, n, p.device)
    return [p, out, *(plain.round_at_random(*each) for each in zip(wide, noise, strict=False))]


def call(p: Tensor, g: Tensor, kept: list[Tensor], out: Tensor | None, op: OptimizerOp) -> tuple[Any, ...]:
    own, shared = NUMBERS[op.name]
    copies = [] if out is None else [out]
    return ([p], [g], *([x] for x in kept), copies, [KEY], [FIRST], *([x] for x in own), *shared)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("op", OPTIMIZERS, ids=lambda op: op.name)
def test_the_cpus_kernels_store_what_torch_says(
    monkeypatch: pytest.MonkeyPatch, op: OptimizerOp, dtype: torch.dtype
) -> None:
    best = native()
    low = dtype if dtype != torch.float32 else torch.bfloat16
    for isa in range(best.isa + 1):
        use(monkeypatch, dataclasses.replace(best, isa=isa))
        for n in SIZES:
            p, g, kept = randn(n), randn(n, 1, dtype), stored(op, n, shift=3)
            want, out = expected(op, p, g, kept, low), torch.zeros(n, dtype=low)
            getattr(OPS, f"{op.name}_")(*call(p, g, kept, out, op))
            assert all(same(x, y) for x, y in zip((p, out, *kept), want, strict=True))


@pytest.mark.parametrize("shift", [0, 1, 4])
@pytest.mark.parametrize("op", OPTIMIZERS, ids=lambda op: op.name)
def test_the_cuda_kernels_store_what_torch_says(emulator: Emulator, op: OptimizerOp, shift: int) -> None:
    """One tensor without a table; sizes and offsets with whole tiles, and without any."""
    for n in (1, 33, 700, 2 * TILE, 3 * TILE + 5):
        p, g, kept = at(shift, randn(n)), at(shift, randn(n, 1).bfloat16()), stored(op, n, shift)
        want, out = expected(op, p, g, kept, torch.bfloat16), at(shift, torch.zeros(n, dtype=torch.bfloat16))
        with emulator.watching(p, *kept, out, read_only=[g]):
            CUDA[f"{op.name}_"](*call(p, g, kept, out, op))
        assert emulator.library.launch_count() == 1
        assert all(same(x, y) for x, y in zip((p, out, *kept), want, strict=True))


def test_many_parts_are_one_launch_with_the_bits_of_the_cpu(emulator: Emulator) -> None:
    lengths = (5, TILE, 64, 3 * TILE + 1, 0)
    p, g = [randn(n, n) for n in lengths], [randn(n, n + 1, torch.bfloat16) for n in lengths]
    kept = [list(column) for column in zip(*(stored(ADAM, n) for n in lengths), strict=True)]
    rest = ([1, 2, 3, 4, 5], [0, 32, 64, 7, 0], *([x] * 5 for x in NUMBERS["adam"][0]), 0.7, True)
    copies = [[x.clone() for x in each] for each in (p, *kept)]
    with emulator.watching(*p, *kept[0], *kept[1], read_only=g):
        CUDA["adam_"](p, g, *kept, [], *rest)
    assert emulator.library.launch_count() == 1
    OPS.adam_(copies[0], g, *copies[1:], [], *rest)
    for mine, theirs in zip((p, *kept), copies, strict=True):
        assert all(same(x, y) for x, y in zip(mine, theirs, strict=True))


def test_plain_torch_does_the_same_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its fp32 arithmetic rounds differently in the last bit, so one state in a thousand may be the
    next number."""
    use(monkeypatch, native())
    n = plain.CHUNK + 100
    p, g, kept = randn(n), randn(n, 1), stored(ADAM, n)
    mine, theirs = ([x.clone() for x in (p, *kept)] for _ in range(2))
    CPU["adam_"](*call(mine[0], g, mine[1:], None, ADAM))
    steps, shared = plain.steps_of(ADAM, call(theirs[0], g, theirs[1:], None, ADAM))
    plain.take_step(ADAM, steps[0], shared)
    torch.testing.assert_close(mine[0], theirs[0], rtol=1e-5, atol=1e-5)
    assert all(float((x != y).double().mean()) < 1e-3 for x, y in zip(mine[1:], theirs[1:], strict=True))


def test_the_mean_of_what_is_stored_is_the_value() -> None:
    """Over 1024 evenly spread noises: within a thousandth of the distance of two numbers."""
    rounds = 1024
    values = randn(64, 3) * 10 ** randn(64, 4)
    noises = range(32, 1 << 16, (1 << 16) // rounds)
    every = torch.stack([plain.round_at_random(values, torch.full((64,), noise)).double() for noise in noises])
    distance = every.amax(0) - every.amin(0)
    met = distance > 0
    assert met.double().mean() > 0.9
    assert bool(((every.mean(0) - values.double()).abs() <= distance / rounds * 1.001)[met].all())


def test_the_noise_is_even_and_differs_by_step_tensor_and_state() -> None:
    """Means, and correlations of neighbours, of steps and of the two states: 0 within five
    deviations of a random draw."""
    n, device = 1 << 16, torch.device("cpu")
    first, second = (
        x.double() / 65536 - 0.5 for x in plain.noise_of(plain.key_of(plain.seed_of("a"), 1), 0, n, device)
    )
    others = [
        second,
        first.roll(1),
        first.roll(32),
        plain.noise_of(plain.key_of(plain.seed_of("a"), 2), 0, n, device)[0].double() / 65536 - 0.5,
        plain.noise_of(plain.key_of(plain.seed_of("b"), 1), 0, n, device)[0].double() / 65536 - 0.5,
    ]
    limit = 5 / n**0.5
    assert abs(float(first.mean())) < limit and float(first.var()) == pytest.approx(1 / 12, rel=0.02)
    assert all(abs(float((first * other).mean()) * 12) < limit for other in others)


def test_what_is_not_finite_stays_so() -> None:
    values = torch.tensor([math.nan, math.inf, -math.inf])
    kept = plain.round_at_random(values, torch.full((3,), (1 << 16) - 1)).float()
    assert kept[0].isnan() and kept[1:].tolist() == [math.inf, -math.inf]


def test_a_part_of_a_tensor_has_the_bits_of_the_whole() -> None:
    n = 640
    p, g, kept = randn(n), randn(n, 1), stored(LION, n)
    whole = [x.clone() for x in (p, *kept)]
    own, shared = NUMBERS["lion"]
    OPS.lion_([whole[0]], [g], [whole[1]], [], [9], [0], *([x] for x in own), *shared)
    cuts = [(0, 97), (97, 128), (128, n)]
    OPS.lion_(
        *([x[a:b] for a, b in cuts] for x in (p, g, kept[0])),
        *([], [9] * 3, [a for a, _ in cuts]),
        *([x] * 3 for x in own),
        *shared,
    )
    assert all(same(x, y) for x, y in zip((p, *kept), whole, strict=True))


def test_what_does_not_fit_is_refused() -> None:
    p, g, (m,) = randn(40), randn(40, 1), stored(LION, 40)
    own, shared = NUMBERS["lion"]

    def step(p: Tensor = p, m: Tensor = m) -> None:
        OPS.lion_([p], [g], [m], [], [1], [0], *([x] for x in own), *shared)

    step()
    for wrong in ({"m": m.float()}, {"m": m[:39]}, {"p": p.double()}):
        with pytest.raises(ConfigError):
            step(**wrong)
