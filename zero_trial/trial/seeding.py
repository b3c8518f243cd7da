"""Every generator that user code draws from, set from one seed."""

from __future__ import annotations

import random
import sys

import torch


def seed_everything(seed: int) -> None:
    """Python's, torch's (all devices) and, if it is in use, numpy's generator.

    The same on every rank, before the trial is built.
    """
    random.seed(seed)
    torch.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
