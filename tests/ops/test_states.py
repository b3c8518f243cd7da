"""Optimizer states in bf16 and in 8 bits: what is stored, that its mean is right, and that kernels
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
from zero_trial.ops import plain, states
from zero_trial.ops.dispatch import CPU, CUDA, OPS
from zero_trial.ops.spec import ADAM, LION, OPTIMIZERS, OptimizerOp

NARROW = ("bf16", "8bit")
NUMBERS: dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]] = {  # a tensor's own, and what all share
    "adam": ((1e-3, 0.9, 0.999, 1e-8, 0.1, 3.0), (0.7, True)),
    "lion": ((1e-3, 0.9, 0.99, 0.1), (0.7,)),
    "adagrad": ((1e-2, 1e-10, 0.1), (0.7,)),
    "sgd": ((1e-2, 0.9, 0.1, 0.1, False), (False, 0.7)),
}
SIZES = (1, 31, 32, 33, 63, 64, 65, 2047, TILE, 3 * TILE + 5)
KEY, FIRST = 0xDEADBEEF, 96


def stored(op: OptimizerOp, name: str, n: int, shift: int = 0) -> tuple[list[Tensor], list[Tensor]]:
    """States of several magnitudes as they are stored, and their scales."""
    kept, scales = [], []
    for which, signed in enumerate(op.signed):
        wide = randn(n, 20 + which) * 10 ** randn(n, 30 + which)
        kept.append(torch.zeros(n + shift + 3, dtype=states.dtype_of(name, signed))[shift : shift + n])
        if name == "8bit":
            scales.append(torch.zeros(states.blocks_of(n), dtype=torch.bfloat16))
        wide = wide if signed else wide.abs()
        states.narrow(wide, kept[-1], scales[-1] if scales else None, torch.full((n,), 1 << 15))
    return kept, scales


def expected(
    op: OptimizerOp, p: Tensor, g: Tensor, kept: list[Tensor], scales: list[Tensor], low: torch.dtype
) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:
    """Read into fp32, the CPU's kernel for fp32 states, stored as plain torch says."""
    n, out = p.numel(), torch.zeros(p.numel(), dtype=low)
    own, shared = NUMBERS[op.name]
    p, kept, scales = p.clone(), [x.clone() for x in kept], [x.clone() for x in scales]
    each = scales or [None] * len(kept)
    wide = [states.widen(x, scale) for x, scale in zip(kept, each, strict=True)]
    CPU[op.single](p, g, *wide, out, None, *own, *shared)
    for x, scale, values, noise in zip(kept, each, wide, states.noise(KEY, FIRST, n, p.device), strict=False):
        states.narrow(values, x, scale, noise)
    return p, out, kept, scales


def call(
    p: Tensor, g: Tensor, kept: list[Tensor], scales: list[Tensor], out: Tensor | None, op: OptimizerOp
) -> tuple[Any, ...]:
    own, shared = NUMBERS[op.name]
    copies = [] if out is None else [out]
    return ([p], [g], *([x] for x in kept), scales, copies, None, None, [KEY], [FIRST], *([x] for x in own), *shared)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NARROW)
@pytest.mark.parametrize("op", OPTIMIZERS, ids=lambda op: op.name)
def test_the_cpus_kernels_store_what_torch_says(
    monkeypatch: pytest.MonkeyPatch, op: OptimizerOp, name: str, dtype: torch.dtype
) -> None:
    best = native()
    low = dtype if dtype != torch.float32 else torch.bfloat16
    for isa in range(best.isa + 1):
        use(monkeypatch, dataclasses.replace(best, isa=isa))
        for n in SIZES:
            p, g = randn(n), randn(n, 1, dtype)
            kept, scales = stored(op, name, n, shift=3)
            want = expected(op, p, g, kept, scales, low)
            out = torch.zeros(n, dtype=low)
            getattr(OPS, op.narrow)(*call(p, g, kept, scales, out, op))
            assert same(p, want[0]) and same(out, want[1])
            assert all(same(x, y) for x, y in zip((*kept, *scales), (*want[2], *want[3]), strict=True))


