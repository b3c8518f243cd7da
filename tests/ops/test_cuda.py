"""The CUDA ops, from packing to kernels, on the emulator: the same bits as the CPU's kernels, and no access beside the tensors."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support import emulated_cuda
from tests.support.emulated_cuda import Emulator
from zero_trial.errors import ConfigError, KernelUnavailable
from zero_trial.ops import _native, cuda, cuda_backend, cuda_kernels, library, many, plain, reference
from zero_trial.ops.cuda_kernels import BF16, FP16, FP32, NONE
from zero_trial.ops.optimizers import FusedAdam, FusedLamb, FusedLion, fused, lamb

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
TILE = 2048
SIZES = (0, 1, 15, 1023, TILE - 1, TILE, TILE + 1, 20 * TILE + 77)  # 20 tiles on 8 blocks
COPY_OF = {torch.float32: torch.bfloat16, torch.bfloat16: torch.bfloat16, torch.float16: torch.float16}
# Shifts of p, g, a, b, out from an aligned address, in elements: all aligned, all at the same odd place, each at its own.
SHIFTS = ((0, 0, 0, 0, 0), (1, 1, 1, 1, 1), (0, 0, 2, 0, 0), (4, 4, 4, 4, 4), (0, 1, 0, 0, 0), (0, 0, 0, 0, 3))

ops = torch.ops.zero_trial


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Emulator:
    emulator = emulated_cuda.make(tmp_path_factory.mktemp("cuda"))
    kinds = ((FP32, BF16), (BF16, BF16), (FP16, FP16))
    emulator.build(
        [
            *(cuda_kernels.update(op, g, out) for op in cuda_kernels.OPTIMIZERS for g, out in kinds),
            *(cuda_kernels.update("ZtAdam", g, out) for g, out in ((FP32, FP32), (FP32, NONE), (BF16, NONE))),
            *(cuda_kernels.lamb("zt_lamb_moments", g, NONE) for g, _ in kinds),
            *(cuda_kernels.lamb("zt_lamb_apply", FP32, out) for out in (NONE, BF16, FP16)),
            cuda_kernels.lamb("zt_lamb_squares", FP32, NONE),
            *(cuda_kernels.square_sum(stored) for stored in cuda_kernels.STORED),
            *(cuda_kernels.sums(), cuda_kernels.step_control()),
            *(
                cuda_kernels.copy(*kind)
                for kind in ((0, 1, False), (1, 0, True), (2, 0, True), (1, 1, True), (0, 2, True))
            ),
        ]
    )
    return emulator


@pytest.fixture
def emulator(built: Emulator, monkeypatch: pytest.MonkeyPatch) -> Emulator:
    try:
        native = _native.open_native(os.environ)
    except KernelUnavailable as trouble:
        pytest.skip(f"nothing to compare with: {trouble.what}")
    monkeypatch.setattr(library, "backend", lambda: _native.Backend(native))
    emulated_cuda.install(built, monkeypatch)
    return built


def randn(n: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed)).to(dtype)


def at(shift: int, values: Tensor) -> Tensor:
    """The values, so many elements after an address that is a multiple of 64, and NaN on both sides."""
    room = torch.full((values.numel() + shift + 3,), math.nan, dtype=values.dtype)
    room[shift : shift + values.numel()] = values
    assert room.data_ptr() % 64 == 0
    return room[shift : shift + values.numel()]


def bits(x: Tensor) -> Tensor:
    """What must be equal; NaN is NaN, whatever its payload."""
    x = torch.where(x.isnan(), torch.full_like(x, math.nan), x)
    return x.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def same(got: Tensor, want: Tensor) -> bool:
    return torch.equal(bits(got), bits(want))


STEPS: dict[str, Callable[..., tuple[Any, ...]]] = {
    "adam_": lambda t, k: (1e-3, 0.9, 0.999, 1e-8, 0.1, float(t), k, True),
    "adam_ L2": lambda t, k: (1e-3, 0.9, 0.99, 1e-6, 0.1, float(t), k, False),
    "lion_": lambda t, k: (1e-3, 0.9, 0.99, 0.1, k),
    "adagrad_": lambda t, k: (1e-2, 1e-10, 0.1, k),
    "sgd_": lambda t, k: (1e-2, 0.9, 0.1, 0.1, t == 1, False, k),
    "sgd_ Nesterov": lambda t, k: (1e-2, 0.9, 0.0, 0.1, t == 1, True, k),
}


def states(name: str, n: int) -> list[Tensor]:
    return [torch.zeros(n) for _ in range(2 if name.startswith("adam_") else 1)]


def both(emulator: Emulator, name: str, values: list[Tensor], found: Tensor | None, t: int, k: float) -> None:
    """One step on the emulator and one on the CPU, of copies of p, g, states and out; the results must have the same bits."""
    p, g, *others = values
    others, (out,) = others[:-1], others[-1:]
    mine = [p.clone(), g.clone(), *(x.clone() for x in others), out.clone()]
    numbers = STEPS[name](t, k)
    op = name.split()[0]
    with emulator.watching(p, *others, out, read_only=[g]):
        getattr(cuda, op)(p, g, *others, out, found, *numbers)
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


# Every place among eight elements, sizes up to several vectors, and both sides of the borders of tiles and chunks.
EVERY_SIZE = (*range(1, 41), *range(TILE - 2, TILE + 10), 2 * TILE - 1, 2 * TILE + 3)
EVERYWHERE = [(shift, n) for shift in range(8) for n in EVERY_SIZE]


@pytest.mark.parametrize("dtype", FLOATS)
def test_steps_of_all_offsets_and_sizes(emulator: Emulator, dtype: torch.dtype) -> None:
    made = [
        [randn(n, n), randn(n, n + 1, dtype), randn(n, n + 2), randn(n, n + 3).abs(), torch.zeros(n, dtype=low)]
        for low in (COPY_OF[dtype],)
        for _, n in EVERYWHERE
    ]
    views = [[at(shift, x) for x in row] for (shift, _), row in zip(EVERYWHERE, made, strict=True)]
    p, g, m, v, out = (list(column) for column in zip(*views, strict=True))
    rest = (None, None, *([x] * len(p) for x in (1e-3, 0.9, 0.99, 1e-8, 0.1, 3.0)), 0.7, True)
    with emulator.watching(*p, *m, *v, *out, read_only=g):
        cuda.adam_many_(p, g, m, v, out, *rest)
    assert emulator.library.launch_count() == 1
    wanted = [list(column) for column in zip(*made, strict=True)]
    ops.adam_many_(*wanted, *rest)
    for mine, theirs in zip((p, m, v, out), (wanted[0], *wanted[2:]), strict=True):
        assert all(same(x, y) for x, y in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("shift", range(8))
def test_views_at_one_offset_are_read_as_wide_as_aligned_tensors(emulator: Emulator, shift: int) -> None:
    """Only the head of up to three elements is not; where one tensor stands elsewhere, nothing is."""
    n, wide = 3 * TILE + 5, []
    for shifts in ((0,) * 5, (shift,) * 5, (0, 1, 0, 0, 0)):
        made = (randn(n), randn(n, 1).bfloat16(), randn(n, 2), randn(n, 3).abs(), torch.zeros(n).bfloat16())
        p, g, m, v, out = (at(s, x) for s, x in zip(shifts, made, strict=True))
        with emulator.watching(p, m, v, out, read_only=[g]):
            cuda.adam_(p, g, m, v, out, None, *STEPS["adam_"](1, 1.0))
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
        cuda.adam_(p, g, m, v, copy, None, *STEPS["adam_"](1, 1.0))
    ops.adam_(want[0], g, *want[1:], None, None, *STEPS["adam_"](1, 1.0))
    assert same(p, want[0]) and same(v, want[2]) and (copy is None or same(copy, p))


def test_no_more_blocks_than_a_device_holds_or_tiles_need(emulator: Emulator) -> None:
    for n, blocks in ((1, 1), (TILE, 1), (3 * TILE, 3), (100 * TILE, 8)):
        p = torch.zeros(n)
        with emulator.watching():
            emulator.library.forget()
            for x in (p,):
                emulator.allow(x)
            cuda.sgd_(p, p.bfloat16(), p, p.bfloat16(), None, *STEPS["sgd_"](1, 1.0))
            assert emulator.library.blocks_of_last() == blocks
            emulator.library.forget()


def test_the_emulator_sees_what_it_must(emulator: Emulator) -> None:
    """An access beside a tensor, a write into a gradient."""
    p, g, m, v = (randn(100, seed) for seed in range(4))
    with pytest.raises(AssertionError, match="outside: 4 bytes"), emulator.watching(p[:99], g, m, v):
        cuda.adam_(p, g, m, v.abs(), p.bfloat16(), None, *STEPS["adam_"](1, 1.0))
    with pytest.raises(AssertionError, match="written outside"), emulator.watching(m, v, read_only=[p, g]):
        cuda.adam_(p, g, m, v, p.bfloat16(), None, *STEPS["adam_"](1, 1.0))


# --- many tensors in one launch ---------------------------------------------------------------------------------------

LENGTHS = (5, TILE, 1, 3 * TILE + 1, 0, 700, 4 * TILE)
NUMBERS: dict[str, Callable[[int], tuple[Any, ...]]] = {  # of tensor i
    "adam_": lambda i: (1e-3 * (i % 2 + 1), 0.9, 0.99, 1e-8, 0.1 * (i % 3), float(i + 1)),
    "lion_": lambda i: (1e-3 * (i % 2 + 1), 0.9, 0.99, 0.1),
    "adagrad_": lambda i: (1e-2, 1e-10, 0.1 * i),
    "sgd_": lambda i: (1e-2, 0.9, 0.1, 0.1 * i, i % 2 == 0),
}
REST: dict[str, tuple[Any, ...]] = {"adam_": (0.7, True), "lion_": (0.7,), "adagrad_": (0.7,), "sgd_": (False, 0.7)}


@pytest.mark.parametrize("with_flags", [False, True])
@pytest.mark.parametrize("name", NUMBERS)
def test_many_tensors_of_several_groups_in_one_launch(emulator: Emulator, name: str, with_flags: bool) -> None:
    flags = (torch.zeros(1), torch.tensor(0.31)) if with_flags else (None, None)
    p = [at(i % 2, randn(n, i)) for i, n in enumerate(LENGTHS)]
    g = [at(i % 3, randn(n, 10 + i, torch.bfloat16)) for i, n in enumerate(LENGTHS)]
    s = [[torch.zeros(n) for n in LENGTHS] for _ in states(name, 1)]
    out = [torch.zeros(n, dtype=torch.bfloat16) for n in LENGTHS]
    numbers = [list(column) for column in zip(*(NUMBERS[name](i) for i in range(len(LENGTHS))), strict=True)]
    copies = [[x.clone() for x in each] for each in (p, *s, out)]
    with emulator.watching(*p, *(x for each in s for x in each), *out, *flags, read_only=g):
        getattr(cuda, f"{name[:-1]}_many_")(p, g, *s, out, *flags, *numbers, *REST[name])
    assert emulator.library.launch_count() == 1
    getattr(ops, f"{name[:-1]}_many_")(copies[0], g, *copies[1:], *flags, *numbers, *REST[name])
    for mine, theirs in zip((p, *s, out), copies, strict=True):
        assert all(same(x, y) for x, y in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("skipped", [0.0, 1.0])
@pytest.mark.parametrize("n", [1, TILE + 1, 20 * TILE + 77])
@pytest.mark.parametrize("name", NUMBERS)
def test_one_tensor_alone_is_told_by_the_device_without_a_table(
    emulator: Emulator, name: str, n: int, skipped: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of the engine: one piece per unit, its factor and whether to skip in device memory."""
    control = torch.tensor([3.0, 0.31, skipped])
    values = [randn(n), *states(name, n), torch.zeros(n, dtype=torch.bfloat16)]
    lists, copies = ([[x.clone()] for x in values] for _ in range(2))
    g, numbers = [randn(n, 10, torch.bfloat16)], [[number] for number in NUMBERS[name](2)]
    tables: list[bytes] = []
    monkeypatch.setattr(cuda, "upload", lambda content, device: tables.append(content))
    with emulator.watching(*(x for each in lists for x in each), control, read_only=g):
        getattr(cuda, f"{name[:-1]}_many_")(lists[0], g, *lists[1:], control[2], control[1:2], *numbers, *REST[name])
    assert emulator.library.launch_count() == 1 and not tables
    getattr(ops, f"{name[:-1]}_many_")(copies[0], g, *copies[1:], control[2], control[1:2], *numbers, *REST[name])
    for (mine,), (theirs,), before in zip(lists, copies, values, strict=True):
        assert same(mine, theirs) and same(mine, before) == bool(skipped)


