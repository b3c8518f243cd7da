"""Sums, the scalars of a step, and copies between buffers on the emulator."""

from __future__ import annotations

import math

import pytest
import torch

from tests.support.cuda_cases import EVERYWHERE, FLOATS, LENGTHS, TILE, at, randn, same
from tests.support.emulated_cuda import Emulator
from zero_trial.ops.dispatch import CUDA

ops = torch.ops.zero_trial


@pytest.mark.parametrize("shift", [0, 1, 4])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("n", [1, 31, 2047, 2048, 2049, 65 * 2048 + 33])
def test_sums_have_the_bits_of_the_cpu(emulator: Emulator, n: int, dtype: torch.dtype, shift: int) -> None:
    x = at(shift, randn(n, dtype=dtype))
    with emulator.watching(read_only=[x]):
        got = CUDA["square_sum"](x)
    assert got.shape == () and got.dtype == torch.float64
    assert got.item() == ops.square_sum(x).item()


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
    assert emulator.library.launch_count() == 3
    assert got.item() == ops.square_sum(x).item()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 31, 2047, 2048, 5000])
def test_one_bad_element_shows_in_the_sum(emulator: Emulator, bad: float, place: int) -> None:
    x = torch.full((5001,), 3e38)
    with emulator.watching(read_only=[x]):
        assert math.isfinite(CUDA["square_sum"](x))
        x[place] = bad
        assert not math.isfinite(CUDA["square_sum"](x))


@pytest.mark.parametrize("total", [0.0, 1e-30, 2.0, 1e60, math.inf, math.nan])
@pytest.mark.parametrize("clip", [0.0, 1.0])
@pytest.mark.parametrize("scale", [None, 1024.0])
def test_the_scalars_of_a_step(emulator: Emulator, total: float, clip: float, scale: float | None) -> None:
    squares = torch.tensor(total, dtype=torch.float64)
    given = None if scale is None else torch.tensor([scale])
    got, want = torch.full((3,), 7.0), torch.full((3,), 7.0)
    with emulator.watching(got, read_only=[squares]):
        CUDA["step_control_"](squares, given, got, 0.25, clip)
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
    """Norm, clip and skip by what the kernels leave for each other in memory, against
    clip_grad_norm_ and the same step."""
    g, p, b, control = randn(3000), randn(3000, 1), torch.zeros(3000), torch.zeros(3)
    weight = torch.nn.Parameter(p.clone())
    weight.grad = g.clone()
    norm = torch.nn.utils.clip_grad_norm_([weight], 1.0)
    with emulator.watching(p, b, control, read_only=[g]):
        sums = CUDA["square_sum"](g)
        CUDA["step_control_"](sums, None, control, 1.0, 1.0)
        out = [p.bfloat16()]
        emulator.allow(out[0])
        CUDA["sgd_many_"](
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
        (CUDA["add_many_"] if add else CUDA["copy_many_"])(targets, sources)
    assert emulator.library.launch_count() == 1
    (ops.add_many_ if add else ops.copy_many_)(plainly, sources)
    assert all(same(x, y) and same(z, y) for x, y, z in zip(targets, want, plainly, strict=True))


@pytest.mark.parametrize(("source", "into", "add"), [(0, 1, False), (1, 0, True), (0, 2, True)])
def test_casts_at_all_offsets_and_sizes(emulator: Emulator, source: int, into: int, add: bool) -> None:
    sources = [at(shift, randn(n, n, FLOATS[source])) for shift, n in EVERYWHERE]
    targets = [at(shift, randn(n, n + 1, FLOATS[into])) for shift, n in EVERYWHERE]
    want = [(x.float() * add + y.float()).to(FLOATS[into]) for x, y in zip(targets, sources, strict=True)]
    with emulator.watching(*targets, read_only=sources):
        (CUDA["add_many_"] if add else CUDA["copy_many_"])(targets, sources)
    assert all(same(x, y) for x, y in zip(targets, want, strict=True))
