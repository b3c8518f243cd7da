"""LAMB on the emulator: the bits of the CPU, sums that depend on no grid, and float64."""

from __future__ import annotations

import pytest
import torch

from tests.support import emulated_cuda
from tests.support.cuda_cases import COPY_OF, EVERYWHERE, FLOATS, LENGTHS, TILE, at, randn
from tests.support.emulated_cuda import Emulator
from zero_trial.ops import reference
from zero_trial.ops.dispatch import CUDA

ops = torch.ops.zero_trial


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
            squares = CUDA["lamb_moments_"](p, g, m, v, *columns, step, 0.5, True)
        ratio = (squares[0] / squares[1]).sqrt().clamp(0.01, 10.0).float()
        with emulator.watching(*p, *out, read_only=[*m, *v, ratio]):
            CUDA["lamb_apply_"](p, m, v, out, ratio, [1e-2] * len(p), *columns, step, True)
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
    """Moments, both sums and the step, with tails."""
    lengths = [n for n in LENGTHS if n]
    columns = [[x] * len(lengths) for x in (0.9, 0.999, 1e-6, 0.1)]
    low, found = COPY_OF[dtype], []
    for moments, apply in ((CUDA["lamb_moments_"], CUDA["lamb_apply_"]), (ops.lamb_moments_, ops.lamb_apply_)):
        p = [randn(n, i) for i, n in enumerate(lengths)]
        m, v = ([torch.zeros(n) for n in lengths] for _ in range(2))
        out, sums = [torch.zeros(n, dtype=low) for n in lengths], []
        for t in (1, 2):
            g, step = [randn(n, 7 * t + i, dtype) for i, n in enumerate(lengths)], [float(t)] * len(p)
            with emulator.watching(*p, *m, *v, *out, read_only=g):
                squares = moments(p, g, m, v, *columns, step, 0.35, True)
                ratio = (squares[0] / squares[1]).sqrt().clamp(0.01, 10.0).float()
            with emulator.watching(*p, *m, *v, *out, read_only=[ratio]):
                apply(p, m, v, out, ratio, [1e-2] * len(p), *columns, step, True)
            sums.append(squares)
        found.append([*p, *m, *v, *out, *sums])
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))


def test_lamb_at_all_offsets_and_sizes(emulator: Emulator) -> None:
    columns, count, found = [[x] * len(EVERYWHERE) for x in (0.9, 0.999, 1e-6, 0.1, 2.0)], len(EVERYWHERE), []
    for moments, apply in ((CUDA["lamb_moments_"], CUDA["lamb_apply_"]), (ops.lamb_moments_, ops.lamb_apply_)):
        p, g, m, v = ([at(shift, randn(n, n + i).abs()) for shift, n in EVERYWHERE] for i in range(4))
        out, ratio = [at(shift, torch.zeros(n).bfloat16()) for shift, n in EVERYWHERE], torch.linspace(0.5, 2.0, count)
        with emulator.watching(*p, *m, *v, *out, read_only=[*g, ratio]):
            sums = moments(p, g, m, v, *columns, 1.0, True)
            apply(p, m, v, out, ratio, [1e-2] * count, *columns, True)
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
            sums = CUDA["lamb_moments_"]([p], [g], [m], [v], *[[0.9], [0.99], [1e-8], [0.1]], [1.0], 1.0, True)
            emulator.library.forget()
        found.append((sums[0, 0].item(), sums[1, 0].item()))
    assert len(set(found)) == 1
    assert found[0][0] == pytest.approx(randn(n).double().square().sum().item(), rel=1e-13)


def test_tensors_without_elements_send_lamb_to_plain_torch(emulator: Emulator) -> None:
    p, m, v = ([torch.ones(3), torch.ones(0)] for _ in range(3))
    columns = [[0.9] * 2, [0.99] * 2, [1e-8] * 2, [0.0] * 2, [1.0] * 2]
    with emulator.watching():
        sums = CUDA["lamb_moments_"](p, p, m, v, *columns, 1.0, True)
        assert sums[:, 1].tolist() == [0.0, 0.0] and sums[0, 0] == 3.0
        assert emulator.library.launch_count() == 0
