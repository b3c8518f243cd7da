"""Images of letters, image folders and pictures."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from zero_trial.data import glyph_images, image_folder
from zero_trial.data.images import _matplotlib_fonts
from zero_trial.errors import DataError


def test_labelled_letters_in_every_font() -> None:
    letters = glyph_images(24, "AgQ7", "train")
    assert letters.images.shape == (len(letters.sources) * 4, 1, 24, 24)
    assert letters.images.dtype == torch.uint8
    assert letters.classes == ("A", "g", "Q", "7")
    assert letters.labels.tolist() == [0, 1, 2, 3] * len(letters.sources)
    assert letters.labels.dtype == torch.int64
    ink = letters.images.float().mean((1, 2, 3)) / 255
    assert ink.min() > 0.02
    assert ink.max() < 0.5
    assert not letters.images[:, :, [0, -1], :].any(), "no letter is cut off"


def test_sides_and_fingerprints() -> None:
    """No family is on both sides; the same call gives the same images, and another does not."""
    train, held_out = glyph_images(16, "xyz", variants=3), glyph_images(16, "xyz", "validation")
    assert len(train.sources) > len(held_out.sources) > 0
    families = [{name.split("-")[0][:10] for name in side.sources} for side in (train, held_out)]
    assert not families[0] & families[1]
    again = glyph_images(16, "xyz", variants=3)
    assert torch.equal(train.images, again.images) and train.fingerprint == again.fingerprint
    others = [glyph_images(16, "xyz"), glyph_images(16, "xzy", variants=3), held_out]
    assert len({train.fingerprint, *(other.fingerprint for other in others)}) == 4
    facts = held_out.describe()
    assert (facts["classes"], facts["size"]) == (3, 16) and "/" not in str(facts)


def test_the_first_variant_is_the_plain_letter_and_further_ones_move_a_little() -> None:
    plain, moved = glyph_images(24, "EF"), glyph_images(24, "EF", variants=3)
    kept = moved.images.view(-1, 3, 24, 24)
    assert torch.equal(kept[:, 0], plain.images[:, 0])
    change = (kept[:, 1:].float() - kept[:, :1].float()).abs().mean((2, 3)) / 255
    assert (change > 0.005).all()
    assert (change < 0.3).all()
    assert moved.labels.tolist() == plain.labels.repeat_interleave(3).tolist()


def test_a_folder_of_fonts_and_one_that_is_too_small(tmp_path: Path) -> None:
    for name in ("DejaVuSans.ttf", "STIXGeneral.ttf", "STIXNonUni.ttf"):
        shutil.copy(_matplotlib_fonts() / name, tmp_path)
    both = {glyph_images(16, "ab", side, fonts=tmp_path).sources for side in ("train", "validation")}  # type: ignore[arg-type]
    assert both == {("DejaVuSans",), ("STIXGeneral",)}, "the third has no letters"
    (tmp_path / "STIXGeneral.ttf").unlink()
    assert glyph_images(16, "ab", fonts=tmp_path).sources == ("DejaVuSans",)
    with pytest.raises(DataError, match="too few fonts"):
        glyph_images(16, "ab", "validation", fonts=tmp_path)
    with pytest.raises(DataError, match="no font has all characters"):
        glyph_images(16, "ab", fonts=tmp_path / "none")


@pytest.mark.parametrize(
    ("arguments", "where"),
    [
        ({"size": 4}, "size"),
        ({"size": "32"}, "size"),
        ({"characters": "a"}, "characters"),
        ({"characters": "aab"}, "characters"),
        ({"split": "test"}, "split"),
        ({"variants": 0}, "variants"),
    ],
)
def test_what_cannot_be_drawn(arguments: dict[str, Any], where: str) -> None:
    with pytest.raises(DataError, match=where):
        glyph_images(**arguments)


def write_png(path: Path, image: torch.Tensor) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(image[0].numpy()).save(path)


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


def test_folders_without_classes_without_images_and_with_a_broken_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no train images"):
        image_folder(tmp_path)
    write_png(tmp_path / "one.png", torch.zeros(1, 8, 8, dtype=torch.uint8))
    assert image_folder(tmp_path, 8, val_share=0.0).classes == ("",)
    (tmp_path / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    with pytest.raises(DataError, match=r"broken\.png"):
        image_folder(tmp_path, val_share=0.0)