def test_other_dtypes_go_in_launches_of_their_own_and_what_no_kernel_takes_in_plain_torch(emulator: Emulator) -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.float32, torch.bfloat16)
    p = [randn(50, i) for i in range(4)] + [randn(6).double()]
    g = [randn(50, i + 5, dtype) for i, dtype in enumerate(dtypes)] + [randn(6).double()]
    m, v = ([torch.zeros_like(x) for x in p] for _ in range(2))
    copies = [[x.clone() for x in each] for each in (p, m, v)]
    numbers = [list(column) for column in zip(*(NUMBERS["adam_"](i) for i in range(5)), strict=True)]
    with emulator.watching(*p, *m, *v, read_only=g):
        cuda.adam_many_(p, g, m, v, [], None, None, *numbers, 1.0, True)
    assert emulator.library.launch_count() == 2
    ops.adam_many_(copies[0], g, *copies[1:], [], None, None, *numbers, 1.0, True)
    assert all(
        same(x, y) for mine, theirs in zip((p, m, v), copies, strict=True) for x, y in zip(mine, theirs, strict=True)
    )


@pytest.mark.parametrize("first", [0, 1])
def test_tensors_of_another_device_stay_out_of_the_launch(emulator: Emulator, first: int) -> None:
    """Whichever comes first: a kernel cannot reach them."""
    there = torch.device("meta")
    p, g, m, v = ([randn(50, k).abs(), randn(50, k).to(there)] for k in range(4))
    lists = [each[::-1] if first else each for each in (p, g, m, v)]
    want = [x[0].clone() for x in (p, m, v)]
    numbers = [list(column) for column in zip(*(NUMBERS["adam_"](0) for _ in range(2)), strict=True)]
    with emulator.watching(p[0], m[0], v[0], read_only=[g[0]]):
        cuda.adam_many_(*lists, [], None, None, *numbers, 1.0, True)
        stepped = [x[0].clone() for x in (p, m, v)]
        assert emulator.library.launch_count() == 1
        cuda.add_many_(lists[0], lists[1])
        cuda.copy_many_(lists[0], lists[0])
        with contextlib.suppress(NotImplementedError):  # of plain torch, which cannot read that device
            cuda.lamb_moments_(*lists, None, None, *numbers[1:], 1.0, True)
    assert emulator.library.launch_count() == 3
    ops.adam_many_(want[:1], g[:1], want[1:2], want[2:], [], None, None, *(x[:1] for x in numbers), 1.0, True)
    assert all(same(x, y) for x, y in zip(stepped, want, strict=True)) and same(p[0], want[0] + g[0])