@pytest.mark.parametrize("shift", [0, 1, 4])
@pytest.mark.parametrize("name", NARROW)
@pytest.mark.parametrize("op", OPTIMIZERS, ids=lambda op: op.name)
def test_the_cuda_kernels_store_what_torch_says(emulator: Emulator, op: OptimizerOp, name: str, shift: int) -> None:
    """One tensor without a table; sizes and offsets with whole tiles, and without any."""
    for n in (1, 33, 700, 2 * TILE, 3 * TILE + 5):
        p, g = at(shift, randn(n)), at(shift, randn(n, 1).bfloat16())
        kept, scales = stored(op, name, n, shift)
        want = expected(op, p, g, kept, scales, torch.bfloat16)
        out = at(shift, torch.zeros(n, dtype=torch.bfloat16))
        with emulator.watching(p, *kept, *scales, out, read_only=[g]):
            CUDA[op.narrow](*call(p, g, kept, scales, out, op))
        assert emulator.library.launch_count() == 1
        assert same(p, want[0]) and same(out, want[1])
        assert all(same(x, y) for x, y in zip((*kept, *scales), (*want[2], *want[3]), strict=True))


@pytest.mark.parametrize("skipped", [0.0, 1.0])
@pytest.mark.parametrize("name", NARROW)
def test_many_parts_are_one_launch_with_the_bits_of_the_cpu(emulator: Emulator, name: str, skipped: float) -> None:
    lengths, flags = (5, TILE, 64, 3 * TILE + 1, 0), (torch.tensor(skipped), torch.tensor([0.31]))
    p, g = [randn(n, n) for n in lengths], [randn(n, n + 1, torch.bfloat16) for n in lengths]
    made = [stored(ADAM, name, n) for n in lengths]
    kept = [[each[0][which] for each in made] for which in range(2)]
    scales = [each[1][which] for which in range(2) for each in made] if name == "8bit" else []
    rest = (flags[0], flags[1], [1, 2, 3, 4, 5], [0, 32, 64, 0, 0], *([x] * 5 for x in NUMBERS["adam"][0]), 0.7, True)
    copies = [[x.clone() for x in each] for each in (p, *kept, scales)]
    before = [x.clone() for x in p]
    with emulator.watching(*p, *kept[0], *kept[1], *scales, *flags, read_only=g):
        CUDA["adam_narrow_"](p, g, *kept, scales, [], *rest)
    assert emulator.library.launch_count() == 1
    OPS.adam_narrow_(copies[0], g, *copies[1:], [], *rest)
    for mine, theirs in zip((p, *kept, scales), copies, strict=True):
        assert all(same(x, y) for x, y in zip(mine, theirs, strict=True))
    assert all(same(x, y) for x, y in zip(p, before, strict=True)) == bool(skipped)


