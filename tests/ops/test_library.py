"""The ops against float64, over sizes, dtypes, views and values; the same bits from every copy of
the kernels and any number of threads."""

from __future__ import annotations

import dataclasses
import math
import os
import signal
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.cuda_cases import randn
from zero_trial.errors import ConfigError, KernelUnavailable
from zero_trial.ops import cpu, cpu_library, reference

SIZES = (0, 1, 15, 63, 64, 65, 1023, 1024, 1025, 40_003)
LOW = (torch.bfloat16, torch.float16)
ops = torch.ops.zero_trial


def native() -> cpu_library.CPULibrary:
    try:
        return cpu_library.open_native(os.environ)
    except KernelUnavailable as trouble:
        pytest.skip(f"no native kernels: {trouble.what}")


@pytest.fixture(params=["native", "plain"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    use(monkeypatch, native() if request.param == "native" else None)
    return request.param


def use(monkeypatch: pytest.MonkeyPatch, kernels: cpu_library.CPULibrary | None) -> None:
    monkeypatch.setattr(cpu_library, "backend", lambda: cpu_library.Backend(kernels))


def error(got: Tensor, exact: Tensor) -> float:
    return float((got.double() - exact).norm() / exact.norm()) if exact.numel() else 0.0


def one(op: str, tensors: list[Tensor], out: Tensor | None, own: tuple[Any, ...], *shared: Any) -> None:
    """One step of one tensor."""
    lists = [[x] for x in tensors]
    getattr(ops, op)(*lists, [] if out is None else [out], [], [], *([x] for x in own), *shared)


# One step of each op on (p, g, state, state, out), and the same in float64: (p, state, state).
def adam(p, g, a, b, out=None, t=1, k=1.0, decoupled=True):  # type: ignore[no-untyped-def]
    one("adam_", [p, g, a, b], out, (1e-3, 0.9, 0.999, 1e-8, 0.1, float(t)), k, decoupled)


def lion(p, g, a, b, out=None, t=1, k=1.0):  # type: ignore[no-untyped-def]
    one("lion_", [p, g, a], out, (1e-3, 0.9, 0.99, 0.1), k)


def adagrad(p, g, a, b, out=None, t=1, k=1.0):  # type: ignore[no-untyped-def]
    one("adagrad_", [p, g, a], out, (1e-2, 1e-10, 0.1), k)


def sgd(p, g, a, b, out=None, t=1, k=1.0):  # type: ignore[no-untyped-def]
    one("sgd_", [p, g, a], out, (1e-2, 0.9, 0.1, 0.1, t == 1), True, k)


def plain_adam(p, g, a, b, out=None, t=1, k=1.0):  # type: ignore[no-untyped-def]
    adam(p, g, a, b, out, t, k, decoupled=False)


STEPS: dict[str, Any] = {"AdamW": adam, "Adam": plain_adam, "Lion": lion, "Adagrad": adagrad, "SGD": sgd}
EXACT: dict[str, Any] = {
    "AdamW": lambda p, g, a, b, t: reference.adamw(p, g, a, b, t, weight_decay=0.1),
    "Adam": lambda p, g, a, b, t: reference.adam(p, g, a, b, t, weight_decay=0.1),
    "Lion": lambda p, g, a, b, t: (*reference.lion(p, g, a, weight_decay=0.1), b),
    "Adagrad": lambda p, g, a, b, t: (*reference.adagrad(p, g, a, t, weight_decay=0.1), b),
    "SGD": lambda p, g, a, b, t: (
        *reference.sgd(
            p, g, None if t == 1 else a, lr=1e-2, momentum=0.9, dampening=0.1, nesterov=True, weight_decay=0.1
        ),
        b,
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("copy", ["plain", *cpu_library.ISAS])
def test_adamw_is_that_of_float64(monkeypatch: pytest.MonkeyPatch, copy: str, dtype: torch.dtype) -> None:
    """Ten steps; the errors of p, m and v in norm, relative to it: what kernels.md promises."""
    if copy != "plain":
        best, isa = native(), cpu_library.ISAS.index(copy)
        if isa > best.isa:
            pytest.skip(f"this processor has no {copy}")
        use(monkeypatch, dataclasses.replace(best, isa=isa))
    else:
        use(monkeypatch, None)
    n = 200_003
    p, m, v = randn(n), torch.zeros(n), torch.zeros(n)
    exact = (p.double(), m.double(), v.double())
    for t in range(1, 11):
        g = randn(n, seed=t, dtype=dtype)
        adam(p, g, m, v, t=t)
        exact = EXACT["AdamW"](exact[0], g.double(), *exact[1:], t)
    limits = (2e-7, 2e-7, 2e-7) if copy == "plain" else (1e-7, 1e-7, 2e-7)
    for got, want, limit in zip((p, m, v), exact, limits, strict=True):
        assert error(got, want) <= limit


@pytest.mark.parametrize("dtype", [torch.float32, *LOW])
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("name", STEPS)
def test_three_steps_of_any_size_and_gradient(backend: str, name: str, n: int, dtype: torch.dtype) -> None:
    """With a multiplier, a rounded copy of the parameter, and on views that start at odd elements.
    Limit: a few roundings, 3e-7."""
    store = [torch.full((n + 6,), math.nan) for _ in range(3)]
    p, a, b = (x[3 : 3 + n] for x in store)
    p.copy_(randn(n)), a.zero_(), b.zero_()
    out = torch.full((n + 2,), math.nan, dtype=torch.bfloat16 if dtype == torch.float32 else dtype)
    exact = (p.double(), a.double(), b.double())
    for t in range(1, 4):
        g = randn(n + 1, seed=t, dtype=dtype)[1:]
        STEPS[name](p, g, a, b, out[1 : 1 + n], t, 0.5)
        exact = EXACT[name](exact[0], g.double() * 0.5, *exact[1:], t)
    if name != "Lion":  # the sign of a sum near zero may turn
        for got, want in zip((p, a, b), exact, strict=True):
            assert error(got, want) <= 3e-7 or not want.any()
    else:
        assert float((p.double() - exact[0]).abs().gt(1e-6).double().mean() if n else 0.0) <= 1e-4
    assert torch.equal(out[1 : 1 + n], p.to(out.dtype))
    for x in (*store, out):  # nothing beside the views was touched
        edge = 3 if x is not out else 1
        assert torch.isnan(x[:edge]).all() and torch.isnan(x[edge + n :]).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 3e38])
@pytest.mark.parametrize("name", STEPS)
def test_what_is_not_finite_stays_where_it_is(backend: str, name: str, bad: float) -> None:
    p, a, b, g = randn(130), torch.zeros(130), torch.zeros(130), randn(130, seed=1)
    places = torch.tensor([0, 64, 129])
    g[places] = bad
    q, c, d = p.clone(), a.clone(), b.clone()
    for t in (1, 2):
        h = g if t == 1 else randn(130, seed=2)
        STEPS[name](p, h, a, b, t=t)
        q, c, d = EXACT[name](q, h, c, d, t)  # in fp32, so that squares overflow
    for got, want in ((p, q), (a, c), (b, d)):
        assert torch.equal(torch.isfinite(got), torch.isfinite(want))


def shapes(name: str, kernels: cpu_library.CPULibrary, dtype: torch.dtype, n: int) -> list[Tensor]:
    p, a, b, out = randn(n), torch.zeros(n), torch.zeros(n), torch.zeros(n, dtype=torch.float16)
    p[:8] = torch.tensor([math.nan, math.inf, -math.inf, 1e-40, -1e-45, 65520.0, 3e38, 0.0])[:n]
    for t in range(1, 4):
        g = randn(n, seed=t)
        g[-5:] *= 1e-38
        STEPS[name](p, g.to(dtype), a, b, out, t, 0.7)
    return [x.nan_to_num(123.0) for x in (p, a, b, out)]


@pytest.mark.parametrize("dtype", [torch.float32, *LOW])
@pytest.mark.parametrize("name", STEPS)
def test_every_copy_and_any_number_of_threads_gives_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, threads: Callable[[int], None], name: str, dtype: torch.dtype
) -> None:
    best = native()
    n = 3 * 32768 + 77
    results = []
    for isa in range(best.isa + 1):
        for count in (1, 2, 3, 8):
            threads(count)
            use(monkeypatch, dataclasses.replace(best, isa=isa))
            results.append(shapes(name, best, dtype, n))
    for other in results[1:]:
        assert all(torch.equal(x, y) for x, y in zip(other, results[0], strict=True))


@pytest.mark.parametrize("dtype", LOW)
def test_rounding_is_that_of_torch(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """Every 16-bit pattern in, and every neighbourhood of a rounding boundary out. SGD without rate
    only copies."""
    best = native()
    patterns = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)
    wide = patterns.float()
    bits = wide.view(torch.int32)
    around = torch.cat(
        [bits + shift for shift in (-4097, -4096, -1, 0, 1, 4095, 4096, 4097, 32767, 32768, 32769)]
    ).view(torch.float32)
    around = around[~around.isinf()]  # infinity times no decay would be NaN
    for isa in range(best.isa + 1):
        use(monkeypatch, dataclasses.replace(best, isa=isa))
        p, b, out = around.clone(), torch.zeros_like(around), torch.zeros(len(around), dtype=dtype)
        one("sgd_", [p, torch.zeros_like(p), b], out, (0.0, 0.0, 0.0, 0.0, True), False, 1.0)
        wanted = around.to(dtype)
        same = out.view(torch.int16) == wanted.view(torch.int16)
        assert (same | (out.isnan() & wanted.isnan())).all()
        p, b = torch.zeros(65536), torch.zeros(65536)
        one("sgd_", [p, patterns, b], None, (0.0, 0.0, 0.0, 0.0, True), False, 1.0)
        assert ((b == wide) | (b.isnan() & wide.isnan())).all()


@pytest.mark.parametrize("source", [torch.float32, *LOW])
@pytest.mark.parametrize("into", [torch.float32, *LOW])
def test_sums_of_any_two_dtypes(
    monkeypatch: pytest.MonkeyPatch, threads: Callable[[int], None], into: torch.dtype, source: torch.dtype
) -> None:
    """Exact sums, rounded once, with every copy of the kernels; nothing around them is touched."""
    threads(2)
    best = native()
    for isa in range(best.isa + 1):
        use(monkeypatch, dataclasses.replace(best, isa=isa))
        for n in (0, 1, 63, 65, 70_001):
            store = torch.full((n + 2,), math.nan, dtype=into)
            target, values = store[1:-1], randn(n + 1, n, source)[1:]
            target.copy_(randn(n, 1))
            want = (target.float() + values.float()).to(into)
            assert cpu.add(target, values)
            assert torch.equal(target, want) and torch.isnan(store[0]) and torch.isnan(store[-1])


@pytest.mark.parametrize("dtype", [torch.float32, *LOW])
@pytest.mark.parametrize("n", SIZES)
def test_the_sum_of_squares(backend: str, n: int, dtype: torch.dtype) -> None:
    x = randn(n + 1, dtype=dtype)[1:]
    got = ops.square_sum(x)
    assert got.dtype == torch.float64 and got.shape == ()
    assert got.item() == pytest.approx(x.double().square().sum().item(), rel=1e-13)


def test_sums_have_the_same_bits_everywhere(monkeypatch: pytest.MonkeyPatch, threads: Callable[[int], None]) -> None:
    best, x, results = native(), randn(200_017), set()
    for isa in range(best.isa + 1):
        for count in (1, 2, 3):
            threads(count)
            use(monkeypatch, dataclasses.replace(best, isa=isa))
            results.add(ops.square_sum(x).item())
    assert len(results) == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 31, 32, 16383, 16384, 40_000])
