"""Small gray images of letters, with labels, drawn from the fonts on this machine and split by font
family.

Two numbers over such images may be compared only when their fingerprints are equal: another version
of a font, or of the library that draws it, gives other pixels.
"""

from __future__ import annotations

import hashlib
import importlib.util
import random
import re
import string
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from zero_trial.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageFont import FreeTypeFont

CHARACTERS = string.ascii_letters + string.digits

_FONT_SUFFIXES = (".ttf", ".otf")

_HELD_OUT = 0.2  # of font families, at least one

_SYMBOL_FONTS = ("cmex10", "cmsy10")  # they have symbols instead of letters


# parts of the image's side: every letter fits, with its descender, at its true relative size
_EM = 0.72

_BASELINE = 0.74

_OVERSAMPLING = 4


# largest rotation in degrees, shift (part of the side) and scaling (part of the size) of a variant
MAX_TURN, MAX_SHIFT, MAX_SCALE = 8.0, 0.06, 0.12

Split = Literal["train", "validation"]


@dataclass(frozen=True)
class GlyphImages:
    """``images`` [N, 1, S, S] uint8, 0 is paper and 255 is ink; ``labels`` [N] int64 index
    ``classes``.

    ``sources`` lists the fonts or counts the files; ``fingerprint`` is a sha256 over
    images and labels.
    """

    images: torch.Tensor
    labels: torch.Tensor
    classes: tuple[str, ...]
    sources: tuple[str, ...]
    fingerprint: str

    def __len__(self) -> int:
        return len(self.labels)

    def describe(self) -> dict[str, object]:
        """Return JSON-able facts for a summary, without paths."""
        return {
            "images": len(self),
            "size": self.images.shape[-1],
            "classes": len(self.classes),
            "sources": list(self.sources),
            "sha256": self.fingerprint,
        }


@dataclass(frozen=True)
class _Face:
    path: Path
    name: str
    family: str


def glyph_images(
    size: int = 32,
    characters: str = CHARACTERS,
    split: Split = "train",
    *,
    variants: int = 1,
    fonts: str | Path | None = None,
) -> GlyphImages:
    """Draw every character in every font of one side of the split; N = fonts x characters x
    variants.

    Whole families are held out for ``"validation"`` (the fifth of them whose names hash lowest), so
    no validation letter was seen in another weight or slant. The first variant is upright and
    centered; each further one is rotated, shifted and scaled a little, by amounts that follow from
    its name, so the same call gives the same images. ``fonts``: a folder of .ttf and .otf files; by
    default those that come with matplotlib. Fonts without all of ``characters`` are left out. Needs
    Pillow. Raises DataError if no font can be used.
    """
    _check_request(size, characters, split, variants)
    faces = _faces(fonts, characters)
    families = sorted({face.family for face in faces}, key=lambda name: hashlib.sha256(name.encode()).hexdigest())
    held_out = set(families[: 0 if len(families) < 2 else max(1, round(_HELD_OUT * len(families)))])
    chosen = [face for face in faces if (face.family in held_out) == (split == "validation")]
    if not chosen:
        raise DataError(
            "too few fonts to hold any out",
            where=f"glyph_images(split={split!r})",
            expected="fonts of at least two families that have every character",
        )
    drawn = [
        (_draw(face, character, size, variant).tobytes(), label)
        for face in chosen
        for label, character in enumerate(characters)
        for variant in range(variants)
    ]
    return _collected(drawn, size, tuple(characters), tuple(face.name for face in chosen))


def _check_request(size: int, characters: str, split: str, variants: int) -> None:
    """Raise DataError for values that do not describe a set of images."""
    if not isinstance(size, int) or not 8 <= size <= 1024:
        raise DataError("cannot draw this size", where="size", got=size, expected="a whole number from 8 to 1024")
    if len(set(characters)) != len(characters) or len(characters) < 2:
        raise DataError("no classes", where="characters", got=characters, expected="at least two, each once")
    if split not in ("train", "validation"):
        raise DataError("unknown side", where="split", got=split, expected='"train" or "validation"')
    if not isinstance(variants, int) or variants < 1:
        raise DataError("no images", where="variants", got=variants, expected="a whole number of at least 1")


def _faces(fonts: str | Path | None, characters: str) -> list[_Face]:
    """Return fonts that have every character, sorted by file name."""
    folder = _matplotlib_fonts() if fonts is None else Path(fonts).expanduser()
    found = []
    for path in sorted(folder.rglob("*"), key=lambda path: path.name):
        if path.suffix.lower() in _FONT_SUFFIXES and path.stem not in _SYMBOL_FONTS:
            font = _font(path, 32)
            if _covers(font, characters):
                name = font.getname()[0] or ""  # each Computer Modern font has its own family name
                family = "Computer Modern" if re.fullmatch(r"cm[a-z]+\d+", name) else name
                found.append(_Face(path, path.stem, family))
    if not found:
        raise DataError(
            "no font has all characters", where=f"fonts in {folder}", expected=f".ttf or .otf with {characters}"
        )
    return found


