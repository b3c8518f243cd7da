"""Windows by index: what they hold, how they tile the text, and what is too short."""

from __future__ import annotations

import pytest
import torch

from zero_trial.data.text import ByteDataset
from zero_trial.errors import DataError

TEXT = torch.arange(101, dtype=torch.uint8)


def test_a_window_and_the_bytes_that_follow() -> None:
    inputs, targets = ByteDataset(TEXT, sequence=10)[3]
    assert inputs.tolist() == list(range(30, 40))
    assert targets.tolist() == list(range(31, 41))
    assert inputs.dtype == targets.dtype == torch.int64


def test_all_windows_predict_every_byte_but_the_first_once() -> None:
    data = ByteDataset(TEXT, sequence=10)
    assert len(data) == 10
    assert data.predicted_bytes().tolist() == list(range(1, 101))
    assert torch.cat([data[i][1] for i in range(10)]).tolist() == data.predicted_bytes().tolist()


def test_fewer_windows_are_spread_over_the_whole_text() -> None:
    data = ByteDataset(TEXT, sequence=10, windows=4)
    assert [data.start(i) for i in range(4)] == [0, 20, 50, 70]
    assert len(ByteDataset(TEXT, sequence=10, windows=99)) == 10


def test_an_index_outside_ends_iteration() -> None:
    data = ByteDataset(TEXT, sequence=50)
    assert len(list(data)) == 2
    with pytest.raises(IndexError):
        data[-1]


@pytest.mark.parametrize("length", [0, 1, 10])
def test_too_short_a_text_says_how_much_is_needed(length: int) -> None:
    with pytest.raises(DataError, match=rf"got {length} bytes, expected at least 11"):
        ByteDataset(TEXT[:length], sequence=10)
