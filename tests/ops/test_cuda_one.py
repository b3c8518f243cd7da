"""An optimizer step of one tensor on the emulator: the bits of the CPU, wherever views start, and no access beside them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.support.cuda_cases import COPY_OF, FLOATS, STEPS, TILE, at, randn, same, states
from tests.support.emulated_cuda import Emulator
from zero_trial.ops.dispatch import CUDA
from zero_trial.ops.spec import BF16, FP32

SIZES = (0, 1, 15, 1023, TILE - 1, TILE, TILE + 1, 20 * TILE + 77)  # 20 tiles on 8 blocks
# Shifts of p, g, a, b, out from an aligned address, in elements: all aligned, all at the same odd place, each at its own.
SHIFTS = ((0, 0, 0, 0, 0), (1, 1, 1, 1, 1), (0, 0, 2, 0, 0), (4, 4, 4, 4, 4), (0, 1, 0, 0, 0), (0, 0, 0, 0, 3))

ops = torch.ops.zero_trial


def both(emulator: Emulator, name: str, values: list[Tensor], found: Tensor | None, t: int, k: float) -> None:
    """One step on the emulator and one on the CPU, of copies of p, g, states and out; the results must have the same bits."""
    p, g, *others = values
    others, (out,) = others[:-1], others[-1:]
    mine = [p.clone(), g.clone(), *(x.clone() for x in others), out.clone()]
    numbers = STEPS[name](t, k)
    op = name.split()[0]
    with emulator.watching(p, *others, out, read_only=[g]):
        CUDA[op](p, g, *others, out, found, *numbers)
    getattr(ops, op)(*mine[:-1], mine[-1], found, *numbers)
    for got, want in zip((p, *others, out), (mine[0], *mine[2:]), strict=True):
        assert same(got, want)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("name", STEPS)
def test_steps_have_the_bits_of_the_cpu(emulator: Emulator, name: str, n: int, dtype: torch.dtype) -> None:
    values = [at(0, randn(n)), at(0, randn(n, 9, dtype)), *(at(0, s) for s in states(name, n))]
    values.append(at(0, torch.zeros(n, dtype=COPY_OF[dtype])))
    for t in (1, 2):
        values[1].copy_(randn(n, t, dtype))
        both(emulator, name, values, None, t, 0.37)


@pytest.mark.parametrize("shifts", SHIFTS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_views_may_start_anywhere(emulator: Emulator, dtype: torch.dtype, shifts: tuple[int, ...]) -> None:
    n = 3 * TILE + 5
    made = (randn(n), randn(n, 1, dtype), randn(n, 2), randn(n, 3).abs(), torch.zeros(n, dtype=COPY_OF[dtype]))
    both(emulator, "adam_", [at(s, x) for s, x in zip(shifts, made, strict=True)], None, 3, 1.0)


@pytest.mark.parametrize("shift", range(8))
def test_views_at_one_offset_are_read_as_wide_as_aligned_tensors(emulator: Emulator, shift: int) -> None:
    """Only the head of up to three elements is not; where one tensor stands elsewhere, nothing is."""
    n, wide = 3 * TILE + 5, []
    for shifts in ((0,) * 5, (shift,) * 5, (0, 1, 0, 0, 0)):
        made = (randn(n), randn(n, 1).bfloat16(), randn(n, 2), randn(n, 3).abs(), torch.zeros(n).bfloat16())
        p, g, m, v, out = (at(s, x) for s, x in zip(shifts, made, strict=True))
        with emulator.watching(p, m, v, out, read_only=[g]):
            CUDA["adam_"](p, g, m, v, out, None, *STEPS["adam_"](1, 1.0))
            wide.append(emulator.library.wide_accesses())
    assert wide == [3 * TILE // 4 * 8, 3 * TILE // 4 * 8, 0]  # four loads and four stores of four elements


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 3e38, 1e-42])
@pytest.mark.parametrize("name", STEPS)
def test_what_is_not_finite_has_the_same_bits_too(emulator: Emulator, name: str, bad: float) -> None:
    n = TILE + 40
    p, g = randn(n), randn(n, 1)
    g[[0, 5, TILE - 1, TILE, n - 1]] = bad
    p[[1, 5, n - 2]] = bad
    both(emulator, name, [p, g, *states(name, n), torch.zeros(n, dtype=torch.bfloat16)], None, 1, 2.0)


@pytest.mark.parametrize("name", STEPS)
def test_the_flag_skips_the_step(emulator: Emulator, name: str) -> None:
    values = [randn(100), randn(100, 1), *states(name, 100), torch.full((100,), 7.0, dtype=torch.bfloat16)]
    before = [x.clone() for x in values]
    both(emulator, name, values, torch.ones(()), 1, 1.0)
    assert all(torch.equal(x, y) for x, y in zip(values, before, strict=True))
    both(emulator, name, values, torch.zeros(1), 1, 1.0)
    assert not torch.equal(values[0], before[0])


@pytest.mark.parametrize(("dtype", "out"), [(FP32, torch.float32), (FP32, None), (BF16, None)])
def test_copies_in_fp32_and_none(emulator: Emulator, dtype: int, out: torch.dtype | None) -> None:
    n = TILE + 9
    p, g, m, v = randn(n), randn(n, 1, FLOATS[dtype]), torch.zeros(n), torch.zeros(n)
    copy = None if out is None else torch.zeros(n, dtype=out)
    want = [x.clone() for x in (p, m, v)]
    with emulator.watching(p, m, v, copy, read_only=[g]):
        CUDA["adam_"](p, g, m, v, copy, None, *STEPS["adam_"](1, 1.0))
    ops.adam_(want[0], g, *want[1:], None, None, *STEPS["adam_"](1, 1.0))
    assert same(p, want[0]) and same(v, want[2]) and (copy is None or same(copy, p))


def test_no_more_blocks_than_a_device_holds_or_tiles_need(emulator: Emulator) -> None:
    for n, blocks in ((1, 1), (TILE, 1), (3 * TILE, 3), (100 * TILE, 8)):
        p, b = torch.zeros(n), torch.zeros(n)
        with emulator.watching(p, b):
            CUDA["sgd_"](p, p.bfloat16(), b, p.bfloat16(), None, *STEPS["sgd_"](1, 1.0))
            assert emulator.library.blocks_of_last() == blocks
            emulator.library.forget()


def test_the_emulator_sees_what_it_must(emulator: Emulator) -> None:
    """An access beside a tensor, a write into a gradient."""
    p, g, m, v = (randn(100, seed) for seed in range(4))
    with pytest.raises(AssertionError, match="outside: 4 bytes"), emulator.watching(p[:99], g, m, v):
        CUDA["adam_"](p, g, m, v.abs(), p.bfloat16(), None, *STEPS["adam_"](1, 1.0))
    with pytest.raises(AssertionError, match="written outside"), emulator.watching(m, v, read_only=[p, g]):
        CUDA["adam_"](p, g, m, v, p.bfloat16(), None, *STEPS["adam_"](1, 1.0))
