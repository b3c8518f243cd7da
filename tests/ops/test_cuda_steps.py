"""Optimizer steps on CUDA, over one tensor and over many: the CPU's bits."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.cuda_cases import COPY_OF, EVERYWHERE, FLOATS, LENGTHS, STEPS, TILE, at, call_of, randn, same, states
from tests.support.emulated_cuda import Emulator
from zero_trial.ops.dispatch import CUDA

SIZES = (0, 1, 15, 1023, TILE - 1, TILE, TILE + 1, 20 * TILE + 77)  # 20 tiles on 8 blocks
# Shifts of p, g, a, b, out from an aligned address, in elements: all aligned, all at the same odd
# place, each at its own.
SHIFTS = ((0, 0, 0, 0, 0), (1, 1, 1, 1, 1), (0, 0, 2, 0, 0), (4, 4, 4, 4, 4), (0, 1, 0, 0, 0), (0, 0, 0, 0, 3))

ops = torch.ops.zero_trial


def both(emulator: Emulator, name: str, values: list[Tensor], t: int, k: float) -> None:
    """One step on the emulator and one on the CPU, of copies of p, g, states and out; the results
    must have the same bits."""
    mine, op = [x.clone() for x in values], name.split()[0]
    with emulator.watching(values[0], *values[2:], read_only=[values[1]]):
        CUDA[op](*call_of(name, values[:-1], values[-1], t, k))
    getattr(ops, op)(*call_of(name, mine[:-1], mine[-1], t, k))
    assert all(same(got, want) for got, want in zip(values, mine, strict=True))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("name", STEPS)
def test_steps_have_the_bits_of_the_cpu(emulator: Emulator, name: str, n: int, dtype: torch.dtype) -> None:
    values = [at(0, randn(n)), at(0, randn(n, 9, dtype)), *(at(0, s) for s in states(name, n))]
    values.append(at(0, torch.zeros(n, dtype=COPY_OF[dtype])))
    for t in (1, 2):
        values[1].copy_(randn(n, t, dtype))
        both(emulator, name, values, t, 0.37)


@pytest.mark.parametrize("shifts", SHIFTS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_views_may_start_anywhere(emulator: Emulator, dtype: torch.dtype, shifts: tuple[int, ...]) -> None:
    n = 3 * TILE + 5
    made = (randn(n), randn(n, 1, dtype), randn(n, 2), randn(n, 3).abs(), torch.zeros(n, dtype=COPY_OF[dtype]))
    both(emulator, "adam_", [at(s, x) for s, x in zip(shifts, made, strict=True)], 3, 1.0)


@pytest.mark.parametrize("shift", range(8))
def test_views_at_one_offset_are_read_as_wide_as_aligned_tensors(emulator: Emulator, shift: int) -> None:
    """Only the head of up to three elements is not; where one tensor stands elsewhere, nothing
    is."""
    n, wide = 3 * TILE + 5, []
    for shifts in ((0,) * 5, (shift,) * 5, (0, 1, 0, 0, 0)):
        made = (randn(n), randn(n, 1).bfloat16(), randn(n, 2), randn(n, 3).abs(), torch.zeros(n).bfloat16())
        p, g, m, v, out = (at(s, x) for s, x in zip(shifts, made, strict=True))
        with emulator.watching(p, m, v, out, read_only=[g]):
            CUDA["adam_"](*call_of("adam_", [p, g, m, v], out))
            wide.append(emulator.library.wide_accesses())
    # four loads and four stores of four elements
    assert wide == [3 * TILE // 4 * 8, 3 * TILE // 4 * 8, 0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 3e38, 1e-42])
@pytest.mark.parametrize("name", STEPS)
def test_what_is_not_finite_has_the_same_bits_too(emulator: Emulator, name: str, bad: float) -> None:
    n = TILE + 40
    p, g = randn(n), randn(n, 1)
    g[[0, 5, TILE - 1, TILE, n - 1]] = bad
    p[[1, 5, n - 2]] = bad
    both(emulator, name, [p, g, *states(name, n), torch.zeros(n, dtype=torch.bfloat16)], 1, 2.0)


def test_no_more_blocks_than_a_device_holds_or_tiles_need(emulator: Emulator) -> None:
    for n, blocks in ((1, 1), (TILE, 1), (3 * TILE, 3), (100 * TILE, 8)):
        p, b = torch.zeros(n), torch.zeros(n)
        with emulator.watching(p, b):
            CUDA["sgd_"](*call_of("sgd_", [p, p.bfloat16(), b], p.bfloat16()))
            assert emulator.library.blocks_of_last() == blocks
            emulator.library.forget()


def test_the_emulator_sees_what_it_must(emulator: Emulator) -> None:
    """An access beside a tensor, a write into a gradient."""
    p, g, m, v = (randn(100, seed) for seed in range(4))
    with pytest.raises(AssertionError, match="outside: 4 bytes"), emulator.watching(p[:99], g, m, v):
        CUDA["adam_"](*call_of("adam_", [p, g, m, v.abs()], p.bfloat16()))
    with pytest.raises(AssertionError, match="written outside"), emulator.watching(m, v, read_only=[p, g]):
        CUDA["adam_"](*call_of("adam_", [p, g, m, v], p.bfloat16()))


NUMBERS: dict[str, Callable[[int], tuple[Any, ...]]] = {  # of tensor i
    "adam_": lambda i: (1e-3 * (i % 2 + 1), 0.9, 0.99, 1e-8, 0.1 * (i % 3), float(i + 1)),
    "lion_": lambda i: (1e-3 * (i % 2 + 1), 0.9, 0.99, 0.1),
    "adagrad_": lambda i: (1e-2, 1e-10, 0.1 * i),
    "sgd_": lambda i: (1e-2, 0.9, 0.1, 0.1 * i, i % 2 == 0),
}
REST: dict[str, tuple[Any, ...]] = {"adam_": (0.7, True), "lion_": (0.7,), "adagrad_": (0.7,), "sgd_": (False, 0.7)}


@pytest.mark.parametrize("dtype", FLOATS)
def test_steps_of_all_offsets_and_sizes(emulator: Emulator, dtype: torch.dtype) -> None:
    made = [
        [randn(n, n), randn(n, n + 1, dtype), randn(n, n + 2), randn(n, n + 3).abs(), torch.zeros(n, dtype=low)]
        for low in (COPY_OF[dtype],)
        for _, n in EVERYWHERE
    ]
    views = [[at(shift, x) for x in row] for (shift, _), row in zip(EVERYWHERE, made, strict=True)]
    p, g, m, v, out = (list(column) for column in zip(*views, strict=True))
    rest = ([], [], *([x] * len(p) for x in (1e-3, 0.9, 0.99, 1e-8, 0.1, 3.0)), 0.7, True)
    with emulator.watching(*p, *m, *v, *out, read_only=g):
        CUDA["adam_"](p, g, m, v, out, *rest)
    assert emulator.library.launch_count() == 1
    wanted = [list(column) for column in zip(*made, strict=True)]
    ops.adam_(*wanted, *rest)
    for mine, theirs in zip((p, m, v, out), (wanted[0], *wanted[2:]), strict=True):
        assert all(same(x, y) for x, y in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("name", NUMBERS)
def test_many_tensors_of_several_groups_in_one_launch(emulator: Emulator, name: str) -> None:
    p = [at(i % 2, randn(n, i)) for i, n in enumerate(LENGTHS)]
    g = [at(i % 3, randn(n, 10 + i, torch.bfloat16)) for i, n in enumerate(LENGTHS)]
    s = [[torch.zeros(n) for n in LENGTHS] for _ in states(name, 1)]
    out = [torch.zeros(n, dtype=torch.bfloat16) for n in LENGTHS]
    numbers = [list(column) for column in zip(*(NUMBERS[name](i) for i in range(len(LENGTHS))), strict=True)]
    copies = [[x.clone() for x in each] for each in (p, *s, out)]
    with emulator.watching(*p, *(x for each in s for x in each), *out, read_only=g):
        CUDA[name](p, g, *s, out, [], [], *numbers, *REST[name])
    assert emulator.library.launch_count() == 1
    getattr(ops, name)(copies[0], g, *copies[1:], [], [], *numbers, *REST[name])
    for mine, theirs in zip((p, *s, out), copies, strict=True):
        assert all(same(x, y) for x, y in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("first", [0, 1])
def test_tensors_of_another_device_stay_out_of_the_launch(emulator: Emulator, first: int) -> None:
    """Whichever comes first: a kernel cannot reach them."""
    there = torch.device("meta")
    p, g, m, v = ([randn(50, k).abs(), randn(50, k).to(there)] for k in range(4))
    lists = [each[::-1] if first else each for each in (p, g, m, v)]
    want = [x[0].clone() for x in (p, m, v)]
    numbers = [list(column) for column in zip(*(NUMBERS["adam_"](0) for _ in range(2)), strict=True)]
    with emulator.watching(p[0], m[0], v[0], read_only=[g[0]]):
        CUDA["adam_"](*lists, [], [], [], *numbers, 1.0, True)
        stepped = [x[0].clone() for x in (p, m, v)]
        assert emulator.library.launch_count() == 1
    ops.adam_(want[:1], g[:1], want[1:2], want[2:], [], [], [], *(x[:1] for x in numbers), 1.0, True)
    assert all(same(x, y) for x, y in zip(stepped, want, strict=True))


@pytest.mark.parametrize("dtype", FLOATS)
def test_sums_of_all_offsets_and_sizes(emulator: Emulator, dtype: torch.dtype) -> None:
    for shift, n in EVERYWHERE:
        x = at(shift, randn(n, n, dtype))
        with emulator.watching(read_only=[x]):
            assert CUDA["square_sum"](x).item() == ops.square_sum(x).item(), (shift, n)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shift", range(1, 8))
def test_sums_of_views_are_read_sixteen_bytes_at_a_time(emulator: Emulator, dtype: torch.dtype, shift: int) -> None:
    x = at(shift, randn(3 * TILE, 5, dtype))
    with emulator.watching(read_only=[x]):
        assert CUDA["square_sum"](x).item() == ops.square_sum(x).item()
        per = 16 // x.element_size()
        # accesses of the one thread per chunk whose lanes go round
        by_element = 3 if shift % per else 0
    assert emulator.library.wide_accesses() >= 3 * (TILE // per) - by_element


def test_a_sum_over_three_levels(emulator: Emulator) -> None:
    x = randn(1024 * 2048 + 1)
    with emulator.watching(read_only=[x]):
        got = CUDA["square_sum"](x)
    assert emulator.library.launch_count() == 3 and got.item() == ops.square_sum(x).item()
