"""Sums of tensors: over ranks, and of gradients of two dtypes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from tests.ops.test_library import native as kernels
from tests.support.cuda_cases import randn, same
from zero_trial.comm import sum_in_order
from zero_trial.ops import cpu, cpu_library
from zero_trial.ops.cpu import native_sum
from zero_trial.ops.dispatch import WORTH_ELEMENTS, accumulate

SIXTEEN = (torch.bfloat16, torch.float16)
DTYPES = (torch.float32, torch.float64, *SIXTEEN)
SIZES = (1, 15, 63, 64, 65, 1000, 4133)


def not_asked(parts: Sequence[Tensor], out: Tensor) -> None:
    raise AssertionError("the twin was asked")


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[cpu_library.CPULibrary | None], None]:
    return lambda native: monkeypatch.setattr(cpu_library, "backend", lambda: cpu_library.Backend(native))


def parts_of(count: int, n: int, dtype: torch.dtype, offset: int = 0) -> list[Tensor]:
    """Of very different magnitudes, so that the order of the sum shows in its bits; ``offset``
    elements into their storages."""
    generator = torch.Generator().manual_seed(31 * count + n)
    scales = [10.0 ** (k % 4 - 1) for k in range(count)]
    return [(torch.randn(n + offset, generator=generator) * scale).to(dtype)[offset:] for scale in scales]


def test_parts_are_added_from_left_to_right(use: Callable[[cpu_library.CPULibrary | None], None]) -> None:
    """In fp32 (1 + 1e8) - 1e8 is 0 and (1e8 - 1e8) + 1 is 1: the order shows."""
    use(kernels())
    out = torch.empty(2)
    add = native_sum(not_asked)
    add([torch.tensor([1.0, 1e8]), torch.tensor([1e8, -1e8]), torch.tensor([-1e8, 1.0])], out)
    assert out.tolist() == [0.0, 1.0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", range(len(cpu_library.ISAS)))
def test_the_bits_are_torchs(
    isa: int, dtype: torch.dtype, use: Callable[[cpu_library.CPULibrary | None], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    best = kernels()
    if isa > best.isa:
        pytest.skip("this processor does not have it")
    use(dataclasses.replace(best, isa=isa))
    monkeypatch.setattr(cpu, "WORTH_BYTES", 0)
    add = native_sum(not_asked)
    for count in range(2, 10):
        for n in SIZES:
            parts = parts_of(count, n, dtype, offset=n % 5)
            want, got = torch.empty(n, dtype=dtype), torch.full((n + 3,), 7.0, dtype=dtype)
            sum_in_order(parts, want)
            add(parts, got[1 : n + 1])
            assert same(got[1 : n + 1], want), (count, n)
            assert got[0] == 7 and (got[n + 1 :] == 7).all(), "nothing beside it is touched"
            kept = [part.clone() for part in parts]
            add(parts, parts[count // 2])
            assert same(parts[count // 2], want), (count, n, "over a part")
            assert all(torch.equal(parts[k], kept[k]) for k in range(count) if k != count // 2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_stays_so(dtype: torch.dtype, use: Callable[[cpu_library.CPULibrary | None], None]) -> None:
    use(kernels())
    largest = torch.finfo(dtype).max
    odd = [0.0, -0.0, 1.0, float("inf"), float("-inf"), float("nan"), largest, -largest, torch.finfo(dtype).tiny, 6e-8]
    first, second, third = (
        parts.flatten().to(dtype)
        for parts in torch.meshgrid(*[torch.tensor(odd, dtype=torch.float64)] * 3, indexing="ij")
    )
    want, got = torch.empty_like(first), torch.empty_like(first)
    sum_in_order([first, second, third], want)
    native_sum(not_asked)([first, second, third], got)
    assert same(got, want) and want.isnan().any() and want.isinf().any() and (want == 0).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_sums_past_the_caches_and_by_several_threads(
    dtype: torch.dtype, use: Callable[[cpu_library.CPULibrary | None], None], threads: Callable[[int], None]
) -> None:
    use(kernels())
    n = (16 << 20) // dtype.itemsize + 67
    parts = parts_of(3, n, dtype)
    want = torch.empty(n, dtype=dtype)
    sum_in_order(parts, want)
    for count, offset in ((1, 0), (3, 0), (2, 1)):
        threads(count)
        got = torch.empty(n + offset, dtype=dtype)[offset:]
        native_sum(not_asked)(parts, got)
        assert same(got, want), (count, offset)


def test_the_twin_does_what_no_kernel_does(use: Callable[[cpu_library.CPULibrary | None], None]) -> None:
    use(kernels())
    asked: list[int] = []
    add = native_sum(lambda parts, out: asked.append(len(parts)))
    whole, real = torch.ones(3, dtype=torch.int64), torch.ones(3)
    add([whole] * 3, whole)  # no floating point numbers
    add([real] * 2, real)  # torch has one pass for two, too
    large = torch.ones(cpu.WORTH_BYTES // 4)
    add([large], large)  # the kernel begins with the second part
    use(None)
    add([real] * 4, real)  # no kernels
    assert asked == [3, 2, 1, 4]


@pytest.mark.parametrize("n", [3, WORTH_ELEMENTS + 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_accumulating_has_torchs_bits(n: int, dtype: torch.dtype) -> None:
    into, values = randn(n, 0, torch.float32), randn(n, 1, dtype)
    want = into + values.float()
    accumulate(into, values)
    assert torch.equal(into, want)


def test_large_sums_of_two_dtypes_need_no_temporary(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(cpu, "add", lambda into, values: asked.append(into.numel()) or True)
    for n in (WORTH_ELEMENTS - 1, WORTH_ELEMENTS):
        for dtype in (torch.float32, torch.bfloat16):
            accumulate(torch.zeros(n), torch.zeros(n, dtype=dtype))
    assert asked == [WORTH_ELEMENTS]
