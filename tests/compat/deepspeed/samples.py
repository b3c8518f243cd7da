"""Data for transformers' Trainer, also for scripts that must not import zero_trial."""

from __future__ import annotations

import torch

VOCABULARY, LENGTH = 64, 12


class Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sequences that count upwards in steps of 1 to 3, or images whose brightness is their class.
    ``alike``: one token everywhere, so that most experts of a mixture get none."""

    def __init__(self, family: str, size: int = 360, *, alike: bool = False) -> None:
        generator = torch.Generator().manual_seed(1)
        self._images = family == "ViT"
        if self._images:
            self._labels = torch.randint(0, 5, (size,), generator=generator)
            self._inputs = torch.randn(size, 3, 16, 16, generator=generator) + self._labels[:, None, None, None]
        else:
            start = torch.randint(0, VOCABULARY, (size, 1), generator=generator)
            step = torch.randint(1, 4, (size, 1), generator=generator)
            counted = (start + step * torch.arange(LENGTH)) % (VOCABULARY - 2) + 2
            self._inputs = self._labels = torch.full_like(counted, 7) if alike else counted

    def __len__(self) -> int:
        return len(self._inputs)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"pixel_values" if self._images else "input_ids": self._inputs[index], "labels": self._labels[index]}