def test_one_bad_element_shows_in_the_sum(backend: str, bad: float, place: int) -> None:
    x = torch.full((40_001,), 3e38)
    assert math.isfinite(ops.square_sum(x).item())
    x[place] = bad
    assert not math.isfinite(ops.square_sum(x).item())


def test_other_layouts_and_dtypes_are_computed_in_plain_torch(backend: str) -> None:
    p = randn(12).view(3, 4).t()
    m, v, g = torch.zeros_like(p), torch.zeros_like(p), randn(12, 1).view(4, 3)
    want = reference.adamw(p.clone(), g, m.clone(), v.clone(), 1, weight_decay=0.1).p
    adam(p, g, m, v)
    torch.testing.assert_close(p, want)
    d = randn(5).double()
    want = reference.adamw(d.clone(), d, d.abs(), d.abs(), 1, weight_decay=0.1).p
    adam(d, d.clone(), d.abs(), d.abs())
    assert torch.equal(d, want)


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"number 0 have different sizes: got 5, 4, 5, 5"):
        adam(torch.zeros(5), torch.zeros(4), torch.zeros(5), torch.zeros(5))


def test_it_compiles_as_part_of_a_graph(backend: str) -> None:
    def step(p: Tensor, g: Tensor, m: Tensor, v: Tensor, out: Tensor) -> Tensor:
        adam(p, g * 2, m, v, out)
        return ops.square_sum(p) + 1

    def tensors() -> list[Tensor]:
        return [randn(70), randn(70, 1), torch.zeros(70), torch.zeros(70), torch.zeros(70, dtype=torch.bfloat16)]

    eager, compiled = tensors(), tensors()
    want = step(*eager)
    got = torch.compile(step, fullgraph=True, backend="aot_eager")(*compiled)
    assert torch.equal(got, want) and all(torch.equal(x, y) for x, y in zip(compiled, eager, strict=True))


