"""A folder of the user's own images, as small grey squares with labels, split into train and validation by file."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from zero_trial.data.glyphs import GlyphImages, Split, check_request, collected
from zero_trial.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp")


def image_folder(folder: str | Path, size: int = 32, split: Split = "train", *, val_share: float = 0.1) -> GlyphImages:
    """The images below ``folder``, grey, cut to a centred square and scaled; bright is ink. A file's class is its subfolder's name.

    A file is validation when its sha256 falls in the first ``val_share`` of all hashes, so the split does not move
    when files are added. Raises DataError when a side is empty or a file is no image.
    """
    check_request(size, "ab", split, 1)
    root = Path(folder).expanduser()
    paths = sorted(path for path in root.rglob("*") if path.suffix.lower() in IMAGE_SUFFIXES and path.is_file())
    classes = tuple(sorted({_class_of(path, root) for path in paths}))
    bound = int(val_share * 16**8)
    read = []
    for path in paths:
        held_out = int(hashlib.sha256(path.read_bytes()).hexdigest()[:8], 16) < bound
        if held_out == (split == "validation"):
            read.append((_square(path, size).tobytes(), classes.index(_class_of(path, root))))
    if not read:
        kinds = ", ".join(IMAGE_SUFFIXES)
        raise DataError(f"no {split} images", where=f"image folder {str(folder)!r}", expected=f"files of {kinds}")
    return collected(read, size, classes, (f"{len(read)} files",))


def _square(path: Path, size: int) -> Image:
    try:
        from PIL import Image
    except ImportError:
        raise DataError("images need Pillow", where="zero_trial.data.glyphs", fix="pip install pillow") from None
    try:
        with Image.open(path) as image:
            side = min(image.size)
            left, top = ((length - side) // 2 for length in image.size)
            square = image.convert("L").crop((left, top, left + side, top + side))
            return square.resize((size, size), Image.Resampling.BICUBIC)
    except (OSError, Image.DecompressionBombError) as error:
        raise DataError("this is not an image that can be read", where=str(path)) from error


def _class_of(path: Path, root: Path) -> str:
    parts = path.relative_to(root).parts
    return parts[0] if len(parts) > 1 else ""