@pytest.mark.parametrize("name", NARROW)
def test_plain_torch_does_the_same_step(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Its fp32 arithmetic rounds otherwise in the last bit, so a code in a thousand may be the next
    one."""
    use(monkeypatch, native())
    n = plain.CHUNK + 100 if name == "8bit" else 5000
    p, g = randn(n), randn(n, 1)
    kept, scales = stored(ADAM, name, n)
    mine, theirs = ([x.clone() for x in (p, *kept, *scales)] for _ in range(2))
    for op, (q, *rest) in ((CPU["adam_narrow_"], mine), (plain.narrow_of(ADAM), theirs)):
        op(*call(q, g, rest[:2], rest[2:], None, ADAM))
    torch.testing.assert_close(mine[0], theirs[0], rtol=1e-5, atol=1e-5)
    assert all(float((x != y).double().mean()) < 1e-3 for x, y in zip(mine[1:], theirs[1:], strict=True))


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("name", NARROW)
def test_the_mean_of_what_is_stored_is_the_value(name: str, signed: bool) -> None:
    """Over 1024 evenly spread noises: within a thousandth of the distance of two codes, and both
    codes are met."""
    n, rounds = 64, 1024
    values = randn(n, 3) * 10 ** randn(n, 4)
    values = values if signed else values.abs()
    kept = torch.zeros(n, dtype=states.dtype_of(name, signed))
    scale = torch.zeros(states.blocks_of(n), dtype=torch.bfloat16) if name == "8bit" else None
    seen = []
    for noise in range(32, 1 << 16, (1 << 16) // rounds):
        states.narrow(values, kept, scale, torch.full((n,), noise))
        seen.append(states.widen(kept, scale).double())
    every = torch.stack(seen)
    distance = every.amax(0) - every.amin(0)
    met = distance > 0
    assert met.double().mean() > 0.9
    assert bool(
        ((every.mean(0) - values.double()).abs() <= distance / rounds + 1e-6 * values.abs().double())[met].all()
    )
    # what met one code only is as near to it as that
    assert bool(((every[0] - values.double()).abs() <= 1e-4 * every.abs().amax())[~met].all())


def test_the_noise_is_even_and_differs_by_step_tensor_and_state() -> None:
    """Means, and correlations of neighbours, of steps and of the two states: 0 within five
    deviations of a random draw."""
    n, device = 1 << 16, torch.device("cpu")
    first, second = (
        x.double() / 65536 - 0.5 for x in states.noise(states.key_of(states.seed_of("a"), 1), 0, n, device)
    )
    others = [
        second,
        first.roll(1),
        first.roll(32),
        states.noise(states.key_of(states.seed_of("a"), 2), 0, n, device)[0].double() / 65536 - 0.5,
        states.noise(states.key_of(states.seed_of("b"), 1), 0, n, device)[0].double() / 65536 - 0.5,
    ]
    limit = 5 / n**0.5
    assert abs(float(first.mean())) < limit and float(first.var()) == pytest.approx(1 / 12, rel=0.02)
    assert all(abs(float((first * other).mean()) * 12) < limit for other in others)


def test_nearest_would_keep_the_second_moment_for_ever() -> None:
    """1000 steps from v = 1 with gradients of 0: v is 0.368 in fp32, and still 1 rounded to
    nearest."""
    v = torch.ones(2048, dtype=torch.bfloat16)
    nearest = v.clone()
    for step in range(1, 1001):
        states.narrow(v.float() * 0.999, v, None, states.noise(states.key_of(1, step), 0, 2048, v.device)[1])
        nearest = (nearest.float() * 0.999).bfloat16()
    assert float(nearest.float().mean()) > 0.9
    assert float(v.float().mean()) == pytest.approx(0.999**1000, rel=0.01)


def test_blocks_that_are_not_ordinary() -> None:
    bits = torch.full((32,), 1 << 15)
    for bad in (math.nan, math.inf, -math.inf, 3.4e38):
        values = torch.ones(64)
        values[5] = bad
        kept, scale = torch.zeros(64, dtype=torch.int8), torch.zeros(2, dtype=torch.bfloat16)
        states.narrow(values, kept, scale, bits.repeat(2))
        assert states.widen(kept, scale)[:32].isnan().all()
        torch.testing.assert_close(states.widen(kept, scale)[32:], torch.ones(32))
    values = torch.zeros(32)
    for tiny, kept_as in ((1e-40, 0.0), (0.0, 0.0)):
        values[3] = tiny
        kept, scale = torch.full((32,), 9, dtype=torch.uint8), torch.ones(1, dtype=torch.bfloat16)
        states.narrow(values, kept, scale, bits)
        assert (states.widen(kept, scale) == kept_as).all()
    values[3], values[4] = 1.0, 1e-30  # far below: not 0
    states.narrow(values, kept, scale, torch.full((32,), (1 << 16) - 1))
    got = states.widen(kept, scale)
    assert got[3] == pytest.approx(1.0, rel=1e-6) and 0 < got[4] < 1e-9 and not got[5:].any()


def test_a_part_of_a_tensor_has_the_bits_of_the_whole() -> None:
    """However it is cut at multiples of 32."""
    n = 640
    p, g = randn(n), randn(n, 1)
    kept, scales = stored(LION, "8bit", n)
    whole = [x.clone() for x in (p, *kept, *scales)]
    own, shared = NUMBERS["lion"]
    OPS.lion_narrow_([whole[0]], [g], [whole[1]], [whole[2]], [], None, None, [9], [0], *([x] for x in own), *shared)
    cuts = [(0, 96), (96, 128), (128, n)]
    OPS.lion_narrow_(
        *([x[a:b] for a, b in cuts] for x in (p, g, kept[0])),
        [scales[0][a // 32 : b // 32] for a, b in cuts],
        *([], None, None, [9] * 3, [a for a, _ in cuts]),
        *([x] * 3 for x in own),
        *shared,
    )
    assert all(same(x, y) for x, y in zip((p, *kept, *scales), whole, strict=True))


def test_what_does_not_fit_is_refused() -> None:
    p, g = randn(40), randn(40, 1)
    kept, scales = stored(LION, "8bit", 40)
    own, shared = NUMBERS["lion"]

    def step(p: Tensor = p, m: Tensor = kept[0], s: Any = scales, first: int = 0) -> None:
        OPS.lion_narrow_([p], [g], [m], s, [], None, None, [1], [first], *([x] for x in own), *shared)

    step()
    for wrong in (
        {"first": 8},
        {"m": kept[0].to(torch.uint8)},
        {"s": [scales[0][:1]]},
        {"s": scales * 2},
        {"p": p.double()},
        {"m": p[:40].view(torch.int8)[:40]},
    ):
        with pytest.raises(ConfigError):
            step(**wrong)  # type: ignore[arg-type]