def tensors(n: int = 70, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.ones(n, dtype=dtype) for _ in range(4)]


def test_a_parameter_in_a_graph_is_refused(backend: str) -> None:
    p, g, m, v = tensors()
    p.requires_grad_()
    for inside in (p, p * 2):
        with pytest.raises(ConfigError, match=r"not differentiable.*Call it under torch\.no_grad"):
            adam(inside, g, m, v)
    with torch.no_grad():
        adam(p, g, m, v)
    assert float(p.detach()[0]) < 1.0


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_what_is_no_real_number_is_refused(backend: str, dtype: torch.dtype) -> None:
    p, g, m, v = tensors()
    with pytest.raises(ConfigError, match="real floating-point"):
        adam(p, g.to(dtype), m, v)
    with pytest.raises(ConfigError, match="real floating-point"):
        adam(*tensors(dtype=dtype))
    if dtype.is_complex:
        with pytest.raises(ConfigError, match="real numbers"):
            ops.square_sum(g.to(dtype))


def test_tensors_that_do_not_go_together(backend: str) -> None:
    p, g, m, v = tensors()
    with pytest.raises(ConfigError, match=r"different shapes.*got \(7, 10\), \(70,\)"):
        adam(p.view(10, 7).t(), g, m, v)
    with pytest.raises(ConfigError, match="numbered from 1"):
        adam(p, g, m, v, t=0)
    with pytest.raises(RuntimeError, match="single memory location"):
        adam(torch.ones(1).expand(70), g, m, v)
    for at in range(4):
        mixed = tensors()
        mixed[at] = mixed[at].to("meta")
        with pytest.raises(ConfigError, match="different devices: got cpu, meta"):
            adam(*mixed)
    assert torch.equal(p, torch.ones(70))


