"""Windows of bytes with 15 % of their places masked (Devlin et al. 2019, section 3.1), each a
function of its index."""

from __future__ import annotations

import torch
from model import IGNORED
from torch import Tensor
from torch.utils.data import Dataset

from zero_trial.data import ByteDataset

MASK, CLS, SEP = 256, 257, 258  # after the 256 bytes
VOCABULARY = 259
MASKED_SHARE = 0.15
KEPT_SHARE, RANDOM_SHARE = 0.1, 0.1  # of the masked places; the rest become MASK


class MaskedBytes(Dataset[tuple[Tensor, Tensor]]):
    """Item i is ``(tokens, targets)``, both (sequence,) int64: CLS, sequence - 2 bytes, SEP.

    The same number of bytes is masked in every window (15 %, at least one), so a mean over windows
    is a mean over masked bytes. The choice depends on ``seed`` and the index only: a resumed run
    sees the same masks.
    """

    def __init__(self, text: Tensor, sequence: int, seed: int, windows: int | None = None) -> None:
        self.bytes = ByteDataset(text, sequence - 2, windows)
        self.seed = seed
        self.masked = max(1, round(MASKED_SHARE * (sequence - 2)))

    def __len__(self) -> int:
        return len(self.bytes)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        original = self.bytes[index][0]
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        places = torch.randperm(len(original), generator=generator)[: self.masked]
        fate = torch.rand(self.masked, generator=generator)
        other = torch.randint(0, 256, (self.masked,), generator=generator)
        shown = torch.where(fate < RANDOM_SHARE, other, MASK)
        shown = torch.where(fate >= 1.0 - KEPT_SHARE, original[places], shown)
        tokens, targets = original.clone(), torch.full_like(original, IGNORED)
        tokens[places], targets[places] = shown, original[places]
        return _framed(tokens, CLS, SEP), _framed(targets, IGNORED, IGNORED)

    def predicted_bytes(self) -> Tensor:
        """Return all masked bytes, (windows * masked,) uint8: what a baseline is measured on."""
        targets = torch.stack([self[index][1] for index in range(len(self))])
        return targets[targets != IGNORED].to(torch.uint8)


def _framed(window: Tensor, first: int, last: int) -> Tensor:
    return torch.cat([window.new_tensor([first]), window, window.new_tensor([last])])
