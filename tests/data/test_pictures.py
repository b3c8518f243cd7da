"""Sheets and PNG files: read back by another library, pixel by pixel."""

from __future__ import annotations

from pathlib import Path

import numpy
import torch
from PIL import Image

from zero_trial.data.images import contact_sheet, write_png


def test_a_png_is_read_back_as_it_was(tmp_path: Path) -> None:
    picture = torch.randint(0, 256, (1, 13, 7), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    write_png(tmp_path / "made" / "a.png", picture)
    with Image.open(tmp_path / "made" / "a.png") as read:
        assert read.mode == "L"
        assert numpy.array_equal(numpy.asarray(read), picture[0].numpy())


def test_a_sheet_has_the_images_row_by_row_and_leaves_the_rest_dark() -> None:
    images = torch.arange(1, 6, dtype=torch.uint8).view(5, 1, 1, 1).expand(5, 1, 2, 3).contiguous()
    sheet = contact_sheet(images, columns=2)
    assert sheet.shape == (1, 6, 6)
    assert sheet[0, ::2, ::3].tolist() == [[1, 2], [3, 4], [5, 0]]