def test_gradients_of_any_layout(backend: str) -> None:
    want, *rest = tensors()
    adam(want, -torch.ones(70), *rest[1:])
    for gradient in (-torch.ones(1).expand(70), torch._neg_view(torch.ones(70)), -torch.ones(70, dtype=torch.float64)):
        p, _, m, v = tensors()
        adam(p, gradient, m, v)
        torch.testing.assert_close(p, want, rtol=1e-6, atol=0)


def test_threads_compute_with_the_rounding_of_their_caller(
    monkeypatch: pytest.MonkeyPatch, threads: Callable[[int], None]
) -> None:
    """Numbers too small for fp32 are flushed to zero where the calling thread does so, on every
    thread, and only then."""
    best, n = native(), 4 * 32768 + 5
    tiny = torch.full((n,), 1e-39)

    def step(isa: int, count: int) -> list[Tensor]:
        threads(count)
        use(monkeypatch, dataclasses.replace(best, isa=isa))
        p, m, v, wide = tiny.clone(), tiny.clone(), tiny.clone(), tiny.clone()
        adam(p, tiny, m, v, decoupled=False)
        cpu.add(wide, torch.zeros(n, dtype=torch.bfloat16))
        return [*(x.view(torch.int32) for x in (p, m, v, wide)), ops.square_sum(tiny)]

    kept = step(0, 3)
    assert kept[3].all()
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor flushes nothing")
    try:
        flushed = [step(isa, count) for isa in range(best.isa + 1) for count in (1, 2, 3)]
    finally:
        torch.set_flush_denormal(False)
    assert not flushed[0][3].any()
    for other in flushed[1:]:
        assert all(torch.equal(x, y) for x, y in zip(other, flushed[0], strict=True))
    assert all(torch.equal(x, y) for x, y in zip(step(0, 3), kept, strict=True))


def test_after_a_fork(monkeypatch: pytest.MonkeyPatch, threads: Callable[[int], None]) -> None:
    """A child has none of the threads that its parent had; waiting for them would take forever."""
    use(monkeypatch, native())
    threads(2)
    mine, childs = tensors(200_000), tensors(200_000)
    adam(*mine)
    with warnings.catch_warnings():
        # of forks beside threads, from Python 3.12 on
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        signal.alarm(20)
        adam(*childs)
        os._exit(7 if childs[0][-1] == mine[0][-1] else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7


def test_python_threads_step_side_by_side(backend: str, threads: Callable[[int], None]) -> None:
    threads(2)

    def train(_: int) -> Tensor:
        p, g, m, v = tensors(100_000)
        for t in range(1, 4):
            adam(p, g, m, v, t=t)
        return p

    with ThreadPoolExecutor(4) as pool:
        first, *others = pool.map(train, range(4))
    assert all(torch.equal(first, other) for other in others)
