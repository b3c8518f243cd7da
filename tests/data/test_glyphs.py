"""Letters as images: what they hold, that families are held out, and what cannot be drawn."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from zero_trial.data import glyph_images
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


def test_no_family_is_on_both_sides() -> None:
    train, held_out = glyph_images(16, "ab"), glyph_images(16, "ab", "validation")
    assert len(train.sources) > len(held_out.sources) > 0
    families = [{name.split("-")[0][:10] for name in side.sources} for side in (train, held_out)]
    assert not families[0] & families[1]


def test_the_same_call_gives_the_same_images_and_another_does_not() -> None:
    first, again = glyph_images(16, "xyz", variants=3), glyph_images(16, "xyz", variants=3)
    assert torch.equal(first.images, again.images)
    assert first.fingerprint == again.fingerprint
    others = [glyph_images(16, "xyz"), glyph_images(16, "xzy", variants=3), glyph_images(16, "xyz", "validation")]
    assert len({first.fingerprint, *(other.fingerprint for other in others)}) == 4


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


def test_facts_for_a_summary_hold_no_path() -> None:
    facts = glyph_images(16, "ab", "validation").describe()
    assert facts["classes"] == 2
    assert facts["size"] == 16
    assert "/" not in str(facts)
