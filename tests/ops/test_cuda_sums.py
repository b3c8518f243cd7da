"""Sums of squares on the emulator."""

from __future__ import annotations

import pytest
import torch

from tests.support.cuda_cases import EVERYWHERE, FLOATS, TILE, at, randn
from tests.support.emulated_cuda import Emulator
from zero_trial.ops.dispatch import CUDA

ops = torch.ops.zero_trial


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
