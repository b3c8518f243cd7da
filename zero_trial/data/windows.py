"""Fixed-length windows of a byte sequence, each one a pure function of its index."""

from __future__ import annotations

import torch
from torch.utils.data import Dataset

from zero_trial.errors import DataError


class ByteDataset(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Windows of ``sequence`` bytes and the bytes that follow each of them: item i is ``(inputs, targets)``, both
    (sequence,) int64.

    ``text`` is 1-D uint8. Windows do not overlap in what they predict: window i starts at i * sequence. With
    ``windows`` given, that many windows are spread evenly over the whole text instead (a validation set of bounded
    cost that is no prefix). An item depends on its index only, so shuffling, sharding and resuming are the sampler's
    business alone.
    """

    def __init__(self, text: torch.Tensor, sequence: int, windows: int | None = None) -> None:
        fitting = (text.numel() - 1) // sequence if text.numel() else 0
        if fitting < 1:
            raise DataError(
                "the text is shorter than one window",
                where="ByteDataset",
                got=f"{text.numel()} bytes",
                expected=f"at least {sequence + 1} (sequence + 1)",
                fix="Use more text or a shorter sequence.",
            )
        self.text = text
        self.sequence = sequence
        self.windows = fitting if windows is None else min(windows, fitting)
        self._fitting = fitting

    def __len__(self) -> int:
        return self.windows

    def start(self, index: int) -> int:
        """Where window ``index`` begins in the text."""
        if not 0 <= index < self.windows:
            raise IndexError(f"window {index} of {self.windows}")
        return (index * self._fitting // self.windows) * self.sequence

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = self.start(index)
        window = self.text[start : start + self.sequence + 1].long()
        return window[:-1], window[1:]

    def predicted_bytes(self) -> torch.Tensor:
        """All bytes that the windows predict, (windows * sequence,) uint8: what a baseline is to be measured on."""
        starts = (self.start(index) + 1 for index in range(self.windows))
        return torch.cat([self.text[start : start + self.sequence] for start in starts])