def test_what_a_cuda_graph_captures_reads_nothing_of_the_hosts_later(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No table is uploaded: a replay would read what lies there by then."""
    backend = emulated_cuda.install(emulator, monkeypatch)
    backend.capturing = lambda: True
    monkeypatch.setattr(cuda, "upload", lambda *_: pytest.fail("a table"))
    lengths, low = (5, TILE + 1, 40), torch.bfloat16
    columns = [[x] * 3 for x in (1e-3, 0.9, 0.99, 1e-8, 0.1, 2.0)]
    ends = []
    for step, add, moments in ((cuda.adam_many_, cuda.add_many_, cuda.lamb_moments_), (ops.adam_many_,) * 3):
        p, g, m, v = ([randn(n, k).abs() for n in lengths] for k in range(4))
        out, flags = [torch.zeros(n, dtype=low) for n in lengths], (torch.zeros(1), torch.tensor([0.4]))
        with emulator.watching(*p, *m, *v, *out, *flags, read_only=g):
            step(p, g, m, v, out, *flags, *columns, 0.7, True)
            if step is cuda.adam_many_:
                assert emulator.library.launch_count() == 3
                add([x.clone() for x in p], out)
                moments(p, g, [x.clone() for x in m], [x.clone() for x in v], None, None, *columns[1:], 1.0, True)
                assert emulator.library.launch_count() == 3
        ends.append([*p, *m, *v, *out])
    assert all(same(x, y) for x, y in zip(*ends, strict=True))


# --- LAMB -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
def test_lamb_is_that_of_float64(emulator: Emulator, dtype: torch.dtype) -> None:
    lengths = [n for n in LENGTHS if n]
    p = [at(i % 2, randn(n, i)) for i, n in enumerate(lengths)]
    m, v = ([torch.zeros(n) for n in lengths] for _ in range(2))
    exact = [(x.double(), y.double(), z.double()) for x, y, z in zip(p, m, v, strict=True)]
    columns = [[x] * len(p) for x in (0.9, 0.999, 1e-6, 0.1)]
    low = COPY_OF[dtype] if dtype != torch.float32 else None
    out = [torch.zeros(n, dtype=low) for n in lengths] if low else []
    for t in (1, 2, 3):
        g = [randn(n, 7 * t + i, dtype) for i, n in enumerate(lengths)]
        step = [float(t)] * len(p)
        with emulator.watching(*m, *v, read_only=[*p, *g]):
            squares = cuda.lamb_moments_(p, g, m, v, None, None, *columns, step, 0.5, True)
        ratio = (squares[0] / squares[1]).sqrt().clamp(0.01, 10.0).float()
        with emulator.watching(*p, *out, read_only=[*m, *v, ratio]):
            cuda.lamb_apply_(p, m, v, out, None, ratio, [1e-2] * len(p), *columns, step, True)
        exact = [
            reference.lamb(x, h.double() * 0.5, y, z, t, lr=1e-2, eps=1e-6, weight_decay=0.1)
            for (x, y, z), h in zip(exact, g, strict=True)
        ]
    for index, want in enumerate(exact):
        for got, right in zip((p[index], m[index], v[index]), want, strict=True):
            assert float((got.double() - right).norm() / right.norm()) < 4e-7
    assert all(torch.equal(x, y.to(x.dtype)) for x, y in zip(out, p, strict=False))


@pytest.mark.parametrize("dtype", FLOATS)
def test_lamb_has_the_bits_of_the_cpus_kernels(emulator: Emulator, dtype: torch.dtype) -> None:
    """Moments, both sums and the step, with tails and with a factor in device memory."""
    lengths = [n for n in LENGTHS if n]
    columns = [[x] * len(lengths) for x in (0.9, 0.999, 1e-6, 0.1)]
    factor, low, found = torch.tensor([0.7]), COPY_OF[dtype], []
    for moments, apply in ((cuda.lamb_moments_, cuda.lamb_apply_), (ops.lamb_moments_, ops.lamb_apply_)):
        p = [randn(n, i) for i, n in enumerate(lengths)]
        m, v = ([torch.zeros(n) for n in lengths] for _ in range(2))
        out, sums = [torch.zeros(n, dtype=low) for n in lengths], []
        for t in (1, 2):
            g, step = [randn(n, 7 * t + i, dtype) for i, n in enumerate(lengths)], [float(t)] * len(p)
            with emulator.watching(*p, *m, *v, *out, read_only=[*g, factor]):
                squares = moments(p, g, m, v, None, factor, *columns, step, 0.5, True)
                ratio = (squares[0] / squares[1]).sqrt().clamp(0.01, 10.0).float()
            with emulator.watching(*p, *m, *v, *out, read_only=[ratio]):
                apply(p, m, v, out, None, ratio, [1e-2] * len(p), *columns, step, True)
            sums.append(squares)
        found.append([*p, *m, *v, *out, *sums])
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))


def test_lamb_at_all_offsets_and_sizes(emulator: Emulator) -> None:
    columns, count, found = [[x] * len(EVERYWHERE) for x in (0.9, 0.999, 1e-6, 0.1, 2.0)], len(EVERYWHERE), []
    for moments, apply in ((cuda.lamb_moments_, cuda.lamb_apply_), (ops.lamb_moments_, ops.lamb_apply_)):
        p, g, m, v = ([at(shift, randn(n, n + i).abs()) for shift, n in EVERYWHERE] for i in range(4))
        out, ratio = [at(shift, torch.zeros(n).bfloat16()) for shift, n in EVERYWHERE], torch.linspace(0.5, 2.0, count)
        with emulator.watching(*p, *m, *v, *out, read_only=[*g, ratio]):
            sums = moments(p, g, m, v, None, None, *columns, 1.0, True)
            apply(p, m, v, out, None, ratio, [1e-2] * count, *columns, True)
        found.append([sums, *p, *m, *v, *out])
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))


def test_lamb_sums_do_not_depend_on_the_grid_or_on_alignment(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    n, found = 5 * TILE + 3, []
    for processors, shift in ((1, 0), (2, 0), (7, 0), (2, 1), (2, 2)):
        monkeypatch.setattr(emulator, "multiprocessors", processors)
        emulated_cuda.install(emulator, monkeypatch)
        p, m, v = at(shift, randn(n)), torch.zeros(n), torch.zeros(n)
        g = at(shift, randn(n, 1))
        with emulator.watching(m, v, read_only=[p, g]):
            sums = cuda.lamb_moments_(
                [p], [g], [m], [v], None, torch.tensor(0.9).sum(), *[[0.9], [0.99], [1e-8], [0.1]], [1.0], 1.0, True
            )
            emulator.library.forget()
        found.append((sums[0, 0].item(), sums[1, 0].item()))
    assert len(set(found)) == 1
    assert found[0][0] == pytest.approx(randn(n).double().square().sum().item(), rel=1e-13)


def test_a_skipped_lamb_changes_nothing(emulator: Emulator) -> None:
    p, g, m, v = (randn(70, seed).abs() for seed in range(4))
    before, flag, columns = [x.clone() for x in (p, m, v)], torch.ones(()), [[0.9], [0.99], [1e-8], [0.1], [1.0]]
    with emulator.watching(flag, read_only=[p, g, m, v]):
        sums = cuda.lamb_moments_([p], [g], [m], [v], flag, None, *columns, 1.0, True)
        cuda.lamb_apply_([p], [m], [v], [], flag, torch.ones(1), [0.1], *columns, True)
    assert not sums.any() and all(torch.equal(x, y) for x, y in zip((p, m, v), before, strict=True))


def test_tensors_without_elements_send_lamb_to_plain_torch(emulator: Emulator) -> None:
    p, m, v = ([torch.ones(3), torch.ones(0)] for _ in range(3))
    columns = [[0.9] * 2, [0.99] * 2, [1e-8] * 2, [0.0] * 2, [1.0] * 2]
    with emulator.watching():
        sums = cuda.lamb_moments_(p, p, m, v, None, None, *columns, 1.0, True)
        assert sums[:, 1].tolist() == [0.0, 0.0] and sums[0, 0] == 3.0
        assert emulator.library.launch_count() == 0


# --- sums, scalars, buffers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shift", [0, 1, 4])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("n", [1, 31, 2047, 2048, 2049, 65 * 2048 + 33])
def test_sums_have_the_bits_of_the_cpu(emulator: Emulator, n: int, dtype: torch.dtype, shift: int) -> None:
    x = at(shift, randn(n, dtype=dtype))
    with emulator.watching(read_only=[x]):
        got = cuda.square_sum(x)
    assert got.shape == () and got.dtype == torch.float64
    assert got.item() == ops.square_sum(x).item()


@pytest.mark.parametrize("dtype", FLOATS)
def test_sums_of_all_offsets_and_sizes(emulator: Emulator, dtype: torch.dtype) -> None:
    for shift, n in EVERYWHERE:
        x = at(shift, randn(n, n, dtype))
        with emulator.watching(read_only=[x]):
            assert cuda.square_sum(x).item() == ops.square_sum(x).item(), (shift, n)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shift", range(1, 8))
def test_sums_of_views_are_read_sixteen_bytes_at_a_time(emulator: Emulator, dtype: torch.dtype, shift: int) -> None:
    x = at(shift, randn(3 * TILE, 5, dtype))
    with emulator.watching(read_only=[x]):
        assert cuda.square_sum(x).item() == ops.square_sum(x).item()
        per = 16 // x.element_size()
        by_element = 3 if shift % per else 0  # accesses of the one thread per chunk whose lanes go round
    assert emulator.library.wide_accesses() >= 3 * (TILE // per) - by_element


def test_a_sum_over_three_levels(emulator: Emulator) -> None:
    x = randn(1024 * 2048 + 1)
    with emulator.watching(read_only=[x]):
        got = cuda.square_sum(x)
    assert emulator.library.launch_count() == 3
    assert got.item() == ops.square_sum(x).item()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 31, 2047, 2048, 5000])
def test_one_bad_element_shows_in_the_sum(emulator: Emulator, bad: float, place: int) -> None:
    x = torch.full((5001,), 3e38)
    with emulator.watching(read_only=[x]):
        assert math.isfinite(cuda.square_sum(x))
        x[place] = bad
        assert not math.isfinite(cuda.square_sum(x))


@pytest.mark.parametrize("total", [0.0, 1e-30, 2.0, 1e60, math.inf, math.nan])
@pytest.mark.parametrize("clip", [0.0, 1.0])
@pytest.mark.parametrize("scale", [None, 1024.0])
def test_the_scalars_of_a_step(emulator: Emulator, total: float, clip: float, scale: float | None) -> None:
    squares = torch.tensor(total, dtype=torch.float64)
    given = None if scale is None else torch.tensor([scale])
    got, want = torch.full((3,), 7.0), torch.full((3,), 7.0)
    with emulator.watching(got, read_only=[squares]):
        cuda.step_control_(squares, given, got, 0.25, clip)
    ops.step_control_(squares, given, want, 0.25, clip)
    assert same(got, want)
    if math.isfinite(total):
        norm = math.sqrt(total) * 0.25 / (scale or 1.0)
        assert got.tolist() == pytest.approx(
            [norm, 0.25 / (scale or 1.0) * min(1.0, clip / (norm + 1e-6) if clip else 1.0), 0.0]
        )
    else:
        assert got[2] == 1.0 and not math.isfinite(got[0])


def test_from_gradient_to_update_without_the_host(emulator: Emulator) -> None:
    """Norm, clip and skip by what the kernels leave for each other in memory, against clip_grad_norm_ and the same step."""
    g, p, b, control = randn(3000), randn(3000, 1), torch.zeros(3000), torch.zeros(3)
    weight = torch.nn.Parameter(p.clone())
    weight.grad = g.clone()
    norm = torch.nn.utils.clip_grad_norm_([weight], 1.0)
    with emulator.watching(p, b, control, read_only=[g]):
        sums = cuda.square_sum(g)
        cuda.step_control_(sums, None, control, 1.0, 1.0)
        out = [p.bfloat16()]
        emulator.allow(out[0])
        cuda.sgd_many_(
            [p], [g], [b], out, control[2:], control[1:2], *[[x] for x in (0.1, 0.0, 0.0, 0.0, True)], False, 1.0
        )
    assert control[0].item() == pytest.approx(norm.item())
    torch.testing.assert_close(p, weight.detach() - 0.1 * weight.grad)


@pytest.mark.parametrize(
    ("source", "into", "add"), [(0, 1, False), (1, 0, True), (2, 0, True), (1, 1, True), (0, 2, True)]
)
def test_casts_and_sums_between_buffers(emulator: Emulator, source: int, into: int, add: bool) -> None:
    sources = [at(i % 3, randn(n, i, FLOATS[source])) for i, n in enumerate(LENGTHS)]
    targets = [at(i % 2, randn(n, i + 9, FLOATS[into])) for i, n in enumerate(LENGTHS)]
    want = [(x.float() * add + y.float()).to(FLOATS[into]) for x, y in zip(targets, sources, strict=True)]
    plainly = [x.clone() for x in targets]
    with emulator.watching(*targets, read_only=sources):
        (cuda.add_many_ if add else cuda.copy_many_)(targets, sources)
    assert emulator.library.launch_count() == 1
    (ops.add_many_ if add else ops.copy_many_)(plainly, sources)
    assert all(same(x, y) and same(z, y) for x, y, z in zip(targets, want, plainly, strict=True))


@pytest.mark.parametrize(("source", "into", "add"), [(0, 1, False), (1, 0, True), (0, 2, True)])
def test_casts_at_all_offsets_and_sizes(emulator: Emulator, source: int, into: int, add: bool) -> None:
    sources = [at(shift, randn(n, n, FLOATS[source])) for shift, n in EVERYWHERE]
    targets = [at(shift, randn(n, n + 1, FLOATS[into])) for shift, n in EVERYWHERE]
    want = [(x.float() * add + y.float()).to(FLOATS[into]) for x, y in zip(targets, sources, strict=True)]
    with emulator.watching(*targets, read_only=sources):
        (cuda.add_many_ if add else cuda.copy_many_)(targets, sources)
    assert all(same(x, y) for x, y in zip(targets, want, strict=True))


# --- the optimizers ---------------------------------------------------------------------------------------------------


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "FusedAdam": lambda groups: FusedAdam(groups, lr=1e-2),
    "FusedLion": lambda groups: FusedLion(groups, lr=1e-3),
    "FusedLamb": lambda groups: FusedLamb(groups, lr=1e-2, weight_decay=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_step_as_on_the_cpu(emulator: Emulator, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Two groups and shapes that are not flat; LAMB adds its sums in another order than the CPU."""
    ends = []
    for on_cuda in (False, True):
        if on_cuda:
            for module in (fused, lamb):
                monkeypatch.setattr(module, "_ops", cuda)
            monkeypatch.setattr(fused, "one_launch", lambda items: True)  # as for tensors on a GPU
        weights = [torch.nn.Parameter(randn(n, n).view(shape)) for n, shape in ((6, (2, 3)), (2100, (2100,)), (1, ()))]
        groups = [{"params": weights[:2], "weight_decay": 0.01}, {"params": weights[2:], "lr": 0.1}]
        optimizer = OPTIMIZERS[name](groups)
        emulator.library.forget()
        emulator.library.allow(0, 2**63 - 1, 1)  # the optimizer makes its own state
        for t in range(3):
            for weight in weights:
                weight.grad = randn(weight.numel(), t + 5).view(weight.shape)
            optimizer.step()
        launches = 9 if name == "FusedLamb" else 3  # of three steps; LAMB is three
        assert emulator.library.fault() == b"" and emulator.library.launch_count() == launches * on_cuda
        ends.append([*(w.detach() for w in weights), *(optimizer.state[w]["exp_avg"] for w in weights)])
    for want, got in zip(*ends, strict=True):
        assert same(got, want) or (name == "FusedLamb" and torch.allclose(got, want, rtol=1e-6, atol=1e-8))


# --- what no kernel takes, and what nobody could ----------------------------------------------------------------------


def test_without_kernels_everything_is_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "cuda_backend", lambda: cuda_backend.CudaBackend(None, "no CUDA device"))
    for name, numbers in STEPS.items():
        op = name.split()[0]
        mine = [randn(40), randn(40, 1), *states(name, 40)]
        theirs = [x.clone() for x in mine]
        getattr(cuda, op)(*mine, None, None, *numbers(1, 0.5))
        getattr(plain, op)(*theirs, None, None, *numbers(1, 0.5))
        assert all(torch.equal(x, y) for x, y in zip(mine, theirs, strict=True))
    x = randn(100)
    assert cuda.square_sum(x).item() == plain.square_sum(x).item()
    into, control = [torch.zeros(100, dtype=torch.bfloat16)], torch.zeros(3)
    cuda.copy_many_(into, [x])
    cuda.step_control_(cuda.square_sum(x), None, control, 1.0, 0.0)
    assert torch.equal(into[0], x.bfloat16()) and control[0] == pytest.approx(x.norm().item())


