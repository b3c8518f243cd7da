"""Letters as samples: grey images drawn from the fonts on this machine, or a folder of images, as
tensors around zero with their classes."""

from __future__ import annotations

import string
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.data import TensorDataset

from zero_trial.data import GlyphImages, glyph_images, image_folder

CHARACTERS = string.ascii_uppercase + string.digits


def letters(data: Mapping[str, Any], size: int, split: str) -> GlyphImages:
    """Return one side of the split: of a folder of images where ``data.source`` names one, else of
    fonts, whole families held out.
    """
    if data.get("source"):
        return image_folder(data["source"], size, split)  # type: ignore[arg-type]
    variants = data.get("variants", 6) if split == "train" else data.get("validation_variants", 4)
    return glyph_images(size, data.get("characters", CHARACTERS), split, variants=variants, fonts=data.get("fonts"))  # type: ignore[arg-type]


def samples(images: GlyphImages) -> TensorDataset:
    """Return (pixels from -1 to 1, float32 [1, S, S]; class) per image."""
    return TensorDataset(images.images.to(torch.float32) / 127.5 - 1, images.labels)
