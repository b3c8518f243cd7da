"""Slices hold exactly their range."""

from __future__ import annotations

import pytest
import torch

from zero_trial.checkpoint.format import Slice, ranges
from zero_trial.errors import CheckpointError


def test_a_whole_tensor_is_one_slice_and_shares_its_memory() -> None:
    tensor = torch.arange(6.0).view(2, 3)
    part = Slice.whole("w", tensor)
    assert (part.shape, part.start, part.stop, part.dtype) == ((2, 3), 0, 6, torch.float32)
    part.flat[5] = 9.0
    assert tensor[1, 2] == 9.0


def test_scalars_and_empty_tensors() -> None:
    assert Slice.whole("s", torch.tensor(3.0)).flat.tolist() == [3.0]
    assert Slice.whole("e", torch.empty(0, 4)).flat.numel() == 0


@pytest.mark.parametrize("bounds", [(-1, 2), (3, 7), (4, 3)])
def test_outside_the_tensor(bounds: tuple[int, int]) -> None:
    with pytest.raises(CheckpointError, match="outside"):
        Slice("w", (2, 3), *bounds, torch.zeros(abs(bounds[1] - bounds[0])))


def test_memory_of_another_size_or_with_gaps() -> None:
    with pytest.raises(CheckpointError, match=r"w: .*4 elements.*3 contiguous"):
        Slice("w", (2, 3), 0, 3, torch.zeros(4))
    with pytest.raises(CheckpointError, match="not contiguous"):
        Slice("w", (2, 3), 0, 3, torch.zeros(6)[::2])


def test_ranges_leave_out_empty_ones() -> None:
    parts = [
        Slice("w", (6,), 3, 6, torch.zeros(3)),
        Slice("w", (6,), 0, 3, torch.zeros(3)),
        Slice.whole("e", torch.empty(0)),
    ]
    assert ranges(parts) == {"w": [(0, 3), (3, 6)]}
