"""A folder of images: classes by subfolder, a split by file that stays, and files that are no images."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from zero_trial.data import image_folder
from zero_trial.data.images import write_png
from zero_trial.errors import DataError


def folder_of(root: Path, per_class: int = 40) -> Path:
    for label, name in enumerate(("cats", "dogs")):
        for number in range(per_class):
            picture = torch.full((1, 20, 30), 100 * label + number, dtype=torch.uint8)
            picture[:, :, :5] = 255  # outside the centred square
            write_png(root / name / f"{number}.png", picture)
    (root / "cats" / "notes.txt").write_text("no image")
    return root


def test_classes_are_the_subfolders_and_images_are_centred_squares(tmp_path: Path) -> None:
    images = image_folder(folder_of(tmp_path), 10)
    assert images.classes == ("cats", "dogs")
    assert images.images.shape[1:] == (1, 10, 10)
    for picture, label in zip(images.images, images.labels, strict=True):
        assert int(picture.min()) == int(picture.max())
        assert int(picture.min()) // 100 == int(label)


def test_each_file_is_on_one_side_and_stays_there(tmp_path: Path) -> None:
    folder_of(tmp_path)
    both = [image_folder(tmp_path, 8, side) for side in ("train", "validation")]  # type: ignore[arg-type]
    assert sum(map(len, both)) == 80
    assert 0 < len(both[1]) < 25
    before = {int(picture.min()) for picture in both[1].images}
    write_png(tmp_path / "dogs" / "more.png", torch.full((1, 8, 8), 250, dtype=torch.uint8))
    after = {int(picture.min()) for picture in image_folder(tmp_path, 8, "validation").images}
    assert before <= after


def test_images_without_subfolders_are_of_one_class(tmp_path: Path) -> None:
    write_png(tmp_path / "one.png", torch.zeros(1, 8, 8, dtype=torch.uint8))
    assert image_folder(tmp_path, 8, val_share=0.0).classes == ("",)


def test_what_is_said_about_nothing_and_about_a_broken_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no train images"):
        image_folder(tmp_path)
    (tmp_path / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    with pytest.raises(DataError, match=r"broken\.png"):
        image_folder(tmp_path, val_share=0.0)