def _matplotlib_fonts() -> Path:
    """Return matplotlib's folder of fonts, found without importing it, which takes a second."""
    spec = importlib.util.find_spec("matplotlib")
    if spec is None or not spec.submodule_search_locations:
        raise DataError(
            "no fonts were found",
            where="glyph_images(fonts)",
            fix="pip install zero_trial[images], or pass fonts: a folder of .ttf files.",
        )
    return Path(spec.submodule_search_locations[0], "mpl-data", "fonts", "ttf")


def _font(path: Path, pixels: int) -> FreeTypeFont:
    try:
        from PIL import ImageFont
    except ImportError:
        raise DataError("images need Pillow", where="zero_trial.data.images", fix="pip install pillow") from None
    # The basic layout is in every build of Pillow; the other one may not be, and would shift
    # letters.
    return ImageFont.truetype(str(path), pixels, layout_engine=ImageFont.Layout.BASIC)


def _covers(font: FreeTypeFont, characters: str) -> bool:
    """Return whether each character has a shape other than the box for a missing one."""
    missing = bytes(font.getmask("\uffff"))
    shapes = [bytes(font.getmask(character)) for character in characters]
    # In a placeholder font all letters look alike; in a real one only a few may (such as I and l).
    return missing not in shapes and all(map(any, shapes)) and len(set(shapes)) > 0.9 * len(shapes)


def _draw(face: _Face, character: str, size: int, variant: int) -> Image:
    """Draw one letter large and scale it down, so that rotated edges are smooth."""
    from PIL import Image, ImageDraw

    side = size * _OVERSAMPLING
    turn, scale, right, down = 0.0, 1.0, 0.0, 0.0  # degrees, factor of the size, parts of the side
    if variant:
        amount = random.Random(hashlib.sha256(f"{face.name} {character} {variant}".encode()).digest())
        turn, scale = amount.uniform(-MAX_TURN, MAX_TURN), 1 + amount.uniform(-MAX_SCALE, MAX_SCALE)
        right, down = amount.uniform(-MAX_SHIFT, MAX_SHIFT), amount.uniform(-MAX_SHIFT, MAX_SHIFT)
    image = Image.new("L", (side, side), 0)
    at = (side * (0.5 + right), side * (_BASELINE + down))
    ImageDraw.Draw(image).text(
        at, character, fill=255, font=_font(face.path, max(1, round(side * _EM * scale))), anchor="ms"
    )
    if turn:
        image = image.rotate(turn, Image.Resampling.BILINEAR)
    return image.resize((size, size), Image.Resampling.BOX)


def _collected(
    drawn: Sequence[tuple[bytes, int]], size: int, classes: tuple[str, ...], sources: tuple[str, ...]
) -> GlyphImages:
    """Return pixels and label of each image as one record."""
    joined = bytearray().join(pixels for pixels, _ in drawn)
    labels = torch.tensor([label for _, label in drawn])
    digest = hashlib.sha256(joined)
    digest.update(repr((size, classes, labels.tolist())).encode())
    images = torch.frombuffer(joined, dtype=torch.uint8).view(len(drawn), 1, size, size)
    return GlyphImages(images, labels, classes, sources, digest.hexdigest())


_IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp")


def image_folder(folder: str | Path, size: int = 32, split: Split = "train", *, val_share: float = 0.1) -> GlyphImages:
    """Return the images below ``folder``, gray, cut to a centered square and scaled; bright is ink.
    A file's class is its subfolder's name.

    A file belongs to validation if its sha256 falls in the first ``val_share`` of all hashes, so
    the split does not move when files are added. Raises DataError if a side is empty or a file is
    not an image.
    """
    _check_request(size, "ab", split, 1)
    root = Path(folder).expanduser()
    paths = sorted(path for path in root.rglob("*") if path.suffix.lower() in _IMAGE_SUFFIXES and path.is_file())
    classes = tuple(sorted({_class_of(path, root) for path in paths}))
    bound = int(val_share * 16**8)
    read = []
    for path in paths:
        held_out = int(hashlib.sha256(path.read_bytes()).hexdigest()[:8], 16) < bound
        if held_out == (split == "validation"):
            read.append((_square(path, size).tobytes(), classes.index(_class_of(path, root))))
    if not read:
        kinds = ", ".join(_IMAGE_SUFFIXES)
        raise DataError(f"no {split} images", where=f"image folder {str(folder)!r}", expected=f"files of {kinds}")
    return _collected(read, size, classes, (f"{len(read)} files",))


def _square(path: Path, size: int) -> Image:
    try:
        from PIL import Image
    except ImportError:
        raise DataError("images need Pillow", where="zero_trial.data.images", fix="pip install pillow") from None
    try:
        with Image.open(path) as image:
            side = min(image.size)
            left, top = ((length - side) // 2 for length in image.size)
            square = image.convert("L").crop((left, top, left + side, top + side))
            small: Image.Image = square.resize((size, size), Image.Resampling.BICUBIC)
            return small
    except (OSError, Image.DecompressionBombError) as error:
        raise DataError("this image cannot be read", where=str(path)) from error


def _class_of(path: Path, root: Path) -> str:
    parts = path.relative_to(root).parts
    return parts[0] if len(parts) > 1 else ""