def test_a_kernel_that_does_not_compile_is_said_once(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    backend = emulator.cuda()

    def refuse(kernel: object, arch: int) -> bytes:
        raise KernelUnavailable("update.cu does not compile: error: no such thing")

    backend.image, backend.strict = refuse, False
    monkeypatch.setattr(cuda, "cuda_backend", lambda: cuda_backend.CudaBackend(backend))
    p, m, v = randn(30), torch.zeros(30), torch.zeros(30)
    want = reference.adamw(p.clone(), p.clone(), m.clone(), v.clone(), 1, weight_decay=0.1).p
    for _ in range(2):
        cuda.adam_(p, randn(30), m, v, None, None, *STEPS["adam_"](1, 1.0))
        torch.testing.assert_close(p, want)
        p, m, v = randn(30), torch.zeros(30), torch.zeros(30)
    said = [record.message for record in caplog.records]
    assert len(said) == 1 and "zt_update(op=ZtAdam,gradient=0,out=-1)" in said[0] and "no such thing" in said[0]
    assert "plain torch for 1 kernels" in cuda_backend.CudaBackend(backend).describe()


def test_sizes_that_do_not_fit_are_refused(emulator: Emulator) -> None:
    five, four = torch.zeros(5), torch.zeros(4)
    with pytest.raises(ConfigError, match="different sizes"):
        cuda.adam_(five, four, five, five, None, None, *STEPS["adam_"](1, 1.0))
    with pytest.raises(ConfigError, match="different lengths"):
        cuda.copy_many_([five], [five, five])
    with pytest.raises(ConfigError, match="number 1"):
        many.same_sizes([five, five], [five, four])
